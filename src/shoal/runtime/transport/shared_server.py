"""A server's end of its connections: requests in, answers out, never blocking, for a loop over one selector.

Everything a peer sends is validated before use: bytes, sizes, segments and places in them. A peer
that breaks a rule, or leaves too much unread, is closed and counted, without effect on others. The
meaning of requests is not decided here; readers must bear in mind that shared memory may change
while they read.

A peer on another host connects to a second socket. It has no shared memory: its frames are received
into memory of this process, which is reserved first, and so are the buffers for its answers. The
name in its Hello must be that of its certificate. While something large is moving to or from it, a
thread has its socket, so that the loop's work and many transfers overlap; small answers overtake
large ones that have not begun. It may add further connections to its first one, which carry blocks
of large frames and nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import re
import resource
import select
import selectors
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal import system
from shoal.errors import ConfigError, WireError
from shoal.runtime.transport import memfd, tls, unix
from shoal.runtime.transport.arena import MessageMemory
from shoal.runtime.transport.envelope import (
    BULK_BYTES,
    DROP,
    MAX_NEW_SEGMENTS,
    REMOTE_REQUESTS,
    REPLIES,
    REPLY_BYTES,
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
from shoal.runtime.transport.messages.client_server import Hello, PsRefused, Stripe, Striped, ViewOver
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.stripes import Stripes
from shoal.runtime.transport.tls import Credentials, Identity, PlainStream, TlsStream

SPARE_FILES = 2 * MAX_NEW_SEGMENTS
"""Descriptors reserved for what one read of a socket may bring, and for the server's own."""


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
    """A peer with more unread answers than this is closed. One answer may be larger."""

    pause_bytes: int = 1 << 20
    """A peer with more unread answers than this is not read from (backpressure)."""

    hello_timeout_s: float = 30.0
    """A connection without a whole message after so long is closed."""

    num_strangers: int = 64
    """Connections of other hosts that have not said Hello. One more, and the oldest is closed."""

    def __post_init__(self) -> None:
        if not 0 < self.pause_bytes <= self.unsent_bytes:
            raise ConfigError(
                "pause_bytes must be positive and at most unsent_bytes, got "
                f"{self.pause_bytes:,} and {self.unsent_bytes:,}."
            )


KEEP_MEMORY_S = 1.0
"""Memory for large messages of other hosts is reused, and freed once none came for so long."""

HELD_BYTES = 64 << 10
"""Answers to one peer that wait for the end of a turn; more are sent at once."""


@dataclass(slots=True, eq=False)
class _Peer:
    """One connection."""

    number: int
    sock: socket.socket
    since: float
    name: str  # in refusals
    intake: Intake
    stream: TlsStream | PlainStream | None = None  # the socket, of a peer on another host
    backlog: deque[Received] = field(default_factory=deque)  # received, and handled once it reads its answers
    outbox: Outbox = field(default_factory=Outbox)
    held: list[Bytes] = field(default_factory=list)  # answers of this turn
    held_bytes: int = 0
    segments: dict[int, memoryview | None] = field(default_factory=dict)  # None: there was no memory for it
    unlocks: list[Callable[[], None]] = field(default_factory=list)  # of segments whose pages are locked
    segment_bytes: int = 0
    has_spoken: bool = False
    events: int = selectors.EVENT_READ
    # Of one on another host:
    into: dict[int, list[memoryview]] = field(default_factory=dict)  # by ticket
    # By message: bytes of its large frames, and why there is no memory for them.
    incoming: dict[int, tuple[int, str | None]] = field(default_factory=dict)
    link: int = -1  # its name for this connection and further ones
    num_connections: int = 1  # that it announced
    others: dict[int, socket.socket] = field(default_factory=dict)  # of those, by number, until all are there
    stripes: Stripes | None = None  # those, afterwards
    lent_bytes: int = 0  # of filled buffers that are not sent yet
    is_away: bool = False  # a thread has its socket
    has_moved: bool = False  # that thread is done, and the socket not taken back yet
    is_closed: bool = False
    wake: system.Wakeup | None = None  # of that thread
    arrived: list[Received] = field(default_factory=list)  # by that thread
    error: Exception | None = None  # of that thread
    lock: threading.Lock = field(default_factory=threading.Lock)  # of its outbox, while it is away

    def wake_up(self) -> None:
        if self.wake is not None:
            self.wake.set()

    @property
    def unread_bytes(self) -> int:
        """Unread answers, without those for which it has reserved memory itself."""
        return max(0, self.unsent_bytes - self.lent_bytes)

    @property
    def unsent_bytes(self) -> int:
        return self.outbox.num_bytes + (self.stripes.num_unsent_bytes if self.stripes is not None else 0)


class Listener:
    """All connections of one server. `hear` gets every request, `gone` every closed peer.

    The owner of the selector calls `attend` with each key whose data is this listener or one of its
    peers (`owns` tells), and `tick` at intervals.
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
        remote: tuple[socket.socket, Credentials] | None = None,
        also: Sequence[socket.socket] = (),
    ) -> None:
        """`memory_problem(n)` says why n bytes more cannot be taken, if so; `remote` listens for other hosts.

        `also` listens at further interfaces for their further connections.
        """
        self.num_refused, self.last_refusal = 0, ""
        self._sock, self._selector, self._config = sock, selector, config or ListenerConfig()
        self._hear, self._gone, self._memory_problem = hear, gone, memory_problem
        self.lock: Callable[[memoryview], Callable[[], None]] | None = None
        """Locks the pages of segments to come, for a device's copies, and gives what unlocks them."""
        self._peers: dict[int, _Peer] = {}
        self._unsent: dict[int, _Peer] = {}
        self._num_accepted = 0
        self._memory = MessageMemory()
        self._remote_at = 0.0  # when memory was last taken for a message of another host
        self._remote = remote
        self._counting = threading.Lock()  # what peers have reserved
        self._movers = ThreadPoolExecutor(self._config.num_peers, "shoal-transfer")
        self._returned: deque[_Peer] = deque()
        self._wake: system.Wakeup | None = None
        if remote is not None:
            self._wake = system.Wakeup()
            selector.register(self._wake, selectors.EVENT_READ, self)
        self._also = list(also)
        self._listening = [sock, *also] if remote is None else [sock, remote[0], *also]
        for each in self._listening:
            each.setblocking(False)
            selector.register(each, selectors.EVENT_READ, self)

    @property
    def num_peers(self) -> int:
        """Connections there are."""
        return len(self._peers)

    @property
    def bytes_mapped(self) -> int:
        """Address space of all segments, whose pages are the clients' memory; and what other hosts have announced."""
        return sum(peer.segment_bytes for peer in list(self._peers.values()))

    def owns(self, key: selectors.SelectorKey) -> bool:
        """Whether this key is for `attend`."""
        return key.data is self or isinstance(key.data, _Peer)

    def attend(self, key: selectors.SelectorKey, mask: int) -> None:
        """Handle the selector's events without waiting."""
        if key.fileobj is self._sock:
            self._accept()
        elif key.fileobj is self._wake:
            with contextlib.suppress(BlockingIOError):
                self._wake.clear()
            while self._returned:
                self._look_again(self._returned.popleft())
        elif isinstance(key.fileobj, socket.socket) and key.data is self:
            self._accept_remote(key.fileobj)
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
        if found.unread_bytes > self._config.unsent_bytes:
            self.close_peer(peer, f"it leaves {found.unread_bytes:,} bytes of answers unread")
            return
        frames = [as_bytes(frame) for frame in frames]
        if found.stream is not None:
            self._reply_remote(found, ticket, message, frames, fds)
            return
        envelope = Envelope(ticket, [], _places(found, frames), [])
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
            if peer.stream is not None:
                self._transmit_remote(peer, parts)
                return
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
            self.last_refusal = f"{found.name}: {problem}"
        if found.is_away:
            found.is_closed = True  # its socket is closed once the thread has released it
            with contextlib.suppress(OSError):
                socket.socket.shutdown(found.sock, socket.SHUT_RDWR)
        else:
            self._selector.unregister(found.sock)
            self._close_sockets(found)
        for unlock in found.unlocks:
            unlock()
        # Each mapping is freed with its last view.
        found.segments.clear()
        found.into.clear()
        self._gone(peer)

    def tick(self) -> None:
        """Close connections that never sent a message."""
        for peer in [each for each in self._peers.values() if not each.has_spoken]:
            silent_s = time.monotonic() - peer.since
            if silent_s > self._config.hello_timeout_s:
                self.close_peer(peer.number, f"connected for {silent_s:.0f} s without a whole message")
        if self._remote_at and time.monotonic() - self._remote_at > KEEP_MEMORY_S:
            self._memory.give_back()
            self._remote_at = 0.0

    def close(self) -> None:
        """End everything."""
        for number in list(self._peers):
            self.close_peer(number)
        self._movers.shutdown()
        while self._returned:  # connections' threads may add to it until they are joined
            peer = self._returned.popleft()
            if peer.has_moved:
                peer.has_moved = False
                self._close_sockets(peer)
        for sock in self._listening:
            self._selector.unregister(sock)
            sock.close()
        if self._wake is not None:
            self._selector.unregister(self._wake)
            self._wake.close()

    # ---- sockets ----------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            sock, who = unix.accept(self._sock)
        except WireError as error:
            self.num_refused += 1
            self.last_refusal = error.problem
            return
        except OSError:
            return  # it was gone before the accept
        sock.setblocking(False)
        intake = Intake(REQUESTS, max_fds=MAX_NEW_SEGMENTS)
        self._add(_Peer(self._num_accepted + 1, sock, time.monotonic(), f"process {who.pid}", intake))

    def _accept_remote(self, listener: socket.socket) -> None:
        assert self._remote is not None
        try:
            stream = self._remote[1].accept(listener)
            name = "{}:{}".format(*stream.getpeername()[:2])
        except OSError:
            return  # it was gone before the accept
        strangers = [peer for peer in self._peers.values() if peer.stream is not None and not peer.has_spoken]
        if len(strangers) >= self._config.num_strangers:
            # A client of this job sends Hello within milliseconds, and is not the oldest.
            self.close_peer(strangers[0].number, f"{len(strangers)} connections said nothing yet")
        intake = Intake(REMOTE_REQUESTS, place=lambda frames, nbytes: self._place_of(peer, frames, nbytes))
        peer = _Peer(self._num_accepted + 1, stream, time.monotonic(), name, intake, stream)
        self._add(peer)

    def _add(self, peer: _Peer) -> None:
        if len(self._peers) >= self._config.num_peers or _is_among_the_last(peer.sock.fileno()):
            # Without a descriptor to spare, accept would fail and select would spin on the listener.
            peer.sock.close()
            self.num_refused += 1
            self.last_refusal = f"{peer.name}: there are {len(self._peers)} connections already"
            return
        self._num_accepted = peer.number
        self._peers[peer.number] = peer
        self._selector.register(peer.sock, peer.events, peer)

    def _serve(self, peer: _Peer, mask: int) -> None:
        try:
            if peer.error is not None:
                raise peer.error
            if mask & selectors.EVENT_WRITE:
                peer.outbox.flush(peer.sock)
                self._watch(peer)
                self._release_lent(peer)
            if mask & selectors.EVENT_READ:
                peer.backlog += peer.intake.receive(peer.sock)
            if self._is_bulky(peer):
                self._hand_over(peer)  # before its messages are handled: both at the same time
            while peer.backlog and not self._is_paused(peer):
                request = self._open(peer, peer.backlog.popleft())
                if request is not None:
                    self._hear(request)
                if peer.number not in self._peers:
                    return
        except WireError as error:
            self.close_peer(peer.number, error.problem)
        except BlockingIOError:
            pass  # spurious wake-up
        except EOFError:
            is_proper = peer.intake.is_between_messages
            self.close_peer(peer.number, None if is_proper else "it left in the middle of a message")
        except ssl.SSLError as error:
            self.close_peer(peer.number, f"TLS: {error.reason or error}")
        except OSError:
            self.close_peer(peer.number)

    def _is_paused(self, peer: _Peer) -> bool:
        return peer.unread_bytes > self._config.pause_bytes

    def _watch(self, peer: _Peer) -> None:
        """Read from it unless it does not read; write to it while there is something to write."""
        events = 0 if self._is_paused(peer) else selectors.EVENT_READ
        if peer.outbox.num_bytes:
            events |= selectors.EVENT_WRITE
        if events != peer.events:
            peer.events = events
            if not peer.is_away:
                self._selector.modify(peer.sock, events, peer)

    # ---- envelopes ---------------------------------------------------------------------------------

    def _open(self, peer: _Peer, received: Received) -> Request | None:
        """The request in an envelope, all of its places resolved; None if it was refused for want of memory."""
        if peer.stream is not None:
            return self._open_remote(peer, peer.stream, received)
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
            memory = None if problem else memoryview(memfd.map_shared(fd, nbytes))
            peer.segments[number] = memory
            peer.segment_bytes += 0 if problem else nbytes
            if memory is not None and self.lock is not None:
                peer.unlocks.append(self.lock(memory))
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

    # ---- other hosts ------------------------------------------------------------------------------

    def _place_of(self, peer: _Peer, frames: Sequence[Bytes], nbytes: int) -> memoryview:
        """Memory for the next frame, as it arrives; `DROP` where there is none."""
        before, problem = peer.incoming.get(id(frames), (0, None))
        problem = problem or self._reserve(peer, nbytes)
        peer.incoming[id(frames)] = (before + nbytes, problem)
        return DROP if problem else self._memory.take(nbytes)

    def _reserve(self, peer: _Peer, nbytes: int) -> str | None:
        """Count memory that a peer has announced; returns the reason if there is not enough."""
        if peer.segment_bytes + nbytes > self._config.segment_bytes:
            raise WireError(
                f"it asks for {peer.segment_bytes + nbytes:,} bytes, where at most {self._config.segment_bytes:,} are allowed"
            )
        problem = self._memory_problem(nbytes)
        with self._counting:
            peer.segment_bytes += nbytes
        self._remote_at = time.monotonic()
        return problem

    def _release(self, peer: _Peer, nbytes: int) -> None:
        with self._counting:
            peer.segment_bytes -= nbytes

    def _release_lent(self, peer: _Peer) -> None:
        if peer.lent_bytes and not peer.unsent_bytes:
            self._release(peer, peer.lent_bytes)
            peer.lent_bytes = 0

    def _open_remote(
        self, peer: _Peer, stream: TlsStream | PlainStream, received: Received
    ) -> Request | None:
        message = received[0]
        # Complete messages that arrived are still delivered.
        num_bytes, problem = peer.incoming.pop(id(received[1]), (0, None))
        self._release(peer, num_bytes)
        self._release_lent(peer)  # what other connections carried of the last answer is sent by now
        envelope, inline = open_table(received, is_remote=True, is_cut=problem is not None)
        if isinstance(message, Stripe):
            self._add_connection(peer, stream, envelope.ticket, message)
            return None
        if not peer.has_spoken or isinstance(message, Hello):
            _check_identity(stream.identity, message)
            peer.has_spoken = True
            peer.name = stream.identity.name
        sizes = [nbytes for _, _, nbytes in envelope.into]
        if sum(sizes) > REPLY_BYTES:
            raise WireError(
                f"{sum(sizes):,} bytes of buffers for an answer, where at most {REPLY_BYTES:,} are allowed"
            )
        if envelope.ticket in peer.into:
            raise WireError(f"request {envelope.ticket} came twice")
        if problem is None and sizes:
            problem = self._reserve(peer, sum(sizes))
            if problem:
                self._release(peer, sum(sizes))
        if problem:
            self.reply(peer.number, envelope.ticket, PsRefused(problem))
            return None
        into = [self._memory.take(nbytes) for nbytes in sizes]
        if into:
            peer.into[envelope.ticket] = into
        return Request(peer.number, envelope.ticket, message, [memoryview(frame) for frame in inline], into)

    def _add_connection(
        self, peer: _Peer, stream: TlsStream | PlainStream, ticket: int, said: Stripe
    ) -> None:
        """Add a connection to a link of several: its first one, or a further one of the same identity."""
        if said.number == 0:
            if not peer.has_spoken or peer.link >= 0:
                raise WireError("it announced further connections before Hello, or twice")
            peer.link, peer.num_connections = said.link, said.count
            ports = [sock.getsockname()[:2] for sock in self._also]
            scheme = self._remote[1].scheme if self._remote is not None else tls.TLS
            self.reply(peer.number, ticket, Striped([tls.join_address(scheme, *port) for port in ports]))
            return
        first = next((each for each in self._peers.values() if each.link == said.link), None)
        if (
            peer.has_spoken
            or first is None
            or first.stream is None
            or first.stream.identity != stream.identity
        ):
            raise WireError("it belongs to no connection of the same process")
        if said.count != first.num_connections or not said.number < said.count or said.number in first.others:
            raise WireError(
                f"connection {said.number} of {said.count} is none that was announced, or came twice"
            )
        if first.stripes is not None or not peer.intake.is_between_messages:
            raise WireError(f"connection {said.number} of a link came twice, or says more")
        peer.outbox.send(peer.sock, seal(Envelope(ticket, [], [], []), Striped([]), []))
        if peer.outbox.num_bytes:
            raise WireError("it does not take its first answer")
        self._selector.unregister(peer.sock)
        del self._peers[peer.number]
        first.others[said.number] = stream
        if len(first.others) == first.num_connections - 1:
            others = [first.others.pop(number) for number in range(1, first.num_connections)]
            first.stripes = first.intake.stripes = Stripes(
                first.sock, others, on_sent=functools.partial(self._return, first)
            )

    def _reply_remote(
        self,
        peer: _Peer,
        ticket: int,
        message: Message,
        frames: Sequence[Bytes],
        fds: Sequence[int],
    ) -> None:
        """An answer through the socket alone: its frames, copied, then the filled buffers, without a copy."""
        into = peer.into.pop(ticket, [])
        if fds:
            message, frames = PsRefused("memory is shared within one host alone."), []
        if isinstance(message, PsRefused | ViewOver):  # they were not filled
            self._release(peer, sum(map(len, into)))
            into = []
        envelope = Envelope(ticket, [], _places(peer, frames), _places(peer, into))
        try:
            parts = seal(envelope, message, [*(bytes(frame) for frame in frames), *into], limits=REPLIES)
        except WireError as error:
            refusal = PsRefused(f"the answer is larger than a message may be: {error.problem}.")
            parts = seal(Envelope(ticket, [], [], []), refusal, [])
        is_large = sum(map(len, parts)) > HELD_BYTES
        if is_large:
            # May find everything sent and release what was lent, so this answer's buffers come after it.
            self._send(peer)
        peer.lent_bytes += sum(map(len, into))
        if is_large:
            self._transmit(peer, parts)
            return
        peer.held += parts
        peer.held_bytes += sum(map(len, parts))
        self._unsent[peer.number] = peer
        if peer.held_bytes > HELD_BYTES:
            self._send(peer)

    # ---- large messages of other hosts, in threads -------------------------------------------------

    def _transmit_remote(self, peer: _Peer, parts: Sequence[Bytes]) -> None:
        is_bulk = sum(map(len, parts)) > BULK_BYTES
        if peer.stripes is not None:
            parts = [*parts[:2], *peer.stripes.share(parts[2:])]  # not its header and its table
        with peer.lock:
            peer.outbox.lend(parts, is_bulk=is_bulk, may_overtake=not is_bulk)
            if not peer.is_away:
                peer.outbox.flush(peer.sock)
        if peer.is_away:
            peer.wake_up()
        elif self._is_bulky(peer):
            self._hand_over(peer)
        else:
            self._watch(peer)
            self._release_lent(peer)

    def _is_bulky(self, peer: _Peer) -> bool:
        """Whether there is enough to move for a thread to pay off."""
        if peer.stream is None or peer.is_away:
            return False
        return max(peer.outbox.num_bytes, peer.intake.num_missing_bytes) > BULK_BYTES

    def _hand_over(self, peer: _Peer) -> None:
        """Let a thread move its bytes, until a message has arrived or nothing large is left."""
        self._selector.unregister(peer.sock)
        if peer.wake is None:
            peer.wake = system.Wakeup()
        peer.is_away = True
        self._movers.submit(self._move, peer)

    def _move(self, peer: _Peer) -> None:
        """Thread of a peer: it owns the socket and the intake, and shares the outbox."""
        poller, wake = select.poll(), peer.wake
        assert wake is not None
        poller.register(wake, select.POLLIN)
        try:
            while not peer.is_closed:
                with peer.lock:
                    left = peer.outbox.num_bytes
                    if max(left, peer.intake.num_missing_bytes) <= BULK_BYTES:
                        break
                reads = select.POLLIN if not self._is_paused(peer) else 0
                peer.intake.wake_for(peer.sock, is_bulk=True)
                awaits_stripes = peer.intake.awaits_stripes
                poller.register(peer.sock, (0 if awaits_stripes else reads) | (select.POLLOUT if left else 0))
                if peer.stripes is not None:
                    poller.register(peer.stripes, reads if awaits_stripes else 0)
                ready = dict(poller.poll())
                if awaits_stripes and ready.get(peer.sock.fileno(), 0) & (select.POLLERR | select.POLLHUP):
                    raise ConnectionError("the connection was closed")
                if wake.fileno() in ready:
                    wake.clear()
                if left:
                    with peer.lock:
                        peer.outbox.flush(peer.sock)
                if reads and any(
                    fd != wake.fileno() and event & ~select.POLLOUT for fd, event in ready.items()
                ):
                    with contextlib.suppress(BlockingIOError):
                        peer.arrived = peer.intake.receive(peer.sock)
                if peer.arrived:
                    break
        except Exception as error:
            peer.error = error
        peer.has_moved = True
        self._return(peer)

    def _return(self, peer: _Peer) -> None:
        """From any thread: make the selector's thread look at a peer again."""
        self._returned.append(peer)
        assert self._wake is not None
        self._wake.set()

    def _look_again(self, peer: _Peer) -> None:
        if peer.has_moved:
            peer.has_moved = False
            self._take_back(peer)
        elif peer.number not in self._peers:
            return
        # Its further connections have sent all they had: it may have been paused until then.
        elif peer.is_away:
            peer.wake_up()
        else:
            self._watch(peer)
            self._release_lent(peer)
            self._serve(peer, 0)

    def _take_back(self, peer: _Peer) -> None:
        peer.is_away = False
        if peer.is_closed:
            self._close_sockets(peer)
            return
        peer.backlog += peer.arrived
        peer.arrived = []
        with contextlib.suppress(OSError):
            peer.intake.wake_for(peer.sock, is_bulk=False)
        self._selector.register(peer.sock, peer.events, peer)
        self._watch(peer)
        self._release_lent(peer)
        self._serve(peer, 0)

    def _close_sockets(self, peer: _Peer) -> None:
        peer.sock.close()
        if peer.stripes is not None:
            peer.stripes.close()
        for sock in peer.others.values():
            sock.close()
        peer.intake.close()
        peer.outbox.clear()
        if peer.wake is not None:
            peer.wake.close()


def _places(peer: _Peer, frames: Sequence[Bytes]) -> list[Place]:
    """Places of frames in the socket: number of connections, and lengths."""
    stripes = peer.stripes
    return [(0, stripes.connections_for(len(frame)) if stripes else 0, len(frame)) for frame in frames]


def _check_identity(identity: Identity, message: Message) -> None:
    """Refuse a peer of another host that is not the one its certificate names."""
    if not isinstance(message, Hello):
        raise WireError(f"its first sentence was {type(message).__name__}, not Hello")
    is_own = message.name == identity.name and identity.role in ("worker", "server")
    is_client = identity.role == "worker" and re.fullmatch(
        rf"kv-{identity.number}-[0-9]{{1,9}}", message.name
    )
    if not (is_own or is_client) or message.incarnation != identity.incarnation:
        raise WireError(
            f"it calls itself {message.name}, incarnation {message.incarnation}, and its certificate names "
            f"{identity.name}, incarnation {identity.incarnation}"
        )


def _is_among_the_last(fd: int) -> bool:
    """Whether the table of descriptors is almost full. The lowest free number is always given, so any new one tells."""
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return num_files != resource.RLIM_INFINITY and fd >= num_files - SPARE_FILES
