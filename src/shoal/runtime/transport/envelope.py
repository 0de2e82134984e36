"""An envelope: a message on a Unix socket whose frames lie in memory that both ends have mapped.

Its first frame is a table that says which ticket it is, which segments come
with it (their descriptors travel beside its first byte), where each frame
lies, and where the answer's frames shall go:

    head      ticket, number of new segments, of frames, of buffers for the answer
    new       segment, bytes                     for each new segment
    frames    segment, offset, bytes             segment 0: it follows in the socket
    into      segment, offset, bytes

Decides the format and that it is well-formed, and gathers the bytes of a
stream into envelopes. Whether a segment exists, and what a place in it is,
is for `shared_server.py`; sending is for both sides.
"""

from __future__ import annotations

import mmap
import socket
import struct
from array import array
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from shoal.errors import WireError
from shoal.runtime.transport import framing, memfd
from shoal.runtime.transport.framing import Bytes, FrameLimits, Received
from shoal.runtime.transport.messages.message import Message

MAX_FRAMES = 4096
"""Of one message, and as many buffers for its answer."""

MAX_NEW_SEGMENTS = 64
"""With one message."""

REQUEST_BYTES = 64 << 20
"""Largest sum of frames of a request that travel in the socket."""

REPLY_BYTES = 1 << 30
"""The same for an answer: a slot of a table as a whole, whose size the asker cannot know."""

Place: TypeAlias = tuple[int, int, int]
"""Segment (0: in the socket), offset, bytes."""

_HEAD = struct.Struct("<QHHHxx")
_TABLE_BYTES = _HEAD.size + 16 * MAX_NEW_SEGMENTS + 24 * 2 * MAX_FRAMES
_BUFFER_BYTES = 64 << 10
_BIG_BYTES = 32 << 10
_CUT, _CLOEXEC = int(socket.MSG_CTRUNC), int(socket.MSG_CMSG_CLOEXEC)  # as enums they cost microseconds

REQUESTS = FrameLimits(num_frames=1 + MAX_FRAMES, frames_bytes=REQUEST_BYTES + _TABLE_BYTES)
REPLIES = FrameLimits(num_frames=1 + MAX_FRAMES, frames_bytes=REPLY_BYTES + _TABLE_BYTES)


class Envelope(NamedTuple):
    """The fixed part of a message, as the table says."""

    ticket: int
    new: list[tuple[int, int]]  # segment, bytes
    frames: list[Place]
    into: list[Place]


def seal(
    envelope: Envelope, message: Message, inline: Sequence[Bytes], *, limits: FrameLimits = REQUESTS
) -> list[Bytes]:
    """The parts to send, in order. `inline` are the frames of segment 0."""
    ticket, new, frames, into = envelope
    table = _HEAD.pack(ticket, len(new), len(frames), len(into))
    if new or frames or into:
        numbers = [number for row in (*new, *frames, *into) for number in row]
        table += struct.pack(f"<{len(numbers)}Q", *numbers)
    return framing.encode(message, [table, *inline], limits=limits)


def open_table(received: Received) -> tuple[Envelope, list[Bytes]]:
    """The table of an envelope and its frames from the socket; WireError where the two do not fit."""
    parts = received[1]
    if not parts:
        raise WireError("an envelope without a table")
    table, inline = parts[0], parts[1:]
    if len(table) < _HEAD.size:
        raise WireError(f"a table of {len(table)} bytes")
    ticket, num_new, num_frames, num_into = _HEAD.unpack_from(table)
    if num_new > MAX_NEW_SEGMENTS or num_frames > MAX_FRAMES or num_into > MAX_FRAMES:
        raise WireError(
            f"{num_new} segments, {num_frames} frames and {num_into} buffers, where at most {MAX_NEW_SEGMENTS}, "
            f"{MAX_FRAMES} and {MAX_FRAMES} are allowed"
        )
    if len(table) != _HEAD.size + 16 * num_new + 24 * (num_frames + num_into):
        raise WireError(f"a table of {len(table)} bytes, which is not what its own head says")
    numbers = struct.unpack_from(f"<{2 * num_new + 3 * (num_frames + num_into)}Q", table, _HEAD.size)
    if not numbers and not inline:
        return Envelope(ticket, [], [], []), inline
    first = 2 * num_new
    new = [numbers[at : at + 2] for at in range(0, first, 2)]
    places = [numbers[at : at + 3] for at in range(first, len(numbers), 3)]
    frames, into = places[:num_frames], places[num_frames:]
    lengths = [nbytes for segment, _, nbytes in frames if segment == 0]
    if lengths != [len(frame) for frame in inline]:
        raise WireError("frames in the socket that are not those which the table announces")
    for segment, _, _ in into:
        if segment == 0:
            raise WireError("a buffer for the answer that lies nowhere")
    return Envelope(ticket, new, frames, into), inline


def as_bytes(frame: Bytes) -> Bytes:
    """The same bytes, one by one: an array of larger items counts its items."""
    if isinstance(frame, bytes | bytearray):
        return frame
    return frame.cast("B") if frame.nbytes else b""


class Intake:
    """The bytes of one connection as they come, gathered into whole messages; and the descriptors beside them.

    What is large is received in place, into memory that is backed as it
    fills: a length that was only announced costs nothing.
    """

    def __init__(self, limits: FrameLimits, *, max_fds: int = 0) -> None:
        self.fds: deque[int] = deque()
        self._limits, self._max_fds = limits, max_fds
        self._room = socket.CMSG_SPACE(min(max_fds, memfd.MAX_FDS) * array("i").itemsize) if max_fds else 0
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0  # what of the buffer is not used yet
        self._big: memoryview | None = None  # the part that is being received in place
        self._num_filled = 0
        self._parser = framing.parse(limits)
        self._wanted = next(self._parser)
        self._is_between = True

    @property
    def is_between_messages(self) -> bool:
        """Would an end of the stream be a proper one?"""
        return self._is_between and self._start == self._end and self._big is None

    def receive(self, sock: socket.socket) -> list[Received]:
        """The messages that one look at the socket completes; EOFError at its end, BlockingIOError where it is empty."""
        into = self._big[self._num_filled :] if self._big is not None else self._view[self._end :]
        if self._room:
            count, ancillary, flags, _ = sock.recvmsg_into([into], self._room, _CLOEXEC)
            if ancillary or flags & _CUT:
                self._take_fds(ancillary, is_cut=bool(flags & _CUT))
        else:
            count = sock.recv_into(into)
        if not count:
            raise EOFError("the connection was closed")
        if self._big is not None:
            self._num_filled += count
            if self._num_filled < len(self._big):
                return []
            part, self._big = self._big, None
            return [*self._feed(part), *self._parse_buffer()]
        self._end += count
        return self._parse_buffer()

    def close(self) -> None:
        """Close the descriptors that nobody took."""
        memfd.close(self.fds)
        self.fds.clear()

    def _parse_buffer(self) -> list[Received]:
        received: list[Received] = []
        while self._end - self._start >= self._wanted:
            if self._is_between:
                taken = framing.take(self._buffer, self._start, self._end, self._limits)
                if taken is not None:
                    received.append(taken[0])
                    self._start = taken[1]
                    continue
            end = self._start + self._wanted
            part = self._buffer[self._start : end]
            self._start = end
            received += self._feed(part)
        rest = self._end - self._start
        if self._wanted > _BIG_BYTES:
            # Mapped, not allocated: pages come to be as bytes arrive. It holds `rest` bytes already.
            self._big = memoryview(mmap.mmap(-1, self._wanted))
            self._big[:rest] = self._view[self._start : self._end]
            self._num_filled, self._start, self._end = rest, 0, 0
        elif self._start and (not rest or self._start + self._wanted > len(self._buffer)):
            self._buffer[:rest] = self._buffer[self._start : self._end]
            self._start, self._end = 0, rest
        return received

    def _feed(self, part: Bytes) -> list[Received]:
        self._is_between = False
        try:
            self._wanted = self._parser.send(part)
        except StopIteration as done:
            self._parser = framing.parse(self._limits)
            self._wanted, self._is_between = next(self._parser), True
            return [done.value]
        return []

    def _take_fds(self, ancillary: list[tuple[int, int, bytes]], *, is_cut: bool) -> None:
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                self.fds.extend(fds)
        if is_cut or len(self.fds) > self._max_fds:
            raise WireError(f"more descriptors than the {self._max_fds} that are allowed")


class Outbox:
    """Send queue of a non-blocking socket; in order, descriptors with the first byte of theirs."""

    def __init__(self) -> None:
        self._parts: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self.num_bytes = 0
        """Not sent yet."""

    def send(self, sock: socket.socket, parts: Sequence[Bytes], fds: Sequence[int] = ()) -> None:
        """Send, or keep a copy of what the socket does not take: the caller's bytes are free either way.

        Copies of `fds` are kept too, until they are sent. Parts are of bytes, not of larger items.
        """
        views = parts
        if not self._parts:
            num_sent, fds = self._try(sock, parts, fds)
            if num_sent == sum(map(len, parts)):
                return
            views = [memoryview(part) for part in parts if len(part)]
            while num_sent and num_sent >= len(views[0]):
                num_sent -= len(views.pop(0))
            views[0] = views[0][num_sent:]
        for view in views:
            if not len(view):
                continue
            self._parts.append((memoryview(bytes(view)), tuple(memfd.duplicate(fds))))
            self.num_bytes += len(view)
            fds = ()

    def flush(self, sock: socket.socket) -> None:
        """Send what the socket takes now."""
        while self._parts:
            view, fds = self._parts[0]
            num_sent, left = self._try(sock, [view], fds)
            if not num_sent:
                return
            memfd.close(() if left else fds)
            self.num_bytes -= num_sent
            if num_sent == len(view):
                self._parts.popleft()
            else:
                self._parts[0] = (view[num_sent:], ())

    def clear(self) -> None:
        """Forget what was not sent."""
        for _, fds in self._parts:
            memfd.close(fds)
        self._parts.clear()
        self.num_bytes = 0

    def _try(
        self, sock: socket.socket, views: Sequence[Bytes], fds: Sequence[int]
    ) -> tuple[int, Sequence[int]]:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        try:
            num_sent = sock.sendmsg(views[:1024], rights)
        except BlockingIOError:
            return 0, fds
        return num_sent, ()
