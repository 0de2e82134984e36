"""Output of workers: to their logs, and to the screen.

    rank 0's stdout     screen, bare      log
    others' stdout                        log
    everybody's stderr  screen, "[rank 1] " before each line (bare with one worker)      log

The log gets the bytes as they come. The screen gets whole lines if several writers share it; an
endless line is split, so it does not fill the memory. Nothing here decodes: bytes that are no text
pass through.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Protocol

from shoal.runtime import own_files

MAX_LINE_BYTES = 64 * 1024
READ_BYTES = 64 * 1024
MAX_LAST_READS = 16
"""More than a pipe can hold: later bytes come from another writer."""

TAIL_BYTES = 16 * 1024
"""Bytes of a log kept in memory for `last_lines`: a crashed interpreter's stack, and the output before it."""


class Screen(Protocol):
    """The user's terminal or file; `display.Display` is one."""

    @property
    def takes_parts(self) -> bool:
        """True where parts of lines may be shown: not while a table is drawn below them."""

    def out(self, data: bytes) -> None:
        """Show on stdout."""

    def err(self, data: bytes) -> None:
        """Show on stderr."""


class LineCutter:
    """Splits bytes into whole lines, each with a prefix.

    Text that a carriage return would overwrite (a progress bar) is left out, as on a terminal: only
    the last state of such a line is given.
    """

    def __init__(self, prefix: bytes = b"") -> None:
        self._prefix = prefix
        self._partial = b""

    def feed(self, data: bytes) -> bytes:
        """Lines that `data` completes."""
        *lines, partial = (self._partial + data).split(b"\n")
        self._partial = _after_overwriting(partial)
        while len(self._partial) > MAX_LINE_BYTES:
            lines.append(self._partial[:MAX_LINE_BYTES])
            self._partial = self._partial[MAX_LINE_BYTES:]
        return b"".join(self._prefix + _after_overwriting(line) + b"\n" for line in lines)

    def flush(self) -> bytes:
        """Last line, whole or not."""
        partial, self._partial = self._partial, b""
        return self._prefix + partial + b"\n" if partial else b""


def _after_overwriting(line: bytes) -> bytes:
    body = line[:-1] if line.endswith(b"\r") else line  # the \r of \r\n, or of a bar that is redrawn later
    return line[body.rfind(b"\r") + 1 :]


class Log:
    """Output of one worker on disk, and its newest lines at hand."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO | None = None
        with contextlib.suppress(OSError):  # as in write(): the run's directory may have been removed
            fd = own_files.open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            self._file = open(fd, "ab", buffering=0)  # noqa: SIM115  closed in close()
        self._tail = b""

    def write(self, data: bytes) -> None:
        """Append. A disk that is full does not end a job."""
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        if self._file is not None:
            with contextlib.suppress(OSError, ValueError):
                self._file.write(data)

    def last_lines(self) -> list[str]:
        return self._tail.decode(errors="replace").splitlines()

    def close(self) -> None:
        """Close the file; `last_lines` still answers."""
        if self._file is not None:
            self._file.close()


class Pipe:
    """One stream of a worker: read without blocking, kept in the log, passed to the screen."""

    def __init__(
        self, fd: int, log: Log, show: Callable[[bytes], None] | None = None, cutter: LineCutter | None = None
    ) -> None:
        """`show`: None to log only. `cutter`: None to show output as it comes."""
        os.set_blocking(fd, False)
        self._fd, self._log, self._show, self._cutter = fd, log, show, cutter
        self.is_shown, self.is_closed = show is not None, False

    def fileno(self) -> int:
        return self._fd

    def pump(self) -> bool:
        """Forward one piece of output; False if there was none."""
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return False
        if data:
            self._log.write(data)
            if self._show:
                self._show(self._cutter.feed(data) if self._cutter else data)
        return bool(data)

    def close(self) -> None:
        """Forward the rest. The worker must be dead: its output is in the pipe already."""
        for _ in range(MAX_LAST_READS):
            if not self.pump():
                break
        if self._show and self._cutter:
            self._show(self._cutter.flush())
        self.is_closed = True
        os.close(self._fd)


def stdout_pipe(fd: int, log: Log, screen: Screen, *, rank: int, shown_rank: int = 0) -> Pipe:
    """A worker's stdout: rank 0's, or the debugged rank's, is shown; the others' goes to their logs."""
    if rank != shown_rank:
        return Pipe(fd, log)
    return Pipe(fd, log, screen.out, None if screen.takes_parts else LineCutter())


def stderr_pipe(fd: int, log: Log, screen: Screen, *, rank: int, num_workers: int) -> Pipe:
    """A worker's stderr: shown, with a prefix where others write there too."""
    if num_workers == 1 and screen.takes_parts:
        return Pipe(fd, log, screen.err)
    return Pipe(fd, log, screen.err, LineCutter(f"[rank {rank}] ".encode() if num_workers > 1 else b""))
