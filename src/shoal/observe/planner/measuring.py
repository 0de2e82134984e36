"""Measurements for a plan: short runs of the script with one worker and with several, read back from their directories.

Each is a run of its own (`observe/trials.py`) in `<run-dir>/<script>-plan/`, where it can be looked at like any other. Four
of them tell apart what threads, small slices and neighbours do to compute: one worker with all cores, one with a worker's
share of them, the same with its batch in parts, and several workers under ddp.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shoal.cluster.launch.threads import available_cores, threads_per_worker
from shoal.errors import ClusterError, ConfigError
from shoal.observe import record as records
from shoal.observe import runs
from shoal.observe.planner.cost_model import (
    ROW_LAYERS,
    SHARDS,
    TERMS,
    UNMEASURED,
    ClusterShape,
    DryRun,
    LinkSpeed,
    ModelLayer,
    PlanCandidate,
    ServerCost,
    TensorCost,
    Workload,
    asks_for_dry_run,
    compressed,
    fitted,
    gradient_sum_s,
    rows_sum_s,
    sift,
)
from shoal.observe.trials import Trial

MIN_STEPS = 8
WARM_STEPS = 3
QUICK = 0.25
"""Quantile of step latencies that counts: other processes of a machine make steps longer, and never shorter."""

STARVED = 0.75
"""Share of the processor under which a measurement is of the machine's other work as well."""

SPAN_TERM = {
    "compute": "compute",
    "exchange": "communication",
    "push": "communication",
    "pull": "communication",
    "wait": "communication",
    "apply": "apply",
    "read": "read",
}
MAX_OVERLAP = 0.95
PARTS = 4
"""Parts of a batch by which the cost of a forward and backward beside its samples is measured."""

COPIED_BYTES = 32 << 20
MAX_DRY_RUNS = 16
MAX_FIXED = 0.9
"""Of compute: what a slice leaves is never nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """One short run, read back. Seconds are of one step."""

    step_s: float
    terms: Mapping[str, float]
    batch: int
    workers: int
    threads: int
    sent_bytes: float
    """By each worker in a step."""

    peak_bytes: int
    cpu_share: float
    """Processor time over the time in which its workers computed: under 1 where others had the processor."""

    graph: Mapping[str, Any]


def read_run(path: Path, *, is_synchronous: bool = True) -> MeasuredRun:
    """Figures of a run. Workers that do not step together are measured by their samples."""
    record = records.read(path)
    loads = records.loads(record)
    steps = sum(load.steps for load in loads.values())
    if not steps:
        raise ClusterError(f"{path} has no step of any worker.")
    num_workers = len(loads)
    per_worker = steps / num_workers
    sizes = record.steps.samples
    batch = round(
        float(np.median(sizes)) if len(sizes) else sum(load.samples for load in loads.values()) / per_worker
    )
    latencies = record.steps.latencies_s()[WARM_STEPS:]
    rate = records.samples_per_s(record) or 0.0
    if is_synchronous and len(latencies) >= MIN_STEPS // 2:
        step_s = float(np.quantile(latencies, QUICK))
    else:
        step_s = batch / rate if rate else math.inf
    sums = dict.fromkeys(TERMS, 0.0)
    for load in loads.values():
        for kind, term in SPAN_TERM.items():
            sums[term] += load.seconds.get(kind, 0.0)
        spent = sum(load.seconds.get(kind, 0.0) for kind in (*SPAN_TERM, "checkpoint"))
        sums["other"] += max(0.0, load.interval_s - spent)
    whole = sum(sums.values())
    return MeasuredRun(
        step_s=step_s,
        terms={term: spent / whole * step_s for term, spent in sums.items()},
        batch=batch,
        workers=num_workers,
        threads=int(record.config.get("threads") or 1),
        sent_bytes=sum(load.sent_bytes for load in loads.values()) / steps,
        peak_bytes=max(load.peak_bytes for load in loads.values()),
        cpu_share=sum(load.cpu_s for load in loads.values()) / max(sums["compute"] + sums["apply"], 1e-9),
        graph=runs.read_json(path / "graph.json"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRuns:
    """Runs one script again and again, for some seconds each."""

    script: str
    args: tuple[str, ...]
    folder: Path
    seconds: float
    say: Callable[[str], None]
    is_module: bool = False
    repeats: int = 1
    """How often a run is measured again in which others had the processor; the quicker counts."""

    shares: list[float] = field(default_factory=list)
    """Of the processor, that the workers of each run had."""

    def run(
        self, name: str, candidate: PlanCandidate, *, threads: int | None = None, parts: int | None = None
    ) -> MeasuredRun:
        """Run a candidate; `threads` of each worker at most, a worker's slice in so many parts."""
        began = time.monotonic()
        in_parts = ("--accumulate", str(parts)) if parts is not None else ()
        trial = Trial(
            script=self.script,
            args=self.args,
            workers=candidate.workers,
            options=(*candidate.flags()[2:], *in_parts, *(["-m"] if self.is_module else [])),
            name=name,
            run_dir=self.folder,
            threads=threads,
        )
        is_synchronous = candidate.is_exact or not (candidate.servers or candidate.sync_every)
        found = None
        for _ in range(1 + self.repeats):
            try:
                trial.run(seconds=self.seconds, min_steps=MIN_STEPS)
            except ClusterError:
                if found is None:
                    raise
                break  # a script that cannot be run twice has this one figure; its next run is refused by name
            again = read_run(self.folder / name, is_synchronous=is_synchronous)
            found = again if found is None or again.step_s < found.step_s else found
            if found.cpu_share >= STARVED:
                break
        assert found is not None
        self.shares.append(found.cpu_share)
        of_threads = f", {found.threads} thread{'s' if found.threads > 1 else ''} each"
        of_threads += f", in {parts} parts" if parts is not None else ""
        self.say(
            f"measured {candidate.name} on {candidate.workers} worker{'s' if candidate.workers > 1 else ''}{of_threads}: "
            f"{found.step_s * 1e3:.3g} ms a step ({time.monotonic() - began:.0f} s)"
        )
        return found


def disturbed(shares: Sequence[float]) -> str:
    """A sentence where other processes had the machine while it was measured; else nothing. Accelerators compute without the processor."""
    if not shares or min(shares) >= STARVED:
        return ""
    return (
        f"note: while they computed, workers had as little as {min(shares):.0%} of a core: other processes were using this machine. Predictions and "
        "measurements are of the machine as it was; plan again while nothing else runs."
    )


SINGLE = PlanCandidate(workers=1, strategy="single")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The runs by which a workload is known."""

    alone: MeasuredRun
    """One worker with all cores."""

    narrow: MeasuredRun
    """One worker with the threads that it has among several."""

    in_parts: MeasuredRun | None = None
    """The same, its batch in `PARTS`. None: not measured."""

    several: MeasuredRun | None = None
    """Several workers under ddp. None for one."""


def calibrate(runs_: ScriptRuns, num_workers: int, *, with_parts: bool = True) -> Calibration:
    alone = runs_.run("n1", SINGLE)
    if num_workers == 1:
        return Calibration(alone=alone, narrow=alone)
    threads = threads_per_worker(num_workers, cores=available_cores(), env={})
    narrow = alone if threads >= alone.threads else again(runs_, "n1-narrow", SINGLE, threads=threads)
    several = again(runs_, f"n{num_workers}", PlanCandidate(workers=num_workers, strategy="ddp"))
    if narrow.step_s < STARVED * alone.step_s:
        # So much quicker with fewer threads: other processes had a core of these, and all of them waited for it.
        alone = min(alone, runs_.run("n1", SINGLE), key=lambda each: each.step_s)
    in_parts = None
    if with_parts and alone.graph and alone.batch >= 2 * PARTS:
        # A loop of the script's own, or a loss that does not recombine, cannot be run so, and is planned without it.
        with contextlib.suppress(ClusterError):
            in_parts = runs_.run("n1-parts", SINGLE, threads=threads, parts=PARTS)
    return Calibration(alone=alone, narrow=narrow, in_parts=in_parts, several=several)


def again(
    runs_: ScriptRuns, name: str, candidate: PlanCandidate, *, threads: int | None = None
) -> MeasuredRun:
    """Run a script again. A script that fails by itself is distinguished from one that this strategy cannot train."""
    try:
        return runs_.run(name, candidate, threads=threads)
    except ClusterError as failed:
        try:
            runs_.run("n1-again", SINGLE)
        except ClusterError as error:
            raise ConfigError(
                f"the script '{runs_.script}' cannot be run twice: it trained the first time, and the next run of the same command "
                "failed. A plan measures it several times, so none was made; have the script write where nothing is yet (shoal "
                f"gives each run a directory of its own, trainer.run_dir), or skip what is there. {_last_lines(error)}"
            ) from None
        raise failed


def _last_lines(error: ClusterError) -> str:
    return str(error)[str(error).find("Its last lines:") :]


def workload_of(calibration: Calibration, cluster: ClusterShape) -> Workload:
    """The workload that explains the calibration: predicted again, it gives the same step."""
    alone, narrow, several = calibration.alone, calibration.narrow, calibration.several
    layers = layers_of(alone.graph)
    parameter_bytes = sum(layer.parameter_bytes for layer in layers)
    base = Workload(
        batch=alone.batch,
        alone=dict(alone.terms),
        compute_s=alone.terms["compute"],
        apply_s=alone.terms["apply"],
        read_s=alone.terms["read"],
        other_s=alone.terms["other"],
        threads=alone.threads,
        num_tensors=len(alone.graph.get("model") or ()),
        parameter_bytes=parameter_bytes,
        gradient_bytes=parameter_bytes,
        layers=layers,
        is_batch_dependent=any("BatchNorm" in layer.kind for layer in layers),
        peak_bytes=alone.peak_bytes,
    )
    if several is None:
        return base
    n, slice_s, whole_s = several.workers, several.terms["compute"], narrow.terms["compute"]
    if calibration.in_parts is not None:
        fixed_s = min(
            max((calibration.in_parts.terms["compute"] - whole_s) / (PARTS - 1), 0.0), MAX_FIXED * whole_s
        )
    else:
        # The slowdown by neighbouring workers is used for it: too much for many small slices, and right for
        # slices of this size.
        fixed_s = min(max((n * slice_s - whole_s) / (n - 1), 0.0), MAX_FIXED * whole_s)
    dense, rows = _told_apart(several.sent_bytes, layers, parameter_bytes)
    sum_s = gradient_sum_s("auto", dense, n, cluster, hosts=1)
    sum_s += rows_sum_s("auto", rows, n, cluster, hosts=1)
    exposed_s = several.terms["communication"]
    gain = 1.0
    if narrow.threads < alone.threads and whole_s > 0 < alone.terms["compute"]:
        gain = math.log(whole_s / alone.terms["compute"]) / math.log(alone.threads / narrow.threads)
    return replace(
        base,
        compute_s=whole_s,
        fixed_s=fixed_s,
        crowding=slice_s / (fixed_s + (whole_s - fixed_s) / n),
        crowd=n,
        apply_s=several.terms["apply"],
        apply_alone_s=narrow.terms["apply"],
        read_s=n * several.terms["read"],
        other_s=several.terms["other"],
        threads=several.threads,
        thread_gain=min(max(gain, 0.0), 1.0),
        overlap=min(max(1 - exposed_s / sum_s, 0.0), MAX_OVERLAP) if sum_s else 0.0,
        waiting_s=max(0.0, exposed_s - sum_s),
        parameter_bytes=parameter_bytes or round(several.sent_bytes),
        gradient_bytes=round(dense),
        row_bytes=round(n * rows),
    )


def _told_apart(sent: float, layers: Sequence[ModelLayer], parameter_bytes: int) -> tuple[float, float]:
    """Bytes of dense gradients, and of rows of one worker: where less was sent than there are parameters, embeddings were sparse."""
    dense = sum(layer.parameter_bytes for layer in layers if layer.kind not in ROW_LAYERS)
    is_sparse = dense < parameter_bytes and dense <= sent < 0.9 * parameter_bytes
    return (dense, sent - dense) if is_sparse else (sent, 0.0)


def layers_of(graph: Mapping[str, Any]) -> tuple[ModelLayer, ...]:
    """Layers of graph.json, joins left out."""
    return tuple(
        ModelLayer(
            name=str(layer["name"]),
            kind=str(layer["kind"]),
            parameters=int(layer["parameters"]),
            parameter_bytes=int(layer["parameter_bytes"]),
            output_bytes=int(layer["output_bytes"]),
            features=_features(str(layer["kind"]), str(layer["shape"])),
        )
        for layer in graph.get("layers", ())
        if not layer.get("is_join")
    )


def _features(kind: str, shape: str) -> int:
    """Features of an output N×...×features, channels of a convolution's N×channels×...."""
    sizes = shape.split("×")
    at = 1 if "Conv" in kind and len(sizes) > 2 else -1
    return int(sizes[at]) if sizes[at].isdecimal() else 0


# ---- memory ----------------------------------------------------------------------------------------


def dry_runs_wanted(
    candidates: Iterable[PlanCandidate], workload: Workload, cluster: ClusterShape
) -> list[tuple[int, int]]:
    """Ranks that share a batch and shards of fsdp, of the quickest candidates of which memory decides.

    With (1, 1), which what was measured is compared with. Whole and sharded models in turn: the limit
    is not spent on one kind because a busy machine made its predictions the quicker ones.
    """
    roomy = replace(cluster, memory_bytes=0)
    quickest, _ = sift(iter(candidates), workload, roomy)
    asked = [
        (each.candidate.axes.num_data_ranks, each.candidate.axes.fsdp)
        for each in quickest
        if asks_for_dry_run(each.candidate, workload, cluster)
    ]
    kinds = [[each for each in dict.fromkeys(asked) if (each[1] > 1) is sharded] for sharded in (False, True)]
    in_turn = [each for pair in zip_longest(*kinds) for each in pair if each is not None]
    return list(dict.fromkeys([(1, 1), *in_turn]))[:MAX_DRY_RUNS] if asked else []


def dry_runs_of(told: Sequence[Mapping[str, Any]]) -> tuple[DryRun, ...]:
    """From report.json; ValueError with the reason where the model could not be run dry."""
    for each in told:
        if "error" in each:
            raise ValueError(str(each["error"]))
    return tuple(DryRun(**each) for each in told)


# ---- links ----------------------------------------------------------------------------------------


class LinkTimes(NamedTuple):
    """Seconds that `shoal.cli.bench.command.measure_links` measured on this machine, with as many workers as are planned for."""

    exchanges: Mapping[int, Mapping[str, float]]
    """By bytes and exchange."""

    compressors: Mapping[str, Mapping[int, float]]
    """By compressor and bytes; "none" is the sum alone."""

    rows: Mapping[str, Mapping[int, float]]
    """Of sparse gradients by the exchange of "auto" and by "native", by the bytes of one worker's rows."""

    shards: Sequence[Mapping[str, float]]
    """Of models under fsdp and without, by bytes and number of parameters; empty where fsdp does not run."""

    served: Sequence[Mapping[str, float]]
    """Of models on one server, by bytes of dense parameters and of rows."""


def with_links(cluster: ClusterShape, times: LinkTimes, num_workers: int) -> ClusterShape:
    """A cluster whose links within a host are as they were measured here."""
    links = links_of(times.exchanges, num_workers)
    unit, costs = links.get("native", UNMEASURED), TensorCost()  # a gather moves what 1.5 sums do
    if times.shards:
        unit, costs = shards_of(times.shards, num_workers)
    return replace(
        cluster,
        exchanges=links | {SHARDS: unit},
        codecs=codecs_of(times.compressors, num_workers),
        rows={name: _rows_of(seconds, num_workers) for name, seconds in times.rows.items()},
        tensors=costs,
        served=served_of(times.served, num_workers) if times.served else None,
    )


def _rows_of(seconds: Mapping[int, float], num_workers: int) -> LinkSpeed:
    """By the bytes that a worker receives of the others."""
    small, large = sorted(seconds)
    per_byte = max(seconds[large] - seconds[small], 1e-9) / (large - small)
    return LinkSpeed(max(0.0, seconds[small] - small * per_byte), (num_workers - 1) / per_byte)


def served_of(lines: Sequence[Mapping[str, float]], num_workers: int) -> ServerCost:
    """What a server's steps cost beside the update, as the copies of workers and server by which the model explains them."""
    small, large, rows = lines
    copies = 2 * (1 + num_workers)  # of a push and a pull: by a worker, and by the server for each worker

    def bandwidth(more: Mapping[str, float], num_bytes: float) -> float:
        return copies * num_bytes / max(more["whole_s"] - small["whole_s"], 1e-9)

    return ServerCost(
        small["served_s"],
        bandwidth(large, large["bytes"] - small["bytes"]),
        bandwidth(rows, rows["row_bytes"]),
    )


def shards_of(lines: Sequence[Mapping[str, float]], num_workers: int) -> tuple[LinkSpeed, TensorCost]:
    """A unit of fsdp by its bytes, and each of its parameters."""

    def gathered(line: Mapping[str, float]) -> float:
        return max(line["sharded_s"] - line["plain_s"], 0.0)

    few, many, large = lines
    more = many["parameters"] - few["parameters"]
    copies_s = max((gathered(many) - gathered(few)) / more, 0.0)
    apply_s = max((many["sharded_apply_s"] - few["sharded_apply_s"]) / more, 0.0)
    by_bytes = {
        round(line["bytes"]): max(gathered(line) - line["parameters"] * copies_s, 1e-6)
        for line in (few, large)
    }
    return fitted(SHARDS, by_bytes, num_workers), TensorCost(copies_s, apply_s)


def links_of(by_size: Mapping[int, Mapping[str, float]], num_workers: int) -> dict[str, LinkSpeed]:
    """Latency and bandwidth of each exchange within a host, from seconds by size and exchange."""
    names = {name for medians in by_size.values() for name in medians}
    return {
        name: fitted(name, {size: medians[name] for size, medians in by_size.items()}, num_workers)
        for name in sorted(names)
    }


def codecs_of(seconds: Mapping[str, Mapping[int, float]], num_workers: int) -> dict[str, LinkSpeed]:
    """Seconds of compressors beside the sum of what they send: of a gradient, and of its bytes."""
    found = {}
    for name, by_bytes in seconds.items():
        if name != "none":
            small, large = sorted(by_bytes)
            beside = {}
            for size in (small, large):
                side = math.isqrt(size // 4)
                layer = ModelLayer(
                    name="", kind="Linear", parameters=side * side, parameter_bytes=size, features=side
                )
                sum_s = seconds["none"][size] * compressed(name, size, num_workers, [layer]) / size
                beside[size] = max(0.0, by_bytes[size] - sum_s)
            # Never zero: a plan is JSON, which has no infinite bandwidth.
            slope = max(1e-18, (beside[large] - beside[small]) / (large - small))
            found[name] = LinkSpeed(max(0.0, beside[small] - small * slope), 1 / slope)
    return found


def copy_bytes_per_s() -> float:
    """Bandwidth of the quickest of a few copies in memory."""
    source, target = np.ones(COPIED_BYTES, np.uint8), np.empty(COPIED_BYTES, np.uint8)
    took_s = []
    for _ in range(4):
        began = time.perf_counter()
        np.copyto(target, source)
        took_s.append(time.perf_counter() - began)
    return COPIED_BYTES / min(took_s)
