"""Figures of a run for `shoal report`: latency, throughput, where the time went, faults, cost, and the bottleneck.

Pure: a RunRecord in, plain JSON values out. Every figure is measured; a missing one is None, and
`missing` says why.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shoal.config import strategy as strategies
from shoal.errors import ConfigError
from shoal.observe import record as records
from shoal.observe.planner.cost_model import BEYOND_IDEAL
from shoal.observe.record import BUSY, RunRecord, StepSeries, Totals, Trace

LOWER_IS_BETTER = re.compile(r"loss|error|mse|mae|rmse|perplexity|nll|entropy")
FAULTS = ("worker-exited", "server-exited", "coordinator-exited", "host-lost")
DOWN_S = 30.0
"""A longer silence of all processes is between two launches, and costs nothing."""

CLOCK_ERROR_NS = 1_000_000
"""Of aligned clocks of two hosts, at most."""

STRAGGLES = 1.25
"""Slowdown of a worker's own time per step, against the median of the others, that makes it a straggler."""

STRAGGLES_FROM = 0.05
"""Share of its time by which it has to be slower: where all of them mostly wait, a third more of little is noise."""


@dataclass(frozen=True, slots=True)
class Target:
    """A metric and the value it has to reach."""

    name: str
    value: float
    is_below: bool

    @classmethod
    def parse(cls, said: str) -> Target:
        """`loss<0.3`, `auroc>0.7`, or `loss=0.3`, where the name tells which way is better."""
        match = re.fullmatch(r"\s*([\w.]+)\s*(<=?|>=?|=)\s*(\S+)\s*", said)
        try:
            if match is None:
                raise ValueError
            value = float(match[3])
        except ValueError:
            raise ConfigError(
                f"--target {said!r} is no target: give a metric and a value, such as 'loss<0.3' or 'val_auroc>0.75'."
            ) from None
        is_below = match[2].startswith("<") or (match[2] == "=" and bool(LOWER_IS_BETTER.search(match[1])))
        return cls(match[1], value, is_below)

    def is_reached(self, value: float) -> bool:
        return value <= self.value if self.is_below else value >= self.value


class MeasuredBandwidth(NamedTuple):
    """Bandwidth of a link between processes of the run, and how it was measured."""

    bytes_per_s: float
    measured_by: str


def figures(
    record: RunRecord,
    *,
    traces: Sequence[Trace] = (),
    baseline: Mapping[str, Any] | None = None,
    target: Target | None = None,
    price: float | None = None,
    bandwidth: MeasuredBandwidth | None = None,
) -> dict[str, Any]:
    """All figures of a run. `price` is of one host for an hour; `bandwidth` of the link between its processes."""
    workers = records.loads(record)
    servers = {name: records.totals(lines) for name, lines in record.servers.items()}
    everybody = {name: records.totals(lines) for name, lines in record.activity.items()}
    rate = records.samples_per_s(record)
    seconds = _seconds(record)
    found: dict[str, Any] = {
        "run": record.path.name,
        "state": str(record.state),
        "script": record.config.get("script"),
        "strategy": record.config.get("strategy"),
        "workers": record.config.get("workers"),
        "servers": record.config.get("servers"),
        "threads": record.config.get("threads"),
        "steps": _num_steps(record, workers),
        "seconds": seconds,
        "samples": record.summary.get("samples") or sum(w.samples for w in workers.values()) or None,
        "samples_per_s": rate,
        "loss": _last_finite(record.steps),
        "metrics": record.summary.get("metrics") or (record.epochs[-1] if record.epochs else {}),
        "step_latency": _latency(record.steps),
        "time_to_target": _time_to(record, target),
        "scaling": _scaling(record, rate, baseline),
        "time_by_worker": {name: _spent(each) for name, each in workers.items()},
        "stragglers": stragglers(workers),
        "exchange": _waiting(traces),
        "nodes": {name: _node(each, bandwidth) for name, each in everybody.items()},
        "hosts": _hosts(record),
        "links": _links(record, workers),
        "bandwidth": bandwidth._asdict() if bandwidth is not None else None,
        "imbalance": _imbalances(workers, servers),
        "servers_load": {name: _server(record.servers[name], each) for name, each in servers.items()},
        "staleness": _staleness(record),
        "row_cache": record.summary.get("row_cache"),
        "restarts": record.summary.get("restarts", _restarts(record)),
        "faults": _faults(record),
        "core_seconds": sum(each.cpu_s for each in everybody.values()) or None,
        "gpu_seconds": _gpu_seconds(record, seconds),
        "peak_bytes": max((each.peak_bytes for each in everybody.values()), default=0) or None,
        "device_peak_bytes": _device_peak_bytes(record),
        "money": _money(record, seconds, price),
        "missing": list(record.missing),
    }
    scaling = found["scaling"]
    if scaling and scaling["efficiency"] > BEYOND_IDEAL:
        found["missing"].append(
            f"a baseline that holds: {scaling['efficiency']:.0%} of the ideal cannot be, so {scaling['baseline']} was disturbed, by other "
            "processes or by threads that share a core. Remove that run and measure again while nothing else runs."
        )
    found["bottleneck"], found["cure"] = bottleneck(record, workers, servers, found)
    return found


def _num_steps(record: RunRecord, workers: Mapping[str, Totals]) -> int | None:
    """Steps of the newest line of rank 0; where batches are leased, others may have done the last ones."""
    by_worker = [each.steps for each in workers.values()]
    together = sum(by_worker) if _is_relaxed(record) else max(by_worker, default=0)
    found = [int(record.steps.step[-1])] if len(record.steps) else [together]
    if record.summary.get("leases") and isinstance(record.summary.get("steps"), int):
        found.append(record.summary["steps"])
    return max(found) or None


def _is_relaxed(record: RunRecord) -> bool:
    """Whether a step is one worker's, not all of theirs."""
    try:
        return not strategies.parse(str(record.config.get("strategy"))).is_exact
    except ConfigError:
        return False


def _seconds(record: RunRecord) -> float | None:
    """From the first launch to the end, or to the newest sign of life, without the time between launches."""
    began = _began(record)
    ended = record.summary.get("ended")
    if not isinstance(ended, (int, float)):
        ends = [lines[-1]["at"] for lines in record.activity.values()]
        ends += [record.steps.time[-1]] if len(record.steps) else []
        ended = max(ends, default=None)
    if began is None or ended is None:
        return None
    there = records.stretches(record.activity.values())
    down = [later[0] - before[1] for before, later in itertools.pairwise(there)]
    return round(float(ended) - began - sum(each for each in down if each > DOWN_S), 3)


def _began(record: RunRecord) -> float | None:
    """When it was launched first, or took its first step: config.json tells of the newest launch."""
    started = record.config.get("started")
    found = [float(started)] if isinstance(started, (int, float)) else []
    times = record.steps.time[record.steps.time > 0]
    return min([*found, *(times[:1].tolist())], default=None)


def _last_finite(steps: StepSeries) -> float | None:
    finite = steps.loss[np.isfinite(steps.loss)]
    return float(finite[-1]) if len(finite) else None


def _latency(steps: StepSeries) -> dict[str, float] | None:
    spent = steps.latencies_s()
    if not len(spent):
        return None
    median, late = np.percentile(spent, [50, 99])
    return {"median_s": float(median), "p99_s": float(late), "max_s": float(spent.max()), "steps": len(spent)}


def _time_to(record: RunRecord, target: Target | None) -> dict[str, Any] | None:
    if target is None:
        return None
    began = _began(record) or 0.0
    reached: tuple[float, int, float] | None = None
    if target.name == "loss":
        hits = np.flatnonzero(
            record.steps.loss <= target.value if target.is_below else record.steps.loss >= target.value
        )
        if len(hits):
            at = int(hits[0])
            reached = (
                float(record.steps.time[at]),
                int(record.steps.step[at]),
                float(record.steps.loss[at]),
            )
    for line in (*record.measured, *record.epochs) if reached is None else ():
        value, moment, step = line.get(target.name), line.get("time"), line.get("step")
        if not (isinstance(value, (int, float)) and isinstance(moment, float) and target.is_reached(value)):
            continue
        if reached is None or moment < reached[0]:
            reached = moment, step if isinstance(step, int) else 0, float(value)
    said = f"{target.name} {'<=' if target.is_below else '>='} {target.value:g}"
    if reached is None:
        return {"target": said, "seconds": None, "step": None}
    return {"target": said, "seconds": round(reached[0] - began, 3), "step": reached[1], "value": reached[2]}


def _scaling(
    record: RunRecord, rate: float | None, baseline: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    if baseline is None or rate is None or not baseline.get("samples_per_s"):
        return None
    workers = int(record.config.get("workers") or 1)
    speedup = rate / float(baseline["samples_per_s"])
    return {
        "baseline": baseline.get("run"),
        "baseline_samples_per_s": baseline["samples_per_s"],
        "baseline_threads": baseline.get("threads"),
        "speedup": speedup,
        "efficiency": speedup / workers,
    }


def _spent(each: Totals) -> dict[str, Any]:
    rest = max(0.0, each.interval_s - each.busy_s)
    seconds = {kind: round(each.seconds[kind], 4) for kind in BUSY if kind in each.seconds}
    return {
        "seconds": seconds | {"other": round(rest, 4)},
        "steps": each.steps,
        "samples": each.samples,
        "own_s_per_step": each.own_s / each.steps if each.steps else None,
        "exposed_communication": each.share(*records.COMMUNICATION),
        "cpu_s": round(each.cpu_s, 3),
    }


def stragglers(workers: Mapping[str, Totals]) -> dict[str, float]:
    """Workers that are slower than the others and keep them waiting, by name, and how many times."""
    return {
        name: round(times, 2)
        for name, times in slowness(workers).items()
        if times > STRAGGLES
        and workers[name].own_s * (1 - 1 / times) > STRAGGLES_FROM * workers[name].whole_s
    }


def slowness(workers: Mapping[str, Totals]) -> dict[str, float]:
    """Time of a step that a worker does not spend waiting, over the median of the others."""
    paces = {name: each.own_s / each.steps for name, each in workers.items() if each.steps and each.own_s}
    return {
        name: pace / statistics.median(other for key, other in paces.items() if key != name)
        for name, pace in paces.items()
        if len(paces) > 1
    }


def _waiting(traces: Sequence[Trace]) -> dict[str, Any] | None:
    """From the recorded exchanges: each worker's wait for the last one, and the time in which all of them moved bytes.

    Separated at the moment at which the last worker began the same exchange.
    """
    newest: dict[str, Trace] = {}
    for trace in traces:
        if trace.process.startswith("worker-"):
            newest[trace.process] = max(
                newest.get(trace.process, trace), trace, key=lambda each: each.incarnation
            )
    begun: dict[int, dict[str, tuple[int, int]]] = {}
    for name, trace in newest.items():
        kind = trace.kinds.index("exchange") if "exchange" in trace.kinds else -1
        for span in trace.spans[trace.spans["kind"] == kind]:
            at = int(span["start_ns"]) + trace.unix_ns, int(span["end_ns"]) + trace.unix_ns
            begun.setdefault(int(span["step"]), {}).setdefault(name, at)
    shared = {
        step: spans for step, spans in begun.items() if len(spans) == len(newest) > 1 and _is_one(spans)
    }
    if not shared:
        return None
    waited = dict.fromkeys(newest, 0.0)
    last = dict.fromkeys(newest, 0)
    moving = 0.0
    for spans in shared.values():
        latest = max(start for start, _ in spans.values())
        last[max(spans, key=lambda name: spans[name][0])] += 1
        for name, (start, _) in spans.items():
            waited[name] += (latest - start) / 1e9
        moving += max(0.0, statistics.median(end for _, end in spans.values()) - latest) / 1e9
    count = len(shared)
    return {
        "steps": count,
        "transfer_s_per_step": moving / count,
        "waited_s_per_step": {name: spent / count for name, spent in waited.items()},
        "was_last": {name: times / count for name, times in last.items()},
    }


def _is_one(spans: Mapping[str, tuple[int, int]]) -> bool:
    """Whether spans of a step are of one exchange: nobody ends it before the last has come. A replaced worker's first
    spans, before it has caught up, are of another."""
    return max(start for start, _ in spans.values()) <= min(end for _, end in spans.values()) + CLOCK_ERROR_NS


def _node(each: Totals, bandwidth: MeasuredBandwidth | None) -> dict[str, Any]:
    moved = max(each.sent_bytes, each.received_bytes) / each.whole_s if each.whole_s else 0.0
    return {
        "sent_bytes": each.sent_bytes,
        "received_bytes": each.received_bytes,
        "bytes_per_s": round(moved),
        "share_of_bandwidth": round(moved / bandwidth.bytes_per_s, 6) if bandwidth is not None else None,
        "waited_s": round(each.communication_s, 3),
        "cpu_s": round(each.cpu_s, 3),
        "peak_bytes": each.peak_bytes,
    }


def _hosts(record: RunRecord) -> dict[str, dict[str, Any]]:
    """Sums over the processes of each host, by where they were at the time; empty for a run on one machine."""
    found: dict[str, dict[str, Any]] = {}
    for lines in record.activity.values():
        for host in sorted({line["host"] for line in lines if isinstance(line.get("host"), int)}):
            each = records.totals([line for line in lines if line.get("host") == host])
            sums = found.setdefault(f"host {host}", {"processes": 0})
            for name, value in _node(each, None).items():
                if name in ("sent_bytes", "received_bytes", "bytes_per_s", "waited_s", "cpu_s"):
                    sums[name] = round(sums.get(name, 0) + value, 3)
            sums["processes"] += 1
    return dict(sorted(found.items(), key=lambda item: int(item[0].split()[1])))


def _links(record: RunRecord, workers: Mapping[str, Totals]) -> dict[str, int]:
    """Bytes between workers and servers, where workers send to nobody else. Between two hosts none are counted."""
    try:
        strategy = strategies.parse(str(record.config.get("strategy")))
    except ConfigError:
        return {}
    if not strategy.has_servers or strategy.mode == "hybrid":
        return {}
    return {
        "workers to servers": sum(each.sent_bytes for each in workers.values()),
        "servers to workers": sum(each.received_bytes for each in workers.values()),
    }


def _imbalances(workers: Mapping[str, Totals], servers: Mapping[str, Totals]) -> dict[str, float]:
    """Largest over mean: 1 is even."""
    measured = {
        "time computing": [each.seconds.get("compute", 0.0) for each in workers.values()],
        "time waiting": [each.communication_s for each in workers.values()],
        "bytes of workers": [float(each.sent_bytes + each.received_bytes) for each in workers.values()],
        "bytes of servers": [float(each.sent_bytes + each.received_bytes) for each in servers.values()],
        "work of servers": [each.busy_s - each.seconds.get("wait", 0.0) for each in servers.values()],
    }
    return {
        name: round(max(values) / statistics.mean(values), 3)
        for name, values in measured.items()
        if len(values) > 1 and sum(values) > 0
    }


def _server(lines: Sequence[Mapping[str, Any]], each: Totals) -> dict[str, Any]:
    newest = lines[-1]
    requests = sum(line.get("requests", 0) for line in lines)
    queued = sum(line.get("queue_s", 0.0) * line.get("requests", 0) for line in lines)
    working = each.busy_s - each.seconds.get("wait", 0.0)
    return {
        "busy": working / each.interval_s if each.interval_s else None,
        "requests": requests,
        "queue_s": queued / requests if requests else None,
        "slots": newest.get("slots"),
        "replicas": newest.get("replicas"),
        "rows": newest.get("rows", {}),
    }


def _staleness(record: RunRecord) -> dict[str, int]:
    counted: dict[str, int] = {}
    told = record.summary.get("staleness")
    sources = (
        [told]
        if isinstance(told, dict)
        else [line.get("staleness", {}) for lines in record.servers.values() for line in lines]
    )
    for source in sources:
        for distance, count in source.items():
            counted[str(distance)] = counted.get(str(distance), 0) + int(count)
    return dict(sorted(counted.items(), key=lambda each: int(each[0])))


def _restarts(record: RunRecord) -> int:
    return sum(
        str(event.get("event")) in ("worker-replaced", "server-replaced", "coordinator-restarted")
        for event in record.events
    )


def _faults(record: RunRecord) -> list[dict[str, Any]]:
    """Deaths during training, each with what it cost: the step that lasted over it, less a usual one."""
    found = []
    spent = record.steps.latencies_s()
    usual = float(np.median(spent)) if len(spent) else 0.0
    times = record.steps.time
    for event in record.events:
        kind, at = event.get("event"), event.get("time")
        if kind not in FAULTS or not event.get("code", 1) or not isinstance(at, (int, float)):
            continue
        if not len(times) or at >= times[-1]:
            continue  # of processes that end with the job
        who = f"{str(kind).partition('-')[0]} {event.get('rank', event.get('server', event.get('host', '')))}".strip()
        next_step = int(np.searchsorted(times, at))
        gap = float(times[next_step] - times[next_step - 1]) if next_step else None
        again = [
            each
            for each in record.events
            if each.get("event") == "went-back" and at <= each.get("time", 0) <= at + (gap or 0) + 60
        ]
        found.append(
            {
                "what": who,
                "code": event.get("code"),
                "time": at,
                "step": int(record.steps.step[next_step]),
                "cost_s": round(max(0.0, gap - usual), 3) if gap is not None else None,
                "repeated_steps": sum(each.get("from_step", 0) - each.get("to_step", 0) for each in again),
            }
        )
    return found


def _gpu_seconds(record: RunRecord, seconds: float | None) -> float | None:
    """Seconds of the run for each accelerator that its workers allocated on; by --device for runs that tell of none."""
    used = {
        (line.get("host"), line["device"])
        for lines in record.workers.values()
        for line in lines
        if line.get("device")
    }
    number = len(used)
    if not used and str(record.config.get("device") or "").startswith(("cuda", "gpu", "xpu")):
        number = int(record.config.get("workers") or 1)
    return round(seconds * number, 1) if seconds is not None and number else None


def _device_peak_bytes(record: RunRecord) -> int | None:
    peaks = [line.get("device_peak_bytes") for lines in record.workers.values() for line in lines]
    return max((each for each in peaks if isinstance(each, int)), default=None)


def _money(record: RunRecord, seconds: float | None, price: float | None) -> dict[str, float] | None:
    if price is None or seconds is None:
        return None
    hosts = max(1, len(record.config.get("hosts") or []))
    cost = price * hosts * seconds / 3600
    samples = record.summary.get("samples") or 0
    found = {"price_per_host_hour": price, "hosts": float(hosts), "cost": cost}
    return found | ({"cost_per_million_samples": cost / samples * 1e6} if samples else {})


# ---- the bottleneck -------------------------------------------------------------------------------


def bottleneck(
    record: RunRecord,
    workers: Mapping[str, Totals],
    servers: Mapping[str, Totals],
    found: Mapping[str, Any],
) -> tuple[str | None, str | None]:
    """(what limits the run, what would help), a sentence each; None where the time of the workers is not known."""
    known = [each for each in workers.values() if each.busy_s]
    if not known:
        return None, None

    def mean(*kinds: str) -> float:
        return statistics.mean(each.share(*kinds) for each in known)

    read, compute = mean("read"), mean("compute", "apply")
    communication, saving = mean(*records.COMMUNICATION), mean("checkpoint")
    outside = 1 - mean(*BUSY)
    slow = found["stragglers"]
    busiest = max((each["busy"] or 0.0 for each in found["servers_load"].values()), default=0.0)
    shares = f"compute {compute:.0%}, communication and waiting {communication:.0%}, reading {read:.0%}"
    got = _share_of_cores(record, known)
    if got is not None and got < 0.6 and communication < 0.6:
        return (
            f"The cores are: a worker that computed had {got:.0%} of the processor time it could use, the rest went to other processes "
            f"({shares}).",
            "Use fewer workers or threads per host, or a host with more cores that nobody else uses.",
        )
    if slow and communication > 0.15:
        name, times = max(slow.items(), key=lambda each: each[1])
        return (
            f"{name} is: it needs {times:g} times as long for a step as the others, which wait for it ({shares}).",
            "Give it less work (--shard measured), or a free core; under ps, ps:ssp=4 or ps:drop=1 wait less.",
        )
    if outside > 0.3 and outside > max(read, communication, saving):
        return (
            f"Code outside of the step is: {outside:.0%} of the workers' time is neither reading nor training ({shares}).",
            "Look at callbacks, metrics and what the script does between steps; `shoal stack` shows where it stands.",
        )
    if read > 0.3:
        return (
            f"Reading is: workers wait for data during {read:.0%} of their time ({shares}).",
            "Read in processes of their own, map(fn, workers=2) or more, or cache what is decoded with .cache().",
        )
    if saving > 0.15:
        return (
            f"Saving is: checkpoints take {saving:.0%} of the workers' time ({shares}).",
            "Save less often, or onto a faster disk.",
        )
    if communication > 0.35 and servers and busiest > 0.6:
        return (
            f"The servers are: the busiest works {busiest:.0%} of the time while workers wait ({shares}).",
            f"Use more servers (--servers {len(servers) + 1}), or a larger batch.",
        )
    if communication > 0.35:
        cure = "Use a larger batch, --compress int8, or --sync-every 8, so that there is more to compute for each exchange."
        if servers:
            cure = "Use a larger batch, or wait less: --strategy ps:ssp=4 instead of ps."
        elif len(known) == 2:
            cure += " With a model this small, one worker may be as fast."
        return f"Communication is: workers spend {communication:.0%} of their time in it ({shares}).", cure
    cure = "More workers help as long as there are cores for them; `shoal bench scale` measures how far."
    if len(known) == 1:
        cure = "More workers help where there are cores for them: `shoal bench scale SCRIPT -n 1,2,4` measures it."
    return f"Compute is, as it should be: {compute:.0%} of the workers' time ({shares}).", cure


def _share_of_cores(record: RunRecord, workers: Sequence[Totals]) -> float | None:
    """Processor time of workers over the time in which they computed; None where that may be on a device, while cores idle."""
    versions = record.config.get("versions")
    torch = str(versions.get("torch")) if isinstance(versions, dict) else ""
    device = record.config.get("device") or "auto"
    if device != "cpu" and not (device == "auto" and torch.endswith("+cpu")):
        return None
    own = sum(each.seconds.get(kind, 0.0) for each in workers for kind in ("compute", "apply"))
    used = sum(each.cpu_s for each in workers)
    share = used / own if own else math.inf
    return share if share < 1 else None
