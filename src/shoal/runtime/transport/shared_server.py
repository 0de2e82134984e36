"""A server's end of its connections: requests in, answers out, never blocking, for a loop over one selector.

Everything a peer sends is checked before it is used: bytes, sizes, segments
and places in them. A peer that breaks a rule, or leaves too much unread, is
closed and counted, and nobody else notices. What a request means is not
decided here; that what lies in shared memory may change while it is read is
for its reader to bear in mind.
"""

from __future__ import annotations

import resource
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.errors import ConfigError, WireError
from shoal.runtime.transport import memfd, unix
from shoal.runtime.transport.envelope import (
    MAX_NEW_SEGMENTS,
    REPLIES,
    REQUESTS,
    Envelope,
    Intake,
    Outbox,
    Place,
    as_bytes,
    open_table,
    seal,
)
from shoal.runtime.transport.framing import Bytes, Received
from shoal.runtime.transport.messages.client_server import PsRefused
from shoal.runtime.transport.messages.message import Message

SPARE_FILES = 2 * MAX_NEW_SEGMENTS
"""Descriptors that are left for what one look at a socket may bring, and for the server's own."""


class Request(NamedTuple):
    """A message of a peer, its frames, and where the answer's frames shall go.

    The views stay valid for as long as somebody holds them, whatever becomes
    of the connection.
    """

    peer: int
    ticket: int
    message: Message
    frames: list[memoryview]
    into: list[memoryview]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerConfig:
    """Limits of a server's connections."""

    num_peers: int = 1024
    """Connections at a time."""

    num_segments: int = 256
    """Segments of one peer. Each holds a descriptor for as long as it is mapped."""

    segment_bytes: int = 8 << 30
    """All segments of one peer together."""

    unsent_bytes: int = 64 << 20
    """A peer with more answers than this unread is sent no further one: it is closed. One answer may be larger."""

    pause_bytes: int = 1 << 20
    """A peer with more answers than this unread is not listened to."""

    hello_timeout_s: float = 30.0
    """A connection without a whole message after so long is closed."""

    def __post_init__(self) -> None:
        if not 0 < self.pause_bytes <= self.unsent_bytes:
            raise ConfigError(
                "pause_bytes must be positive and at most unsent_bytes, got "
                f"{self.pause_bytes:,} and {self.unsent_bytes:,}."
            )


HELD_BYTES = 64 << 10
"""Answers to one peer that wait for the end of a turn; more are sent at once."""


@dataclass(slots=True, eq=False)
class _Peer:
    """One connection."""

    number: int
    sock: socket.socket
    since: float
    pid: int
    intake: Intake = field(default_factory=lambda: Intake(REQUESTS, max_fds=MAX_NEW_SEGMENTS))
    backlog: deque[Received] = field(default_factory=deque)  # came, and is heard once it reads its answers
    outbox: Outbox = field(default_factory=Outbox)
    held: list[Bytes] = field(default_factory=list)  # answers of this turn
    held_bytes: int = 0
    segments: dict[int, memoryview | None] = field(default_factory=dict)  # None: there was no memory for it
    segment_bytes: int = 0
    has_spoken: bool = False
    events: int = selectors.EVENT_READ


class Listener:
    """All connections of one server. `hear` gets every request, `gone` every peer that is no more.

    Whoever runs the selector calls `attend` with each key whose data is this
    listener or one of its peers (`owns` tells), and `tick` now and then.
    """

    def __init__(
        self,
        sock: socket.socket,
        selector: selectors.BaseSelector,
        *,
        hear: Callable[[Request], None],
        gone: Callable[[int], None],
        config: ListenerConfig | None = None,
        memory_problem: Callable[[int], str | None] = lambda nbytes: None,
    ) -> None:
        """`memory_problem(n)` says why n bytes more cannot be taken, if so."""
        self.num_refused, self.last_refusal = 0, ""
        self._sock, self._selector, self._config = sock, selector, config or ListenerConfig()
        self._hear, self._gone, self._memory_problem = hear, gone, memory_problem
        self._peers: dict[int, _Peer] = {}
        self._unsent: dict[int, _Peer] = {}
        self._num_accepted = 0
        sock.setblocking(False)
        selector.register(sock, selectors.EVENT_READ, self)

    @property
    def num_peers(self) -> int:
        """Connections there are."""
        return len(self._peers)

    @property
    def bytes_mapped(self) -> int:
        """Address space of all segments; their pages are the clients' memory."""
        return sum(peer.segment_bytes for peer in self._peers.values())

    def owns(self, key: selectors.SelectorKey) -> bool:
        """Is this key for `attend`?"""
        return key.data is self or isinstance(key.data, _Peer)

    def attend(self, key: selectors.SelectorKey, mask: int) -> None:
        """Do what the selector says can be done without waiting."""
        if key.data is self:
            self._accept()
        elif key.data.number in self._peers:  # not closed earlier in this round
            self._serve(key.data, mask)
        self.flush()

    def reply(
        self,
        peer: int,
        ticket: int,
        message: Message,
        frames: Sequence[Bytes] = (),
        fds: Sequence[int] = (),
    ) -> None:
        """Answer a request, with the next `flush`. `frames` are copied: they may change afterwards."""
        found = self._peers.get(peer)
        if found is None:
            return
        if found.outbox.num_bytes > self._config.unsent_bytes:
            self.close_peer(peer, f"it leaves {found.outbox.num_bytes:,} bytes of answers unread")
            return
        frames = [as_bytes(frame) for frame in frames]
        places: list[Place] = [(0, 0, len(frame)) for frame in frames]
        envelope = Envelope(ticket, [], places, [])
        try:
            parts = seal(envelope, message, frames, limits=REPLIES)
        except WireError as error:
            refusal = PsRefused(f"the answer is larger than a message may be: {error.problem}.")
            parts = seal(Envelope(ticket, [], [], []), refusal, [])
        if fds:  # with the first byte of their own message
            self._send(found)
            self._transmit(found, parts, fds)
            return
        found.held += parts if not frames else [bytes(part) for part in parts]
        found.held_bytes += sum(map(len, parts))
        self._unsent[peer] = found
        if found.held_bytes > HELD_BYTES:
            self._send(found)

    def flush(self) -> None:
        """Send the answers of this turn: several to one peer wake it up once."""
        while self._unsent:
            self._send(self._unsent.popitem()[1])

    def _send(self, peer: _Peer) -> None:
        parts, peer.held, peer.held_bytes = peer.held, [], 0
        self._unsent.pop(peer.number, None)
        if not parts or peer.number not in self._peers:
            return
        self._transmit(peer, parts)

    def _transmit(self, peer: _Peer, parts: Sequence[Bytes], fds: Sequence[int] = ()) -> None:
        if peer.number not in self._peers:
            return
        try:
            peer.outbox.send(peer.sock, parts, fds)
            if peer.outbox.num_bytes:
                self._watch(peer)
        except OSError:
            self.close_peer(peer.number)

    def close_peer(self, peer: int, problem: str | None = None) -> None:
        """End a connection; with a problem it is counted."""
        found = self._peers.pop(peer, None)
        if found is None:
            return
        if problem is not None:
            self.num_refused += 1
            self.last_refusal = f"process {found.pid}: {problem}"
        self._selector.unregister(found.sock)
        found.sock.close()
        found.intake.close()
        found.outbox.clear()
        # Each mapping goes with the last view of it.
        found.segments.clear()
        self._gone(peer)

    def tick(self) -> None:
        """Close those that connected and never said a word."""
        for peer in [each for each in self._peers.values() if not each.has_spoken]:
            silent_s = time.monotonic() - peer.since
            if silent_s > self._config.hello_timeout_s:
                self.close_peer(peer.number, f"connected for {silent_s:.0f} s without a whole message")

    def close(self) -> None:
        """End everything."""
        for number in list(self._peers):
            self.close_peer(number)
        self._selector.unregister(self._sock)
        self._sock.close()

    # ---- sockets ----------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            sock, who = unix.accept(self._sock)
        except WireError as error:
            self.num_refused += 1
            self.last_refusal = error.problem
            return
        except OSError:
            return  # it was gone before we looked
        if len(self._peers) >= self._config.num_peers or _is_among_the_last(sock.fileno()):
            # Without a descriptor to spare, accept would fail and select would spin on the listener.
            sock.close()
            self.num_refused += 1
            self.last_refusal = f"process {who.pid}: there are {len(self._peers)} connections already"
            return
        sock.setblocking(False)
        self._num_accepted += 1
        peer = _Peer(self._num_accepted, sock, time.monotonic(), who.pid)
        self._peers[peer.number] = peer
        self._selector.register(sock, peer.events, peer)

    def _serve(self, peer: _Peer, mask: int) -> None:
        try:
            if mask & selectors.EVENT_WRITE:
                peer.outbox.flush(peer.sock)
                self._watch(peer)
            if mask & selectors.EVENT_READ:
                peer.backlog += peer.intake.receive(peer.sock)
            while peer.backlog and not self._is_paused(peer):
                request = self._open(peer, peer.backlog.popleft())
                if request is not None:
                    self._hear(request)
                if peer.number not in self._peers:
                    return
        except WireError as error:
            self.close_peer(peer.number, error.problem)
        except BlockingIOError:
            pass  # woken for nothing
        except EOFError:
            is_proper = peer.intake.is_between_messages
            self.close_peer(peer.number, None if is_proper else "it left in the middle of a message")
        except OSError:
            self.close_peer(peer.number)

    def _is_paused(self, peer: _Peer) -> bool:
        return peer.outbox.num_bytes > self._config.pause_bytes

    def _watch(self, peer: _Peer) -> None:
        """Listen to it unless it does not read; write to it while there is something to write."""
        events = 0 if self._is_paused(peer) else selectors.EVENT_READ
        if peer.outbox.num_bytes:
            events |= selectors.EVENT_WRITE
        if events != peer.events:
            peer.events = events
            self._selector.modify(peer.sock, events, peer)

    # ---- what is in an envelope --------------------------------------------------------------------

    def _open(self, peer: _Peer, received: Received) -> Request | None:
        """The request in an envelope, all of its places found; None where it was answered for want of memory."""
        envelope, inline = open_table(received)
        peer.has_spoken = True
        problem = None
        for number, nbytes in envelope.new:
            problem = self._map(peer, number, nbytes) or problem
        waiting = iter(inline)
        frames = [
            memoryview(next(waiting)) if place[0] == 0 else self._find(peer, place)
            for place in envelope.frames
        ]
        into = [self._find(peer, place) for place in envelope.into]
        if None in frames or None in into:
            problem = problem or "there was no memory for a segment that it needs"
            self.reply(peer.number, envelope.ticket, PsRefused(problem))
            return None
        # Not checked by mypy: there is no None in them.
        return Request(peer.number, envelope.ticket, received[0], frames, into)  # type: ignore[arg-type]

    def _map(self, peer: _Peer, number: int, nbytes: int) -> str | None:
        config = self._config
        if not peer.intake.fds:
            raise WireError(f"segment {number} was announced without a descriptor")
        fd = peer.intake.fds.popleft()
        try:
            if number == 0 or number in peer.segments:
                raise WireError(f"segment {number} was announced twice")
            if len(peer.segments) >= config.num_segments:
                raise WireError(f"more than {config.num_segments} segments")
            if peer.segment_bytes + nbytes > config.segment_bytes:
                raise WireError(
                    f"segments of {peer.segment_bytes + nbytes:,} bytes, where at most {config.segment_bytes:,} are allowed"
                )
            problem = self._memory_problem(nbytes)
            if problem is None and _is_among_the_last(fd):
                problem = "this server has no descriptor left for another segment of shared memory; raise `ulimit -n`."
            peer.segments[number] = None if problem else memoryview(memfd.map_shared(fd, nbytes))
            peer.segment_bytes += 0 if problem else nbytes
            return problem
        finally:
            memfd.close([fd])

    def _find(self, peer: _Peer, place: Place) -> memoryview | None:
        number, offset, nbytes = place
        if number not in peer.segments:
            raise WireError(f"segment {number} was never announced")
        memory = peer.segments[number]
        if memory is None:
            return None
        if offset + nbytes > len(memory):
            raise WireError(f"{nbytes:,} bytes at {offset:,} of segment {number}, which has {len(memory):,}")
        return memory[offset : offset + nbytes]


def _is_among_the_last(fd: int) -> bool:
    """Is the table of descriptors all but full? The lowest free number is always given, so any new one tells."""
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return num_files != resource.RLIM_INFINITY and fd >= num_files - SPARE_FILES
