"""Recorder of a process: where its time goes, as spans in a bounded ring and as sums that are sampled once a second.

    with recorder.COMPUTE:
        loss = strategy.forward_backward(part)

A span costs two readings of the clock and a few writes into preallocated memory: no allocation, no
lock, no I/O. Spans nest, and the sums are exclusive: a pull within a forward counts as pull and not
as compute, so they add up to no more than the elapsed time. Only the thread that called `own`
records; a span on another thread (autograd's for a device, a reader) is ignored.

A `Sampler` is the thread beside it: once a second it sends one line of activity
(`<run>/activity/<process>.jsonl`), and writes new spans into
`<run>/trace/<process>.<incarnation>.bin`. A disk or a supervisor that is slow or gone costs lines
and spans, never a step.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from threading import get_ident
from time import monotonic_ns
from typing import Any

from shoal import system
from shoal.runtime.transport import framing
from shoal.runtime.transport.messages.supervisor import Activity

KINDS = ("other", "read", "compute", "exchange", "push", "pull", "wait", "apply", "checkpoint", "step")
"""Kinds of spans by number. Files name them, so that a later version may add some; "other" is the time between."""

VERSION = 1
MAGIC = b"shoaltrc"
HEADER_BYTES = 1024
CAPACITY = 1 << 15
"""Spans that are kept: at 8 a step, the newest 4,000 steps, in 768 KiB of memory and as much on disk."""

MAX_DEPTH = 15
FIRST_S = 0.1  # interval of the first lines, so that a job of half a second leaves some: servers are killed at its end
EVERY_S = 1.0
KEPT_INCARNATIONS = 8
"""Files of one process: a crash loop must not fill the disk."""

RECORD_FIELDS = (
    ("start_ns", "<i8"),
    ("end_ns", "<i8"),
    ("step", "<u4"),
    ("kind", "u1"),
    ("depth", "u1"),
    ("_", "<u2"),
)
"""A span on disk, as a numpy dtype; in the ring the last four fields are one integer."""

RECORD_BYTES = 24
_WORDS = RECORD_BYTES // 8
_KIND_SHIFT, _DEPTH_SHIFT, _STEP_MASK = 32, 40, (1 << 32) - 1


class Recorder:
    """Spans and sums of one process. Written by one thread, read by the sampler's.

    Sums only grow, so a reader that misses an update sees it the next time.
    """

    __slots__ = (
        "count",
        "depth",
        "facts",
        "kinds",
        "mask",
        "owner",
        "received",
        "ring",
        "samples",
        "sent",
        "since",
        "spent",
        "starts",
        "step",
        "steps",
    )

    def __init__(self) -> None:
        self.owner = 0
        self.ring, self.mask = array("q", bytes(RECORD_BYTES)), 0  # one record, until `own`
        self.count = 0  # spans so far; those beyond the ring were overwritten
        self.spent = [0] * len(KINDS)
        self.kinds, self.starts = [0] * (MAX_DEPTH + 1), [0] * (MAX_DEPTH + 1)
        self.depth, self.since = 0, monotonic_ns()
        self.step = self.steps = self.samples = self.sent = self.received = 0
        self.facts: Callable[[], dict[str, Any]] | None = None

    def own(self, *, capacity: int = CAPACITY) -> None:
        """Record this thread from now on. `capacity` is a power of two."""
        self.ring, self.mask = array("q", bytes(capacity * RECORD_BYTES)), capacity - 1
        self.count, self.depth, self.since = 0, 0, monotonic_ns()
        self.owner = get_ident()

    def base(self, span: Span | None) -> None:
        """Count time outside of spans as this kind: a script's own loop does not mark where compute begins."""
        if get_ident() == self.owner:
            now = monotonic_ns()
            self.spent[self.kinds[self.depth]] += now - self.since
            self.since = now
            self.kinds[0] = span.kind if span is not None else 0

    def done(self, step: int, samples: int) -> None:
        """End a step, in which this process computed this many samples."""
        self.step = step
        self.steps += 1
        self.samples += samples

    def totals_ns(self) -> list[int]:
        """Time by kind so far, what is open included. From any thread."""
        spent, since, kind = list(self.spent), self.since, self.kinds[self.depth]
        spent[kind] += max(0, monotonic_ns() - since)
        return spent


class Span:
    """One kind of span, entered as often as one likes; within itself, too."""

    __slots__ = ("_recorder", "_word", "kind")

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self.kind = recorder, KINDS.index(name)
        self._word = self.kind << _KIND_SHIFT

    def __enter__(self) -> None:
        r = self._recorder
        if get_ident() != r.owner:
            return
        now = monotonic_ns()
        depth = r.depth
        r.spent[r.kinds[depth]] += now - r.since
        r.since = now
        if depth < MAX_DEPTH:
            depth += 1
        r.kinds[depth] = self.kind
        r.starts[depth] = now
        r.depth = depth

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        r = self._recorder
        if get_ident() != r.owner or not r.depth:
            return
        now = monotonic_ns()
        depth, ring = r.depth, r.ring
        r.spent[self.kind] += now - r.since
        r.since = now
        at = (r.count & r.mask) * _WORDS
        ring[at] = r.starts[depth]
        ring[at + 1] = now
        ring[at + 2] = self._word | depth << _DEPTH_SHIFT | r.step & _STEP_MASK
        r.count += 1
        r.depth = depth - 1


RECORDER = Recorder()
"""This process's."""

READ, COMPUTE, EXCHANGE, PUSH, PULL, WAIT, APPLY, CHECKPOINT, STEP = (
    Span(RECORDER, name) for name in KINDS[1:]
)


# ---- once a second --------------------------------------------------------------------------------


class Sampler:
    """Thread that sends the recorder's figures. `close` sends the rest."""

    def __init__(
        self,
        recorder: Recorder,
        *,
        process: str,
        incarnation: int,
        trace: Path | None,
        send: Callable[[str], bool],
    ) -> None:
        """`send` passes a line to its writer, and returns False where it was dropped."""
        self._recorder, self._process, self._incarnation, self._send = recorder, process, incarnation, send
        self._trace = TraceFile(trace, process, incarnation) if trace is not None else None
        self._num_dropped = 0
        self._before = self._now()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal-recorder", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join(timeout=EVERY_S)  # a hanging disk must not block the exit

    def _run(self) -> None:
        every_s = FIRST_S
        while not self._is_over.wait(every_s):
            with contextlib.suppress(Exception):  # facts may change while they are read
                self._send_line()
            every_s = min(2 * every_s, EVERY_S)
        with contextlib.suppress(Exception):
            self._send_line(ends=True)
        if self._trace is not None:
            self._trace.close()

    def _send_line(self, *, ends: bool = False) -> None:
        before, now = self._before, self._now()
        line = self._line(before, now)
        if ends:
            line["end"] = True
        if self._num_dropped:
            line["dropped"] = self._num_dropped
        if self._send(json.dumps(line, separators=(",", ":"))):
            self._before, self._num_dropped = now, 0
        else:
            self._num_dropped += 1  # the next line covers this interval too
        if self._trace is not None:
            self._trace.write(self._recorder)

    def _now(self) -> dict[str, Any]:
        r = self._recorder
        return {
            "at": time.time(),
            "clock": time.monotonic(),
            "cpu_s": time.process_time(),
            "spent": r.totals_ns(),
            "steps": r.steps,
            "samples": r.samples,
            "sent": r.sent,
            "received": r.received,
        }

    def _line(self, before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
        r = self._recorder
        since = {
            key: now[key] - before[key] for key in ("steps", "samples", "sent", "received", "cpu_s", "clock")
        }
        spent = [
            (name, (b - a) / 1e9) for name, a, b in zip(KINDS, before["spent"], now["spent"], strict=True)
        ]
        line = {
            "at": round(now["at"], 3),
            "process": self._process,
            "incarnation": self._incarnation,
            "interval_s": round(since["clock"], 4),
            "step": r.step,
            "steps": since["steps"],
            "samples": since["samples"],
            "seconds": {name: round(s, 5) for name, s in spent if s > 5e-6 and name not in ("other", "step")},
            "bytes": {"sent": since["sent"], "received": since["received"]},
            "rss_bytes": system.resident_bytes(),
            "peak_bytes": system.peak_bytes(),
            "cpu_s": round(since["cpu_s"], 4),
        }
        return line | (r.facts() if r.facts is not None else {})


_sampler: Sampler | None = None


def start(process: str, incarnation: int, *, run_dir: str | Path | None, send: Callable[[str], bool]) -> None:
    """Record this thread, and report once a second until `stop`. Called once, by the process's entry point."""
    global _sampler
    RECORDER.own()
    trace = trace_folder(run_dir) if run_dir is not None else None
    _sampler = Sampler(RECORDER, process=process, incarnation=incarnation, trace=trace, send=send)


def stop() -> None:
    global _sampler
    if _sampler is not None:
        _sampler.close()
        _sampler = None


def trace_folder(run_dir: str | Path) -> Path:
    return Path(run_dir) / "trace"


def over(status_fd: int) -> Callable[[str], bool]:
    """`send` through a status socket, without ever waiting."""
    status = system.packet_socket(status_fd)
    status.setblocking(False)

    def send(line: str) -> bool:
        try:
            status.send(b"".join(framing.encode(Activity(line))))
        except OSError:
            return False
        return True

    return send


# ---- the file of spans ----------------------------------------------------------------------------


class TraceFile:
    """The newest spans of one process on disk: a header, then a ring of records.

    The header has the number of spans, so a reader knows where the ring begins, and two clocks read
    at one moment: spans are in monotonic time, which differs between processes and hosts.
    """

    def __init__(self, folder: Path, process: str, incarnation: int) -> None:
        self._fd = -1
        self._num_written = 0
        self._header = {
            "process": process,
            "incarnation": incarnation,
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _prune(folder, process, incarnation)
            path = folder / f"{process}.{incarnation}.bin"
            path.unlink(missing_ok=True)
            self._fd = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )

    def write(self, recorder: Recorder) -> None:
        """Write new spans, up to a whole ring. On a full disk the rest is dropped."""
        if self._fd < 0:
            return
        ring, count = recorder.ring, recorder.count
        capacity = len(ring) // _WORDS
        records = memoryview(ring).cast("B")
        first = max(self._num_written, count - capacity)
        try:
            while first < count:
                at = first % capacity
                last = min(count, first + capacity - at)
                begin, end = at * RECORD_BYTES, (at + last - first) * RECORD_BYTES
                os.pwrite(self._fd, records[begin:end], HEADER_BYTES + begin)
                first = last
            os.pwrite(self._fd, self._encoded(capacity, count), 0)
            self._num_written = count
        except OSError:
            self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _encoded(self, capacity: int, count: int) -> bytes:
        clocks = {"unix_ns": time.time_ns(), "monotonic_ns": monotonic_ns()}
        header = (
            self._header | {"version": VERSION, "kinds": KINDS, "capacity": capacity, "count": count} | clocks
        )
        encoded = MAGIC + json.dumps(header).encode()
        return encoded.ljust(HEADER_BYTES - 1) + b"\n"


def _prune(folder: Path, process: str, incarnation: int) -> None:
    """Remove files of old incarnations, and of later ones: those are an earlier launch's."""
    name = re.compile(rf"{re.escape(process)}\.(\d+)\.bin")
    for path in folder.iterdir():
        match = name.fullmatch(path.name)
        if match and not incarnation - KEPT_INCARNATIONS < int(match[1]) <= incarnation:
            path.unlink(missing_ok=True)
