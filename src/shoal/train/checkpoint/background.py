"""Checkpoints in the background: a copy of the state in memory, and one thread that writes it.

Training waits for the copy alone. One checkpoint is written at a time: the next
one waits for it (back-pressure), and so do the end of a fit and Ctrl-C. An error
of the disk is raised in the main thread, at the next step.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from shoal import system
from shoal.parallel.protocol import Piece
from shoal.runtime import memory

LEAST_BYTES = 16 << 20
"""A smaller state is written synchronously: that takes some milliseconds, and it is complete when the step is over."""

_ALIGNED_BYTES = 64
_ROOM = 1.2  # free memory required, relative to a copy, so that other processes are not short of it
_GIVE_UP_S = 10.0


class BackgroundWriter:
    """Runs the writing of one Trainer's checkpoints, one after the other."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._after: list[Callable[[], object]] = []
        self._then: list[Callable[[], None]] = []
        self._changing = threading.Lock()
        self._is_open = False  # whether the thread will look for more work
        self._began_at = 0.0
        self._has_noted = False
        self.copies = Copies()
        self.gives_up = threading.Event()
        """Set when nothing waits for the write in progress any more."""

    def start(
        self, write: Callable[[], None], *, then: Callable[[], None], after: Callable[[], object]
    ) -> None:
        """Write in the background, and `then` clean up there; `after` runs in the main thread, once it is written."""
        self.wait()
        self._began_at = time.monotonic()
        self.gives_up.clear()
        self._after, self._then, self._is_open = [after], [], True
        self._thread = threading.Thread(
            target=self._run, args=(write, then), name="shoal-checkpoint-writer", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """Raise the error of the last write, and run its `after`."""
        if self._thread is None or self._thread.is_alive():
            return
        self._thread.join()
        self._thread = None
        after, self._after = self._after, []
        error, self._error = self._error, None
        if error is not None:
            raise error
        for each in after:
            each()

    def wait(self, *, is_back_pressure: bool = False) -> None:
        """Wait until nothing is being written."""
        if self._thread is not None and self._thread.is_alive():
            if is_back_pressure and not self._has_noted:
                self._has_noted = True
                since = time.monotonic() - self._began_at
                print(
                    f"note: a checkpoint is due and the one before it is still being written after {since:.1f} s: training waits "
                    "for the disk. Save less often, or to a faster one",
                    file=sys.stderr,
                    flush=True,
                )
            self._thread.join()
        self.check()

    def abandon(self) -> None:
        """At the end of a fit: free the memory; if the fit failed, the write in progress may finish,
        and nothing is raised.
        """
        self.copies = Copies()
        if self._thread is not None:
            self._thread.join(_GIVE_UP_S)
            self.gives_up.set()
            with contextlib.suppress(Exception):
                self.check()

    def then(self, clean_up: Callable[[], None]) -> None:
        """Run this in the thread after the present write; at once if there is none."""
        with self._changing:
            if self._is_open:
                self._then.append(clean_up)
                return
        clean_up()

    def _run(self, write: Callable[[], None], then: Callable[[], None]) -> None:
        try:
            write()
            then()
            while (more := self._next()) is not None:
                more()
        except BaseException as error:  # raised by `check`
            self._error, self._is_open = error, False

    def _next(self) -> Callable[[], None] | None:
        with self._changing:
            if self._then:
                return self._then.pop(0)
            self._is_open = False
            return None


class Copies:
    """Memory for copies of a state, reused between checkpoints: page faults in fresh memory take longer than the copy."""

    def __init__(self) -> None:
        self._block: mmap.mmap | None = None

    def block(self, num_bytes: int, *, num_sharers: int) -> mmap.mmap | None:
        """A block of this size; None if there is no room for it."""
        if self._block is not None and len(self._block) == num_bytes:
            return self._block
        self._block = None
        if num_bytes * _ROOM * num_sharers > memory.available_bytes():
            return None
        self._block = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return self._block


def copied(pieces: Sequence[Piece], copies: Copies, *, num_sharers: int = 1) -> list[Piece] | None:
    """The pieces copied in memory; None if it is not worth it, or there is no room. `num_sharers`: workers that copy now."""
    sizes = {_memory_of(piece): piece.tensor.nbytes for piece in pieces}
    num_bytes = sum(_aligned(size) for size in sizes.values())
    if not num_bytes or num_bytes < LEAST_BYTES:
        return None
    block = copies.block(num_bytes, num_sharers=num_sharers)
    if block is None:
        return None
    # One page fault per 2 MiB: faults are most of the time of a copy into fresh memory.
    system.use_huge_pages(block)
    made: dict[object, torch.Tensor] = {}
    position = 0
    result = []
    for piece in pieces:
        key, tensor = _memory_of(piece), piece.tensor
        if key not in made:
            if tensor.numel():
                place = torch.frombuffer(block, dtype=tensor.dtype, offset=position, count=tensor.numel())
                made[key] = place.view(tensor.shape).copy_(tensor.detach())
            else:
                made[key] = tensor
            position += _aligned(tensor.nbytes)
        result.append(replace(piece, tensor=made[key]))  # tied weights stay one memory
    return result


def _memory_of(piece: Piece) -> object:
    tensor = piece.tensor
    if not tensor.numel():
        return piece.name
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _aligned(num_bytes: int) -> int:
    return math.ceil(num_bytes / _ALIGNED_BYTES) * _ALIGNED_BYTES
