"""`shoal graph`: the model of a script as a picture, as a strategy would spread it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.options import Replicas, Script, Servers, Strategy, Workers, takes_parallel_options
from shoal.cli.verb import leave
from shoal.cli.verify import temporary_job
from shoal.config import strategy as strategies
from shoal.config.parallel_options import ParallelOptions, options_of
from shoal.errors import ConfigError

EXAMPLES = (
    "\b\n"
    "Examples:\n"
    "  shoal graph train.py                                        train.svg\n"
    "  shoal graph -n 4 --strategy dp=2,tp=2 train.py -o spread.svg\n"
    "  shoal graph -n 2 --servers 2 --strategy ps train.py --lr 0.1     --lr is the script's\n"
    "\n"
    "The script runs for one step, in a temporary run directory and in float32. `shoal dashboard` shows the same of every run."
)


@takes_parallel_options()
def graph(
    script: Script,
    args: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ARGS]...", help="What follows SCRIPT is the script's own, options too."),
    ] = None,
    workers: Workers = 1,
    strategy: Strategy = None,
    servers: Servers = None,
    replicas: Replicas = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="File to write; - is stdout.", show_default="SCRIPT.svg"
        ),
    ] = None,
    *,
    parallel: ParallelOptions,
) -> None:
    """Draw a script's model: layers, where each lives, what the strategy sends. As SVG."""
    from shoal.cluster.launch.api import launch
    from shoal.config.job import VerifyPlan
    from shoal.observe import drawing, runs

    chosen = strategies.choose(strategy, workers)
    if not strategies.parse(chosen).is_exact:
        # Workers that run ahead of each other do not end at one step; their servers hold the same.
        typer.echo(f"'{chosen}' is drawn as 'ps': it spreads the model alike.", err=True)
        chosen = "ps"
    job = {"script": script, "args": tuple(args or ()), "workers": workers, "strategy": chosen, "seed": 0}
    with temporary_job(**job, servers=servers, replicas=replicas, **options_of(parallel)) as (config, warm):
        plan = VerifyPlan(dtype="float32", num_steps=1, dump_to=str(Path(config.run_dir) / "dump"))
        result = launch(
            replace(config, name="graph", verify=plan),
            warm=warm,
            stdout=sys.stderr.buffer,
            stderr=sys.stderr.buffer,
        )
        if result.exit_code:
            leave(result)
        found = runs.read_json(result.run_dir / "graph.json")
    if not found.get("layers"):
        raise ConfigError(
            f"the script '{script}' ended without a step of shoal.Trainer, so there is no model to draw. Nothing was written; "
            "check that it trains when it is run with these arguments."
        )
    picture = drawing.svg(found)
    if output is not None and str(output) == "-":
        typer.echo(picture, nl=False)
        return
    path = output or Path(Path(script).stem + ".svg")
    try:
        path.write_text(picture)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}. Choose another file with --output."
        ) from None
    layers, edges = (
        f"{len(found[key])} {key[: -1 if len(found[key]) == 1 else None]}" for key in ("layers", "edges")
    )
    typer.echo(f"{path}: {layers}, {edges}" + (f", {chosen} on {workers} workers" if workers > 1 else ""))
