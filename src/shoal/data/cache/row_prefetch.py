"""Rows that will be asked for soon, read from disk before they are.

Whoever reads batches knows their indices long before: it announces them in
the order in which it will ask, and a thread reads them, a piece at a time, so
that a step does not wait for the disk. Rows in RAM need none of this.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.data.cache.background import Errands
from shoal.data.cache.cache_plan import NUM_AHEAD


class _Piece:
    """Some of the rows announced."""

    def __init__(self, rows: NDArray[np.int64]) -> None:
        self.rows = rows
        self.found: torch.Tensor | None = None
        self.is_done = False
        self.num_used = 0

    def offset_of(self, rows: NDArray[np.int64]) -> int | None:
        """Where these rows begin in what is left of the piece, as far as it goes."""
        left = self.rows[self.num_used :]
        for at in np.flatnonzero(left == rows[0]).tolist():
            length = min(len(left) - at, len(rows))
            if np.array_equal(left[at : at + length], rows[:length]):
                return int(at)
        return None


class RowsAhead:
    """Rows that were announced, in pieces of at most `piece_bytes`."""

    def __init__(
        self, take: Callable[[NDArray[np.int64]], torch.Tensor], *, row_bytes: int, piece_bytes: int
    ) -> None:
        self._take = take
        self._piece_rows = max(1, piece_bytes // row_bytes)
        self._errands = Errands("shoal-rows-ahead")
        self._begin()

    def announce(self, rows: NDArray[np.int64]) -> None:
        """These rows come next, after those announced before."""
        if self._pid != os.getpid():
            self._begin()
        with self._changed:
            for begin in range(0, len(rows), self._piece_rows):
                self._pieces.append(_Piece(rows[begin : begin + self._piece_rows]))
        self._errands(self._read)

    def take(self, rows: NDArray[np.int64]) -> torch.Tensor | None:
        """The rows, if they were announced; waits for what is being read. None where they are not among the next."""
        if self._pid != os.getpid():
            self._begin()
        parts: list[torch.Tensor] = []
        with self._changed:
            self._go_to(rows)
            while len(rows):
                piece = self._pieces[0] if self._pieces else None
                if piece is None or piece.offset_of(rows) != 0:
                    return None
                if not piece.is_done:
                    self._errands(self._read)
                    self._changed.wait_for(lambda piece=piece: piece.is_done)  # type: ignore[misc]  # the piece of this round
                if piece.found is None:
                    self._pieces.clear()
                    return None  # whoever reads them now meets the error
                end = min(piece.num_used + len(rows), len(piece.rows))
                parts.append(piece.found[piece.num_used : end])
                rows = rows[end - piece.num_used :]
                piece.num_used = end
                if end == len(piece.rows):
                    self._pieces.popleft()
                    self._errands(self._read)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _begin(self) -> None:
        self._pid, self._changed = os.getpid(), threading.Condition()
        self._pieces: deque[_Piece] = deque()

    def _go_to(self, rows: NDArray[np.int64]) -> None:
        """Forget what is announced before these rows: nobody came for it, as when an epoch is left in the middle."""
        for number, piece in enumerate(self._pieces):
            offset = piece.offset_of(rows)
            if offset is not None:
                piece.num_used += offset
                for _ in range(number):
                    self._pieces.popleft()
                return

    def _read(self) -> None:
        while True:
            with self._changed:
                in_memory = [self._pieces[number] for number in range(min(NUM_AHEAD, len(self._pieces)))]
                piece = next((each for each in in_memory if not each.is_done), None)
            if piece is None:
                return
            try:
                piece.found = self._take(piece.rows)
            except Exception:
                piece.found = None
            with self._changed:
                piece.is_done = True
                self._changed.notify_all()
