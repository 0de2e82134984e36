"""An envelope: a message whose frames are in memory mapped by both ends, or follow in the socket.

Its first frame is a table with its ticket, the new segments (their descriptors are sent with its
first byte), the place of each frame, and the places for the answer's frames:

    head      ticket, number of new segments, of frames, of buffers for the answer
    new       segment, bytes                     for each new segment
    frames    segment, offset, bytes             segment 0: it follows in the socket
    into      segment, offset, bytes

Between hosts there is no shared memory: every segment is 0, `into` of a request gives the wanted
bytes, and in an answer `into` are frames that follow the others in the socket. The offset of a
striped frame is the number of connections that carry its blocks (`stripes.py`).

This module defines the format, validates it, and collects the bytes of a stream into envelopes.
`shared_server.py` checks segments and places; both sides send.
"""

from __future__ import annotations

import itertools
import mmap
import socket
import struct
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from shoal import system
from shoal.errors import WireError
from shoal.runtime.transport import framing, memfd
from shoal.runtime.transport.framing import Bytes, FrameLimits, Received
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.stripes import STRIPE_BYTES, Stripes, wake_after
from shoal.runtime.transport.tls import TlsStream

MAX_FRAMES = 4096
"""Frames of one message, and buffers for its answer, at most."""

MAX_NEW_SEGMENTS = 64
"""New segments that one message may bring."""

REQUEST_BYTES = 64 << 20
"""Largest sum of frames of a request that travel in the socket."""

BULK_BYTES = 256 << 10
"""A larger message between hosts moves in a thread of its own, and lets others pass."""

REPLY_BYTES = 1 << 30
"""The same for an answer: a slot of a table as a whole, whose size the asker cannot know."""

Place: TypeAlias = tuple[int, int, int]
"""Segment (0: in the socket), offset, bytes."""

DROP = memoryview(b"")
"""Stands for the memory of a frame that is not wanted; it becomes empty."""

_HEAD = struct.Struct("<QHHHxx")
_TABLE_BYTES = _HEAD.size + 16 * MAX_NEW_SEGMENTS + 24 * 2 * MAX_FRAMES
_BUFFER_BYTES = 64 << 10
_NUM_OFFERED = 1024  # parts of one write (IOV_MAX)
_BIG_BYTES = 32 << 10
_SEND_BYTES = _DECRYPT_BYTES = 1 << 20  # per read: one connection must not starve the others
# More than a socket holds: bytes that arrive during the copy are read too, without a wake-up.
_RECEIVE_BYTES = 8 << 20
_CUT, _CLOEXEC = int(socket.MSG_CTRUNC), system.CMSG_CLOEXEC  # as enums they cost microseconds

REQUESTS = FrameLimits(num_frames=1 + MAX_FRAMES, frames_bytes=REQUEST_BYTES + _TABLE_BYTES)
REPLIES = FrameLimits(num_frames=1 + 2 * MAX_FRAMES, frames_bytes=REPLY_BYTES + _TABLE_BYTES)
REMOTE_REQUESTS = FrameLimits(num_frames=1 + MAX_FRAMES, frames_bytes=REPLY_BYTES + _TABLE_BYTES)
"""Limits of another host's requests, whose frames all come in the socket. A server asks for memory before it takes a large one."""


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


def open_table(
    received: Received, *, is_remote: bool = False, is_answer: bool = False, is_cut: bool = False
) -> tuple[Envelope, list[Bytes]]:
    """The table of an envelope and its frames from the socket; WireError where the two do not fit.

    `is_cut`: frames were dropped for want of memory.
    """
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
    coming = places if is_answer else frames
    lengths = [nbytes for segment, _, nbytes in coming if segment == 0]
    if not is_cut and lengths != [len(frame) for frame in inline]:
        raise WireError("frames in the socket that are not those which the table announces")
    if is_remote and (new or any(segment for segment, _, _ in places)):
        raise WireError("shared memory of another host")
    if not is_remote and any(segment == 0 for segment, _, _ in into):
        raise WireError("a buffer for the answer that lies nowhere")
    return Envelope(ticket, new, frames, into), inline


def answer_frame(frames: Sequence[Bytes]) -> tuple[int, int]:
    """Ticket of an answer of which these frames are here, and for which of its buffers the next one is; < 0: none."""
    if len(frames[0]) < _HEAD.size:
        return 0, -1
    ticket, _, num_frames, _ = _HEAD.unpack_from(frames[0])
    return ticket, len(frames) - 1 - num_frames


def num_connections(frames: Sequence[Bytes]) -> int:
    """Over how many connections the next frame of a remote message comes; 0: all of it over the first."""
    table = frames[0]
    if len(table) < _HEAD.size:
        return 0
    at = _HEAD.size + 16 * _HEAD.unpack_from(table)[1] + 24 * (len(frames) - 1) + 8
    return int(struct.unpack_from("<Q", table, at)[0]) if at + 16 <= len(table) else 0


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

    def __init__(
        self,
        limits: FrameLimits,
        *,
        max_fds: int = 0,
        place: Callable[[Sequence[Bytes], int], memoryview | None] | None = None,
    ) -> None:
        """`place(frames before it, bytes)`: memory for a large frame; None: new memory; `DROP`: it is left out."""
        self.fds: deque[int] = deque()
        self.stripes: Stripes | None = None
        """Further connections of a peer on another host."""
        self._limits, self._max_fds, self._place = limits, max_fds, place
        self._room = socket.CMSG_SPACE(min(max_fds, memfd.MAX_FDS) * array("i").itemsize) if max_fds else 0
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0  # what of the buffer is not used yet
        self._big: memoryview | None = None  # the part that is being received in place
        self._num_filled = 0
        self._num_dropped = 0  # bytes still to come of a part that is left out
        self._num_connections = 0  # of the wanted part
        self._whole: Bytes = b""  # the part of which other connections carry blocks
        self._striped_bytes = 0  # of those blocks, until all are here
        self._wake_bytes = 1
        self._announce = self._find_place if place is not None else None
        self._parser = framing.parse(limits, self._announce)
        self._wanted = next(self._parser)
        self._target: memoryview | None = None  # of the wanted part
        self._is_between = True

    @property
    def num_missing_bytes(self) -> int:
        """Still to come of the large part that is being received."""
        return self._own_missing_bytes + self._striped_bytes

    @property
    def _own_missing_bytes(self) -> int:
        return self._num_dropped + (len(self._big) - self._num_filled if self._big is not None else 0)

    @property
    def awaits_stripes(self) -> bool:
        """Whether everything missing comes over the other connections; then `stripes` signals its arrival."""
        return self._striped_bytes > 0 and not self._own_missing_bytes

    def wake_for(self, sock: socket.socket, *, is_bulk: bool) -> None:
        """Set the wake-up threshold of the next poll: much of a large part, or any byte. No poll may use an old setting."""
        missing = self._own_missing_bytes if is_bulk else 0
        self._wake_bytes = wake_after(sock, missing, self._wake_bytes)

    @property
    def is_between_messages(self) -> bool:
        """Would an end of the stream be a proper one?"""
        return self._is_between and self._start == self._end

    def receive(self, sock: socket.socket) -> list[Received]:
        """Messages completed by one read of the socket; EOFError at its end, BlockingIOError if it is empty."""
        if self.stripes is not None and self.stripes.error is not None:
            raise self.stripes.error
        if self.awaits_stripes:
            received = self._end_big(b"")
            if self.awaits_stripes:
                raise BlockingIOError
        else:
            received = self._receive(sock, _DECRYPT_BYTES if isinstance(sock, TlsStream) else _RECEIVE_BYTES)
        if isinstance(sock, TlsStream):
            # The selector does not report bytes that TLS has already decrypted.
            while not self.awaits_stripes and (pending := sock.pending()):
                received += self._receive(sock, pending)
        return received

    def _receive(self, sock: socket.socket, at_most: int) -> list[Received]:
        if self._big is not None:
            into = self._big[self._num_filled : self._num_filled + at_most]
        elif self._num_dropped:
            into = self._view[: min(at_most, self._num_dropped)]
        else:
            into = self._view[self._end : self._end + at_most]
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
            return self._end_big(part)
        if self._num_dropped:
            self._num_dropped -= count
            return [] if self._num_dropped else self._end_big(b"")
        self._end += count
        return self._parse_buffer()

    def close(self) -> None:
        """Close descriptors that were not taken."""
        memfd.close(self.fds)
        self.fds.clear()

    def _parse_buffer(self) -> list[Received]:
        received: list[Received] = []
        while self._end - self._start >= self._wanted and self._target is None:
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
        if self._target is not None or self._wanted > _BIG_BYTES:
            return received + self._begin_big(rest)
        if self._start and (not rest or self._start + self._wanted > len(self._buffer)):
            self._buffer[:rest] = self._buffer[self._start : self._end]
            self._start, self._end = 0, rest
        return received

    def _begin_big(self, rest: int) -> list[Received]:
        """The wanted part is received in place from here on; `rest` bytes are here, and may be all of it and more."""
        target, self._target = self._target, None
        num_connections, self._num_connections = self._num_connections, 0
        # Mapped, not allocated: pages are backed as bytes arrive.
        whole = memoryview(mmap.mmap(-1, self._wanted)) if target is None else target
        own_bytes = self._wanted
        if num_connections:
            assert self.stripes is not None
            own_bytes = self.stripes.expect(whole if target is not DROP else None, self._wanted)
            self._whole, self._striped_bytes = whole, self._wanted - own_bytes
        here = min(rest, own_bytes)
        if target is DROP:
            self._num_dropped = own_bytes - here
        else:
            self._big = whole[:own_bytes] if num_connections else whole
            self._big[:here] = self._view[self._start : self._start + here]
            self._num_filled = here
        self._start += here
        if here == own_bytes:
            self._big = None
            return self._end_big(whole)
        self._start = self._end = 0
        return []

    def _end_big(self, part: Bytes) -> list[Received]:
        """Go on with the wanted part, once its blocks of other connections are here too."""
        if self._striped_bytes:
            assert self.stripes is not None
            if not self.stripes.is_complete():
                return []
            part, self._whole, self._striped_bytes = self._whole, b"", 0
        return [*self._feed(part), *self._parse_buffer()]

    def _find_place(self, frames: Sequence[Bytes], nbytes: int) -> None:
        assert self._place is not None
        if not frames or nbytes <= _BIG_BYTES:  # the first is the table
            return
        self._num_connections = num_connections(frames)
        if self._num_connections:
            there = self.stripes.num_connections if self.stripes is not None else 1
            if self._num_connections != there or nbytes < STRIPE_BYTES:
                raise WireError(
                    f"{nbytes:,} bytes over {self._num_connections} connections, where there are {there}"
                )
        self._target = self._place(frames, nbytes)

    def _feed(self, part: Bytes) -> list[Received]:
        self._is_between = False
        try:
            self._wanted = self._parser.send(part)
        except StopIteration as done:
            self._parser = framing.parse(self._limits, self._announce)
            self._wanted, self._is_between = next(self._parser), True
            return [done.value]
        return []

    def _take_fds(self, ancillary: list[tuple[int, int, bytes]], *, is_cut: bool) -> None:
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                system.keep_from_children(fds)
                self.fds.extend(fds)
        if is_cut or len(self.fds) > self._max_fds:
            raise WireError(f"more descriptors than the {self._max_fds} that are allowed")


class Outbox:
    """Send queue of a non-blocking socket; in order, descriptors with the first byte of theirs."""

    def __init__(self) -> None:
        # Bytes, descriptors, and whether they begin an answer that is large and may wait.
        self._parts: deque[tuple[memoryview, tuple[int, ...], bool]] = deque()
        self.num_bytes = 0
        """Not sent yet."""

    def send(self, sock: socket.socket, parts: Sequence[Bytes], fds: Sequence[int] = ()) -> None:
        """Send, or copy what the socket does not take: the caller's bytes are free either way.

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
            self._parts.append((memoryview(bytes(view)), tuple(memfd.duplicate(fds)), False))
            self.num_bytes += len(view)
            fds = ()

    def lend(self, parts: Sequence[Bytes], *, is_bulk: bool = False, may_overtake: bool = False) -> None:
        """Queue for `flush` without a copy: all parts must stay unchanged until they are sent.

        Small messages go before bulk of which nothing is sent yet.
        """
        self.num_bytes += sum(map(len, parts))
        views = [memoryview(part) for part in parts if len(part)]
        at = len(self._parts)
        if may_overtake:
            bulk = (number for number, part in enumerate(self._parts) if number and part[2])
            at = next(bulk, at)
        for number, view in enumerate(views):
            self._parts.insert(at + number, (view, (), is_bulk and number == 0))

    def flush(self, sock: socket.socket) -> None:
        """Send as much as the socket takes; of very much only a part, since others wait too."""
        most = _SEND_BYTES
        while self._parts and most > 0:
            fds = self._parts[0][1]
            # Several at once: TLS wants a write that blocked to begin with the same bytes, and to be no
            # shorter.
            views: list[memoryview] = []
            left = _SEND_BYTES
            for view, others, may_wait in itertools.islice(self._parts, _NUM_OFFERED):
                if left <= 0 or ((others or may_wait) and views):  # something may be put before what may wait
                    break
                views.append(view[:left])
                left -= len(view)
            num_sent, unsent = self._try(sock, views, fds)
            if not num_sent:
                return
            memfd.close(() if unsent else fds)
            self.num_bytes -= num_sent
            most -= num_sent
            while num_sent:
                view = self._parts.popleft()[0]
                if num_sent < len(view):
                    self._parts.appendleft((view[num_sent:], (), False))
                    break
                num_sent -= len(view)

    def clear(self) -> None:
        """Forget what was not sent."""
        for _, fds, _ in self._parts:
            memfd.close(fds)
        self._parts.clear()
        self.num_bytes = 0

    def _try(
        self, sock: socket.socket, views: Sequence[Bytes], fds: Sequence[int]
    ) -> tuple[int, Sequence[int]]:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        try:
            num_sent = sock.sendmsg(views[:_NUM_OFFERED], rights)
        except BlockingIOError:
            return 0, fds
        return num_sent, ()
