"""Shared memory segments in which reader processes hand over what they have read.

Arrays and tensors of a value, however deep inside it, are laid into a memfd
(so the size of /dev/shm is no limit); the rest of the value is pickled beside
them, between processes of one user. The receiver's arrays lie in that memory
and nothing is copied again. When the last of them is gone the segment is
reused: pages that exist already are ten times faster to write than new ones.
"""

from __future__ import annotations

import io
import mmap
import os
import weakref
from collections import deque
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.errors import DataError
from shoal.runtime.transport import memfd

_ALIGNED_TO = 64
_INLINE_BYTES = 512
"""Arrays smaller than this are not worth a place of their own."""

_KEPT_SEGMENTS = 4
"""Of one process, free and waiting to be used again."""

_MAX_USED_SEGMENTS = 16
"""Of one process, by values that a consumer keeps; beyond, they are copied out. Each costs a descriptor here."""


class Parcel(NamedTuple):
    """Where a value lies."""

    segment: int
    num_bytes: int
    """Of the whole segment."""

    begin: int
    """Of the list of what lies where in it."""

    end: int
    dropped: tuple[int, ...]
    """Segments that the sender will not use again."""


class Sender:
    """Lays values into segments. One process's end; the other end is a Receiver."""

    def __init__(self) -> None:
        self._segments: dict[int, mmap.mmap] = {}
        self._free: set[int] = set()
        self._dropped: list[int] = []
        self._next_segment = 0

    def send(self, value: Any) -> tuple[Parcel, int | None]:
        """Lay it down. With a segment that the receiver has not seen comes its descriptor, the caller's to close."""
        packed, buffers = _pack(value)
        at, spans = 0, []
        for buffer in buffers:
            spans.append((at, at + buffer.nbytes))
            at = _aligned(at + buffer.nbytes)
        contents = bytes(ForkingPickler.dumps((spans, packed)))
        number, fd = self._room_for(at + len(contents))
        memory = self._segments[number]
        whole: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
        for (begin, end), buffer in zip(spans, buffers, strict=True):
            whole[begin:end] = np.frombuffer(buffer, np.uint8)
        memory[at : at + len(contents)] = contents
        dropped, self._dropped = tuple(self._dropped), []
        return Parcel(number, len(memory), at, at + len(contents), dropped), fd

    def released(self, numbers: list[int]) -> None:
        """The receiver is through with these segments."""
        self._free.update(numbers)
        while len(self._free) > _KEPT_SEGMENTS:
            self._drop(min(self._free, key=self._size))

    def _room_for(self, num_bytes: int) -> tuple[int, int | None]:
        large_enough = [number for number in self._free if self._size(number) >= num_bytes]
        if large_enough:
            number = min(large_enough, key=self._size)
            self._free.remove(number)
            return number, None
        if self._free:  # values have grown: what was large enough yesterday would wait here for ever
            self._drop(min(self._free, key=self._size))
        # A little more than asked for: the next value is rarely of exactly this size.
        size = -(-(num_bytes + num_bytes // 8) // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = memfd.create(size, "shoal-samples")
        try:
            memory = memfd.map_shared(fd, size)
        except BaseException:
            os.close(fd)
            raise
        number, self._next_segment = self._next_segment, self._next_segment + 1
        self._segments[number] = memory
        return number, fd

    def _drop(self, number: int) -> None:
        self._free.remove(number)
        self._segments.pop(number).close()
        self._dropped.append(number)

    def _size(self, number: int) -> int:
        return len(self._segments[number])


class Receiver:
    """Opens what a Sender laid down, and knows what of it nobody uses any more."""

    def __init__(self) -> None:
        self._segments: dict[int, mmap.mmap] = {}
        self._num_used = 0
        # Consumers let go of values in any thread, and at any moment: this is all that happens then.
        self._let_go: deque[int] = deque()

    def receive(self, parcel: Parcel, fd: int | None) -> Any:
        """The value; `fd` stays the caller's to close. What is in it is the consumer's, to change as well."""
        for number in parcel.dropped:
            del self._segments[number]
        if fd is not None:
            self._segments[parcel.segment] = memfd.map_shared(fd, parcel.num_bytes)
        # All arrays of the value lie in this one and keep it alive.
        whole: NDArray[np.uint8] = np.frombuffer(self._segments[parcel.segment], np.uint8)
        weakref.finalize(whole, self._let_go.append, parcel.segment).atexit = False
        self._num_used += 1
        view = memoryview(whole)  # type: ignore[arg-type]  # an array is a buffer
        spans, packed = ForkingPickler.loads(view[parcel.begin : parcel.end])
        buffers: list[Any] = [view[begin:end] for begin, end in spans]
        if self._num_used - len(self._let_go) > _MAX_USED_SEGMENTS:
            buffers = [bytearray(buffer) for buffer in buffers]
        return ForkingPickler.loads(packed, buffers=buffers)

    def releases(self) -> list[int]:
        """Segments that the sender may use again; each is told once."""
        released = [self._let_go.popleft() for _ in range(len(self._let_go))]
        self._num_used -= len(released)
        return released


class _Packer(ForkingPickler):
    """Puts arrays beside what it writes; tensors are arrays of another name."""

    # torch would send its tensors through files in /dev/shm and a thread in the process that made them.
    _extra_reducers: dict[type, Any] = {}  # noqa: RUF012  # the base class's own name for it

    def reducer_override(self, value: Any) -> Any:
        """How a plain tensor is written; everything else in the usual way."""
        if type(value) is not torch.Tensor or value.layout is not torch.strided:
            return NotImplemented
        if value.device.type != "cpu":
            raise DataError(
                f"a reader process was to hand over a tensor on the device {value.device}, which belongs to the process "
                "that made it. Nothing of that batch was used; leave samples on the CPU in map(fn, workers=...): batches "
                "are put on the device for you."
            )
        plain = value.detach().resolve_conj().resolve_neg().contiguous()
        try:
            return _tensor, (plain.numpy(), None)
        except TypeError:  # bfloat16 and other kinds that numpy has not
            return _tensor, (plain.view(_OF_SIZE[plain.itemsize]).numpy(), plain.dtype)


_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _tensor(array: NDArray[Any], kind: torch.dtype | None) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor if kind is None else tensor.view(kind)


def _pack(value: Any) -> tuple[bytes, list[memoryview]]:
    """The value without its arrays, and those."""
    buffers: list[memoryview] = []

    def keep(buffer: Any) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _INLINE_BYTES:
            return True
        buffers.append(raw)
        return False

    written = io.BytesIO()
    _Packer(written, 5, True, keep).dump(value)
    return written.getvalue(), buffers


def _aligned(at: int) -> int:
    return -(-at // _ALIGNED_TO) * _ALIGNED_TO
