"""Record of a run, read back from its directory: steps, events, activity of its processes and their spans.

Read-only and tolerant: a run may be writing at this moment, have been killed while it did, or come
from a version that wrote less. Missing parts are listed in `missing`, a sentence each; nothing here
raises for them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from shoal.observe import json_lines, runs
from shoal.runtime import own_files
from shoal.runtime.recorder import HEADER_BYTES, MAGIC, RECORD_BYTES, RECORD_FIELDS, VERSION

BUSY = ("read", "compute", "exchange", "push", "pull", "wait", "apply", "checkpoint")
"""Kinds of time in the order in which they are shown."""

COMMUNICATION = ("exchange", "push", "pull", "wait")

MAX_FILE_BYTES = 4 << 30
PAUSE_S = 5.0
"""A process that told nothing for longer was not there: the run was down, or it was being replaced."""

RECORD = np.dtype(list(RECORD_FIELDS))


class _StepLine(msgspec.Struct):
    step: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]  # what a float holds
    loss: float | None = None
    samples: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)] = 0
    time: float = 0.0
    epoch: int = 0


@dataclass(slots=True)
class StepSeries:
    """metrics.jsonl as columns, one entry per step of rank 0."""

    step: NDArray[np.int64]
    loss: NDArray[np.float64]
    samples: NDArray[np.int64]
    time: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.step)

    def latencies_s(self) -> NDArray[np.float64]:
        """From one step to the next, where both are of one launch."""
        if len(self) < 2:
            return np.zeros(0)
        spent = np.diff(self.time)
        return spent[(np.diff(self.step) >= 1) & (spent > 0)]


@dataclass(slots=True)
class RunRecord:
    """One run, as its files tell it."""

    path: Path
    config: dict[str, Any]
    summary: dict[str, Any]
    state: runs.RunState
    steps: StepSeries
    epochs: list[dict[str, Any]]
    events: list[dict[str, Any]]
    activity: dict[str, list[dict[str, Any]]]
    """By process, oldest first."""

    measured: list[dict[str, Any]] = field(default_factory=list)
    """Lines of metrics.jsonl that have the metric asked for: values between epochs."""

    missing: list[str] = field(default_factory=list)

    @property
    def workers(self) -> dict[str, list[dict[str, Any]]]:
        return {name: lines for name, lines in self.activity.items() if name.startswith("worker-")}

    @property
    def servers(self) -> dict[str, list[dict[str, Any]]]:
        return {name: lines for name, lines in self.activity.items() if name.startswith("server-")}


def read(path: Path, *, metric: str | None = None) -> RunRecord:
    """Read all of a run directory but its spans. `metric`: whose values by step are wanted, too."""
    summary = runs.read_json(path / "summary.json")
    record = RunRecord(
        path=path,
        config=runs.read_json(path / "config.json"),
        summary=summary,
        state=runs.state(path, summary),
        steps=read_steps(path / "metrics.jsonl"),
        epochs=_objects(path / "epochs.jsonl"),
        events=_objects(path / "events.jsonl"),
        activity=read_activity(path),
        measured=_objects(path / "metrics.jsonl", having=metric) if metric is not None else [],
    )
    record.missing = list(_missing(record))
    return record


def _missing(record: RunRecord) -> Iterator[str]:
    if not record.config:
        yield "config.json cannot be read: strategy and number of workers are not known."
    if not len(record.steps):
        yield (
            "metrics.jsonl has no step: there is no loss curve and no step latency. Rank 0's Trainer writes it; a loop of the "
            "script's own does not."
        )
    if not record.activity:
        yield (
            "there is no activity of any process: where the time went is not known. Runs of an earlier version have none."
        )
    if record.state is runs.RunState.DEAD:
        yield "summary.json is missing: the run was killed, and figures are those of what was written by then."
    elif record.state is runs.RunState.ALIVE:
        yield "the run is still alive: figures are those of what was written by now."


def read_steps(path: Path) -> StepSeries:
    try:
        raw = own_files.read(path, any_owner=True, max_bytes=MAX_FILE_BYTES)
    except OSError:
        raw = b""
    lines = json_lines.decoded(raw, msgspec.json.Decoder(_StepLine))
    return StepSeries(
        step=np.array([line.step for line in lines], np.int64),
        loss=np.array([np.nan if line.loss is None else line.loss for line in lines], np.float64),
        samples=np.array([line.samples for line in lines], np.int64),
        time=np.array([line.time for line in lines], np.float64),
    )


def read_activity(path: Path) -> dict[str, list[dict[str, Any]]]:
    found = {}
    for file in sorted((path / "activity").glob("*.jsonl"), key=lambda each: by_number(each.stem)):
        lines = [line for line in _objects(file) if isinstance(line.get("at"), (int, float))]
        if lines:
            found[file.stem] = lines
    return found


def by_number(process: str) -> tuple[int, str, int]:
    role, _, number = process.rpartition("-")
    order = {"worker": 0, "server": 1}.get(role, 2)
    return order, role or process, int(number) if number.isdigit() else 0


def _objects(path: Path, *, having: str | None = None) -> list[dict[str, Any]]:
    """Objects of a file, a line each; those that have a key, where one is given."""
    try:
        raw = own_files.read(path, any_owner=True, max_bytes=MAX_FILE_BYTES)
    except OSError:
        return []
    if having is not None:
        raw = b"\n".join(line for line in raw.splitlines() if f'"{having}"'.encode() in line)
    return json_lines.objects(raw)


@dataclass(slots=True)
class Totals:
    """Sums over lines of one process's activity."""

    seconds: dict[str, float]
    interval_s: float
    steps: int
    samples: int
    sent_bytes: int
    received_bytes: int
    cpu_s: float
    peak_bytes: int

    @property
    def busy_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def communication_s(self) -> float:
        return sum(self.seconds.get(kind, 0.0) for kind in COMMUNICATION)

    @property
    def own_s(self) -> float:
        """Time without waiting, that between spans too: a slow callback keeps the others waiting as a slow forward does."""
        return self.whole_s - self.communication_s

    @property
    def whole_s(self) -> float:
        """All of its time, that between spans too."""
        return max(self.interval_s, self.busy_s)

    def share(self, *kinds: str) -> float:
        return sum(self.seconds.get(kind, 0.0) for kind in kinds) / self.whole_s if self.whole_s else 0.0


def totals(lines: Sequence[Mapping[str, Any]]) -> Totals:
    seconds: dict[str, float] = {}
    for line in lines:
        for kind, spent in _numbers(line.get("seconds")):
            seconds[kind] = seconds.get(kind, 0.0) + spent

    def total(key: str) -> float:
        return float(sum(line[key] for line in lines if isinstance(line.get(key), (int, float))))

    def moved(way: str) -> int:
        return int(sum(n for line in lines for name, n in _numbers(line.get("bytes")) if name == way))

    peaks = [line.get("peak_bytes") or line.get("rss_bytes") or 0 for line in lines]
    return Totals(
        seconds=seconds,
        interval_s=total("interval_s"),
        steps=int(total("steps")),
        samples=int(total("samples")),
        sent_bytes=moved("sent"),
        received_bytes=moved("received"),
        cpu_s=total("cpu_s"),
        peak_bytes=max((int(each) for each in peaks if isinstance(each, (int, float))), default=0),
    )


def _numbers(value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        yield from ((str(key), each) for key, each in value.items() if isinstance(each, (int, float)))


def is_of_fit(line: Mapping[str, Any]) -> bool:
    """Steps of evaluate and predict are counted apart: 108 steps of a fit before 1 of an evaluation are not 108/1."""
    return line.get("phase") not in ("evaluate", "predict")


def while_training(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the seconds before the first step and after the last: of each launch, where it was resumed."""
    launches: list[list[dict[str, Any]]] = []
    for line in lines:
        if not launches or line["at"] - interval_s(line) > launches[-1][-1]["at"] + PAUSE_S:
            launches.append([])
        launches[-1].append(line)
    found = []
    for launch in launches:
        stepped = [at for at, line in enumerate(launch) if line.get("steps")]
        found += launch[stepped[0] : stepped[-1] + 1] if stepped else []
    return found


def interval_s(line: Mapping[str, Any]) -> float:
    """How long a line tells of; about a second where it does not say."""
    found = line.get("interval_s", 1.0)
    return found if isinstance(found, (int, float)) else 1.0


def stretches(activity: Iterable[Sequence[Mapping[str, Any]]]) -> list[tuple[float, float]]:
    """From when to when at least one of several processes was there, by its activity; oldest first."""
    found: list[tuple[float, float]] = []
    for began, ended in sorted(
        (line["at"] - interval_s(line), line["at"]) for each in activity for line in each
    ):
        if found and began <= found[-1][1] + PAUSE_S:
            began, ended = found[-1][0], max(ended, found.pop()[1])
        found.append((began, ended))
    return found


def samples_per_s(record: RunRecord) -> float | None:
    """Samples of all workers over the time in which any of them trained; None where that is not known."""
    training = [lines for each in record.workers.values() if (lines := while_training(each))]
    if training:
        # The first line begins before the first step: what that took is not known, and it is short.
        seconds = sum(ended - began for began, ended in stretches(training))
        done = sum(totals(lines).samples for lines in training)
        return done / seconds if seconds > 0 and done else None
    rate = record.summary.get("samples_per_s")
    return float(rate) if isinstance(rate, (int, float)) and rate else None


def loads(record: RunRecord) -> dict[str, Totals]:
    """Activity of each worker while it trained."""
    return {name: totals(while_training(lines)) for name, lines in record.workers.items()}


# ---- spans ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Trace:
    """Newest spans of one process."""

    process: str
    incarnation: int
    pid: int
    host: str
    kinds: list[str]
    count: int
    """Spans there were; more than `spans` where the oldest were overwritten."""

    spans: NDArray[Any]
    """Records, oldest first, in monotonic time of its host."""

    unix_ns: int
    """To be added to monotonic time."""


def read_traces(
    path: Path, activity: Mapping[str, Sequence[Mapping[str, Any]]]
) -> tuple[list[Trace], list[str]]:
    """Spans of all processes of a run, host clocks aligned; and a sentence for each file that cannot be read."""
    found, problems = [], []
    for file in sorted((path / "trace").glob("*.bin"), key=lambda each: by_number(each.name.split(".")[0])):
        try:
            trace = read_trace(file)
        except (OSError, ValueError, KeyError, TypeError) as error:
            problems.append(f"{file.name} is left out: {error}.")
            continue
        lines = [line for line in activity.get(trace.process, ()) if "clock_s" in line]
        if lines:
            trace.unix_ns += int(float(lines[-1]["clock_s"]) * 1e9)
        found.append(trace)
    return found, problems


def read_trace(path: Path) -> Trace:
    """Read a file of spans, which its process may be writing; ValueError where it is none."""
    raw = own_files.read(path, any_owner=True)
    if not raw.startswith(MAGIC) or len(raw) < HEADER_BYTES:
        raise ValueError("it does not begin as a file of spans does")
    header = json.loads(raw[len(MAGIC) : HEADER_BYTES])
    if header.get("version") != VERSION:
        raise ValueError(f"it is of version {header.get('version')}, and this shoal reads version {VERSION}")
    capacity, count = int(header["capacity"]), int(header["count"])
    body = raw[HEADER_BYTES:]
    records = np.frombuffer(body[: len(body) // RECORD_BYTES * RECORD_BYTES], RECORD)
    if count > capacity and len(records) == capacity:
        records = np.roll(records, -(count % capacity))
    is_whole = (records["start_ns"] > 0) & (records["end_ns"] >= records["start_ns"])
    return Trace(
        process=str(header["process"]),
        incarnation=int(header["incarnation"]),
        pid=int(header["pid"]),
        host=str(header["host"]),
        kinds=[str(kind) for kind in header["kinds"]],
        count=count,
        spans=records[is_whole & (records["kind"] < len(header["kinds"]))],
        unix_ns=int(header["unix_ns"]) - int(header["monotonic_ns"]),
    )
