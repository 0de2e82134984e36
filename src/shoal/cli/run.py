"""`shoal run`: train a script in one process or many."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.options import (
    Grace,
    MaxRestarts,
    Oversubscribe,
    Replicas,
    RunDir,
    Script,
    Servers,
    StepTimeout,
    Strategy,
    Workers,
    takes_parallel_options,
)
from shoal.cli.verb import leave
from shoal.config.parallel_options import ParallelOptions, options_of

EXAMPLES = (
    "\b\n"
    "Examples:\n"
    "  shoal run train.py                          one process\n"
    "  shoal run -n 4 train.py --lr 0.1            four workers; --lr is the script's\n"
    "  shoal run -n 4 --name click train.py        in runs/click\n"
    "  shoal run -n 4 --name click --again train.py        anew; the former run is kept as runs/click.1\n"
    "  shoal run -n 2 --servers 2 --strategy ps train.py   two servers hold the weights"
)

BEFORE_SCRIPT = (
    "-n",
    "--workers",
    "--strategy",
    "--shard",
    "--servers",
    "--replicas",
    "--soft-placement",
    "--sync-every",
    "--batchnorm",
    "--sequence-parallel",
    "--checkpoint-activations",
    "--offload",
    "--oversubscribe",
)
"""Options that change what runs. Meant for shoal, and written behind the script, they would silently do nothing."""


@takes_parallel_options()
def run(
    script: Script,
    args: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ARGS]...", help="Everything after SCRIPT is the script's own, options too."),
    ] = None,
    workers: Workers = 1,
    strategy: Strategy = None,
    servers: Servers = None,
    replicas: Replicas = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name", metavar="NAME", help="Name of the run.", show_default="the script's, numbered"
        ),
    ] = None,
    again: Annotated[
        bool,
        typer.Option(
            "--again", help="Start anew under a --name that was used; that run is kept as NAME.1, NAME.2 ..."
        ),
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Start anew under a --name that was used; that run is removed."),
    ] = False,
    run_dir: RunDir = Path("runs"),
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            metavar="N",
            min=0,
            help="Seeds the script's global generators alike in every worker.",
            show_default="drawn, and kept in config.json",
        ),
    ] = None,
    faults: Annotated[
        str | None,
        typer.Option(
            "--faults",
            metavar="FAULTS",
            help="Faults to inject: 'kill worker-1 at step 60; kill coordinator after 5 s'.",
        ),
    ] = None,
    *,
    parallel: ParallelOptions,
    oversubscribe: Oversubscribe = False,
    pretend_hosts: Annotated[
        int,
        typer.Option(
            "--pretend-hosts",
            metavar="N",
            help="Treat this machine as N hosts, each with some of the workers and a cache of its own: to try out data that "
            "not every host has.",
        ),
    ] = 1,
    step_timeout: StepTimeout = 300.0,
    grace: Grace = 60.0,
    max_restarts: MaxRestarts = 3,
) -> None:
    """Train a script in one process or many. Options of shoal come before SCRIPT."""
    from shoal.cluster.launch.api import LaunchConfig, launch
    from shoal.config.faults import Faults

    config = LaunchConfig(
        script=script,
        args=tuple(args or ()),
        workers=workers,
        strategy=strategy,
        servers=servers,
        replicas=replicas,
        name=name,
        again=again,
        overwrite=overwrite,
        run_dir=str(run_dir),
        seed=seed,
        step_timeout_s=step_timeout,
        grace_s=grace,
        max_restarts=max_restarts,
        pretend_hosts=pretend_hosts,
        oversubscribe=oversubscribe,
        faults=Faults.parse(faults) if faults else None,
        **options_of(parallel),
    )
    misplaced = [option for option in BEFORE_SCRIPT if option in config.args]
    if misplaced and workers == 1 and strategy is None:
        typer.echo(
            f"note: {misplaced[0]} stands after {script} and so goes to the script; shoal's own options come before it.",
            err=True,
        )
    leave(launch(config, set_title=True))
