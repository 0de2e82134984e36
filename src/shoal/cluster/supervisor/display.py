"""Display of a running job: the script's output, and its progress in one place.

`Display` writes plain lines, few enough to read in a file. On a terminal
`LiveDisplay` draws one table below the output, in place, with a line per
worker; it is redrawn by `tick`, so there is no thread. Output goes to stdout
as the script's, progress to stderr: a redirected stdout holds only what the
script printed.

The supervisor feeds it Progress from its workers. A plain `python train.py`
uses the same one, from the Trainer:

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
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO, cast

from shoal.cluster.supervisor import progress_text
from shoal.runtime.transport.messages.supervisor import Progress

if TYPE_CHECKING:
    from rich.table import Table

LINE_EVERY_S = 5.0
"""Between two plain lines of the same phase."""

EPOCH_LINE_EVERY_S = 1.0
"""Between two plain lines of different epochs: short epochs need not fill a page."""

DRAW_EVERY_S = 0.125


class Display:
    """Plain lines: one when a phase or an epoch begins, one when the last ends, one every few seconds between."""

    takes_parts = True

    def __init__(
        self, stdout: BinaryIO, stderr: BinaryIO, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stdout, self._stderr, self._clock = stdout, stderr, clock
        self._newest: dict[int, Progress] = {}
        self._shown: Progress | None = None
        self._shown_at = 0.0

    def out(self, data: bytes) -> None:
        _write(self._stdout, data)

    def err(self, data: bytes) -> None:
        _write(self._stderr, data)

    def note(self, text: str) -> None:
        """Show a message of shoal's own, on a line of its own."""
        self.err(f"{text}\n".encode())

    def update(self, progress: Progress) -> None:
        self._newest[progress.rank] = progress
        if progress.rank == 0:
            self._show(progress)

    def tick(self) -> float | None:
        """Draw what is due; returns the seconds until the next call, None for never."""
        return None

    def close(self) -> None:
        last, shown = self._newest.get(0), self._shown
        if last and shown and (last.call, last.phase, last.step) != (shown.call, shown.phase, shown.step):
            self.note(progress_text.line(last))

    @contextlib.contextmanager
    def owning_prints(self) -> Iterator[None]:
        """In a plain process: keep print() and the table apart."""
        yield

    def _show(self, progress: Progress) -> None:
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
        self._pending: list[tuple[BinaryIO, bytes]] = []
        self._num_lines = 0  # of the table as it stands on the terminal
        self._draw_at = 0.0
        self._is_dirty = False

    def out(self, data: bytes) -> None:
        self._above(self._stdout, data)

    def err(self, data: bytes) -> None:
        self._above(self._stderr, data)

    def update(self, progress: Progress) -> None:
        """Show progress. A call that is over stays above the table, as one line."""
        before = self._newest.get(progress.rank)
        if progress.rank == 0 and before is not None and before.call != progress.call:
            self.note(progress_text.line(before))
        self._newest[progress.rank] = progress
        self._is_dirty = True
        self.tick()

    def tick(self) -> float | None:
        if not self._is_dirty:
            return None
        now = self._clock()
        if now < self._draw_at:
            return self._draw_at - now
        self._draw_at = now + DRAW_EVERY_S
        self._draw()
        return None

    def close(self) -> None:
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

    def _above(self, stream: BinaryIO, data: bytes) -> None:
        if data:
            self._pending.append((stream, data))
            self._is_dirty = True
            self.tick()

    def _draw(self) -> None:
        self._is_dirty = False
        # Up to the table's first line, and clear all from there.
        _write(self._stderr, f"\x1b[{self._num_lines}F\x1b[J".encode() if self._num_lines else b"")
        for stream, data in self._pending:
            _write(stream, data)
        self._pending.clear()
        drawn = self._render() if self._newest else ""
        self._num_lines = drawn.count("\n")
        _write(self._stderr, drawn.encode())

    def _render(self) -> str:
        from rich.console import Console

        width, height = _terminal_size(self._stderr)
        console = Console(
            file=io.StringIO(), force_terminal=True, width=max(20, width - 1), legacy_windows=False
        )
        with console.capture() as captured:
            console.print(table(self._newest, max_workers=max(1, height - 6)))
        return captured.get()


def table(newest: dict[int, Progress], *, max_workers: int) -> Table:
    """Progress table: one line for the job, and one per worker where there are several."""
    from rich import box
    from rich.table import Table

    first = newest[min(newest)]
    metrics = [name for name in first.metrics if name != "loss"]
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=None)
    for name in ("", "epoch", "step", "loss", *metrics, "samples/s", "ETA"):
        drawn.add_column(name, justify="left" if not name else "right", no_wrap=True)
    drawn.add_row(
        first.phase,
        progress_text.of(first.epoch, first.num_epochs) if first.epoch else "",
        progress_text.of(first.step, first.num_steps),
        progress_text.value(first.loss) if first.loss is not None else "",
        *(progress_text.value(first.metrics[name]) for name in metrics),
        progress_text.rate(first.samples_per_s),
        progress_text.duration(first.eta_s) if first.eta_s is not None else "",
        style="bold",
    )
    if len(newest) > 1:
        for rank in sorted(newest)[:max_workers]:
            theirs = newest[rank]
            drawn.add_row(f"worker {rank}", str(theirs.epoch or ""), str(theirs.step), style="dim")
        if len(newest) > max_workers:
            drawn.add_row(f"and {len(newest) - max_workers} more", style="dim")
    return drawn


class Quiet(Display):
    """The script's output alone."""

    def update(self, progress: Progress) -> None:
        """Take it in; show nothing."""

    def close(self) -> None:
        """Nothing to show."""


def open_display(stdout: BinaryIO, stderr: BinaryIO, *, quiet: bool = False) -> Display:
    """Display for the kind of stderr: a terminal that can move its cursor, or anything else."""
    if quiet:
        return Quiet(stdout, stderr)
    is_terminal = stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    return LiveDisplay(stdout, stderr) if is_terminal else Display(stdout, stderr)


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


def _write(stream: BinaryIO, data: bytes) -> None:
    """Write, or stop trying: a reader that went away (`| head`) does not end a job."""
    if data:
        with contextlib.suppress(OSError, ValueError):
            stream.write(data)
            stream.flush()


def _terminal_size(stream: BinaryIO) -> tuple[int, int]:
    try:
        size = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        return 80, 24
    return size.columns or 80, size.lines or 24  # a terminal nobody looks at may say 0
