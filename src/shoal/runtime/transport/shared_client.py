"""A client's end of a connection to a parameter server: requests out, answers in, frames through shared memory.

To a server on another host every frame goes through the socket: from its own buffer, and answers
into the buffers that wait for them. A thread of the link moves what the socket does not take at
once, while its owner computes; large frames go over several connections, each with its thread.

Independent of the messages' meaning. Threads may share a link: a waiting thread reads for all, and
answers to others are kept for them. Nothing ever spins: on a machine whose cores are all busy, a
spinning waiter takes the time of the process it waits for.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from shoal import system
from shoal.errors import LinkLost, PsError, WaitTimedOut, WireError
from shoal.runtime.recorder import RECORDER
from shoal.runtime.transport import endpoint, memfd, tls
from shoal.runtime.transport.arena import Arena, ArenaConfig, Buffer
from shoal.runtime.transport.envelope import (
    BULK_BYTES,
    REMOTE_REQUESTS,
    REPLIES,
    Envelope,
    Intake,
    Outbox,
    Place,
    answer_frame,
    as_bytes,
    open_table,
    seal,
)
from shoal.runtime.transport.framing import Bytes, read_message
from shoal.runtime.transport.messages.client_server import Hello, PsRefused, Stripe, Striped, Welcome
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.stripes import Stripes

INLINE_BYTES = 4096
"""Buffers up to this size are sent in the socket: that is faster than looking them up."""

BLOCKED_LOOK_S = 0.01
"""Interval at which a sender with a full socket checks whether it has to read for others too."""


class LinkReply(NamedTuple):
    """An answer with the ticket of its request, and its frames that came in the socket."""

    ticket: int
    message: Message
    frames: list[memoryview]


MAX_REPLY_FDS = 240
"""Descriptors that a server may send before they are taken."""

HELD_BYTES = 64 << 10
"""Requests that wait to be sent together; more are sent at once."""


class Link:
    """One connection, with an arena of its own; after LinkLost neither can be used again.

    Requests reach the server in the order of `send`. A sent buffer belongs to the server until the
    answer after which the protocol returns it, small ones too.
    """

    def __init__(
        self,
        address: str | Path,
        *,
        peer: str = "",
        timeout_s: float = 10.0,
        arena: ArenaConfig | None = None,
    ) -> None:
        """Connect to the server that listens at `address`; sends nothing.

        `peer` is what errors call it, and the name that the certificate of another host's must carry.
        """
        self.peer = peer or str(address)
        self.is_remote = tls.is_remote(str(address))
        """Whether the server is on another host, so that nothing of it can be mapped here."""
        self.on_lost: Callable[[LinkLost], None] | None = None
        """Called once, by the first thread that notices the lost connection."""
        self.unasked: deque[LinkReply] = deque()
        """Answers to requests that were sent with `wants_reply=False`: refusals."""
        self.welcome: Welcome | None = None
        self.arena = Arena(arena, is_shared=not self.is_remote)
        self._timeout_s = timeout_s
        lock = threading.RLock()
        self._lock, self._work = threading.Condition(lock), threading.Condition(lock)  # waiters', the mover's
        self._is_read_by_somebody = False
        self._num_waiting = 0  # threads
        self._lost: LinkLost | None = None
        self._intake, self._outbox = Intake(REPLIES, max_fds=MAX_REPLY_FDS), Outbox()
        if self.is_remote:
            self._intake = Intake(REPLIES, place=self._place_of)
        self._stripes: Stripes | None = None  # further connections to a remote server
        self._into: dict[int, list[memoryview]] = {}  # of a remote server: by ticket
        self._mover: threading.Thread | None = None  # of a remote server
        self._wake: system.Wakeup | None = None
        self._next_ticket = 1
        self._awaited: set[int] = set()
        self._held: list[Bytes] = []
        self._held_bytes = 0
        self._replies: dict[int, LinkReply] = {}
        try:
            self._sock = endpoint.connect(str(address), expect=self.peer, timeout_s=timeout_s)
        except OSError as error:
            raise LinkLost(
                peer=self.peer, reason=f"nobody answers there ({error.strerror or 'timed out'})"
            ) from None
        except WireError as error:
            if not self.is_remote:
                raise
            raise LinkLost(peer=self.peer, reason=error.problem) from None
        self._sock.setblocking(False)
        self._fileno = self._sock.fileno()

    @classmethod
    def connect(
        cls,
        address: str | Path,
        hello: Hello,
        timeout_s: float = 10.0,
        *,
        peer: str = "",
        arena: ArenaConfig | None = None,
    ) -> Link:
        """A link whose server has said Welcome; PsError where it refuses us."""
        link = cls(address, peer=peer, timeout_s=timeout_s, arena=arena)
        try:
            message, _ = link.wait(link.send(hello), timeout_s)
            if not isinstance(message, Welcome):
                reason = message.reason if isinstance(message, PsRefused) else f"it answered {message}"
                raise PsError(f"{link.peer} does not take {hello.name} in: {reason}")
            if link.is_remote and tls.connections().per_server > 1:
                link._open_stripes(str(address), tls.connections(), timeout_s)
        except BaseException:
            link.close()
            raise
        link.welcome = message
        return link

    @property
    def is_lost(self) -> bool:
        """Whether the connection is known to be over."""
        return self._lost is not None

    @property
    def has_unsent(self) -> bool:
        """Whether the socket has not taken everything sent with `is_blocking=False`. Then `poll` when it is writable."""
        return self._outbox.num_bytes > 0

    def fileno(self) -> int:
        return self._fileno

    def alloc(self, nbytes: int) -> Buffer:
        """A buffer that the server can see."""
        return self.arena.alloc(nbytes)

    def free(self, buffer: Buffer) -> None:
        """Give a buffer back; of a link that is lost there is nothing to give back."""
        if self._lost is None:
            self.arena.free(buffer)

    def send(
        self,
        message: Message,
        frames: Sequence[Buffer | Bytes] = (),
        into: Sequence[Buffer] = (),
        *,
        wants_reply: bool = True,
        is_blocking: bool = True,
        is_held: bool = False,
        is_lent: bool = False,
    ) -> int:
        """Send a request and return its ticket.

        With `is_held` it goes together with the next one that is not, or with `flush`, or when an
        answer is awaited: related requests wake the server up once.

        Without `wants_reply` an answer, should there be one, goes to `unasked`. Without
        `is_blocking` nothing waits for a full socket: for loops that poll. With `is_lent` all
        frames stay unchanged until the answer, not only buffers: nothing needs to be copied.
        """
        RECORDER.sent += sum(len(f) if not isinstance(f, Buffer) else f.nbytes for f in frames)
        RECORDER.received += sum(buffer.nbytes for buffer in into)
        if self.is_remote:
            return self._send_remote(message, frames, into, wants_reply, is_blocking, is_held, is_lent)
        places, inline = _place(frames)
        wanted = [(buffer.segment, buffer.offset, buffer.nbytes) for buffer in into]
        needed = {segment for segment, _, _ in (*places, *wanted) if segment}
        with self._lock:
            self._check()
            known = [self.arena.segment(number) for number in sorted(needed)]
            new = [segment for segment in known if segment.fd >= 0]
            ticket = self._next_ticket
            envelope = Envelope(
                ticket,
                [(segment.number, segment.nbytes) for segment in new],
                places,
                wanted,
            )
            parts = seal(envelope, message, inline)
            self._next_ticket += 1
            if wants_reply:
                self._awaited.add(ticket)
            if is_held and not new and sum(map(len, parts)) + self._held_bytes <= HELD_BYTES:
                self._held += [bytes(part) for part in parts]
                self._held_bytes += sum(map(len, parts))
                return ticket
            try:
                if new:
                    self._flush()
                self._outbox.send(self._sock, [*self._held, *parts], [segment.fd for segment in new])
                self._held, self._held_bytes = [], 0
            except OSError as error:
                raise self._lose(error) from None
            for segment in new:
                memfd.close([segment.fd])
                segment.fd = -1
            if not is_blocking or not self._outbox.num_bytes:
                return ticket
        self._drain(f"sending {type(message).__name__}")
        return ticket

    def wait(self, ticket: int, timeout_s: float) -> tuple[Message, list[memoryview]]:
        """Wait for the answer to that request; WaitTimedOut if it does not come, and the wait may be repeated."""
        began = time.monotonic()
        self._send_held()
        with self._lock:
            if ticket not in self._awaited:
                raise ValueError(f"ticket {ticket} is not waited for: it was answered, or wanted no answer")
            # While a thread waits the mover does not read: two threads taking turns at one socket cost more
            # than they move.
            self._num_waiting += 1
            try:
                while ticket not in self._replies:
                    self._check()
                    left_s = began + timeout_s - time.monotonic()
                    if left_s <= 0:
                        raise WaitTimedOut(
                            operation="a request",
                            waited_s=timeout_s,
                            missing=[self.peer],
                            setting="step_timeout_s",
                        )
                    if self._is_read_by_somebody:
                        self._lock.wait(left_s)
                    else:
                        self._read_for_all(left_s)
            finally:
                self._num_waiting -= 1
                if self._awaits_bulk():
                    self._work.notify()
            return self._take(ticket)[1:]

    def flush(self) -> None:
        """Send held requests, and wait until the socket took all of them (to another host: in a thread)."""
        self._send_held()
        if self.is_remote:
            self._move()

    def _send_held(self) -> None:
        with self._lock:
            if self._held and self._lost is None:
                self._flush()
            if not self._outbox.num_bytes:
                return
        if self.is_remote:
            self._move()
        else:
            self._drain("sending what was held back")

    def take_fds(self, count: int) -> list[int]:
        """The descriptors that came with an answer, the caller's to close; LinkLost where there are fewer."""
        with self._lock:
            if len(self._intake.fds) < count:
                raise self._lose(WireError(f"{count} descriptors were announced and fewer came"))
            return [self._intake.fds.popleft() for _ in range(count)]

    def take(self, ticket: int) -> tuple[Message, list[memoryview]] | None:
        """The answer to that request if it has arrived, without waiting; LinkLost if it cannot come any more."""
        with self._lock:
            if ticket not in self._replies:
                self._check()
                if not self._is_read_by_somebody:
                    self._read()
            return self._take(ticket)[1:] if ticket in self._replies else None

    def poll(self) -> list[LinkReply]:
        """All answers that have arrived, without waiting; sends the rest. For a loop that never waits."""
        with self._lock:
            if self._replies:
                pass  # messages received before the loss still count
            else:
                self._check()
            with contextlib.suppress(LinkLost):
                if self._lost is None:
                    self._flush()
                    self._read()
            if self._lost is not None and not self._replies:
                raise self._lost
            return [self._take(ticket) for ticket in sorted(self._replies)]

    def close(self) -> None:
        """End the connection; waiters get LinkLost."""
        with self._lock:
            if self._lost is None:
                self.on_lost = None
                self._lose(LinkLost(peer=self.peer, reason="it was closed on this side"))
        if self._mover is not None and self._mover is not threading.current_thread():
            self._mover.join()

    def __enter__(self) -> Link:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- with the lock held -----------------------------------------------------------------------

    def _take(self, ticket: int) -> LinkReply:
        self._awaited.discard(ticket)
        return self._replies.pop(ticket)

    def _check(self) -> None:
        if self._lost is not None:
            # A new exception each time: the traceback of a raised one would keep its waiters' frames alive.
            raise LinkLost(peer=self._lost.peer, reason=self._lost.reason)

    def _read_for_all(self, timeout_s: float) -> None:
        """Sleep until there is something to read, with the lock free for others; then read it."""
        self._is_read_by_somebody = True
        try:
            self._sleep(select.POLLIN, timeout_s)
            if self._lost is None:
                self._read()
        finally:
            self._is_read_by_somebody = False
            self._lock.notify_all()

    def _sleep(self, events: int, timeout_s: float, wake: system.Wakeup | None = None) -> None:
        poller = select.poll()
        if events & select.POLLIN and self._intake.awaits_stripes:
            assert self._stripes is not None
            poller.register(self._stripes, select.POLLIN)
            events &= ~select.POLLIN
        elif self.is_remote and events & select.POLLIN:
            self._intake.wake_for(self._sock, is_bulk=True)
        if events:
            poller.register(self._fileno, events)
        if wake is not None:
            poller.register(wake, select.POLLIN)
        self._lock.release()
        try:
            poller.poll(timeout_s * 1000 + 1 if timeout_s < math.inf else None)
        finally:
            self._lock.acquire()
        if wake is not None:
            with contextlib.suppress(BlockingIOError):
                wake.clear()

    def _read(self) -> None:
        """Take in what the socket has, without waiting."""
        try:
            # From another host in small reads: senders in between wait for the lock.
            for _ in range(1 if self.is_remote else 64):
                received = self._intake.receive(self._sock)
                for message, parts in received:
                    envelope, inline = open_table((message, parts), is_remote=self.is_remote, is_answer=True)
                    if self.is_remote:
                        inline = self._fill(envelope, inline)
                    self._sort_in(
                        LinkReply(envelope.ticket, message, [memoryview(frame) for frame in inline])
                    )
                if received:
                    return
        except BlockingIOError:
            pass
        except (OSError, EOFError, WireError) as error:
            raise self._lose(error) from None

    def _sort_in(self, reply: LinkReply) -> None:
        if reply.ticket in self._awaited:
            self._replies[reply.ticket] = reply
        elif reply.ticket < self._next_ticket:
            self.unasked.append(reply)
        else:
            raise WireError(f"an answer to request {reply.ticket}, which was never sent")

    def _flush(self) -> None:
        held, self._held, self._held_bytes = self._held, [], 0
        try:
            self._outbox.flush(self._sock)
            if held and self.is_remote:
                self._outbox.lend(held)
                self._outbox.flush(self._sock)
            elif held:
                self._outbox.send(self._sock, held)
        except OSError as error:
            raise self._lose(error) from None

    def _lose(self, error: Exception) -> LinkLost:
        if isinstance(error, LinkLost):
            lost = error
        else:
            reason = error.problem if isinstance(error, WireError) else str(error)
            lost = LinkLost(peer=self.peer, reason=reason)
        if self._lost is None:
            self._lost = lost
            # Wakes waiters in poll(); close() alone would leave them asleep.
            with contextlib.suppress(OSError):
                self._sock.shutdown(2)
            self._sock.close()
            if self._stripes is not None:
                self._stripes.close()
            self._outbox.clear()
            self._into.clear()
            self.arena.close()
            self._lock.notify_all()
            self._work.notify_all()
            if self.on_lost is not None:
                self.on_lost(lost)
        return LinkLost(peer=lost.peer, reason=lost.reason)

    # ---- a server on another host -----------------------------------------------------------------

    def _send_remote(
        self,
        message: Message,
        frames: Sequence[Buffer | Bytes],
        into: Sequence[Buffer],
        wants_reply: bool,
        is_blocking: bool,
        is_held: bool,
        is_lent: bool,
    ) -> int:
        inline: list[Bytes] = []
        for frame in frames:
            # A buffer stays unchanged until it is acknowledged.
            view = frame.view if isinstance(frame, Buffer) else as_bytes(frame)
            inline.append(view if is_lent or isinstance(frame, Buffer) else bytes(view))
        with self._lock:
            self._check()
            ticket = self._next_ticket
            stripes = self._stripes
            places: list[Place] = [
                (0, stripes.connections_for(len(view)) if stripes else 0, len(view)) for view in inline
            ]
            wanted: list[Place] = [(0, 0, buffer.nbytes) for buffer in into]
            parts = seal(Envelope(ticket, [], places, wanted), message, inline, limits=REMOTE_REQUESTS)
            self._next_ticket += 1
            if wants_reply:
                self._awaited.add(ticket)
                if into:
                    self._into[ticket] = [buffer.view for buffer in into]
            num_bytes = sum(map(len, parts))
            if is_held and num_bytes + self._held_bytes <= HELD_BYTES:
                self._held += [bytes(part) for part in parts]
                self._held_bytes += num_bytes
                return ticket
            if stripes:
                parts = [*parts[:2], *stripes.share(parts[2:])]  # not its header and its table
            try:
                self._outbox.lend([*self._held, *parts])
                self._held, self._held_bytes = [], 0
                self._outbox.flush(self._sock)
            except OSError as error:
                raise self._lose(error) from None
        if is_blocking:
            self._move()
        return ticket

    def _open_stripes(self, address: str, asked: tls.Connections, timeout_s: float) -> None:
        """Open the further connections, spread over the interfaces of both ends."""
        link, streams = secrets.randbits(62), []
        try:
            answer, _ = self.wait(self.send(Stripe(link, 0, asked.per_server)), timeout_s)
            if not isinstance(answer, Striped):
                raise WireError(f"it answered {answer}")
            ways = [(address, None), *zip(answer.addresses, asked.sources[1:], strict=False)]
            for number in range(1, asked.per_server):
                to, source = ways[number % len(ways)]
                streams.append(tls.mine().connect(to, expect=self.peer, timeout_s=timeout_s, source=source))
                for part in seal(Envelope(number, [], [], []), Stripe(link, number, asked.per_server), []):
                    streams[-1].sendall(part)
                read_message(streams[-1], limits=REPLIES, timeout_s=timeout_s)
                streams[-1].setblocking(False)
        except (OSError, EOFError, WireError) as error:
            for stream in streams:
                stream.close()
            raise LinkLost(
                peer=self.peer, reason=f"connection {1 + len(streams)} of {asked.per_server}: {error}"
            ) from None
        with self._lock:
            self._stripes = self._intake.stripes = Stripes(self._sock, streams)

    def _place_of(self, frames: Sequence[Bytes], nbytes: int) -> memoryview | None:
        """The buffer in which the next frame of an answer is wanted."""
        ticket, at = answer_frame(frames)
        wanted = self._into.get(ticket, ())
        return wanted[at] if 0 <= at < len(wanted) and len(wanted[at]) == nbytes else None

    def _fill(self, envelope: Envelope, inline: list[Bytes]) -> list[Bytes]:
        """Copy what did not come in place; the frames that belong in no buffer."""
        first = len(envelope.frames)
        for view, frame in zip(self._into.pop(envelope.ticket, ()), inline[first:], strict=False):
            if len(frame) > len(view):
                raise WireError(f"{len(frame):,} bytes for a buffer of {len(view):,}")
            if frame is not view:
                view[: len(frame)] = frame
        return inline[:first]

    def _move(self) -> None:
        """Let the link's thread send what the socket did not take, and receive what large buffers wait for."""
        with self._lock:
            if self._lost is not None or not (self._outbox.num_bytes or self._awaits_bulk()):
                return
            if self._mover is None or self._wake is None:
                self._wake = system.Wakeup()
                self._mover = threading.Thread(target=self._run_mover, name=f"shoal-{self.peer}", daemon=True)
                self._mover.start()
            self._wake.set()
            self._work.notify()

    def _awaits_bulk(self) -> bool:
        return any(len(view) > BULK_BYTES for views in self._into.values() for view in views)

    def _run_mover(self) -> None:
        with self._lock:
            with contextlib.suppress(LinkLost):
                while self._lost is None:
                    reads = not (self._is_read_by_somebody or self._num_waiting) and self._awaits_bulk()
                    if reads or self._outbox.num_bytes:
                        self._move_some(reads=reads)
                    else:
                        self._work.wait()
            if self._wake is not None:
                self._wake.close()

    def _move_some(self, *, reads: bool) -> None:
        self._is_read_by_somebody |= reads
        try:
            events = select.POLLOUT if self._outbox.num_bytes else 0
            self._sleep(events | (select.POLLIN if reads else 0), math.inf, wake=self._wake)
            if self._lost is None:
                self._flush()
                if reads:
                    self._read()
        finally:
            if reads:
                self._is_read_by_somebody = False
            self._lock.notify_all()

    # ---- a socket that is full --------------------------------------------------------------------

    def _drain(self, operation: str) -> None:
        """Wait until everything was sent. Reads meanwhile: the server stops reading from a client that it cannot answer."""
        began = time.monotonic()
        while True:
            with self._lock:
                self._check()
                self._flush()
                if not self._outbox.num_bytes:
                    return
                if time.monotonic() - began > self._timeout_s:
                    raise WaitTimedOut(
                        operation=operation,
                        waited_s=self._timeout_s,
                        missing=[self.peer],
                        setting="timeout_s",
                    )
                if self._is_read_by_somebody:
                    self._sleep(select.POLLOUT, BLOCKED_LOOK_S)
                else:
                    self._is_read_by_somebody = True
                    try:
                        self._sleep(select.POLLIN | select.POLLOUT, BLOCKED_LOOK_S)
                        if self._lost is None:
                            self._read()
                    finally:
                        self._is_read_by_somebody = False
                        self._lock.notify_all()


def _place(frames: Sequence[Buffer | Bytes]) -> tuple[list[Place], list[Bytes]]:
    places: list[Place] = []
    inline: list[Bytes] = []
    for frame in frames:
        if isinstance(frame, Buffer) and frame.nbytes > INLINE_BYTES:
            places.append((frame.segment, frame.offset, frame.nbytes))
        else:
            view = frame.view if isinstance(frame, Buffer) else as_bytes(frame)
            places.append((0, 0, len(view)))
            inline.append(view)
    return places, inline
