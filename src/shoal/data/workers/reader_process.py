"""A reader process: takes tasks from its line, does them in order, lays the results into shared memory.

Runs in a child of the pool's fork server. Knows nothing of the other readers;
that a result is lost when this process dies is its owner's to mend.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import socket
import struct
import traceback
from array import array
from collections import deque
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

from shoal.data import randomness
from shoal.data.workers.segments import Parcel, Sender
from shoal.errors import DataError
from shoal.runtime import events
from shoal.runtime.forkserver.messages import receive_packet, send_packet
from shoal.runtime.forkserver.server import flush
from shoal.runtime.user_frames import Elsewhere, hide_ours

INLINE_BYTES = 16 << 10
"""A task that is longer goes in a file of its own: what is sent must never wait for a process that is busy."""

ASKS_FOR_STACK = signal.SIGUSR2
"""Tells a process to write its stack behind the task number in its notes."""

AT = struct.Struct("<q")
"""The number of the task that a process is at; -1 between two."""

_DELIVERY = struct.Struct("=5q")
_PACKET_BYTES = INLINE_BYTES + 4096


class ReadTask(NamedTuple):
    """Owner to reader: do this, unless it is called off."""

    number: int
    task: Any
    """None: it is in the file beside this packet."""

    valid_from: int
    """What has a lower number is called off."""

    released: list[int]
    """Segments that may be used again."""


class Delivery(NamedTuple):
    """Reader to owner: it is done, and an Outcome lies there. With a segment that is new comes its descriptor."""

    number: int
    parcel: Parcel

    def packed(self) -> bytes:
        """As a packet."""
        segment, num_bytes, begin, end, dropped = self.parcel
        return _DELIVERY.pack(self.number, segment, num_bytes, begin, end) + array("q", dropped).tobytes()

    @classmethod
    def unpacked(cls, packet: bytes) -> Delivery:
        """Out of a packet."""
        number, segment, num_bytes, begin, end = _DELIVERY.unpack_from(packet)
        dropped = array("q", packet[_DELIVERY.size :])
        return cls(number, Parcel(segment, num_bytes, begin, end, tuple(dropped)))


class ReadOutcome(NamedTuple):
    """What came of a task."""

    value: Any
    error: BaseException | None = None
    traceback: str = ""
    """Of the error, in the reader: no exception can take it along."""

    told: tuple[tuple[str, dict[str, Any]], ...] = ()
    """What happened meanwhile that is worth writing down."""

    def get(self) -> Any:
        """The value, or the error raised."""
        for kind, facts in self.told:
            events.emit(kind, **facts)
        if self.error is None:
            return self.value
        cause = Elsewhere(self.traceback) if self.traceback else None
        try:
            if isinstance(self.error, StopIteration):  # would pass for the end of the data
                raise RuntimeError("reading raised StopIteration") from cause
            raise self.error from cause
        finally:
            del self, cause  # else the error would keep every frame it passed, and those keep it


def task_packet(order: ReadTask) -> tuple[bytes, int | None]:
    """What to send, and a file beside it, the caller's to close."""
    data = bytes(ForkingPickler.dumps(order))
    if len(data) <= INLINE_BYTES:
        return data, None
    fd = os.memfd_create("shoal-task", os.MFD_CLOEXEC)
    with open(os.dup(fd), "wb") as file:
        file.write(ForkingPickler.dumps(order.task))
    return bytes(ForkingPickler.dumps(order._replace(task=None))), fd


def serve(work: Callable[[Any], Any], line: socket.socket, notes: int) -> None:
    """Do what comes along the line until it ends."""
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
    """What this process has been told, and has not done yet."""

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
    send_packet(line, Delivery(number, parcel).packed(), [] if fd is None else [fd])
    if fd is not None:
        os.close(fd)


def _failed(error: BaseException) -> ReadOutcome:
    if "CUDA in forked subprocess" in str(
        error
    ):  # what torch says then does not fit: nobody asked for a fork
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
