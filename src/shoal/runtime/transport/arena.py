"""Arena of shared memory between a client and one server: its segments and buffers.

Allocates buffers in segments of shared memory, by size class, up to a limit. It does not know a
buffer's content, nor when a server has read it: a buffer belongs to its holder until it is freed.
An arena belongs to one connection and is never reused for another, so a process that wakes up late
writes into memory that nobody reads any more.
"""

from __future__ import annotations

import mmap
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal import system
from shoal.errors import ArenaFull, ConfigError
from shoal.runtime.transport import memfd

HUGE_BYTES = 4 << 20
"""Size from which memory is requested in pages of 2 MiB."""

ALIGNMENT = 64
"""Every buffer begins at a cache line."""

STEPS_PER_OCTAVE = 4
"""Size classes between a size and its double: at most a quarter of a buffer is slack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaConfig:
    """Limits of the memory that one connection shares."""

    limit_bytes: int = 4 << 30
    """All segments together. Backed as it is touched, so it is a bound and no cost."""

    segment_bytes: int = 16 << 20
    """First reservation; later a quarter of what there is, and never less than a buffer needs."""

    def __post_init__(self) -> None:
        if not ALIGNMENT <= self.segment_bytes <= self.limit_bytes:
            raise ConfigError(
                f"segment_bytes must be at least {ALIGNMENT} and at most limit_bytes, got {self.segment_bytes:,} and "
                f"{self.limit_bytes:,}."
            )


@dataclass(slots=True, eq=False)
class Segment:
    """One memfd, mapped here; the server maps it too, once its descriptor has arrived there."""

    number: int
    nbytes: int
    fd: int  # -1 once it was handed over
    memory: memoryview
    used: int = 0  # everything above is unallocated since `round` began
    num_live: int = 0
    round: int = 0  # number of times it was empty; free places of an older round are void
    unlock: Callable[[], None] | None = None  # where its pages are locked


@dataclass(slots=True, eq=False)  # not frozen: that would cost as much as the rest of `alloc`
class Buffer:
    """Bytes of an arena, owned by the caller until it releases them."""

    view: memoryview
    """Writable, of exactly `nbytes` bytes: for numpy.frombuffer and torch.frombuffer."""

    segment: int
    offset: int
    nbytes: int
    owner: Segment = field(repr=False)


class Arena:
    """Allocates and frees buffers. Threads may share it.

    A segment whose buffers are all free is reused from its start, for whatever sizes come next, so
    sizes that change from step to step do not accumulate.
    """

    def __init__(
        self, config: ArenaConfig | None = None, *, name: str = "shoal-arena", is_shared: bool = True
    ) -> None:
        """Without `is_shared` it is ordinary memory, for a server on another host."""
        self._config, self._name, self._is_shared = config or ArenaConfig(), name, is_shared
        self._lock = threading.Lock()
        self._segments: list[Segment] = []
        self._free: dict[int, list[tuple[Segment, int, int]]] = {}  # size class -> (segment, round, offset)
        self._live: set[Buffer] = set()
        self._is_closed = False
        self.bytes_reserved = 0
        """Address space in segments; what was never touched has no memory behind it."""
        self.bytes_in_use = 0
        """Bytes of held buffers, slack included."""
        self.lock: Callable[[memoryview], Callable[[], None]] | None = None
        """Locks the pages of segments to come, for a device's copies, and gives what unlocks them."""

    def alloc(self, nbytes: int) -> Buffer:
        """A buffer of `nbytes`, or of none, whatever is in it; ArenaFull where the limit does not allow it."""
        size = size_class(nbytes)
        with self._lock:
            if self._is_closed:
                raise ArenaFull(asked=nbytes, in_use=self.bytes_in_use, limit=0, setting="limit_bytes")
            segment, offset = self._place(size, nbytes)
            segment.num_live += 1
            self.bytes_in_use += size
            buffer = Buffer(segment.memory[offset : offset + nbytes], segment.number, offset, nbytes, segment)
            self._live.add(buffer)
            return buffer

    def free(self, buffer: Buffer) -> None:
        """Free a buffer. Neither the caller nor the server may use its bytes any more."""
        size = size_class(buffer.nbytes)
        with self._lock:
            if buffer not in self._live:
                raise ValueError("a buffer was given back twice, or to an arena that is not its own")
            self._live.remove(buffer)
            segment = buffer.owner
            segment.num_live -= 1
            self.bytes_in_use -= size
            if segment.num_live:
                self._free.setdefault(size, []).append((segment, segment.round, buffer.offset))
            else:
                segment.used, segment.round = 0, segment.round + 1

    def segment(self, number: int) -> Segment:
        """The segment of that number; they count from 1."""
        return self._segments[number - 1]

    def close(self) -> None:
        """Allocate no more. Held buffers stay readable; the rest is unmapped."""
        with self._lock:
            self._is_closed = True
            memfd.close([segment.fd for segment in self._segments if segment.fd >= 0])
            for segment in self._segments:
                segment.fd = -1
                if segment.unlock is not None:
                    segment.unlock()
            self._segments, self._free, self._live = [], {}, set()
            self.bytes_reserved = self.bytes_in_use = 0

    def _place(self, size: int, nbytes: int) -> tuple[Segment, int]:
        places = self._free.get(size)
        while places:
            segment, round_, offset = places.pop()
            if round_ == segment.round:
                return segment, offset
        # The fullest first, so that others become empty.
        found = max(
            (each for each in self._segments if each.nbytes - each.used >= size),
            key=lambda each: each.used / each.nbytes,
            default=None,
        )
        segment = found if found is not None else self._reserve(size, nbytes)
        offset, segment.used = segment.used, segment.used + size
        return segment, offset

    def _reserve(self, size: int, nbytes: int) -> Segment:
        # Larger the more there is: a mapping holds a descriptor, here and in the server.
        usual = max(self._config.segment_bytes, self.bytes_reserved // 4 // mmap.PAGESIZE * mmap.PAGESIZE)
        reserved = max(size, min(usual, self._config.limit_bytes - self.bytes_reserved))
        if self.bytes_reserved + reserved > self._config.limit_bytes:
            raise ArenaFull(
                asked=nbytes,
                in_use=self.bytes_in_use,
                limit=self._config.limit_bytes,
                setting="limit_bytes",
            )
        fd = memfd.create(reserved, self._name) if self._is_shared else -1
        memory = memfd.map_shared(fd, reserved) if self._is_shared else ordinary(reserved)
        segment = Segment(len(self._segments) + 1, reserved, fd, memoryview(memory))
        segment.unlock = self.lock(segment.memory) if self.lock is not None else None
        self._segments.append(segment)
        self.bytes_reserved += reserved
        return segment


def size_class(nbytes: int) -> int:
    """The bytes that a buffer of `nbytes` takes up: the next of a few sizes per octave."""
    if nbytes < 0:
        raise ValueError(f"a buffer of {nbytes} bytes")
    step = max(ALIGNMENT, (1 << (nbytes - 1).bit_length()) // (2 * STEPS_PER_OCTAVE))
    return max(1, -(-nbytes // step)) * step


def ordinary(nbytes: int) -> mmap.mmap:
    """Memory of this process, backed as it is touched: in large pages, which a socket's copies go through quicker."""
    # Private: shared pages are small ones unless the machine's administrator allows others.
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= HUGE_BYTES:
        system.use_huge_pages(memory)
    return memory


class MessageMemory:
    """Memory for large frames, reused once no view of it is held."""

    KEEP_BYTES = 256 << 20
    """Kept for later. Memory beyond it is freed with its last view."""

    def __init__(self) -> None:
        self._kept: deque[mmap.mmap] = deque()
        self._kept_bytes = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> memoryview:
        """Writable, whatever is in it."""
        with self._lock:
            return self._take(nbytes, size_class(nbytes))

    def _take(self, nbytes: int, size: int) -> memoryview:
        for memory in self._kept:
            # References: the deque's, the loop's, the call's. A view would be one more.
            if len(memory) == size and sys.getrefcount(memory) == 3:
                self._kept.remove(memory)
                break
        else:
            memory = ordinary(size)
            self._kept_bytes += size
        self._kept.append(memory)
        while self._kept_bytes > self.KEEP_BYTES:
            self._kept_bytes -= len(self._kept.popleft())
        return memoryview(memory)[:nbytes]

    def give_back(self) -> None:
        """Free everything: it was not needed for a while."""
        with self._lock:
            self._kept.clear()
            self._kept_bytes = 0
