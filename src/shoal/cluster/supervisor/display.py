"""Display of a running job: the script's output, and its progress in one place.

`Display` writes plain lines, few enough to read in a file. On a terminal `LiveDisplay` draws one
table below the output, in place, with a line per worker; `tick` redraws it, so there is no thread.
The script's output goes to stdout, progress to stderr: a redirected stdout holds only what the
script printed.

The supervisor feeds it Progress from its workers. A plain `python train.py` uses the same one, from
the Trainer:

    display = open_display(sys.stdout.buffer, sys.stderr.buffer)
    session.listen(display.update)      # report() now reaches it
    with display.owning_prints():       # print() goes above the table
        ...train...
    session.listen(None)
    display.close()
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO, cast

from shoal.cluster.supervisor import progress_text
from shoal.runtime.transport.messages.supervisor import Progress

if TYPE_CHECKING:
    from rich.table import Table

LINE_EVERY_S = 5.0
"""Interval of plain lines of the same phase."""

MAX_EPOCH_LINES = 100
"""Epochs of a fit that get a line each; with more of them, one line a second."""

EPOCH_LINE_EVERY_S = 1.0
"""Interval of plain lines of different epochs: short epochs need not fill a page."""

DRAW_EVERY_S = 0.125

SILENT_AFTER_S = 1.5
"""A start that takes longer is explained."""

RETRY_S = 0.05
"""Interval of attempts to write to a stream without a reader."""

MAX_PENDING_BYTES = 16 << 20
"""Output buffered for a stream without a reader (a pager left alone); beyond it the scripts' prints block."""

CHUNK_BYTES = 4096
"""PIPE_BUF: a writable pipe takes this much without blocking."""


class Outlet:
    """One stream towards the user. Writing never blocks: output the stream does not take is buffered."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._pending = bytearray()
        self._poll: select.poll | None = None
        # Without a descriptor it is in memory, and takes everything.
        with contextlib.suppress(OSError, ValueError):
            fd = stream.fileno()
            self._poll = select.poll()
            self._poll.register(fd, select.POLLOUT)

    @property
    def num_pending(self) -> int:
        """Bytes that the stream has not taken yet."""
        return len(self._pending)

    def write(self, data: bytes) -> None:
        """Write as much as the stream takes now; the rest goes with the next `write` or `flush`."""
        self._pending += data
        self.flush()

    def flush(self, *, wait: bool = False) -> None:
        """Write pending output, as far as the stream takes it, or all of it."""
        while self._pending and (wait or self._poll is None or self._poll.poll(0)):
            try:
                self._stream.write(self._pending[:CHUNK_BYTES])
                self._stream.flush()
            except (OSError, ValueError):  # a reader that went away (`| head`) does not end a job
                self._pending.clear()
            del self._pending[:CHUNK_BYTES]

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


class Display:
    """Plain lines: one when a phase or an epoch begins, one when the last ends, one every few seconds between."""

    takes_parts = True

    def __init__(
        self, stdout: BinaryIO, stderr: BinaryIO, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stdout, self._stderr, self._clock = Outlet(stdout), Outlet(stderr), clock
        self._is_leaving = False
        self._newest: dict[int, Progress] = {}
        self._shown: Progress | None = None
        self._shown_at = 0.0
        self._awaited, self._explain_at = "", 0.0
        self._epoch_shown: tuple[int, int] | None = None
        self._epoch_shown_at = -EPOCH_LINE_EVERY_S

    def expect(self, what: str) -> None:
        """Set an explanation to show if nothing is written for a while; empty for none."""
        self._awaited, self._explain_at = what, self._clock() + SILENT_AFTER_S

    def expect_script(self) -> None:
        """The workers run the script: on files and pipes only its output appears."""
        self._awaited = ""

    def _explain(self) -> float | None:
        """Explain if it is time to; else the seconds until then."""
        if not self._awaited:
            return None
        if (left_s := self._explain_at - self._clock()) > 0:
            return left_s
        what, self._awaited = self._awaited, ""
        self.note(what)
        return None

    def out(self, data: bytes) -> None:
        self._write(self._stdout, data)

    def err(self, data: bytes) -> None:
        self._write(self._stderr, data)

    def note(self, text: str) -> None:
        """Show a message of shoal's own, on a line of its own."""
        self.err(f"{text}\n".encode())

    def update(self, progress: Progress) -> None:
        self._awaited = ""
        self._newest[progress.rank] = progress
        if progress.rank == 0:
            self._show(progress)

    def tick(self) -> float | None:
        """Draw if due; returns the seconds until the next call, None for never."""
        for outlet in (self._stdout, self._stderr):
            outlet.flush()
        if self._stdout.num_pending or self._stderr.num_pending:
            return RETRY_S
        return self._explain()

    @property
    def is_full(self) -> bool:
        """Whether so much is pending that scripts' prints should block; never while the job leaves."""
        return not self._is_leaving and self._has_no_room(self._stdout, self._stderr)

    def leave(self) -> None:
        """The job was asked to leave: from now on streams without a reader are not waited for."""
        self._is_leaving = True

    def close(self) -> None:
        """Show the last state, and nothing after it."""
        self._show_last()
        for outlet in (self._stdout, self._stderr):
            outlet.flush(wait=not self._is_leaving)

    def _has_no_room(self, *outlets: Outlet) -> bool:
        return any(outlet.num_pending > MAX_PENDING_BYTES for outlet in outlets)

    def _write(self, outlet: Outlet, data: bytes) -> None:
        self._awaited = "" if data else self._awaited
        if not (self._is_leaving and self._has_no_room(outlet)):  # the logs have it
            outlet.write(data)

    def _show_last(self) -> None:
        last, shown = self._newest.get(0), self._shown
        if last and shown and (last.call, last.phase, last.step) != (shown.call, shown.phase, shown.step):
            self.note(progress_text.line(last))

    @contextlib.contextmanager
    def owning_prints(self) -> Iterator[None]:
        """Keep print() and the table apart, in a process that was not launched."""
        yield

    def _show_epoch(self, progress: Progress) -> None:
        """One line for an epoch that is over, with its own number and means."""
        epoch, many = progress.metrics_epoch, (progress.num_epochs or 0) > MAX_EPOCH_LINES
        if not epoch or (progress.call, epoch) == self._epoch_shown:
            return
        if (
            not many
            or self._clock() >= self._epoch_shown_at + EPOCH_LINE_EVERY_S
            or epoch == progress.num_epochs
        ):
            self._epoch_shown_at = self._clock()
            self._epoch_shown = progress.call, progress.metrics_epoch
            self.note(progress_text.epoch_line(progress))

    def _show(self, progress: Progress) -> None:
        self._show_epoch(progress)
        now, shown = self._clock(), self._shown
        waited_s = now - self._shown_at
        begins = shown is None or (shown.call, shown.phase) != (progress.call, progress.phase)
        turns = shown is not None and shown.epoch != progress.epoch and waited_s >= EPOCH_LINE_EVERY_S
        ends = progress.step == progress.num_steps and (shown is None or shown.step != progress.step)
        if begins or turns or ends or waited_s >= LINE_EVERY_S:
            self._shown, self._shown_at = progress, now
            self.note(progress_text.line(progress))


class LiveDisplay(Display):
    """One table at the foot of a terminal, the output above it.

    Output is collected and written together with the next table, so a script
    that prints a lot does not make it flicker.
    """

    takes_parts = False

    def __init__(
        self, stdout: BinaryIO, stderr: BinaryIO, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(stdout, stderr, clock=clock)
        self._pending: list[tuple[Outlet, bytes]] = []
        self._num_lines = 0  # of the table as it stands on the terminal
        self._draw_at = 0.0
        self._is_dirty = False

    def out(self, data: bytes) -> None:
        self._above(self._stdout, data)

    def err(self, data: bytes) -> None:
        self._above(self._stderr, data)

    def note(self, text: str) -> None:
        super().note(progress_text.wrapped(text, _terminal_size(self._stderr)[0]))

    def expect_script(self) -> None:
        self.expect("the workers run the script; its first step is to come")

    def update(self, progress: Progress) -> None:
        """Show progress. A call that is over stays above the table, as one line."""
        before = self._newest.get(progress.rank)
        if progress.rank == 0:
            if before is not None and before.call != progress.call:
                self.note(progress_text.line(before))
            self._show_epoch(progress)
        self._awaited = ""
        self._newest[progress.rank] = progress
        self._is_dirty = True
        self.tick()

    def tick(self) -> float | None:
        """Draw if due; returns the seconds until the next call, None for never."""
        blocked_s = super().tick()
        if not self._is_dirty or self._stdout.num_pending or self._stderr.num_pending:
            return blocked_s
        now = self._clock()
        if now < self._draw_at:
            return self._draw_at - now
        self._draw_at = now + DRAW_EVERY_S
        self._draw()
        return None

    def _show_last(self) -> None:
        """Leave the last table standing."""
        self._draw()
        self._newest.clear()
        self._num_lines = 0

    @contextlib.contextmanager
    def owning_prints(self) -> Iterator[None]:
        before = sys.stdout, sys.stderr
        above = _Above(self.out, before[0]), _Above(self.err, before[1])
        sys.stdout, sys.stderr = above
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before
            for stream in above:
                stream.finish()

    def _has_no_room(self, *outlets: Outlet) -> bool:
        undrawn = sum(len(data) for stream, data in self._pending if stream in outlets)
        return undrawn > MAX_PENDING_BYTES or super()._has_no_room(*outlets)

    def _above(self, stream: Outlet, data: bytes) -> None:
        if data:
            self._pending.append((stream, data))
            self._is_dirty = True
            self.tick()

    def _draw(self) -> None:
        self._is_dirty = False
        # Up to the table's first line, and clear all from there.
        self._write(self._stderr, f"\x1b[{self._num_lines}F\x1b[J".encode() if self._num_lines else b"")
        for stream, data in self._pending:
            self._write(stream, data)
        self._pending.clear()
        drawn = self._render() if self._newest else ""
        self._num_lines = drawn.count("\n")
        self._write(self._stderr, drawn.encode())

    def _render(self) -> str:
        from rich.console import Console

        width, height = _terminal_size(self._stderr)
        console = Console(
            file=io.StringIO(), force_terminal=True, width=max(20, width - 1), legacy_windows=False
        )
        with console.capture() as captured:
            console.print(table(self._newest, max_workers=max(1, height - 6), width=max(20, width - 1)))
        return captured.get()


def table(newest: dict[int, Progress], *, max_workers: int, width: int = 80) -> Table:
    """Progress table: one line for the job, and one per worker if there are several.

    Epoch, step, loss and ETA are always complete. The metrics of the previous epoch have a line of
    their own when it ends, and no column.
    """
    from rich import box
    from rich.table import Table

    first = newest[min(newest)]
    cells = {
        "": first.phase,
        "epoch": progress_text.of(first.epoch, first.num_epochs) if first.epoch else "",
        "step": progress_text.of(first.step, first.num_steps),
        "loss": progress_text.value(first.loss) if first.loss is not None else "",
        "ETA": progress_text.duration(first.eta_s) if first.eta_s is not None else "",
        "samples/s": progress_text.rate(first.samples_per_s),
    }
    others = {"": [f"worker {max(newest)}"] if len(newest) > 1 else []}
    widths = {name: max(map(len, (name, cell, *others.get(name, ())))) for name, cell in cells.items()}
    if sum(widths.values()) + 2 * len(widths) > width:
        del cells["samples/s"]
    drawn = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for name in cells:
        drawn.add_column(name, justify="left" if not name else "right", no_wrap=True)
    drawn.add_row(*cells.values(), style="bold")
    if len(newest) > 1:
        for rank in sorted(newest)[:max_workers]:
            theirs = newest[rank]
            drawn.add_row(f"worker {rank}", str(theirs.epoch or ""), str(theirs.step), style="dim")
        if len(newest) > max_workers:
            drawn.add_row(f"and {len(newest) - max_workers} more", style="dim")
    return drawn


class Quiet(Display):
    """The script's output alone."""

    def expect(self, what: str) -> None:
        """Explain nothing."""

    def update(self, progress: Progress) -> None:
        """Take it in; show nothing."""

    def _show_last(self) -> None:
        pass


def open_display(stdout: BinaryIO, stderr: BinaryIO, *, quiet: bool = False, plain: bool = False) -> Display:
    """Display for the kind of stderr: a terminal that can move its cursor, or anything else."""
    if quiet:
        return Quiet(stdout, stderr)
    is_terminal = stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    return LiveDisplay(stdout, stderr) if is_terminal and not plain else Display(stdout, stderr)


def binary(stream: TextIO) -> BinaryIO:
    """Bytes under a text stream; a stand-in where it has none, as in a notebook."""
    stream.flush()
    under = getattr(stream, "buffer", None)
    return under if under is not None else cast(BinaryIO, _TextEncoder(stream))


class _TextEncoder(io.RawIOBase):
    """Bytes into a stream that only takes text."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, data: Any) -> int:
        self._stream.write(bytes(data).decode(errors="replace"))
        return len(data)

    def flush(self) -> None:
        self._stream.flush()


class _Above(io.TextIOBase):
    """Stands in for sys.stdout or sys.stderr: whole lines go above the table."""

    encoding = "utf-8"

    def __init__(self, show: Callable[[bytes], None], instead_of: TextIO) -> None:
        self._show, self._instead_of, self._partial = show, instead_of, ""

    def fileno(self) -> int:
        return self._instead_of.fileno()

    def isatty(self) -> bool:
        return self._instead_of.isatty()

    def write(self, text: str) -> int:
        lines, newline, self._partial = (self._partial + text).rpartition("\n")
        if newline:
            self._show(f"{lines}\n".encode(errors="surrogateescape"))
        return len(text)

    def finish(self) -> None:
        if self._partial:
            self.write("\n")


def _terminal_size(stream: Outlet) -> tuple[int, int]:
    try:
        size = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        return 80, 24
    return size.columns or 80, size.lines or 24  # a detached terminal may report 0
