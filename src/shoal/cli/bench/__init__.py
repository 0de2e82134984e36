"""`shoal bench`: speed on this machine, measured in real processes with the package alone.

Comparisons with other software, and measurements that take hours, are in
benchmarks/ of the source and are only named here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.verb import console, did_you_mean
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.cli.bench.measure import Figure

EXAMPLES = (
    "\b\n"
    "Examples:\n"
    "  shoal bench                what can be measured\n"
    "  shoal bench exchange       all-reduce by every exchange, under a minute\n"
    "  shoal bench ps             the parameter server, about a minute\n"
    "  shoal bench ps --json      a JSON line per figure"
)


@dataclass(frozen=True, slots=True)
class Bench:
    """A measurement that needs the package alone."""

    measures: str
    run: Callable[[float, Callable[[Figure], None]], None]


def _ps(seconds: float, emit: Callable[[Figure], None]) -> None:
    from shoal.cli.bench.measure import measure_ps

    measure_ps(seconds, emit)


def _exchange(seconds: float, emit: Callable[[Figure], None]) -> None:
    from shoal.cli.bench.measure import measure_exchange

    measure_exchange(seconds, emit)


BENCHES = {
    "exchange": Bench(
        "every way of summing gradients, from 4 KiB to 64 MiB, by 2 workers and by 4", _exchange
    ),
    "ps": Bench("push and pull at a server; a click model in one process, data parallel and on servers", _ps),
}

FROM_SOURCE = {
    "trainer_overhead": "the Trainer against a loop written by hand",
    "on_device": "on an accelerator: the Trainer against a loop written by hand, memory of fsdp, a CPU beside it",
    "ddp_step": "a step of ddp against torch's DDP",
    "exchange_shm": "all-reduce through shared memory against gloo's, 4 KiB to 256 MiB",
    "ddp_shm": "a step of ddp with shm against torch's DDP: ResNet-18, an MLP of 2 M parameters",
    "mesh_step": "a step of fsdp, tp and pp against the same by hand; memory per process against ddp",
    "compress_slow_link": "compression and --sync-every between two networks at 100 Mbit/s",
    "launch": "launch to first step against torchrun",
    "recovery": "kills under ddp: bits, time to go on, goodput",
    "data_arrays": "a shuffled table in memory against torch's DataLoader and plain indexing",
    "data_parquet": "shuffled Parquet against a bare scan and other libraries",
    "data_memory": "memory while a table of four times its limit is read",
    "data_workers": "map(fn, workers=2) against torch's DataLoader",
    "ps_channel": "the channel to a server against torch's rpc",
    "ps_kv": "push and pull of rows by key against torch's rpc",
    "ps_recovery": "kills under ps and ps:async: bits, samples lost or doubled, time to the next push, goodput",
    "ps_memory": "a server's memory over what it holds, and its growth",
    "ps_quality": "AUC of the relaxed modes against ps at equal samples",
    "data_dynamic": "an epoch with a slow worker: dynamic, equal and measured shares against the ideal",
    "peers": "the click model against other parameter servers; installs them",
}


def complete_bench(incomplete: str) -> list[str]:
    return [name for name in BENCHES if name.startswith(incomplete)]


def bench(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="What to measure; without, what there is.",
            autocompletion=complete_bench,
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON line per figure.")] = False,
    seconds: Annotated[
        float,
        typer.Option(
            "--seconds", metavar="S", min=0.2, max=3600.0, help="How long each training is measured."
        ),
    ] = 5.0,
) -> None:
    """Measure how fast shoal is on this machine, in real processes."""
    if name is None:
        _list(as_json)
        return
    if name in FROM_SOURCE:
        raise ConfigError(
            f"'{name}' ({FROM_SOURCE[name]}) is measured from the source and not from the installed package: it needs "
            f"what stands in benchmarks/ there. Nothing was started; in a checkout, run `python -m benchmarks {name}`."
        )
    if name not in BENCHES:
        raise ConfigError(
            f"there is nothing to measure by the name '{name}'.{did_you_mean(name, [*BENCHES, *FROM_SOURCE])} Nothing was "
            "started; `shoal bench` lists what there is."
        )
    screen = console()

    def emit(figure: Figure) -> None:
        if as_json:
            typer.echo(json.dumps(figure.line()))
        else:
            # As they come: the last ones take a while.
            screen.print(
                f"{figure.what:<44} {figure.value:>12,.1f} {figure.unit:<16} {figure.how}", soft_wrap=True
            )

    BENCHES[name].run(seconds, emit)


def _list(as_json: bool) -> None:
    if as_json:
        for name, each in BENCHES.items():
            typer.echo(json.dumps({"name": name, "measures": each.measures, "from": "package"}))
        for name, measures in FROM_SOURCE.items():
            typer.echo(json.dumps({"name": name, "measures": measures, "from": "source"}))
        return
    typer.echo("Measured by `shoal bench NAME`:")
    for name, each in BENCHES.items():
        typer.echo(f"  {name:<20}{each.measures}")
    typer.echo("\nMeasured in a checkout of the source, by `python -m benchmarks NAME`:")
    for name, measures in FROM_SOURCE.items():
        typer.echo(f"  {name:<20}{measures}")
