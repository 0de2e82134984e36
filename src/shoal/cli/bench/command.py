"""`shoal bench`: speed on this machine, measured in real processes with the package alone.

Comparisons with other software, and measurements that take hours, are in benchmarks/ of the source
and are only named here.
"""

from __future__ import annotations

import io
import json
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.options import RunDir
from shoal.cli.verb import console, did_you_mean
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.observe.planner.measuring import LinkTimes

EXAMPLES = (
    "\b\n"
    "Examples:\n"
    "  shoal bench                what can be measured\n"
    "  shoal bench exchange       all-reduce by every exchange, under a minute\n"
    "  shoal bench ps             the parameter server, about a minute\n"
    "  shoal bench ps --json      a JSON line per figure"
)


FROM_SOURCE = {
    "trainer_overhead": "the Trainer against a loop written by hand",
    "on_device": "on an accelerator: the Trainer against a loop written by hand, memory of fsdp, a CPU beside it",
    "ddp_step": "a step of ddp against torch's DDP",
    "exchange_shm": "all-reduce through shared memory against gloo's, 4 KiB to 256 MiB",
    "ddp_shm": "a step of ddp with shm against torch's DDP: ResNet-18, an MLP of 2 M parameters",
    "hosts_transport": "connections between hosts against a bare socket, torch rpc and gRPC",
    "hosts_ddp": "two hosts, ddp and ps, against torchrun by the speed of the link",
    "hosts_loss": "hosts lost and joined under ddp and ps: time to go on",
    "engines": "the click model on MPI, Slurm and Ray of this machine against the same without; needs `make test-engines`",
    "coordinator_load": "the coordinator under 1,000 and 10,000 simulated workers: events, memory, time to a new view",
    "mesh_step": "a step of fsdp, tp and pp against the same by hand; memory per process against ddp",
    "large_model": "peak memory of a rank under fsdp, tp and pp, and the largest model within 2 GiB",
    "table_increments": "what a checkpoint of a table costs of which 1 % of the rows changed",
    "checkpoint_stall": "what a checkpoint of 1 GiB costs a step, in the background and not",
    "compress_slow_link": "compression and --sync-every between two networks at 100 Mbit/s",
    "launch": "launch to first step against torchrun",
    "first_start": "first start, cold and warm, against torchrun; size of an install",
    "models": "public models by every exact strategy: equal to one process, refused or failed",
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
    "device_cache": "rows of a table on a GPU worker's device, against all of it there and all of it on servers",
    "migration": "lines changed and time to a first model for each migration page",
    "data_dynamic": "an epoch with a slow worker: dynamic, equal and measured shares against the ideal",
    "scaling": "samples/s and CPU time of a step over numbers of workers and servers",
    "ps_tables": "rows on disk past a memory limit, and compressed pushes and pulls, against neither",
    "ps_relaxed": "options of the relaxed modes (--push-every, --row-cache, --fan-in, top-k): bytes, samples/s, AUC",
    "dashboard": "pages of a run of a million steps and 64 workers; samples/s with and without the dashboard",
    "observe_cost": "spans and activity of processes: a step recorded against one that is not",
    "planner": "step time as `shoal plan` predicts it against what was measured, several models by several strategies",
    "peers": "the click model against other parameter servers; installs them",
}


SCALE = "scale"
SCALE_MEASURES = "a script of yours with 1, 2, 4 workers: `shoal bench scale train.py -n 1,2,4`"


def complete_bench(incomplete: str) -> list[str]:
    return [name for name in (*BENCHES, SCALE) if name.startswith(incomplete)]


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
    script: Annotated[
        str | None,
        typer.Argument(metavar="[SCRIPT]", help="For scale: the script to run.", show_default=False),
    ] = None,
    args: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ARGS]...", help="Its arguments; options of its own behind --.", show_default=False
        ),
    ] = None,
    workers: Annotated[
        str, typer.Option("--workers", "-n", metavar="N,N,...", help="For scale: numbers of workers.")
    ] = "1,2",
    strategy: Annotated[
        str | None,
        typer.Option(
            "--strategy", metavar="STRATEGY", help="For scale: of several workers.", show_default="ddp"
        ),
    ] = None,
    servers: Annotated[
        int | None, typer.Option("--servers", metavar="S", min=1, help="For scale: servers of a ps strategy.")
    ] = None,
    run_dir: RunDir = Path("runs"),
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
    if name == SCALE:
        _scale(script, args or [], workers, strategy, servers, seconds, run_dir, as_json=as_json)
        return
    if script is not None:
        raise ConfigError(
            f"'{name}' measures no script of yours; `shoal bench {SCALE} {script}` does. Nothing was started."
        )
    if name in FROM_SOURCE:
        raise ConfigError(
            f"'{name}' ({FROM_SOURCE[name]}) is measured from the source and not from the installed package: it needs "
            f"what stands in benchmarks/ there. Nothing was started; in a checkout, run `python -m benchmarks {name}`."
        )
    if name not in BENCHES:
        raise ConfigError(
            f"there is nothing to measure by the name '{name}'.{did_you_mean(name, [*BENCHES, SCALE, *FROM_SOURCE])} Nothing was "
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

    _, measure = BENCHES[name]
    measure(seconds, emit)


def _scale(
    script: str | None,
    args: list[str],
    counts: str,
    strategy: str | None,
    servers: int | None,
    seconds: float,
    run_dir: Path,
    *,
    as_json: bool,
) -> None:
    from shoal.cli.bench import scale

    if script is None:
        raise ConfigError(
            "scale measures a script of yours. Nothing was started; `shoal bench scale train.py -n 1,2,4`."
        )
    wanted = scale.parse_counts(counts)

    def emit(line: dict[str, Any]) -> None:
        if as_json:
            typer.echo(json.dumps({"benchmark": SCALE, "script": script, **line}))
        else:
            scale.show(line, max(wanted) / min(wanted))

    found = scale.measure(
        script,
        args,
        counts=wanted,
        strategy=strategy,
        options=("--servers", str(servers)) if servers is not None else (),
        seconds=seconds,
        run_dir=run_dir,
        emit=emit,
    )
    if not as_json:
        typer.echo(f"{found['advice']}\n{found['page']}")


def _list(as_json: bool) -> None:
    measured = {name: measures for name, (measures, _) in BENCHES.items()} | {SCALE: SCALE_MEASURES}
    if as_json:
        for source, benches in (("package", measured), ("source", FROM_SOURCE)):
            for name, measures in benches.items():
                typer.echo(json.dumps({"name": name, "measures": measures, "from": source}))
        return
    for title, benches in (
        ("Measured by `shoal bench NAME`:", measured),
        ("\nMeasured in a checkout of the source, by `python -m benchmarks NAME`:", FROM_SOURCE),
    ):
        typer.echo(title)
        for name, measures in benches.items():
            typer.echo(f"  {name:<20}{measures}")


# ---- measurements -----------------------------------------------------------------------------------
# Figures hold for one machine at one time. Two of them compare only where both were measured in one call; comparisons that must
# hold alternate, and are in benchmarks/.

JOBS = Path(__file__).with_name("jobs.py")

NUM_PAIRS = 10_000_000
"""Less where little time is given: making so many rows takes seconds."""

CLICKS = (("single", 1, 0), ("ddp", 2, 0), ("ps", 2, 1), ("ps:async", 2, 1))
"""Strategy, workers, servers."""

EXCHANGE_WORKERS = (2, 4)

CODEC_ROUNDS, ROW_ROUNDS, SHARD_ROUNDS, SERVED_STEPS = 9, 15, 15, 40

KEPT_FROM_S = 2.0
"""Shorter measurements are not kept for `--exchange auto`."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One thing that was measured."""

    what: str
    value: float
    unit: str
    configuration: dict[str, Any] = field(default_factory=dict)
    benchmark: str = "ps"

    @property
    def how(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.configuration.items())

    def line(self) -> dict[str, Any]:
        return {
            "benchmark": self.benchmark,
            "figure": self.what,
            "value": self.value,
            "unit": self.unit,
            "configuration": self.configuration,
        }


def measure_ps(seconds: float, emit: Callable[[Figure], None]) -> None:
    """Push, pull and a click model; each figure is emitted as soon as it is there."""
    with _job_runner(with_servers=True) as run_job:
        num_pairs = NUM_PAIRS if seconds >= 1 else NUM_PAIRS // 20
        for figure in run_job("kv", num_pairs, "ps:async", 1, 1)[0]:
            emit(Figure(figure["what"], figure["value"], figure["unit"], {"workers": 1, "servers": 1}))
        for strategy, workers, servers in CLICKS:
            ranks = run_job("click", seconds, strategy, workers, servers)
            rate = sum(rank["samples_per_s"] for rank in ranks)
            about = {
                "workers": workers,
                "servers": servers,
                "threads": ranks[0]["threads"],
                "batch": ranks[0]["batch"],
            }
            emit(Figure(f"click model, 1 M rows x 16, {strategy}", round(rate, 1), "samples/s", about))


def measure_exchange(seconds: float, emit: Callable[[Figure], None]) -> None:
    """All-reduce by every exchange, alternated, at every size; medians by size, the fastest first."""
    from shoal.config import exchange_rule

    with _job_runner(with_servers=False) as run_job:
        measured: dict[int, dict[int, dict[str, float]]] = {}
        for workers in EXCHANGE_WORKERS:
            by_size, *_ = run_job("exchange", 3 * seconds, "ddp", workers, 0)
            measured[workers] = {int(size): medians for size, medians in by_size.items()}
            for size, medians in by_size.items():
                for name, median_s in sorted(medians.items(), key=lambda each: each[1]):
                    about = {"workers": workers, "x native": round(medians["native"] / median_s, 2)}
                    what = f"{_shown(int(size))} by {name}"
                    emit(Figure(what, round(median_s * 1e6, 1), "us", about, benchmark="exchange"))
    kept = seconds >= KEPT_FROM_S and exchange_rule.write(exchange_rule.path(), measured)
    for workers in EXCHANGE_WORKERS:
        rule = exchange_rule.choose(measured, num_workers=workers, num_hosts=1, processor=platform.machine())
        where = f"kept in {exchange_rule.path()}" if kept else "not kept: too short, or no place for it"
        print(f"--exchange auto, {workers} workers: {rule} ({where})", file=sys.stderr)


def measure_links(seconds: float, workers: int) -> LinkTimes:
    """Seconds of every exchange and compressor by size, and of rows, fsdp and a server by bytes, for the planner."""
    from shoal.errors import Interrupted, ShoalError
    from shoal.observe.planner.measuring import LinkTimes

    with _job_runner(with_servers=True) as run_job:

        def where_it_runs(job: str, rounds: float, strategy: str, servers: int) -> list[dict[str, float]]:
            """What a job measured; nothing where it fails. fsdp is not everywhere, on macOS for one: the planner has defaults."""
            try:
                found, *_ = run_job(job, rounds, strategy, workers, servers)
            except Interrupted:
                raise
            except ShoalError:
                return []
            return list(found)

        by_size, *_ = run_job("exchange", seconds, "ddp", workers, 0)
        codecs, *_ = run_job("codecs", CODEC_ROUNDS, "ddp", workers, 0)
        rows, *_ = run_job("rows", ROW_ROUNDS, "ddp", workers, 0)
        shards = where_it_runs("shards", SHARD_ROUNDS, "ddp", 0)
        served = where_it_runs("served", SERVED_STEPS, "ps", 1)
    return LinkTimes(
        {int(size): medians for size, medians in by_size.items()},
        _by_size(codecs),
        _by_size(rows),
        shards,
        served,
    )


def _by_size(found: dict[str, dict[str, float]]) -> dict[str, dict[int, float]]:
    return {name: {int(size): took_s for size, took_s in seconds.items()} for name, seconds in found.items()}


def _shown(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"


@contextmanager
def _job_runner(*, with_servers: bool) -> Iterator[Callable[[str, float, str, int, int], list[Any]]]:
    """Runs jobs of jobs.py by name, argument, strategy, workers and servers; each returns what its ranks wrote."""
    from shoal.cluster.launch.api import LaunchConfig, launch
    from shoal.cluster.launch.roles import preload_for
    from shoal.cluster.supervisor.warm_parent import WarmParent

    with (
        tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder,
        WarmParent("bench", preload=preload_for(str(JOBS), with_servers=with_servers)) as warm,
    ):
        warm.wait_ready()

        def run_job(job: str, argument: float, strategy: str, workers: int, servers: int) -> list[Any]:
            out = Path(tempfile.mkdtemp(dir=folder))
            config = LaunchConfig(
                script=str(JOBS),
                args=(job, str(out), str(argument)),
                workers=workers,
                strategy=strategy,
                servers=servers or None,
                run_dir=f"{folder}/runs",
                seed=0,
                quiet=True,
            )
            result = launch(config, warm=warm, stdout=io.BytesIO(), stderr=io.BytesIO())
            if result.error is not None:
                raise result.error
            return [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]

        yield run_job


BENCHES: dict[str, tuple[str, Callable[[float, Callable[[Figure], None]], None]]] = {
    "exchange": (
        "every way of summing gradients, from 4 KiB to 64 MiB, by 2 workers and by 4",
        measure_exchange,
    ),
    "ps": (
        "push and pull at a server; a click model in one process, data parallel and on servers",
        measure_ps,
    ),
}
