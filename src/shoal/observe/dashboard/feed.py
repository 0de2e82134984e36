"""Feed of a run directory: the content of its files so far, read incrementally into bounded memory.

`poll` takes a budget of seconds and continues where it stopped, so a run of a million steps is on
the screen at once, from a sample of its lines, and exact as soon as all of them are read.
Independent of the pages.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from shoal.observe import drawing, runs
from shoal.observe.dashboard.buckets import Buckets
from shoal.observe.json_lines import JsonLines, objects

MAX_EVENTS = 4000
"""Newest events that are kept; those that repeat every second (leases) are not among them."""

MAX_EPOCHS = 4096
MAX_INTERVALS = 600
"""Lines of activity kept per process: ten minutes of a line each second."""

MAX_PROCESSES = 4096
MAX_METRICS = 64
"""Columns of metrics.jsonl beside the loss."""

ACTIVITY_TAIL_BYTES, ALL_TAILS_BYTES, LEAST_TAIL_BYTES = 192 << 10, 4 << 20, 48 << 10
"""Read of each process at first: ten minutes, less where they are many, so that the first view waits for no more than all of these; two
minutes at least, the length of the lanes."""

SAMPLE_ABOVE_BYTES = 8 << 20
"""A metrics.jsonl longer than this is drawn from a sample of its lines until it is read."""

LEDGER_EVERY_S = 2.0

PROCESS_NAME = re.compile(r"[a-z]+(-[0-9]+)?")
_KNOWN = ("step", "epoch", "loss", "samples", "time")


class _Step(msgspec.Struct, forbid_unknown_fields=True):
    """A line of metrics.jsonl without metrics: decoded five times as fast as a dict."""

    step: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]  # what a float holds
    epoch: int | None = None
    loss: float | None = None
    samples: float | None = None
    time: float | None = None


_steps = msgspec.json.Decoder(_Step)


class RunFeed:
    """One run directory. Its owner holds `lock` while it polls or reads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = threading.Lock()
        self.version = 0
        self.config: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.graph: dict[str, Any] = {}
        self.plan: dict[str, Any] = {}
        """Of `shoal run --plan`; empty for other runs."""

        self.state = runs.RunState.DEAD
        self.steps = Buckets()
        self.last: dict[str, Any] = {}
        self.epochs: deque[dict[str, Any]] = deque(maxlen=MAX_EPOCHS)
        self.events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self.leases: dict[str, Any] = {}
        """The newest event of that kind."""

        self.activity: dict[str, deque[dict[str, Any]]] = {}
        self.is_sampled = False
        """Whether `steps` is from a sample of the lines; the exact ones are still being read."""

        self.polled_at = 0.0
        self._exact = self.steps
        self._metrics = JsonLines(path / "metrics.jsonl")
        self._epochs = JsonLines(path / "epochs.jsonl")
        self._events = JsonLines(path / "events.jsonl")
        self._activity: dict[str, JsonLines] = {}
        self._stamps: dict[str, tuple[int, int, int]] = {}
        self._drawing: tuple[tuple[int, int, int], str] | None = None
        self._ledger: tuple[float, dict[str, Any]] = (-LEDGER_EVERY_S, {})

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def left_bytes(self) -> int:
        """Bytes of metrics.jsonl that were not read yet."""
        return self._metrics.left_bytes

    def poll(self, budget_s: float = 0.3) -> bool:
        """Read what is new, for about this long; whether anything was."""
        deadline = time.monotonic() + budget_s
        found = self._poll_objects()
        found |= self._poll_epochs(deadline)
        found |= self._poll_events(deadline)
        found |= self._poll_activity()
        found |= self._poll_metrics(deadline)
        state = runs.state(self.path, self.summary)
        found |= state is not self.state
        self.state = state
        self.polled_at = time.monotonic()
        self.version += found
        return found

    def drawing(self) -> str:
        """The model's graph as SVG; drawn anew only when its file is another one."""
        stamp = self._stamps.get("graph", (0, 0, 0))
        if self._drawing is None or self._drawing[0] != stamp:
            self._drawing = (stamp, drawing.svg(self.graph))
        return self._drawing[1]

    def ledger(self) -> dict[str, Any]:
        """The run's ledger; read from the journal at most every few seconds. Empty where it cannot be read."""
        at, found = self._ledger
        if time.monotonic() - at >= LEDGER_EVERY_S:
            try:
                found = runs.read_ledger(self.path, is_alive=self.state is runs.RunState.ALIVE)
            # A journal that is damaged, locked or of another version: the rest of the page is shown.
            except Exception:
                found = {}
            self._ledger = (time.monotonic(), found)
        return found

    def _poll_objects(self) -> bool:
        changed = False
        for key in ("config", "summary", "graph", "plan"):
            path = self.path / f"{key}.json"
            try:
                at = path.lstat()
                stamp = (at.st_ino, at.st_mtime_ns, at.st_size)
            except OSError:
                stamp = (0, 0, 0)
            if self._stamps.get(key, (0, 0, 0)) != stamp:
                self._stamps[key] = stamp
                setattr(self, key, runs.read_json(path))
                changed = True
        return changed

    def _poll_epochs(self, deadline: float) -> bool:
        changed = False
        for lines, is_other in _parts(self._epochs, deadline):
            if is_other:
                self.epochs.clear()
            self.epochs.extend(objects(lines))
            changed |= bool(lines) or is_other
        return changed

    def _poll_events(self, deadline: float) -> bool:
        changed = False
        for lines, is_other in _parts(self._events, deadline):
            if is_other:
                self.events.clear()
                self.leases = {}
            for event in objects(lines):
                if event.get("event") == "leases":
                    self.leases = event  # one a second: only what they add up to is of interest
                else:
                    self.events.append(event)
            changed |= bool(lines) or is_other
        return changed

    def _poll_activity(self) -> bool:
        folder, changed = self.path / "activity", False
        if folder.is_symlink():
            return False
        try:
            names = sorted(each.name.removesuffix(".jsonl") for each in folder.glob("*.jsonl"))
        except OSError:
            return False
        tail_bytes = min(ACTIVITY_TAIL_BYTES, max(LEAST_TAIL_BYTES, ALL_TAILS_BYTES // max(1, len(names))))
        for name in names[:MAX_PROCESSES]:
            if name not in self._activity:
                if not PROCESS_NAME.fullmatch(name):
                    continue
                self._activity[name] = JsonLines(folder / f"{name}.jsonl", tail_bytes=tail_bytes)
                self.activity[name] = deque(maxlen=MAX_INTERVALS)
            lines, is_other = self._activity[name].read()
            if is_other:
                self.activity[name].clear()
            found = [line for line in objects(lines) if isinstance(line.get("at"), (int, float))]
            self.activity[name].extend(found)
            changed |= bool(found) or is_other
        return changed

    def _poll_metrics(self, deadline: float) -> bool:
        changed = False
        for lines, is_other in _parts(self._metrics, deadline):
            if is_other:
                self._exact = self.steps = Buckets()
                self.last, self.is_sampled = {}, False
            if lines:
                newest = _add(self._exact, lines)
                # Of a sample, the last line is known before those in between.
                if newest and not (self.is_sampled and newest["step"] < self.last.get("step", 0)):
                    self.last = newest
            changed |= bool(lines) or is_other
            if self._metrics.left_bytes > SAMPLE_ABOVE_BYTES and not self.is_sampled:
                self.is_sampled, self.steps = True, Buckets()
                sampled = _add(self.steps, self._metrics.samples(512))
                self.last = sampled or self.last
                return True  # there is something to show: the rest is read by later polls
            elif self.is_sampled and not self._metrics.left_bytes:
                self.is_sampled, self.steps = False, self._exact
        return changed


def _parts(file: JsonLines, deadline: float) -> Iterator[tuple[bytes, bool]]:
    """New lines of a file, a part at a time, until none is left or the deadline passes."""
    while True:
        left = file.left_bytes
        yield file.read()
        if not file.left_bytes or file.left_bytes == left or time.monotonic() >= deadline:
            return


def _add(into: Buckets, lines: bytes) -> dict[str, Any]:
    """Add the steps of whole lines; the last of them."""
    if lines.count(b'":') <= len(_KNOWN) * lines.count(b"\n"):
        try:
            found = _steps.decode_lines(lines)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            pass
        else:
            into.add(
                np.array([line.step for line in found], dtype=np.int64),
                {
                    name: np.array([getattr(line, name) for line in found], dtype=np.float64)
                    for name in ("loss", "samples", "time")
                },
            )
            return msgspec.structs.asdict(found[-1]) if found else {}
    rows = [
        line for line in objects(lines) if isinstance(line.get("step"), int) and 0 <= line["step"] < 1 << 53
    ]
    names = dict.fromkeys(name for row in rows for name in row if name not in ("step", "epoch"))
    known = [name for name in names if name in into.names or len(into.names) < MAX_METRICS]
    into.add(
        np.array([row["step"] for row in rows], dtype=np.int64),
        {name: np.array([_number(row.get(name)) for row in rows]) for name in known},
    )
    return rows[-1] if rows else {}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else float("nan")
