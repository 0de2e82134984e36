"""A reader process: takes tasks from its socket, runs them in order, writes the results to shared memory.

Runs in a child of the pool's fork server. Independent of the other readers; its owner retries
results lost with this process. Arrays and tensors of a result, at any depth, are written to a file
in RAM (so the size of /dev/shm is no limit); the rest is pickled beside them, between processes of
one user. The receiver's arrays are views of that memory: nothing is copied again. When the last of
them is gone the segment is reused: existing pages are ten times faster to write than new ones.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import mmap
import os
import select
import signal
import socket
import struct
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from shoal import system
from shoal.data import randomness
from shoal.errors import DataError
from shoal.runtime import events
from shoal.runtime.forkserver.messages import receive_packet, send_packet
from shoal.runtime.forkserver.server import flush
from shoal.runtime.transport import memfd
from shoal.runtime.user_frames import Elsewhere, hide_ours

_ALIGNED_TO = 64
_INLINE_BYTES = 512
"""Arrays smaller than this are not worth a place of their own."""

_KEPT_SEGMENTS = 4
"""Segments of one process that are free and kept for its next batch."""

_MAX_USED_SEGMENTS = 16
"""Segments of one process held by a consumer's values; beyond, values are copied out. Each costs a descriptor here."""


class Parcel(NamedTuple):
    """Location of a value in shared memory."""

    segment: int
    num_bytes: int
    """Bytes of the whole segment."""

    begin: int
    """Begin of the list of what lies where in it."""

    end: int
    dropped: tuple[int, ...]
    """Segments that the sender will not use again."""


class Sender:
    """Writes values into segments. One process's end; the other end is a Receiver."""

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
        self._free.update(numbers)
        while len(self._free) > _KEPT_SEGMENTS:
            self._drop(min(self._free, key=self._size))

    def _room_for(self, num_bytes: int) -> tuple[int, int | None]:
        large_enough = [number for number in self._free if self._size(number) >= num_bytes]
        if large_enough:
            number = min(large_enough, key=self._size)
            self._free.remove(number)
            return number, None
        if self._free:  # values have grown: a segment that was large enough before would never be used again
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
    """Opens the buffers that a Sender wrote, and tracks which of them are no longer used."""

    def __init__(self) -> None:
        self._segments: dict[int, mmap.mmap] = {}
        self._num_used = 0
        # Consumers release values in any thread and at any moment: only this happens then.
        self._released: deque[int] = deque()

    def receive(self, parcel: Parcel, fd: int | None) -> Any:
        """The value; `fd` stays the caller's to close. What is in it is the consumer's, to change as well."""
        for number in parcel.dropped:
            del self._segments[number]
        if fd is not None:
            self._segments[parcel.segment] = memfd.map_shared(fd, parcel.num_bytes)
        # All arrays of the value are in this one and keep it alive.
        whole: NDArray[np.uint8] = np.frombuffer(self._segments[parcel.segment], np.uint8)
        weakref.finalize(whole, self._released.append, parcel.segment).atexit = False
        self._num_used += 1
        view = memoryview(whole)  # type: ignore[arg-type]  # an array is a buffer
        spans, packed = ForkingPickler.loads(view[parcel.begin : parcel.end])
        buffers: list[Any] = [view[begin:end] for begin, end in spans]
        if self._num_used - len(self._released) > _MAX_USED_SEGMENTS:
            buffers = [bytearray(buffer) for buffer in buffers]
        return ForkingPickler.loads(packed, buffers=buffers)

    def releases(self) -> list[int]:
        """Segments that the sender may reuse; each is returned once."""
        released = [self._released.popleft() for _ in range(len(self._released))]
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


INLINE_BYTES = 16 << 10
"""A longer task goes in a file of its own: sending must never wait for a busy process."""

ASKS_FOR_STACK = signal.SIGUSR2
"""Tells a process to write its stack behind the task number in its notes."""

AT = struct.Struct("<q")
"""The number of the task that a process is at; -1 between two."""

_PACKET_BYTES = INLINE_BYTES + 4096


class ReadTask(NamedTuple):
    """Owner to reader: do this, unless it is called off."""

    number: int
    task: Any
    """None: it is in the file beside this packet."""

    valid_from: int
    """Tasks with lower numbers are cancelled."""

    released: list[int]
    """Segments that may be used again."""


class Delivery(NamedTuple):
    """Reader to owner: it is done, and an Outcome lies there. With a segment that is new comes its descriptor."""

    number: int
    parcel: Parcel


class ReadOutcome(NamedTuple):
    """Result or error of a task."""

    value: Any
    error: BaseException | None = None
    traceback: str = ""
    """Traceback of the error in the reader: no exception can take it along."""

    told: tuple[tuple[str, dict[str, Any]], ...] = ()
    """Events since the last answer, for the record."""

    def get(self) -> Any:
        for kind, facts in self.told:
            events.emit(kind, **facts)
        if self.error is None:
            return self.value
        cause = Elsewhere(self.traceback) if self.traceback else None
        try:
            if isinstance(self.error, StopIteration):  # would be taken for the end of the data
                raise RuntimeError("reading raised StopIteration") from cause
            raise self.error from cause
        finally:
            del self, cause  # else the error would keep every frame it passed, and those keep it


def task_packet(order: ReadTask) -> tuple[bytes, int | None]:
    """Message of a task, and a file beside it, the caller's to close."""
    data = bytes(ForkingPickler.dumps(order))
    if len(data) <= INLINE_BYTES:
        return data, None
    fd = system.anonymous_file("shoal-task")
    with open(os.dup(fd), "wb") as file:
        file.write(ForkingPickler.dumps(order.task))
    return bytes(ForkingPickler.dumps(order._replace(task=None))), fd


def serve(work: Callable[[Any], Any], line: socket.socket, notes: int) -> None:
    faulthandler.register(ASKS_FOR_STACK, file=notes, all_threads=False, chain=False)
    randomness.own_the_generators()
    told: list[tuple[str, dict[str, Any]]] = []
    events.set_sink(lambda kind, facts: told.append((kind, facts)))
    inbox = _Inbox(line)
    with contextlib.suppress(EOFError, ConnectionError):  # its owner has closed the line
        while True:
            order = inbox.next()
            told.clear()
            os.pwrite(notes, AT.pack(order.number), 0)
            outcome = _do(work, order.task)
            _deliver(line, inbox.sender, order.number, outcome._replace(told=tuple(told)))
            os.pwrite(notes, AT.pack(-1), 0)
            del order, outcome
            flush()


class _Inbox:
    """Orders received by this process and not done yet."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._waiting: deque[ReadTask] = deque()
        self._watch = select.poll()  # not select: that knows descriptors below 1024 only
        self._watch.register(line, select.POLLIN)
        self._valid_from = 0
        self.sender = Sender()

    def next(self) -> ReadTask:
        """The next order that is not called off; EOFError when there will be none."""
        while True:
            while not self._waiting or self._watch.poll(0):
                self._take()
            order = self._waiting.popleft()
            if order.number >= self._valid_from:
                return order

    def _take(self) -> None:
        data, fds = receive_packet(self._line, max_bytes=_PACKET_BYTES, max_fds=1)
        order = ForkingPickler.loads(data)
        for fd in fds:
            with open(fd, "rb") as file:
                file.seek(0)
                order = order._replace(task=ForkingPickler.loads(file.read()))
        self._valid_from = order.valid_from
        self.sender.released(order.released)
        self._waiting.append(order)


def _do(work: Callable[[Any], Any], task: Any) -> ReadOutcome:
    try:
        return ReadOutcome(work(task))
    except BaseException as error:
        return _failed(error)


def _deliver(line: socket.socket, sender: Sender, number: int, outcome: ReadOutcome) -> None:
    try:
        parcel, fd = sender.send(outcome)
    except Exception as error:
        cause = DataError(
            f"what was read cannot be handed from the process that read it to the one that trains: {error} "
            f"({type(error).__name__}). Nothing of that batch was used; let samples be numbers, arrays, tensors, strings, "
            "and dicts and tuples of them, or take workers= out of map."
        )
        failed = _failed(error if isinstance(error, DataError) else cause)
        parcel, fd = sender.send(failed._replace(told=outcome.told))
    send_packet(line, bytes(ForkingPickler.dumps(Delivery(number, parcel))), [] if fd is None else [fd])
    if fd is not None:
        os.close(fd)


def _failed(error: BaseException) -> ReadOutcome:
    # torch's own hint does not apply: the user did not ask for a fork.
    if "CUDA in forked subprocess" in str(error):
        error.add_note(
            "raised in a process of map(fn, workers=...), which has no GPU: keep samples on the CPU there. fit, evaluate and "
            "predict put batches on the GPU; functions that need it belong behind batch: data.batch(n).map(fn)."
        )
    hide_ours(error)
    text = "".join(traceback.format_exception(error))
    try:
        ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception:
        error = DataError(
            f"reading failed with {type(error).__name__}: {error}. That error cannot leave the process that read; its "
            "traceback is above. Nothing of that batch was used."
        )
    return ReadOutcome(None, error, text)
