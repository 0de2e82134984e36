"""Activity of a job's processes on disk: `<run>/activity/<process>.jsonl`, about a line a second for each.

The lines come over the processes' status sockets, also from other hosts, whose
clocks are corrected here by the smallest delay of their newest lines. A file that
reaches MAX_LINES is halved: neighbours become one line over both intervals, so a
week of training stays as small as an hour.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from shoal import system
from shoal.errors import WireError
from shoal.runtime import own_files
from shoal.runtime.transport import framing
from shoal.runtime.transport.messages.supervisor import Activity

FOLDER = "activity"
MAX_LINES = 4096
MAX_LINE_BYTES = 256 * 1024
NUM_DELAYS = 64
"""Newest lines of a host whose smallest delay gives its clock error, up to a message's latency."""

_SUMMED = ("interval_s", "steps", "samples", "cpu_s", "requests", "dropped")
_COUNTED = ("seconds", "bytes", "staleness", "cache")
_LARGEST = ("rss_bytes", "peak_bytes", "device_peak_bytes")


class ActivityFiles:
    """Writes the lines of one job. A full disk costs lines, never the job."""

    def __init__(self, run: Path, *, num_hosts: int = 1) -> None:
        self._folder, self._num_hosts = run / FOLDER, num_hosts
        self._files: dict[str, tuple[BinaryIO, int]] = {}  # by process: the file, and how many lines it has
        self._delays: dict[int, deque[float]] = {}  # by host

    def write(self, line: str, *, process: str, incarnation: int, host: int) -> None:
        """Append a line of a process, under the name by which the supervisor knows it."""
        try:
            facts = msgspec.json.decode(line)
            facts = {**facts, "process": process, "incarnation": incarnation}
            if self._num_hosts > 1:
                facts["host"] = host
            if host:
                facts["clock_s"] = round(self._clock_error(host, float(facts["at"])), 6)
                facts["at"] = round(facts["at"] + facts["clock_s"], 3)
        except (msgspec.DecodeError, TypeError, KeyError, ValueError):
            return  # from a script that wrote to a descriptor it did not open
        with contextlib.suppress(Exception):  # nothing that a script sends may stop the supervisor
            file, num_lines = self._open(process)
            file.write(msgspec.json.encode(facts) + b"\n")
            self._files[process] = (file, num_lines + 1)
            if num_lines + 1 >= MAX_LINES:
                self._halve(process)

    def close(self) -> None:
        for file, _ in self._files.values():
            file.close()
        self._files.clear()

    def _clock_error(self, host: int, sent_at: float) -> float:
        """Seconds to add to a host's clock to have this one's."""
        delays = self._delays.setdefault(host, deque(maxlen=NUM_DELAYS))
        delays.append(time.time() - sent_at)
        return min(delays)

    def _open(self, process: str) -> tuple[BinaryIO, int]:
        if process not in self._files:
            own_files.make_directory(self._folder)
            path = self._path(process)
            fd = own_files.open_file(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
            file = open(fd, "ab", buffering=0)  # noqa: SIM115  closed in close()
            self._files[process] = (file, path.read_bytes().count(b"\n"))
        return self._files[process]

    def _halve(self, process: str) -> None:
        file, _ = self._files.pop(process)
        file.close()
        path = self._path(process)
        kept = b"".join(msgspec.json.encode(line) + b"\n" for line in halved(_lines(path.read_bytes())))
        temporary = path.with_suffix(".new")
        temporary.unlink(missing_ok=True)
        with open(own_files.open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as new:
            new.write(kept)
        temporary.replace(path)

    def _path(self, process: str) -> Path:
        return self._folder / f"{process}.jsonl"


class StatusLine:
    """The supervisor's end of a status socket, on which a server or the coordinator reports activity."""

    def __init__(
        self,
        files: ActivityFiles,
        selector: selectors.BaseSelector,
        *,
        process: str,
        incarnation: int,
        host: int,
    ) -> None:
        self._files, self._selector = files, selector
        self._process, self._incarnation, self._host = process, incarnation, host
        self._ours, self.theirs = system.packet_pair()
        """`theirs` goes to the child, and is closed here after the fork."""
        self._ours.setblocking(False)
        selector.register(self._ours, selectors.EVENT_READ, self)

    def attend(self) -> None:
        """Write received lines; unregister the socket when its process is gone."""
        if not self._take():
            self._selector.unregister(self._ours)

    def close(self) -> None:
        """Write the rest. The process has exited."""
        self._take()
        with contextlib.suppress(KeyError):
            self._selector.unregister(self._ours)
        self._ours.close()
        self.theirs.close()

    def _take(self) -> bool:
        try:
            while packet := self._ours.recv(MAX_LINE_BYTES):
                with contextlib.suppress(WireError):
                    message, _ = framing.decode(packet)
                    if isinstance(message, Activity):
                        self._files.write(
                            message.line,
                            process=self._process,
                            incarnation=self._incarnation,
                            host=self._host,
                        )
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False


def _lines(raw: bytes) -> list[dict[str, Any]]:
    found = []
    for line in raw.splitlines():
        with contextlib.suppress(msgspec.DecodeError):
            facts = msgspec.json.decode(line)
            if isinstance(facts, dict):
                found.append(facts)
    return found


def halved(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbouring lines merged in pairs. Lines of two incarnations are never merged: a death stays visible."""
    kept: list[dict[str, Any]] = []
    first: dict[str, Any] | None = None
    for line in lines:
        if first is None:
            first = line
        elif first.get("incarnation") == line.get("incarnation"):
            try:
                kept.append(merged(first, line))
            except (TypeError, AttributeError, ValueError, ArithmeticError):
                kept.append(line)  # one of them is invalid; the file is halved all the same
            first = None
        else:
            kept.append(first)
            first = line
    return kept + ([first] if first is not None else [])


def merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """One line over both intervals: sums, the larger of two sizes, and otherwise the later value."""
    line = {**first, **second}
    for key in _SUMMED:
        if key in line:
            line[key] = first.get(key, 0) + second.get(key, 0)
    for key in _COUNTED:
        if key in line:
            a, b = first.get(key, {}), second.get(key, {})
            line[key] = {name: a.get(name, 0) + b.get(name, 0) for name in {**a, **b}}
    for key in _LARGEST:
        if key in line:
            line[key] = max(first.get(key, 0), second.get(key, 0))
    if "queue_s" in line and line.get("requests"):
        waited = sum(each.get("queue_s", 0) * each.get("requests", 0) for each in (first, second))
        line["queue_s"] = waited / line["requests"]
    return line
