"""A client's end of a connection to a parameter server: requests out, answers in, frames through shared memory.

Decides nothing about what is said. Threads may share a link: whoever waits
reads for all, and answers to others are kept for them. Nobody ever spins: on
a machine whose cores are all busy, a waiter that spins takes the time of
whom it waits for.
"""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from shoal.errors import LinkLost, PsError, WaitTimedOut, WireError
from shoal.runtime.transport import memfd, unix
from shoal.runtime.transport.arena import Arena, ArenaConfig, Buffer
from shoal.runtime.transport.envelope import (
    REPLIES,
    Envelope,
    Intake,
    Outbox,
    Place,
    as_bytes,
    open_table,
    seal,
)
from shoal.runtime.transport.framing import Bytes
from shoal.runtime.transport.messages.client_server import Hello, PsRefused, Welcome
from shoal.runtime.transport.messages.message import Message

INLINE_BYTES = 4096
"""Buffers up to this size are sent in the socket: that is quicker than looking them up."""

BLOCKED_LOOK_S = 0.01
"""Interval at which a sender with a full socket checks whether it has to read for others too."""


class LinkReply(NamedTuple):
    """An answer: whose it is, what it says, and those of its frames that came in the socket."""

    ticket: int
    message: Message
    frames: list[memoryview]


MAX_REPLY_FDS = 240
"""Descriptors that a server may hand over before somebody takes them."""

HELD_BYTES = 64 << 10
"""Requests that wait to be sent together; more are sent at once."""


class Link:
    """One connection, with an arena of its own; after LinkLost it is of no more use, and neither is its arena.

    Requests reach the server in the order of `send`. A buffer that was sent
    belongs to the server until the answer after which the protocol gives it
    back, small ones too.
    """

    def __init__(
        self, path: str | Path, *, peer: str = "", timeout_s: float = 10.0, arena: ArenaConfig | None = None
    ) -> None:
        """Connect to whoever listens at `path`, without a word; `peer` is what errors call it."""
        self.peer = peer or str(path)
        self.on_lost: Callable[[LinkLost], None] | None = None
        """Called once, by whoever notices first that the connection is lost."""
        self.unasked: deque[LinkReply] = deque()
        """Answers to requests that were sent with `wants_reply=False`: refusals."""
        self.welcome: Welcome | None = None
        self.arena = Arena(arena)
        self._timeout_s = timeout_s
        self._lock = threading.Condition()
        self._is_read_by_somebody = False
        self._lost: LinkLost | None = None
        self._intake, self._outbox = Intake(REPLIES, max_fds=MAX_REPLY_FDS), Outbox()
        self._next_ticket = 1
        self._awaited: set[int] = set()
        self._held: list[Bytes] = []
        self._held_bytes = 0
        self._replies: dict[int, LinkReply] = {}
        try:
            self._sock = unix.connect(path, timeout_s=timeout_s)
        except OSError as error:
            raise LinkLost(
                peer=self.peer, reason=f"nobody answers there ({error.strerror or 'timed out'})"
            ) from None
        self._sock.setblocking(False)
        self._fileno = self._sock.fileno()

    @classmethod
    def connect(
        cls,
        path: str | Path,
        hello: Hello,
        timeout_s: float = 10.0,
        *,
        peer: str = "",
        arena: ArenaConfig | None = None,
    ) -> Link:
        """A link whose server has said Welcome; PsError where it refuses us."""
        link = cls(path, peer=peer, timeout_s=timeout_s, arena=arena)
        try:
            message, _ = link.wait(link.send(hello), timeout_s)
            if not isinstance(message, Welcome):
                reason = message.reason if isinstance(message, PsRefused) else f"it answered {message}"
                raise PsError(f"{link.peer} does not take {hello.name} in: {reason}")
        except BaseException:
            link.close()
            raise
        link.welcome = message
        return link

    @property
    def is_lost(self) -> bool:
        """Has somebody noticed that the connection is over?"""
        return self._lost is not None

    @property
    def has_unsent(self) -> bool:
        """Does the socket not take all that was sent with `is_blocking=False`? Then `poll` when it is writable."""
        return self._outbox.num_bytes > 0

    def fileno(self) -> int:
        """For a selector."""
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
    ) -> int:
        """Send a request and return its ticket.

        With `is_held` it goes together with the next one that is not, or with
        `flush`, or when an answer is waited for: what belongs together wakes
        the server up once.

        Without `wants_reply` an answer, should there be one, goes to
        `unasked`. Without `is_blocking` nothing waits for a socket that is
        full: for loops that poll.
        """
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
        """The answer to that request, when it comes; WaitTimedOut where it does not, and it may be waited for again."""
        began = time.monotonic()
        self.flush()
        with self._lock:
            if ticket not in self._awaited:
                raise ValueError(f"ticket {ticket} is not waited for: it was answered, or wanted no answer")
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
            return self._take(ticket)[1:]

    def flush(self) -> None:
        """Send what was held back, and wait until the socket took all of it."""
        with self._lock:
            if self._held and self._lost is None:
                self._flush()
            if not self._outbox.num_bytes:
                return
        self._drain("sending what was held back")

    def take_fds(self, count: int) -> list[int]:
        """The descriptors that came with an answer, the caller's to close; LinkLost where there are fewer."""
        with self._lock:
            if len(self._intake.fds) < count:
                raise self._lose(WireError(f"{count} descriptors were announced and fewer came"))
            return [self._intake.fds.popleft() for _ in range(count)]

    def take(self, ticket: int) -> tuple[Message, list[memoryview]] | None:
        """The answer to that request if it is here, without waiting; LinkLost where it cannot come any more."""
        with self._lock:
            if ticket not in self._replies:
                self._check()
                if not self._is_read_by_somebody:
                    self._read()
            return self._take(ticket)[1:] if ticket in self._replies else None

    def poll(self) -> list[LinkReply]:
        """All answers that are here, without waiting; sends what is left. For a loop that never waits."""
        with self._lock:
            if self._replies:
                pass  # what came before the connection was lost still counts
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
            # A new one each time: the traceback of a raised one would hold on to its waiters' frames.
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

    def _sleep(self, events: int, timeout_s: float) -> None:
        poller = select.poll()
        poller.register(self._fileno, events)
        self._lock.release()
        try:
            poller.poll(timeout_s * 1000 + 1)
        finally:
            self._lock.acquire()

    def _read(self) -> None:
        """Take in what the socket has, without waiting."""
        try:
            for _ in range(64):
                received = self._intake.receive(self._sock)
                for message, parts in received:
                    envelope, inline = open_table((message, parts))
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
            if held:
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
            # Waiters in poll() wake up by it; close() alone would leave them asleep.
            with contextlib.suppress(OSError):
                self._sock.shutdown(2)
            self._sock.close()
            self._outbox.clear()
            self.arena.close()
            self._lock.notify_all()
            if self.on_lost is not None:
                self.on_lost(lost)
        return LinkLost(peer=lost.peer, reason=lost.reason)

    # ---- a socket that is full --------------------------------------------------------------------

    def _drain(self, operation: str) -> None:
        """Wait until all was sent. Reads meanwhile: the server stops reading from whom it cannot answer."""
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
