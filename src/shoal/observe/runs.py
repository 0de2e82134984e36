"""Run directories on disk: the runs, the state of each, and its ledger in plain values and in text.

Read-only, and never fails on a file that is missing, damaged or half written: a run may be writing
it at this moment, or have died while it did.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import RunDirectoryError
from shoal.runtime import own_files

if TYPE_CHECKING:
    from shoal.cluster.coordinator.lease_service import LeaseService
    from shoal.cluster.ledger.ledger import Epoch, RankTotals, SampleSpan

TAIL_BYTES = 256 * 1024
"""How much of the end of a file is looked through for its last lines."""

MAX_EVENTS = 100_000
MAX_LINE_BYTES = 256 * 1024
_LEASES = re.compile(rb'"event": ?"leases"')


class RunState(StrEnum):
    """State of a run."""

    ALIVE = "alive"  # a supervisor holds its lock
    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"  # asked to leave, and left
    DEAD = "dead"  # no supervisor, and no summary: it was killed


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run, as its directory tells it. None: not known, or not yet."""

    name: str
    state: RunState
    strategy: str | None = None
    workers: int | None = None
    step: int | None = None
    loss: float | None = None
    samples_per_s: float | None = None
    started: float | None = None
    path: str

    def facts(self) -> dict[str, Any]:
        return asdict(self)


def names(run_dir: Path) -> list[str]:
    return sorted(path.parent.name for path in run_dir.glob("*/config.json"))


def find(run: str, run_dir: Path) -> Path:
    """The directory of a run given by name or path."""
    for path in (run_dir / run, Path(run)):
        if (path / "config.json").is_file():
            return path
    known = names(run_dir)
    there = (
        f"{run_dir} has {', '.join(known[:8])}{' ...' if len(known) > 8 else ''}"
        if known
        else f"{run_dir} has no runs; --run-dir says where they are"
    )
    meant = "".join(f" Did you mean '{close}'?" for close in get_close_matches(run, known, n=1))
    raise RunDirectoryError(f"there is no run '{run}'.{meant} {there}.", path=str(run_dir / run))


def read(path: Path) -> Run:
    config, summary = read_json(path / "config.json"), read_json(path / "summary.json")
    metrics = last_lines(path / "metrics.jsonl", 200)
    last, strategy = last_step(metrics, summary), config.get("strategy")
    loss = last.get("loss")
    workers, step = (_number(each, limit=1 << 53) for each in (config.get("workers"), last.get("step")))
    return Run(
        name=path.name,
        state=state(path, summary),
        strategy=strategy if isinstance(strategy, str) else None,
        workers=int(workers) if workers is not None else None,
        step=int(step) if step is not None else None,
        loss=loss if isinstance(loss, float) else _number(loss),  # NaN is worth showing
        samples_per_s=_number(summary.get("samples_per_s")) or recent_rate(metrics),
        started=_number(config.get("started"), limit=1 << 36),  # what a calendar holds
        path=str(path),
    )


def _number(value: Any, *, limit: float = sys.float_info.max) -> float | None:
    """A number of a run's files; what is none, or none that can be shown, is not known."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < limit else None


def last_step(metrics: list[dict[str, Any]], summary: dict[str, Any]) -> dict[str, Any]:
    """The last line of metrics; the lines are rank 0's, and where batches are leased others may have done the last steps."""
    last = metrics[-1] if metrics else {}
    if isinstance(last.get("step"), int) and summary.get("leases") and isinstance(summary.get("steps"), int):
        last = last | {"step": max(last["step"], summary["steps"])}
    return last


def state(path: Path, summary: dict[str, Any]) -> RunState:
    """Alive by its lock; otherwise what its summary says, if it lived to write one."""
    from shoal.cluster.launch.run_directory import is_alive

    if is_alive(path):
        return RunState.ALIVE
    # Read again: it may have ended, and written it, between the caller's look and ours.
    summary = summary or read_json(path / "summary.json")
    match summary.get("exit"):
        case None:
            return RunState.DEAD
        case 0:
            return RunState.FINISHED
        case 130 | 143:
            return RunState.INTERRUPTED
        case _:
            return RunState.FAILED


def recent_rate(metrics: list[dict[str, Any]]) -> float | None:
    """Samples per second over the last steps, where the lines carry their time."""
    timed = [line for line in metrics if isinstance(line.get("time"), float)]
    if len(timed) < 2 or timed[-1]["time"] <= timed[0]["time"]:
        return None
    samples = sum(_number(line.get("samples")) or 0 for line in timed[1:])
    return float(samples / (timed[-1]["time"] - timed[0]["time"]))


def processes(
    events: list[dict[str, Any]], state: RunState, *, num_workers: int | None
) -> list[dict[str, Any]]:
    """Workers of the run, each as the newest event describes it.

    Resumed with fewer workers, its events still tell of the others: they are
    no part of it any more.
    """
    found = _processes(events, "worker", "rank", state)
    return [each for each in found if num_workers is None or each["rank"] < num_workers]


def servers(events: list[dict[str, Any]], state: RunState) -> list[dict[str, Any]]:
    """The servers of the newest view: what each holds, and how its process stands."""
    views = [event for event in events if event.get("event") == "server-view"]
    held = views[-1].get("servers", {}) if views else {}
    found = []
    for process in _processes(events, "server", "server", state):
        slots = held.get(str(process["server"]), {})
        if slots or process["state"] == "running":
            kinds = {kind: slots.get(kind, 0) for kind in ("primary", "replica", "filling")}
            found.append({**process, **kinds})
    return found


def _processes(
    events: list[dict[str, Any]], role: str, key: str, state: RunState
) -> Iterator[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        number, what = event.get(key), event.get("event")
        if isinstance(number, int) and what in (f"{role}-started", f"{role}-replaced"):
            restarts = event.get("incarnation", 0)
            about = {"pid": event.get("pid"), "restarts": restarts, "state": "running", "code": None}
            found[number] = {key: number, **about}
            if isinstance(event.get("host"), int):  # of a job on several
                found[number] |= {"host": event["host"]}
        elif isinstance(number, int) and what == f"{role}-exited" and number in found:
            found[number] |= {"state": "exited", "code": event.get("code")}
    for _, process in sorted(found.items()):
        # A killed supervisor writes down no exit; but no worker outlives it, and servers end with the job.
        if state is not RunState.ALIVE and (role == "server" or process["state"] == "running"):
            process["state"] = "gone"
        yield process


def hosts(
    config: dict[str, Any],
    events: list[dict[str, Any]],
    state: RunState,
    *,
    workers: list[dict[str, Any]],
    servers: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Hosts of the run with the processes that are there now, or are at home there; empty on one machine."""
    found: dict[int, dict[str, Any]] = {}
    for host in config.get("hosts") or []:
        here = "here" if state is RunState.ALIVE else "gone"
        facts = {key: host.get(key) for key in ("number", "name", "address", "workers")}
        mine = [each for each in host.get("servers", []) if each < config.get("servers", 0)]
        found[host.get("number")] = {**facts, "servers": mine, "state": here, "reason": None}
    for event in events:
        host = found.get(event.get("host", -1))
        if host is not None and event.get("event") == "host-joined":
            host |= {"name": event.get("hostname"), "address": event.get("address")}
            host |= {"state": "here" if state is RunState.ALIVE else "gone", "reason": None}
        elif host is not None and event.get("event") == "host-lost":
            host |= {"state": "lost", "reason": event.get("reason")}
    for key, number, processes in (("workers", "rank", workers), ("servers", "server", servers)):
        for process in processes:
            if process.get("host") in found:
                for host in found.values():
                    host[key] = [each for each in host[key] or [] if each != process[number]]
                found[process["host"]][key] = sorted([*found[process["host"]][key], process[number]])
    return [host for _, host in sorted(found.items())]


def leases(events: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Leases and samples that each rank has finished; empty where none were handed out."""
    noted = [event for event in events if event.get("event") == "leases"]
    by_rank = noted[-1].get("by_rank") if noted else None
    return by_rank if isinstance(by_rank, dict) else {}


def newest_checkpoint(path: Path) -> str | None:
    """The newest checkpoint that was finished; its name holds its step."""
    finished = sorted(manifest.parent for manifest in path.glob("checkpoints/step-*/manifest.json"))
    return str(finished[-1]) if finished else None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is none."""
    try:
        return _object(own_files.read(path, any_owner=True))
    except OSError:
        return {}


def read_events(path: Path) -> list[dict[str, Any]]:
    """Events of a run, oldest first; of those that repeat every second (leases) only the newest."""
    found: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
    num_read, newest = 0, (0, b"")
    try:
        file = open(own_files.open_file(path / "events.jsonl", os.O_RDONLY, any_owner=True), "rb")  # noqa: SIM115
    except OSError:
        return []
    with file:
        while line := file.readline(MAX_LINE_BYTES):
            if _LEASES.search(line, 0, 256):
                newest = num_read, line
            elif fact := _object(line):
                found.append(fact)
                num_read += 1
    events = list(found)
    if lease := _object(newest[1]):
        events.insert(max(0, newest[0] - num_read + len(events)), lease)
    return events


def last_lines(path: Path, count: int | None = None, *, tail_bytes: int = TAIL_BYTES) -> list[dict[str, Any]]:
    """The last whole lines of a file of JSON lines, as many as its tail holds. A line torn by a kill, or just being written, is left out."""
    try:
        with open(own_files.open_file(path, os.O_RDONLY, any_owner=True), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - tail_bytes))
            tail = file.read()
    except OSError:
        return []
    found = [fact for line in tail.splitlines() if (fact := _object(line))]
    return found if count is None else found[-count:]


def _object(text: bytes) -> dict[str, Any]:
    """The object that this is; empty where it is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):  # torn; or nested so deep that it is none of ours
        return {}
    return found if isinstance(found, dict) else {}


# ---- the ledger, in plain values and in text --------------------------------------------------------


MAX_RANGES = 4
"""Named in a sentence; more are counted."""


def read_ledger(path: Path, *, is_alive: bool) -> dict[str, Any]:
    """A run's ledger in plain values; empty where nothing is in it."""
    from shoal.cluster.coordinator.journal_reader import leases_of, ledger_of, read_launches
    from shoal.cluster.ledger import trained_file

    launches = read_launches(path)
    ledger = ledger_of(launches, trained_file.read(path))
    current = ledger.current
    if current is None:
        return {}
    epochs = [epoch for epoch in ledger.epochs.values() if epoch.spans or epoch.again]
    numbers = sorted({epoch.trainer for epoch in epochs})  # of those that trained
    return {
        "workers": _workers(ledger.by_rank),
        "launches": [
            {"launch": launch, "workers": _workers(by_rank)} for launch, by_rank in ledger.by_launch.items()
        ],
        "launch": launches[-1].number,
        "epochs": [{**_epoch(epoch), "trainer": numbers.index(epoch.trainer)} for epoch in epochs],
        "remainder": _remainder(current, leases_of(launches[-1])) if is_alive else None,
        "replaced": [
            {"launch": launch, "rank": rank, "incarnation": incarnation}
            for launch, rank, incarnation in ledger.replaced
        ],
    }


def _epoch(epoch: Epoch) -> dict[str, Any]:
    from shoal.cluster.ledger.ledger import joined

    return {
        "data": epoch.data,
        "epoch": epoch.number,
        "samples": epoch.total,
        "trained": epoch.reached,
        "is_over": epoch.end is not None,
        "is_exact": epoch.is_exact,
        "left_out": epoch.num_left_out,
        "skipped": sorted(epoch.skipped),
        "handed_out_twice": epoch.num_samples_twice,
        "repeated": epoch.num_repeated,
        "missing": epoch.missing if epoch.end is not None else [],
        "doubled": epoch.doubled,
        "workers": _workers(epoch.by_rank),
        "ranges": [_span(span) for span in joined(epoch.spans)],
        "again": [_span(span) for span in joined(epoch.again)],
    }


def _workers(by_rank: Mapping[int, RankTotals]) -> dict[str, dict[str, int]]:
    return {str(rank): {"batches": had.batches, "samples": had.samples} for rank, had in by_rank.items()}


def _span(span: SampleSpan) -> dict[str, Any]:
    return {
        "start": span.start,
        "stop": span.stop,
        "launch": span.launch,
        "workers": span.num_workers,
        "sharding": span.sharding,
        "by_rank": {str(rank): had.samples for rank, had in span.by_rank.items()},
    }


def _remainder(epoch: Epoch, leases: LeaseService) -> dict[str, Any] | None:
    if epoch.end is not None:
        return None
    held = leases.holdings
    if held is None:
        left = None if epoch.total is None else epoch.total - epoch.reached
        return {"together": left}
    config, by_rank, num_todo = held
    return {
        "by_rank": {
            str(rank): [[lease.start, lease.stop] for lease in map(config.lease, numbers)]
            for rank, numbers in sorted(by_rank.items())
        },
        "to_hand_out": num_todo * config.samples_per_lease,
    }


def ledger_of_worker(ledger: dict[str, Any], rank: int) -> str:
    now = [each for each in ledger.get("launches", []) if each["launch"] == ledger["launch"]]
    had = now[0]["workers"].get(str(rank)) if now else None
    said = f"; {_had(had)}" if had else ""
    holds = ((ledger.get("remainder") or {}).get("by_rank") or {}).get(str(rank))
    return f"{said}; holds {ranges(holds)}" if holds else said


def ledger_before(ledger: dict[str, Any]) -> Iterator[str]:
    """Samples of former launches that count, a line for each launch."""
    for each in ledger.get("launches", []):
        if each["launch"] != ledger["launch"] and each["workers"]:
            by_rank = "; ".join(f"rank {rank} {_had(had)}" for rank, had in each["workers"].items())
            yield f"launch {each['launch']}, before: {by_rank}"


def ledger_lines(ledger: dict[str, Any]) -> Iterator[str]:
    """A sentence for each epoch: the whole ones together, where there are many."""
    whole = [epoch for epoch in ledger.get("epochs", []) if epoch["is_exact"]]
    if len(whole) > MAX_RANGES:
        yield f"{len(whole)} epochs, each: every sample trained exactly once"
        whole = []
    for epoch in ledger.get("epochs", []):
        if not epoch["is_exact"] or epoch in whole:
            yield ledger_sentence(epoch)
    left = ledger.get("remainder")
    if left and left.get("together"):
        yield f"left of the epoch: {left['together']:,} samples, cut over all workers batch by batch"
    elif left and left.get("to_hand_out"):
        yield f"left of the epoch: {left['to_hand_out']:,} samples to hand out, beside what workers hold"


def ledger_sentence(epoch: dict[str, Any]) -> str:
    name, total = f"epoch {epoch['epoch'] + 1}", epoch["samples"]
    if epoch["trainer"]:
        name += f" of trainer {epoch['trainer'] + 1}"
    of_all = f"{epoch['trained']:,}" + (f" of {total:,}" if total is not None else "") + " samples"
    if epoch["is_exact"]:
        said = f"{name}: all {epoch['trained']:,} samples trained exactly once"
    elif epoch["doubled"] or (epoch["is_over"] and epoch["missing"]):
        said = f"{name}: {of_all} trained"
        said += f"; TWICE: {ranges(epoch['doubled'])}" if epoch["doubled"] else ""
        said += f"; NOT trained: {ranges(epoch['missing'])}" if epoch["missing"] else ""
    elif epoch["is_over"]:
        said = f"{name}: {of_all} trained; who had how much of them is not known for all"
    else:
        said = f"{name}: {of_all} trained so far"
    again = sum(span["stop"] - span["start"] for span in epoch["again"])
    notes = {
        "left out with a last batch that is not full": epoch["left_out"],
        "bad and skipped": len(epoch["skipped"]),
        "computed twice, of which the first result counted": epoch["repeated"],
        "trained again from an earlier checkpoint or the beginning": again,
    }
    return "; ".join([said, *(f"{number:,} {what}" for what, number in notes.items() if number)])


def ledger_ranges(ledger: dict[str, Any]) -> Iterator[str]:
    """All of it, a line for each range."""
    for epoch in ledger.get("epochs", []):
        yield ledger_sentence(epoch)
        for span in epoch["ranges"]:
            yield f"  {_range([span['start'], span['stop']])}  launch {span['launch']}, {_who(span)}"
        for span in epoch["again"]:
            at = _range([span["start"], span["stop"]])
            yield f"  {at}  launch {span['launch']}, {_who(span)}: lost with it, and trained again"
        for index in epoch["skipped"]:
            yield f"  sample {index:,} skipped"
    for each in ledger.get("replaced", []):
        yield f"launch {each['launch']}: rank {each['rank']} was replaced, incarnation {each['incarnation']}"


def ranges(found: list[list[int]]) -> str:
    from shoal.cluster.ledger.ledger import merged

    joined = [list(each) for each in merged((start, stop) for start, stop in found)]
    said = ", ".join(_range(each) for each in joined[:MAX_RANGES])
    return said + (f" and {len(joined) - MAX_RANGES} more" if len(joined) > MAX_RANGES else "")


def _range(found: list[int]) -> str:
    start, stop = found
    return f"{start:,}..{stop - 1:,}"


def _who(span: dict[str, Any]) -> str:
    by_rank = span["by_rank"]
    if len(by_rank) == 1 and span["workers"] != 1:
        return f"rank {next(iter(by_rank))}"
    parts = ", ".join(f"rank {rank} {samples:,}" for rank, samples in by_rank.items())
    how = re.sub(r" \([0-9a-f]{12}\)", "", span["sharding"])  # of costs: for programs
    return f"{how} over {_count(span['workers'], 'worker', 'workers')}" + (f": {parts}" if parts else "")


def _had(had: dict[str, int]) -> str:
    return f"{_count(had['batches'], 'batch', 'batches')}, {_count(had['samples'], 'sample', 'samples')}"


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"
