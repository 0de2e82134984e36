"""`shoal report`: figures of a run as one HTML page and JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cli.options import AsJson, RunDir, complete_run
from shoal.cli.status import finite

EXAMPLES = (
    "\b\n"
    "Examples:\n"
    "  shoal report click                        runs/click/report.html and report.json\n"
    "  shoal report click --baseline             and how much faster it is than one worker, measured now\n"
    "  shoal report click --target 'val_auroc>0.75' --price 2.40\n"
    "  shoal report click --json                 the figures alone, on stdout"
)

BASELINE = "-baseline"
"""Behind a run's name: its one-worker baseline, in the same directory."""


def report(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Name or directory of a run.", autocompletion=complete_run)
    ],
    run_dir: RunDir = Path("runs"),
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Where to write the page.", show_default="RUN/report.html"
        ),
    ] = None,
    baseline: Annotated[
        bool,
        typer.Option(
            "--baseline",
            help="Run the same script with one worker first, and compare. An earlier one is used again.",
        ),
    ] = False,
    baseline_seconds: Annotated[
        float,
        typer.Option(
            "--baseline-seconds",
            metavar="S",
            min=1.0,
            help="How long the baseline is measured from its first step on.",
        ),
    ] = 20.0,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            metavar="METRIC<VALUE",
            help="Report when a metric reached a value: 'loss<0.3', 'val_auroc>0.75'.",
        ),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option("--price", metavar="P", min=0.0, help="Of one host for an hour, in any currency."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write what a run did, how fast, and what limits it: one HTML page without scripts or network, and JSON."""
    from shoal.errors import ConfigError
    from shoal.observe import record as records
    from shoal.observe import runs
    from shoal.observe.figures import Target, figures
    from shoal.observe.page import page

    wanted = Target.parse(target) if target is not None else None
    path = runs.find(run, run_dir)
    record = records.read(path)
    compared = _baseline(record, measure_s=baseline_seconds if baseline else None)
    traces, problems = records.read_traces(path, record.activity)
    found = figures(record, traces=traces, baseline=compared, target=wanted, price=price)
    found["missing"] += problems
    if as_json:
        typer.echo(json.dumps(finite(found), indent=2))
        return
    target_file = output or path / "report.html"
    try:
        target_file.with_suffix(".json").write_text(json.dumps(finite(found), indent=2) + "\n")
        target_file.write_text(page(record, found), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{target_file} cannot be written: {error.strerror}. Choose another place with -o."
        ) from None
    for said in found["missing"]:
        typer.echo(f"note: {said}", err=True)
    typer.echo(f"{target_file} and {target_file.with_suffix('.json').name}")
    if found["scaling"]:
        scaling = found["scaling"]
        typer.echo(
            f"speedup {scaling['speedup']:.2f} with {found['workers']} workers, efficiency {scaling['efficiency']:.0%}"
        )
    if found["bottleneck"]:
        typer.echo(f"bottleneck: {found['bottleneck']} {found['cure']}")


def _baseline(record: Any, *, measure_s: float | None) -> dict[str, Any] | None:
    """Figures of the one-worker run of the same script and arguments; measured where there is none and `measure_s` is given."""
    from shoal.errors import ConfigError
    from shoal.observe import record as records
    from shoal.observe import runs
    from shoal.observe.trials import Trial

    name, config = record.path.name + BASELINE, record.config
    path = record.path.with_name(name)
    there = runs.read_json(path / "config.json")
    if there and all(there.get(key) == config.get(key) for key in ("script", "args", "cwd")):
        rate = records.samples_per_s(records.read(path))
        if rate is not None:
            return {"run": name, "threads": there.get("threads"), "samples_per_s": rate}
    if measure_s is None:
        return None
    if not config.get("script") or record.state is runs.RunState.ALIVE:
        why = (
            "config.json does not say what it ran"
            if not config.get("script")
            else "the run is alive, and both would share the cores"
        )
        raise ConfigError(f"a baseline of {record.path.name} cannot be measured: {why}. Nothing was started.")
    typer.echo(f"measuring one worker for {measure_s:g} s, as {path}", err=True)
    module = ("-m",) if config.get("module") else ()
    return Trial(
        script=config.get("module") or config["script"],
        args=tuple(config.get("args") or ()),
        workers=1,
        options=("--seed", str(config.get("seed", 0)), *module),
        cwd=config.get("cwd"),
        name=name,
        run_dir=record.path.parent,
    ).run(seconds=measure_s)
