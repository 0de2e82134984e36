"""The row store: rows by number, decoded once, the first part in RAM and the rest on disk.

Row-major, so that a gather of a shuffled batch touches one stretch per row. All processes of a host
that open the same rows share one copy, forked children too; locks that end with their process
assign the decoding. A thread prefetches announced rows on disk, a piece at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.data.cache import cache_plan, row_file
from shoal.data.cache.background import BackgroundJobs
from shoal.data.cache.cache_plan import NUM_AHEAD
from shoal.data.cache.row_file import CachedRows, Field, Heap, RowLayout, buffer
from shoal.data.formats.table import Ragged
from shoal.errors import BlockDamaged, CacheFull
from shoal.runtime import scratch

UNLIMITED = 1 << 62
"""Limit of a store without one."""

_PAGE = mmap.ALLOCATIONGRANULARITY
_COUNTERS = (
    4  # of the shared page: bytes in the heap in RAM, in that on disk, the owner's note, and one unused
)
# The byte of the file whose lock the heaps' counters need; parts are locked by their number.
_HEAP_LOCK = 1 << 40


@dataclass(frozen=True, slots=True)
class RowSpec:
    """Columns, number and place of a store's rows."""

    fields: Mapping[str, Field]
    """Columns of one shape per row."""

    lists: Mapping[str, np.dtype[Any]]
    """Columns whose rows are lists of several lengths, with the type of their elements."""

    num_rows: int
    num_parts: int
    """Number of parts that are present or not: blocks of a table, or single rows."""

    num_ram_rows: int
    """Number of rows in RAM, from the first on."""

    heap_ram_bytes: int = 0
    """Limit of lists in RAM; the rest goes to disk."""


def row_layout(fields: Mapping[str, Field], lists: Iterable[str]) -> RowLayout:
    """Layout of rows; of a list, its place in a heap and its length."""
    hidden = {f"{name}\0{what}": Field(torch.int64) for name in lists for what in ("at", "length")}
    return RowLayout({**fields, **hidden})


class RowStore:
    """Rows of one table or cache."""

    def __init__(
        self,
        spec: RowSpec,
        *,
        name: str,
        directory: str | os.PathLike[str] | None = None,
        shared_as: str | None = None,
        files: list[int] | None = None,
        granted_bytes: int = 0,
    ) -> None:
        """`shared_as` identifies the rows to other processes of the job: the same key, the same rows.

        `files` are from `reserve`, so that processes forked since then share them. `granted_bytes`
        of RAM are reserved for this store, and not free for other caches.
        """
        self.name, self.spec = name, spec
        self._directory = directory
        self._layout = row_layout(spec.fields, spec.lists)
        self._control_bytes = -(-(_COUNTERS * 8 + spec.num_parts) // _PAGE) * _PAGE
        self._fds, self.is_first = self._open(shared_as, files)
        self._finalizer = weakref.finalize(self, row_file.close_all, self._fds)
        control = mmap.mmap(self._fds[0], self._control_bytes)
        self._counters = np.frombuffer(control, np.int64, _COUNTERS)
        self.flags = np.frombuffer(control, np.uint8, spec.num_parts, _COUNTERS * 8)
        """State of each part: 0 while it is absent."""
        self._ram = self._rows(0, self._control_bytes, spec.num_ram_rows)
        self._disk = self._rows(1, 0, spec.num_rows - spec.num_ram_rows)
        self._heaps = (Heap(self._fds[2], is_on_disk=False), Heap(self._fds[3], is_on_disk=True))
        self._locks = _Locks()
        self._counts = {"ram": 0, "disk": 0, "ahead": 0}
        self._written = np.zeros(2, np.int64)  # rows, to RAM and to disk, by this process
        self.granted_bytes = granted_bytes
        cache_plan.register(self)

    @property
    def row_bytes(self) -> int:
        return self._layout.row_bytes

    @property
    def is_all_in_ram(self) -> bool:
        """Whether nothing of the rows themselves is on disk."""
        return self.spec.num_ram_rows == self.spec.num_rows

    # ---- writing -----------------------------------------------------------------------------------

    def write(self, begin: int, num_rows: int, columns: Mapping[str, Any]) -> None:
        """Write consecutive rows from their columns: arrays, and Ragged. Does not mark them as present."""
        try:
            packed = {**columns, **self._keep_lists(columns)} if self.spec.lists else columns
            for tile in self._layout.pack(packed, num_rows):
                split = min(max(self.spec.num_ram_rows - begin, 0), len(tile))
                self._written += np.array([split, len(tile) - split])
                if split:
                    self._ram.write(begin, tile[:split])
                if split < len(tile):
                    self._disk.write(begin + split - self.spec.num_ram_rows, tile[split:])
                begin += len(tile)
        except OSError as error:
            raise self._full(error, num_rows * self.row_bytes) from error

    def put(self, numbers: NDArray[np.int64], columns: Mapping[str, Any]) -> None:
        """Write single rows, by their numbers. Does not mark them as present."""
        try:
            at = 0
            packed = {**columns, **self._keep_lists(columns)} if self.spec.lists else columns
            for tile in self._layout.pack(packed, len(numbers)):
                chosen = numbers[at : at + len(tile)]
                at += len(tile)
                in_ram = chosen < self.spec.num_ram_rows
                self._written += np.array([np.count_nonzero(in_ram), np.count_nonzero(~in_ram)])
                if in_ram.any():
                    self._ram.put(chosen[in_ram], tile[in_ram])
                if not in_ram.all():
                    self._disk.put(chosen[~in_ram] - self.spec.num_ram_rows, tile[~in_ram])
        except OSError as error:
            raise self._full(error, len(numbers) * self.row_bytes) from error

    @contextlib.contextmanager
    def claimed(self, part: int, *, waits: bool = False) -> Iterator[bool]:
        """Context: True if this process alone makes the part; False if another does."""
        with self._locks.held(self._fds[0], part, waits=waits) as is_ours:
            yield is_ours

    # ---- reading -----------------------------------------------------------------------------------

    def gather(self, rows: range | NDArray[np.int64]) -> dict[str, Any]:
        """Copies of these rows as columns: tensors, and Ragged. They must be present."""
        return self.unpack(self.take(rows))

    def take(self, rows: range | NDArray[np.int64]) -> torch.Tensor:
        """Copies of these rows as they lie: int64, [n, words]."""
        try:
            return self._taken(rows)
        except OSError as error:
            problem = f"rows of it cannot be read ({error.strerror or error})"
            raise BlockDamaged(path=f"of {self.name} in {self.directory}", problem=problem) from error

    def _taken(self, rows: range | NDArray[np.int64]) -> torch.Tensor:
        num_ram = self.spec.num_ram_rows
        if isinstance(rows, range):
            if rows.step != 1:
                return self._taken(np.asarray(rows, dtype=np.int64))
            self._counts["ram"] += max(0, min(rows.stop, num_ram) - rows.start)
            self._counts["disk"] += max(0, rows.stop - max(rows.start, num_ram))
            if rows.stop <= num_ram:
                return self._ram.take_range(rows.start, rows.stop)
            on_disk = self._disk.take_range(max(rows.start - num_ram, 0), rows.stop - num_ram)
            return (
                on_disk
                if rows.start >= num_ram
                else torch.cat([self._ram.take_range(rows.start, num_ram), on_disk])
            )
        if self.is_all_in_ram:
            self._counts["ram"] += len(rows)
            return self._ram.take(rows)
        in_ram = rows < num_ram
        num_in_ram = int(np.count_nonzero(in_ram))
        self._counts["ram"] += num_in_ram
        self._counts["disk"] += len(rows) - num_in_ram
        if num_in_ram == len(rows):
            return self._ram.take(rows)
        found = buffer(len(rows), self._layout.row_bytes)
        self._ram.take_into(rows[in_ram], found, np.flatnonzero(in_ram))
        self._disk.take_into(rows[~in_ram] - num_ram, found, np.flatnonzero(~in_ram))
        return torch.from_numpy(found)

    def unpack(self, taken: torch.Tensor) -> dict[str, Any]:
        found = self._layout.unpack(taken)
        if not self.spec.lists:
            return found
        return {**{name: found[name] for name in self.spec.fields}, **self._lists_of(found)}

    @property
    def note(self) -> int:
        """A number shared by all processes with these rows; 0 until it is set."""
        return int(self._counters[2])

    @note.setter
    def note(self, value: int) -> None:
        self._counters[2] = value

    # ---- figures -----------------------------------------------------------------------------------

    def filled_bytes(self) -> int:
        return row_file.bytes_on_disk(self._fds[0]) + int(self._counters[0])

    def disk_bytes(self) -> int:
        return sum(row_file.bytes_on_disk(fd) for fd in (self._fds[1], self._fds[3]))

    def count_ahead(self, num_rows: int) -> None:
        """Count rows on disk that were prefetched before they were requested."""
        self._counts["ahead"] += num_rows

    def figures(self) -> dict[str, Any]:
        """Rows asked for, by where they were; fit for JSON."""
        return {
            "kind": "rows",
            "ram": {
                "num_bytes": self.filled_bytes(),
                "limit_bytes": self.granted_bytes,
                "num_hits": self._counts["ram"],
                "num_misses": self._counts["disk"],
                "hit_rate": cache_plan.hit_rate(self._counts["ram"], self._counts["disk"]),
                "bytes_in": int(self._written[0]) * self.row_bytes,
            },
            "disk": {
                "num_bytes": self.disk_bytes(),
                "num_hits": self._counts["disk"],
                "num_ahead": self._counts["ahead"],
                "bytes_in": int(self._written[1]) * self.row_bytes,
                "bytes_out": self._counts["disk"] * self.row_bytes,
            },
        }

    # ---- the rest ----------------------------------------------------------------------------------

    @staticmethod
    def reserve(directory: str | os.PathLike[str] | None) -> list[int]:
        """Files for the rows of a store that is opened later; without a directory none of them is on disk."""
        fds: list[int] = []
        try:
            for name in ("shoal-rows", "shoal-lists"):
                fds.append(row_file.in_memory(name, 0))
                fds.append(
                    row_file.in_memory("shoal-nothing", 0)
                    if directory is None
                    else row_file.on_disk(directory, 0)
                )
        except BaseException:
            row_file.close_all(fds)
            raise
        return fds

    def _open(self, shared_as: str | None, files: list[int] | None) -> tuple[list[int], bool]:
        spec = self.spec
        if shared_as is None:
            return self._sized(files or self._reserved()), True
        identity = [shared_as, self._layout.describe(), spec.num_rows, spec.num_parts]
        facts = {"num_ram_rows": spec.num_ram_rows, "heap_ram_bytes": spec.heap_ram_bytes}
        fds, known, is_first = row_file.share(
            scratch.directory("rows"), identity, lambda: (self._sized(self._reserved()), facts)
        )
        # The first process to open it has decided the layout.
        self.spec = RowSpec(spec.fields, spec.lists, spec.num_rows, spec.num_parts, **known)
        return fds, is_first

    def _reserved(self) -> list[int]:
        spec = self.spec
        is_in_ram = spec.num_ram_rows == spec.num_rows and (
            not spec.lists or spec.heap_ram_bytes >= UNLIMITED
        )
        return self.reserve(None if is_in_ram else self.directory)

    def _sized(self, fds: list[int]) -> list[int]:
        row_bytes, num_ram = self._layout.row_bytes, self.spec.num_ram_rows
        os.ftruncate(fds[0], self._control_bytes + num_ram * row_bytes)
        os.ftruncate(fds[1], (self.spec.num_rows - num_ram) * row_bytes)
        return fds

    @property
    def directory(self) -> Path:
        return scratch.directory("rows") if self._directory is None else Path(self._directory)

    def _rows(self, which: int, offset: int, num_rows: int) -> CachedRows:
        return CachedRows(
            self._fds[which],
            offset=offset,
            num_rows=num_rows,
            row_bytes=self._layout.row_bytes,
            is_on_disk=which == 1,
        )

    def _keep_lists(self, columns: Mapping[str, Any]) -> dict[str, NDArray[np.int64]]:
        """Put the lists of some rows into a heap; returns each one's beginning and length."""
        kept = {}
        for name, dtype in self.spec.lists.items():
            values, offsets = columns[name]
            values = np.ascontiguousarray(values[offsets[0] : offsets[-1]], dtype)
            is_on_disk, at = self._reserve(values.nbytes)
            if values.nbytes:
                self._heaps[is_on_disk].write(at, values)
            begins = at + (offsets[:-1] - offsets[0]) * dtype.itemsize
            kept[f"{name}\0at"] = -1 - begins if is_on_disk else begins
            kept[f"{name}\0length"] = np.diff(offsets)
        return kept

    def _reserve(self, num_bytes: int) -> tuple[bool, int]:
        with self._locks.waited(self._fds[0], _HEAP_LOCK):
            is_on_disk = int(self._counters[0]) + num_bytes > self.spec.heap_ram_bytes
            at = int(self._counters[int(is_on_disk)])
            self._counters[int(is_on_disk)] += -(-num_bytes // 8) * 8
        return is_on_disk, at

    def _lists_of(self, found: dict[str, torch.Tensor]) -> dict[str, Ragged]:
        lists = {}
        for name, dtype in self.spec.lists.items():
            lengths = found[f"{name}\0length"].numpy()
            offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
            np.cumsum(lengths, out=offsets[1:])
            ram, disk = self._heaps
            pieces = [
                disk.read(-1 - at, length) if at < 0 else ram.read(at, length)
                for at, length in zip(
                    found[f"{name}\0at"].tolist(), (lengths * dtype.itemsize).tolist(), strict=True
                )
            ]
            lists[name] = Ragged(np.frombuffer(bytearray().join(pieces), dtype), offsets)
        return lists

    def _full(self, error: OSError, num_bytes: int) -> CacheFull:
        return CacheFull(
            what=self.name,
            directory=str(self.directory),
            needed_bytes=num_bytes,
            free_bytes=cache_plan.free_disk_bytes(self.directory),
            reason=error.strerror or str(error),
        )


class _Locks:
    """Locks on bytes of a file: between processes by the kernel, between threads by a set."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._pid, self._changed = os.getpid(), threading.Condition()
        self._mine: set[int] = set()

    @contextlib.contextmanager
    def held(self, fd: int, byte: int, *, waits: bool = False) -> Iterator[bool]:
        """True where the lock is ours while entered."""
        if self._pid != os.getpid():
            self._begin()  # a child has none of its parent's
        with self._changed:
            self._changed.wait_for(lambda: not waits or byte not in self._mine)
            is_free = byte not in self._mine
            if is_free:
                self._mine.add(byte)
        try:
            is_ours = is_free and self._lock(fd, byte, waits=waits)
            try:
                yield is_ours
            finally:
                if is_ours:
                    fcntl.lockf(fd, fcntl.LOCK_UN, 1, byte)
        finally:
            if is_free:
                with self._changed:
                    self._mine.discard(byte)
                    self._changed.notify_all()

    def waited(self, fd: int, byte: int) -> contextlib.AbstractContextManager[bool]:
        """Wait for the lock, without limit."""
        return self.held(fd, byte, waits=True)

    def _lock(self, fd: int, byte: int, *, waits: bool) -> bool:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB), 1, byte)
        except (BlockingIOError, PermissionError):
            return False
        return True


class _Piece:
    """A part of the announced rows."""

    def __init__(self, rows: NDArray[np.int64]) -> None:
        self.rows = rows
        self.found: torch.Tensor | None = None
        self.is_done = False
        self.num_used = 0

    def offset_of(self, rows: NDArray[np.int64]) -> int | None:
        """Offset of these rows in the rest of the piece; None where they are not in it."""
        left = self.rows[self.num_used :]
        for at in np.flatnonzero(left == rows[0]).tolist():
            length = min(len(left) - at, len(rows))
            if np.array_equal(left[at : at + length], rows[:length]):
                return int(at)
        return None


class RowPrefetch:
    """Prefetch of announced rows, in pieces of at most `piece_bytes`."""

    def __init__(
        self, take: Callable[[NDArray[np.int64]], torch.Tensor], *, row_bytes: int, piece_bytes: int
    ) -> None:
        self._take = take
        self._piece_rows = max(1, piece_bytes // row_bytes)
        self._background = BackgroundJobs("shoal-rows-ahead")
        self._begin()

    def announce(self, rows: NDArray[np.int64]) -> None:
        """Announce rows that come next, after those announced before."""
        if self._pid != os.getpid():
            self._begin()
        with self._changed:
            for begin in range(0, len(rows), self._piece_rows):
                self._pieces.append(_Piece(rows[begin : begin + self._piece_rows]))
        self._background(self._read)

    def take(self, rows: NDArray[np.int64]) -> torch.Tensor | None:
        """The rows, if they were announced; waits for a read in progress. None if they are not among the next."""
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
                    self._background(self._read)
                    self._changed.wait_for(lambda piece=piece: piece.is_done)  # type: ignore[misc]  # the piece of this round
                if piece.found is None:
                    self._pieces.clear()
                    return None  # the next reader raises the error
                end = min(piece.num_used + len(rows), len(piece.rows))
                parts.append(piece.found[piece.num_used : end])
                rows = rows[end - piece.num_used :]
                piece.num_used = end
                if end == len(piece.rows):
                    self._pieces.popleft()
                    self._background(self._read)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _begin(self) -> None:
        self._pid, self._changed = os.getpid(), threading.Condition()
        self._pieces: deque[_Piece] = deque()

    def _go_to(self, rows: NDArray[np.int64]) -> None:
        """Drop announcements before these rows: they were not used, as when an epoch is left in the middle."""
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
