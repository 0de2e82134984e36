"""`shoal plan`: how to distribute a script over a cluster, measured and predicted; and `--strategy auto`, its short form."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.options import RunDir, Script
from shoal.cli.verb import console, fail
from shoal.errors import ClusterError, ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from shoal.observe.planner.cost_model import (
        ClusterShape,
        Dropped,
        PlanCandidate,
        Prediction,
        Workload,
    )
    from shoal.observe.planner.measuring import Calibration, ScriptRuns
    from shoal.observe.planner.plan_file import PlanFile

EXAMPLES = (
    "\b\n"
    "Examples:\n"
    "  shoal plan train.py                                   on this machine; writes plan.json\n"
    "  shoal run --plan plan.json                            and runs it\n"
    "  shoal plan train.py --hosts 4 --per-host 8 --bandwidth 25Gbit --latency 30us\n"
    "  shoal plan train.py --hosts 8 --per-host 4 --objective cost --price 2.40\n"
    "  shoal plan train.py -- --lr 0.1                       what follows -- is the script's"
)

TRY, SECONDS, LINK_SECONDS = 3, 4.0, 2.9
AUTO_SECONDS = 2.0
CLEARLY = 0.85
"""Share of ddp's measured time below which auto takes another strategy. A smaller gain is within a prediction's error."""

MORE_TRIES = 2
"""Runs beyond --try, where what was tried makes another way of its kind the best."""

SHOWN = 12
MAX_CALIBRATED = 8
"""Workers of the calibration, where this machine has cores for so many."""

PLANNED = ("workers", "strategy", "servers", "exchange", "compress", "schedule", "sync_every", "config")
"""Options of `shoal run` that a plan decides."""

OBJECTIVES = ("time", "cost")


def plan(
    script: Script,
    args: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ARGS]...", help="What follows SCRIPT is the script's own, options too."),
    ] = None,
    hosts: Annotated[
        int, typer.Option("--hosts", metavar="N", min=1, max=1024, help="Hosts of the cluster.")
    ] = 1,
    per_host: Annotated[
        int | None,
        typer.Option(
            "--per-host",
            metavar="N",
            min=1,
            max=1024,
            help="Workers that a host has room for.",
            show_default="cores of this machine",
        ),
    ] = None,
    cores: Annotated[
        int | None,
        typer.Option(
            "--cores",
            metavar="N",
            min=1,
            help="Cores of a host, where it is not like this machine.",
            show_default="as many as a worker has here, for each worker",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory", metavar="SIZE", help="Memory of a host, as 64G.", show_default="this machine's"
        ),
    ] = None,
    device_memory: Annotated[
        str | None,
        typer.Option(
            "--device-memory",
            metavar="SIZE",
            help="Memory of each worker's device, as 80G, instead of the host's.",
        ),
    ] = None,
    device_speed: Annotated[
        float,
        typer.Option(
            "--device-speed", metavar="X", help="Speed of a worker's compute, in that of this machine's."
        ),
    ] = 1.0,
    bandwidth: Annotated[
        str | None,
        typer.Option(
            "--bandwidth",
            metavar="RATE",
            help="Of a host's link to the others: 10Gbit, 1.2GB (a second).",
            show_default="10Gbit",
        ),
    ] = None,
    latency: Annotated[
        str | None,
        typer.Option(
            "--latency",
            metavar="TIME",
            help="Of a message between hosts: 50us, 0.2ms.",
            show_default="50us",
        ),
    ] = None,
    objective: Annotated[
        str,
        typer.Option("--objective", metavar="WHAT", help="What is to be as small as can be: time or cost."),
    ] = "time",
    price: Annotated[
        float | None,
        typer.Option("--price", metavar="P", min=0.0, help="Of one host for an hour, in any currency."),
    ] = None,
    inexact: Annotated[
        bool,
        typer.Option(
            "--inexact",
            help="Choose also among ways that compute another result: compression, ps:async.",
        ),
    ] = False,
    tries: Annotated[
        int,
        typer.Option(
            "--try", metavar="K", min=0, help="Candidates that are really run, where they fit here."
        ),
    ] = TRY,
    seconds: Annotated[
        float,
        typer.Option("--seconds", metavar="S", min=0.5, max=3600.0, help="How long each run is measured."),
    ] = SECONDS,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where the plan is written.")
    ] = Path("plan.json"),
    start: Annotated[
        bool, typer.Option("--run", help="Run the plan at once, where this machine is the cluster.")
    ] = False,
    show_all: Annotated[
        bool, typer.Option("--all", help="Show every candidate and every reason, not the best few.")
    ] = False,
    run_dir: RunDir = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print plan.json too.")] = False,
) -> None:
    """Find how to spread a script over a cluster: measures it, predicts every way, runs the best few."""
    from shoal.cluster.launch.threads import available_cores

    here = available_cores()
    asked = _Asked(hosts=hosts, per_host=per_host or here, cores=cores, cores_here=here, speed=device_speed)
    _refuse(asked, objective, price, bandwidth, latency, memory, device_memory, start=start)
    if not Path(script).is_file():
        raise ConfigError(f"there is no script {script}. Nothing was started.")
    if output.is_dir() or not output.parent.is_dir():
        reason = "it is a folder" if output.is_dir() else f"there is no folder {output.parent}"
        raise ConfigError(f"{output} cannot be written: {reason}. Nothing was started.")
    shape = _shape(asked, price, bandwidth, latency, memory, device_memory)
    runs = _runs(script, args or (), run_dir, seconds)
    planner = _Planner(runs=runs, cluster=shape, asked=asked, objective=objective, inexact=inexact)
    planner.measure(LINK_SECONDS)
    planner.predict(counts=None)
    planner.try_best(tries)
    text = planner.text(script, args or ())
    try:
        output.write_text(text)
    except OSError as error:
        raise ConfigError(
            f"{output} cannot be written: {error.strerror}. Choose another file with -o."
        ) from None
    if as_json:
        typer.echo(text, nl=False)
    else:
        _show(planner, show_all=show_all)
        typer.echo(f"{output}: run it with `shoal run --plan {output}`")
    if start:
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", "shoal", "run", "--plan", str(output)])


# ---- options ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Asked:
    """The cluster as the options name it."""

    hosts: int
    per_host: int
    cores: int | None
    cores_here: int
    speed: float

    @property
    def is_here(self) -> bool:
        """Whether this machine is the cluster."""
        return (
            self.hosts == 1
            and self.per_host <= self.cores_here
            and self.cores in (None, self.cores_here)
            and self.speed == 1.0
        )

    @property
    def num_calibrated(self) -> int:
        """Workers of the calibration: those of a host, as far as this machine has cores."""
        if self.hosts * self.per_host == 1:
            return 1
        return max(2, min(self.per_host, self.cores_here, MAX_CALIBRATED))


def _refuse(
    asked: _Asked,
    objective: str,
    price: float | None,
    bandwidth: str | None,
    latency: str | None,
    memory: str | None,
    device_memory: str | None,
    *,
    start: bool,
) -> None:
    if objective not in OBJECTIVES:
        raise ConfigError(
            f"--objective {objective} is none. Nothing was started; there are {' and '.join(OBJECTIVES)}."
        )
    if objective == "cost" and price is None:
        raise ConfigError(
            "--objective cost needs the price of a host for an hour. Nothing was started; add --price, or use --objective time."
        )
    for option, said in (("--bandwidth", bandwidth), ("--latency", latency)):
        if said is not None and asked.hosts == 1:
            raise ConfigError(
                f"{option} {said} is of the link between hosts, and --hosts 1 has none. Nothing was started; leave it out, or add "
                "--hosts."
            )
    if memory is not None and device_memory is not None:
        raise ConfigError(
            "--memory is what the workers of a host share, and --device-memory what each has for itself. Nothing was started; give "
            "the one that is short."
        )
    if not (0 < asked.speed < 1e6):
        raise ConfigError(
            f"--device-speed {asked.speed:g} is no speed: give a number above 0. Nothing was started."
        )
    if start and not asked.is_here:
        raise ConfigError(
            f"--run starts the plan on this machine, which has {asked.cores_here} cores, and the plan is for {asked.hosts} "
            f"host{'s' if asked.hosts > 1 else ''} with {asked.per_host} workers each"
            + (f" at {asked.speed:g} times its speed" if asked.speed != 1.0 else "")
            + ". Nothing was started; leave --run out, and start plan.json there with `shoal run --plan plan.json --bind ADDRESS`."
        )


def _shape(
    asked: _Asked,
    price: float | None,
    bandwidth: str | None,
    latency: str | None,
    memory: str | None,
    device_memory: str | None,
) -> ClusterShape:
    from shoal.cluster.launch.threads import threads_per_worker
    from shoal.observe.planner.cost_model import TEN_GIGABIT, ClusterShape, LinkSpeed
    from shoal.runtime.memory import available_bytes

    here = asked.cores_here
    # A worker elsewhere is taken to have the cores that it has here.
    threads = threads_per_worker(asked.num_calibrated, cores=here, env={})
    told = device_memory if device_memory is not None else memory
    return ClusterShape(
        hosts=asked.hosts,
        per_host=asked.per_host,
        cores=asked.cores or (here if asked.is_here else max(here, asked.per_host * threads)),
        memory_bytes=_size(told, "--device-memory" if device_memory else "--memory")
        if told is not None
        else available_bytes(),
        is_device_memory=device_memory is not None,
        speed=asked.speed,
        between=LinkSpeed(
            _latency(latency) if latency is not None else TEN_GIGABIT.latency_s,
            _rate(bandwidth) if bandwidth is not None else TEN_GIGABIT.bytes_per_s,
        ),
        price=price,
    )


def _size(text: str, option: str) -> int:
    from shoal.config.parallel_options import parse_size

    found = parse_size(text)
    if not found:
        raise ConfigError(f"{option} {text} is no size: give one such as 16G. Nothing was started.")
    return found


def _rate(text: str) -> float:
    """Bytes a second of 10Gbit, 1.2GB/s, 100Mbit."""
    said = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(bit|b|B)(?:/s|ps)?", text.strip(), re.IGNORECASE)
    if said is None or float(said[1]) <= 0:
        raise ConfigError(
            f"--bandwidth {text} is no rate: give one such as 10Gbit or 1.2GB. Nothing was started."
        )
    factor = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[said[2].upper()]
    return float(said[1]) * factor / (1 if said[3] == "B" else 8)


def _latency(text: str) -> float:
    said = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|µs|ms|s)", text.strip())
    if said is None:
        raise ConfigError(
            f"--latency {text} is no time: give one such as 50us or 0.2ms. Nothing was started."
        )
    return float(said[1]) * {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}[said[2]]


def _runs(
    script: str, args: Sequence[str], run_dir: Path, seconds: float, *, module: bool = False
) -> ScriptRuns:
    from shoal.observe.planner.measuring import ScriptRuns

    folder = run_dir / f"{Path(script).stem}-plan"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--run-dir {run_dir} cannot be used: {error.strerror}. Nothing was started."
        ) from None
    return ScriptRuns(
        script=script if module else str(Path(script).absolute()),
        args=tuple(args),
        folder=folder,
        seconds=seconds,
        is_module=module,
        say=lambda line: typer.echo(line, err=True),
    )


# ---- planning ---------------------------------------------------------------------------------------


class _Planner:
    """Measures, predicts, tries, chooses; each once, in this order."""

    def __init__(
        self, *, runs: ScriptRuns, cluster: ClusterShape, asked: _Asked, objective: str, inexact: bool
    ) -> None:
        self.runs, self.cluster, self.asked = runs, cluster, asked
        self.objective, self.inexact = objective, inexact
        self.measured: dict[PlanCandidate, float] = {}
        self.trials: list[tuple[Prediction, float]] = []
        """Predicted for this machine, and measured."""

        self._preferred: Prediction | None = None
        self.calibrated: Calibration
        self.workload: Workload
        self.predictions: list[Prediction]
        self.dropped: list[Dropped]

    def measure(self, link_seconds: float) -> None:
        """Links, then the script; without `link_seconds`, links as they were never measured."""
        from shoal.cli.bench.command import measure_links
        from shoal.observe.planner import measuring
        from shoal.observe.planner.cost_model import PlanCandidate

        num = self.asked.num_calibrated
        if link_seconds:
            self.runs.say(
                f"measuring: exchanges between processes, then {Path(self.runs.script).name} several times for about "
                f"{self.runs.seconds:g} s each; the runs are in {self.runs.folder}"
            )
        if num > 1 and link_seconds:
            times = measure_links(link_seconds, num)
            if not times.shards:
                self.runs.say("note: fsdp could not be measured on this machine; its cost is that of sums")
            self.cluster = measuring.with_links(self.cluster, times, num)
        self.cluster = replace(self.cluster, copy_bytes_per_s=measuring.copy_bytes_per_s())
        self.calibrated = measuring.calibrate(self.runs, num, with_parts=bool(link_seconds))
        self.workload = measuring.workload_of(self.calibrated, self.cluster)
        if self.asked.is_here:
            self.measured[measuring.SINGLE] = self.calibrated.alone.step_s
            if self.calibrated.several is not None:
                self.measured[PlanCandidate(workers=num, strategy="ddp")] = self.calibrated.several.step_s

    def predict(self, counts: Sequence[int] | None, *, plain: bool = False) -> None:
        """`plain`: neither exchanges nor compressors by name."""
        from shoal.observe.planner import cost_model

        def wanted() -> Iterator[PlanCandidate]:
            for each in cost_model.enumerate_candidates(self.cluster, counts=counts):
                if not plain or (each.exchange == "auto" and each.is_exact):
                    yield each

        if not plain:
            self._run_dry(wanted())
        self.predictions, self.dropped = cost_model.sift(wanted(), self.workload, self.cluster)
        if not self.allowed():
            reasons = "; ".join(dict.fromkeys(each.reason for each in self.dropped[:3]))
            raise ConfigError(f"nothing that was looked at can run: {reasons}. No plan was written.")

    def _run_dry(self, candidates: Iterator[PlanCandidate]) -> None:
        """Memory by a dry run of the step, if it is decisive; a model that cannot run on shapes alone
        is planned by its layers.
        """
        from shoal.observe.planner.measuring import dry_runs_of, dry_runs_wanted

        wanted = dry_runs_wanted(candidates, self.workload, self.cluster)
        if not wanted:
            return
        try:
            told = _dry_runs(self.runs, wanted)
            self.workload = replace(self.workload, dry_runs=dry_runs_of(told))
            self.runs.say(f"memory of {len(told)} ways to cut a step, by dry runs without peers")
        except (ValueError, ClusterError, ConfigError) as error:
            reason = str(error).strip().splitlines()[-1]
            self.runs.say(f"note: memory is by the shapes of layers: a step cannot be run dry: {reason}")

    def allowed(self) -> list[Prediction]:
        """Candidates that may be chosen, the best first; measured ones as measured, others corrected
        by measurements of their kind.
        """
        from shoal.observe.planner.cost_model import learned, value_of

        able = [
            each
            for each in learned(self.predictions, self.measured)
            if self.inexact or each.candidate.is_exact
        ]
        return sorted(able, key=lambda each: value_of(each, self.objective))

    def try_best(self, tries: int) -> None:
        """Really run the best of each family, as many as asked; where the cluster is elsewhere, those that fit here."""
        from shoal.observe.planner import cost_model

        shape, able = self.cluster, self.allowed()
        if not self.asked.is_here:
            num = self.asked.num_calibrated
            shape = replace(shape, hosts=1, per_host=num, cores=self.asked.cores_here, speed=1.0)
            able, _ = cost_model.sift(
                cost_model.enumerate_candidates(shape, counts=[num]), self.workload, shape
            )
            able = [each for each in able if self.inexact or each.candidate.is_exact]
        able = [each for each in able if each.candidate not in self.measured]
        for each in _of_different_kind(able)[:tries]:
            self._try(each)
        # A measured kind may now promise more by another of its variants.
        for _ in range(MORE_TRIES if tries and self.asked.is_here else 0):
            best = self.allowed()[0]
            if best.candidate in self.measured:
                break
            self._try(best)

    def _try(self, each: Prediction) -> None:
        from shoal.observe.planner.measuring import again

        try:
            took_s = again(self.runs, f"try-{len(self.trials)}", each.candidate).step_s
        except ClusterError as error:
            self._drop(each, str(error).strip().splitlines()[-1])
            return
        self.trials.append((each, took_s))
        if self.asked.is_here:
            self.measured[each.candidate] = took_s

    def _drop(self, failed: Prediction, reason: str) -> None:
        from shoal.observe.planner.cost_model import Dropped

        self.runs.say(f"{failed.candidate.name} on {failed.candidate.workers} workers failed: {reason}")
        self.dropped.append(Dropped(failed.candidate, f"it was tried and failed: {reason}"))
        self.predictions = [each for each in self.predictions if each.candidate != failed.candidate]
        if not self.allowed():
            raise ConfigError(
                f"nothing that may be chosen can run; the last of them, {failed.candidate.name}, failed: {reason}. No plan was written."
            )

    def prefer(self, strategy: str, *, unless: float) -> None:
        """Take a strategy that was measured, unless another is predicted to need less than this share of its time."""
        able = self.allowed()
        for each in able:
            if each.candidate.strategy == strategy and able[0].step_s > unless * each.step_s:
                self._preferred = each
                return

    @property
    def chosen(self) -> Prediction:
        """The best of those that were run, by what was measured; else of all, by what was predicted."""
        if self._preferred is not None:
            return self._preferred
        able = self.allowed()
        if not (self.asked.is_here and self.trials):
            return able[0]
        return next(each for each in able if each.candidate in self.measured)

    def why(self) -> str:
        from shoal.observe.planner.cost_model import why

        return why(self.chosen, self.allowed(), self.workload)

    def stops(self) -> str:
        from shoal.observe.planner.cost_model import best_by_workers, stops_paying

        return stops_paying(best_by_workers(self.allowed()))

    def text(self, script: str, args: Sequence[str]) -> str:
        from shoal.observe.planner.plan_file import written

        return written(
            script=script,
            cwd=Path.cwd(),
            args=args,
            chosen=self.chosen,
            why=self.why(),
            stops=self.stops(),
            model=self.calibrated.alone.graph.get("model", {}),
            objective=self.objective,
            predictions=self.predictions,
            dropped=self.dropped,
            measured=self.measured,
            workload=self.workload,
            cluster=self.cluster,
        )


def _dry_runs(runs: ScriptRuns, wanted: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """One step of the script by one worker, and what it tells of its memory on others."""
    from shoal.cli.verify import temporary_job
    from shoal.cluster.launch.api import launch
    from shoal.config.job import VerifyPlan
    from shoal.observe.runs import read_json

    if runs.is_module:
        raise ClusterError("the script is a module")
    errors = io.BytesIO()
    with temporary_job(script=runs.script, args=runs.args, workers=1, strategy="single", seed=0) as (
        config,
        warm,
    ):
        dump = Path(config.run_dir) / "dump"
        plan = VerifyPlan(dtype="float32", num_steps=1, dump_to=str(dump), dry_runs=tuple(wanted))
        result = launch(
            replace(config, name="dry", verify=plan), warm=warm, stdout=io.BytesIO(), stderr=errors
        )
        if result.exit_code:
            raise ClusterError(
                f"its run failed. Its last lines:\n{errors.getvalue().decode(errors='replace')[-2000:]}"
            )
        return list(read_json(dump / "report.json").get("dry_runs", ()))


def _of_different_kind(able: Sequence[Prediction]) -> list[Prediction]:
    """The best of each family and number of workers, in their order: two exchanges that differ by a percent tell little."""
    found: dict[tuple[str, int], Prediction] = {}
    for each in able:
        found.setdefault((each.candidate.family, each.candidate.workers), each)
    return list(found.values())


# ---- output -----------------------------------------------------------------------------------------


def _show(planner: _Planner, *, show_all: bool) -> None:
    from shoal.observe.planner.cost_model import best_by_workers
    from shoal.observe.planner.measuring import disturbed

    screen, chosen = console(), planner.chosen
    shown = planner.predictions if show_all else _selection(planner.predictions, chosen)
    screen.print(_table(shown, planner))
    if len(shown) < len(planner.predictions):
        typer.echo(f"and {len(planner.predictions) - len(shown)} more; --all shows them, plan.json has them.")
    for line in _reasons(planner.dropped, show_all=show_all):
        typer.echo(line)
    if not planner.asked.is_here and planner.trials:
        typer.echo("\nThe cluster is elsewhere. On this machine, predicted beside measured:")
        for each, took_s in planner.trials:
            typer.echo(
                f"  {each.candidate.name} on {each.candidate.workers} workers: predicted {each.step_s * 1e3:.3g} ms, measured "
                f"{took_s * 1e3:.3g} ms ({each.step_s / took_s - 1:+.0%})"
            )
    typer.echo(f"\nPlan: {chosen.candidate.name} on {_placed(chosen)}. {planner.why()}")
    typer.echo(planner.stops())
    quicker = [
        each for each in planner.predictions if not each.candidate.is_exact and each.step_s < chosen.step_s
    ]
    if quicker and not planner.inexact:
        typer.echo(
            f"{quicker[0].candidate.name} would take {quicker[0].step_s * 1e3:.3g} ms and compute another result; --inexact lets it be chosen."
        )
    if busy := disturbed(planner.runs.shares):
        typer.echo(busy, err=True)
    if chosen.cost_per_million is not None:
        by = best_by_workers(planner.allowed())
        cheapest = min(by.values(), key=lambda each: each.cost_per_million or 0.0)
        typer.echo(
            f"A million samples cost {chosen.cost_per_million:.3g}; {cheapest.cost_per_million:.3g} is the least, with "
            f"{cheapest.candidate.workers} workers."
        )


def _placed(found: Prediction) -> str:
    workers = found.candidate.workers
    return f"{workers} worker{'s' if workers > 1 else ''}" + (
        f" of {found.hosts} hosts" if found.hosts > 1 else ""
    )


def _selection(predictions: Sequence[Prediction], chosen: Prediction) -> list[Prediction]:
    """The quickest of each family for each number of workers, the chosen one, and the quickest of all."""
    kept = {id(each) for each in [*_of_different_kind(predictions)[:SHOWN], *predictions[:3]]}
    kept |= {
        id(each) for each in predictions if each.candidate.workers == 1 or each.candidate == chosen.candidate
    }
    return [each for each in predictions if id(each) in kept]


def _table(shown: Sequence[Prediction], planner: _Planner) -> Table:
    from rich import box
    from rich.table import Table

    from shoal.observe.planner.cost_model import TERMS

    terms = [term for term in TERMS if any(each.terms[term] >= 5e-6 for each in shown)]
    has_price = any(each.cost_per_million is not None for each in shown)
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="ms of a step", title_justify="left")
    drawn.add_column("way", overflow="fold")
    for name in ("workers", "predicted", "measured", *terms, "MB", *(["cost/M"] if has_price else [])):
        drawn.add_column(name, justify="right", no_wrap=True)
    chosen = planner.chosen
    for each in shown:
        took_s = planner.measured.get(each.candidate)
        mark = "* " if each.candidate == chosen.candidate else "  "
        drawn.add_row(
            f"{mark}{each.candidate.name}" + ("" if each.candidate.is_exact else " (inexact)"),
            str(each.candidate.workers),
            _number(each.step_s * 1e3),
            _number(took_s * 1e3) if took_s is not None else "",
            *(_number(each.terms[term] * 1e3) for term in terms),
            f"{each.memory_bytes / 1e6:,.0f}",
            *([f"{each.cost_per_million:.3g}"] if has_price and each.cost_per_million is not None else []),
        )
    return drawn


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _reasons(dropped: Sequence[Dropped], *, show_all: bool) -> Iterator[str]:
    """A reason for each strategy and number of workers that is dropped; by reason, where not all are asked for."""
    if not dropped:
        return
    yield "\nDropped:"
    if show_all:
        yield from (f"  {each.candidate.name} on {each.candidate.workers}: {each.reason}" for each in dropped)
        return
    by_reason: dict[str, list[str]] = {}
    for each in dropped:
        names = by_reason.setdefault(each.reason, [])
        named = f"{each.candidate.name} on {each.candidate.workers}"
        if named not in names:
            names.append(named)
    for reason, names in by_reason.items():
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        yield f"  {', '.join(names[:2])}{more}: {reason}"


# ---- shoal run --plan, --strategy auto --------------------------------------------------------------


def read_plan_options(ctx: typer.Context, file: Path | None) -> Path | None:
    """Defaults of `shoal run` from a plan: an eager callback, as that of --config."""
    if file is not None:
        from shoal.observe.planner.plan_file import read_plan

        try:
            found = read_plan(file)
            found.refuse_other_script(file)
        except ConfigError as error:
            fail(error)
        ctx.default_map = {**(ctx.default_map or {}), **found.options()}
    return file


PlanOption = Annotated[
    Path | None,
    typer.Option(
        "--plan",
        metavar="FILE",
        is_eager=True,
        callback=read_plan_options,
        help="Run what `shoal plan` wrote: its script, workers, strategy and options.",
    ),
]


def refuse_beside_plan(ctx: typer.Context, file: Path, script: str, args: Sequence[str]) -> PlanFile:
    """Refuse options that contradict the plan; the plan."""
    from shoal.observe.planner.plan_file import read_plan

    found = read_plan(file)
    for name in PLANNED:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            flag = "-n" if name == "workers" else f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{flag} and --plan {file} both say how to run it: the plan is {found.candidate.name} on {found.workers} workers. Nothing "
                f"was started; leave one of the two out, or make another plan."
            )
    if Path(script).resolve() != found.script_path.resolve():
        raise ConfigError(
            f"{file} is a plan for {found.script_path}, and {script} was given. Nothing was started; leave the script out, or plan it."
        )
    if list(args) != found.args:
        raise ConfigError(
            f"{file} is a plan for the arguments {' '.join(found.args) or '(none)'}, and {' '.join(args) or 'none'} were given. Nothing was "
            "started; leave them out, or plan the script with them."
        )
    return found


def auto(
    script: str, args: Sequence[str], *, module: bool, workers: int, run_dir: Path
) -> tuple[dict[str, Any], str]:
    """Options of a run with --strategy auto, and what is said of them: the short form of `shoal plan`.

    Two short runs, no candidate tried. A choice made before for the same script, arguments, workers and cores is used again.
    """
    from shoal.cluster.launch.threads import available_cores
    from shoal.observe.planner.plan_file import digest

    if workers == 1:
        return {"strategy": "single"}, "auto: single, because one worker has nobody to share a batch with"
    here = available_cores()
    text = digest(Path(script)) if not module and Path(script).is_file() else ""
    if not module and not text:
        raise ConfigError(f"there is no script {script}. Nothing was started.")
    key = {"script": text, "args": list(args), "workers": workers, "cores": here}
    kept = run_dir / f"{Path(script).stem}-plan" / "auto.json"
    try:
        before = json.loads(kept.read_text()) if text else {}
    except (OSError, ValueError):
        before = {}
    if isinstance(before, dict) and before.get("key") == key and {"options", "said"} <= before.keys():
        return dict(before["options"]), f"auto: {before['said']} (as measured before, {kept})"
    asked = _Asked(hosts=1, per_host=workers, cores=here, cores_here=here, speed=1.0)
    planner = _Planner(
        runs=_runs(script, args, run_dir, AUTO_SECONDS, module=module),
        cluster=_shape(asked, None, None, None, None, None),
        asked=asked,
        objective="time",
        inexact=False,
    )
    planner.measure(0.0)
    planner.predict(counts=[workers], plain=True)
    planner.prefer("ddp", unless=CLEARLY)
    c = planner.chosen.candidate
    options: dict[str, Any] = {"strategy": c.strategy, "schedule": c.schedule}
    if c.servers:
        options["servers"] = str(c.servers)
    said = f"{c.name}. {planner.why()}"
    kept.write_text(json.dumps({"key": key, "options": options, "said": said}) + "\n")
    return options, f"auto: {said}"
