"""`shoal report`: figures of a run as one HTML page and JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.inspect.status import finite
from shoal.cli.options import AsJson, RunDir, complete_run

if TYPE_CHECKING:
    from shoal.observe.figures import MeasuredBandwidth
    from shoal.observe.record import RunRecord

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

SAME_JOB: dict[str, Any] = {"script": None, "module": None, "args": [], "cwd": None, "device": "auto"}
"""Of config.json, with their defaults: in what a run and its baseline agree."""


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
    from shoal.cluster.launch.run_directory import write_atomically
    from shoal.errors import ConfigError
    from shoal.observe import record as records
    from shoal.observe import runs
    from shoal.observe.figures import Target, figures
    from shoal.observe.page import page

    wanted = Target.parse(target) if target is not None else None
    path = runs.find(run, run_dir)
    record = records.read(path, metric=wanted.name if wanted and wanted.name != "loss" else None)
    compared = _baseline(record, measure_s=baseline_seconds if baseline else None)
    traces, problems = records.read_traces(path, record.activity)
    link = _bandwidth(record)
    found = figures(record, traces=traces, baseline=compared, target=wanted, price=price, bandwidth=link)
    found["missing"] += problems
    if link is None:
        found["missing"].append(
            "the share of the bandwidth between hosts is not known: a report measures links within a host alone."
        )
    if as_json:
        typer.echo(json.dumps(finite(found), indent=2))
        return
    target_file = output or path / "report.html"
    try:
        # In a run directory, which may be another user's, never through a link.
        write = write_atomically if output is None else Path.write_bytes
        write(target_file.with_suffix(".json"), (json.dumps(finite(found), indent=2) + "\n").encode())
        write(target_file, page(record, found).encode())
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
    from shoal.cluster.launch import run_directory
    from shoal.errors import ConfigError
    from shoal.observe import record as records
    from shoal.observe import runs
    from shoal.observe.trials import Trial

    name, config = record.path.name + BASELINE, record.config
    path = record.path.with_name(name)
    there = runs.read_json(path / "config.json")
    is_ours = there.get("workers") == 1 and all(
        (there.get(key) or default) == (config.get(key) or default) for key, default in SAME_JOB.items()
    )
    if is_ours:
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
    if os.path.lexists(path) and (not is_ours or run_directory.is_alive(path)):
        which = "which is alive" if is_ours else "which is not this job with one worker"
        raise ConfigError(
            f"a baseline of {record.path.name} would be the run {path}, and there is one of that name already, {which}. Nothing was "
            f"started, and nothing in it was touched; wait for it to end, or give it another name (mv {path} {path}-mine), and measure "
            "again."
        )
    typer.echo(f"measuring one worker for {measure_s:g} s, as {path}", err=True)
    options = ["-m"] if config.get("module") else []
    if isinstance(config.get("seed"), int):
        options += ["--seed", str(config["seed"])]
    if config.get("device") not in (None, "auto"):
        options += ["--device", str(config["device"])]
    return Trial(
        script=config.get("module") or config["script"],
        args=tuple(config.get("args") or ()),
        workers=1,
        options=tuple(options),
        cwd=config.get("cwd"),
        name=name,
        run_dir=record.path.parent,
        keeps_former=True,
    ).run(seconds=measure_s)


def _bandwidth(record: RunRecord) -> MeasuredBandwidth | None:
    """Bandwidth of a link within this host, from `shoal bench exchange` or else from copies in memory made now. None for a run over hosts."""
    from shoal.config import exchange_rule
    from shoal.observe.figures import MeasuredBandwidth
    from shoal.observe.planner.measuring import copy_bytes_per_s

    if len(record.config.get("hosts") or ()) > 1:
        return None
    workers = int(record.config.get("workers") or 1)
    by_size = exchange_rule.read(exchange_rule.path()).get(workers, {})
    if by_size and not record.config.get("servers"):
        size = max(by_size)
        name, took_s = min(by_size[size].items(), key=lambda item: item[1])
        each = 2 * (workers - 1) / workers * size
        return MeasuredBandwidth(
            each / took_s, f"a sum of {size >> 20} MiB by {name}, as `shoal bench exchange` measured it"
        )
    return MeasuredBandwidth(copy_bytes_per_s(), "copies in this host's memory, measured now")
