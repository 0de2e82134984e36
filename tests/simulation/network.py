"""A network without sockets: the streams of a simulated cluster, in somebody else's time.

What it promises is what a Unix socket or TCP promises, and no more: messages
of one connection come in order, or not at all once it broke; nothing is said
about the order of two connections. How long things take and what goes wrong
is decided by whoever simulates; no clock, no thread, no randomness here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from shoal.runtime.transport.framing import decode, encode
from shoal.runtime.transport.messages.message import Message

Schedule = Callable[..., None]
"""schedule(delay_s, action, *arguments): do it so much later."""


class Owner(Protocol):
    """A simulated process, as its connections see it."""

    def heard(self, end: End, message: Message) -> None:
        """A message has arrived."""

    def lost(self, end: End) -> None:
        """The other side closed, or the connection broke: nothing more will come."""


class Acceptor(Owner, Protocol):
    """A process that others connect to."""

    def accepted(self, end: End) -> None:
        """Somebody has connected; its messages follow."""


class End:
    """One side of a connection. Closing it twice is fine, and so is speaking into a broken one."""

    __slots__ = (
        "_arrives_at",
        "_held",
        "_is_mute",
        "_network",
        "is_open",
        "lag_s",
        "number",
        "owner",
        "peer",
        "where",
    )

    def __init__(self, network: Network, number: int, owner: Owner | None, where: str) -> None:
        self.owner, self.number, self.where = owner, number, where
        self.is_open = True
        self.lag_s = 0.0
        """What is sent from here takes so much longer than it should."""
        self.peer: End = self  # until the other side is made
        self._network = network
        self._is_mute = False  # broken, and nobody noticed yet
        self._arrives_at = 0.0  # of what was sent last: the next comes no earlier
        self._held: list[Message | None] = []  # came before anybody owned this end; None: it was closed

    def send(self, message: Message) -> None:
        """Say something to the other side. Whether it arrives is not known."""
        if self.is_open:
            self._network.carry(self, message)

    def close(self) -> None:
        """Stop listening; the other side hears of it after everything that was sent before."""
        if self.is_open:
            self.is_open = False
            self._network.carry(self, None)

    def adopt(self, owner: Acceptor) -> None:
        """Take an end that waited for somebody to accept it, with all that came for it meanwhile."""
        self.owner = owner
        owner.accepted(self)
        held, self._held = self._held, []
        for message in held:
            self.arrive(message)

    def arrive(self, message: Message | None) -> None:
        """Something has come from the other side: a message, or (None) the end of the stream."""
        if not self.is_open:
            return
        if self.owner is None:
            self._held.append(message)
        elif message is None:
            self.is_open = False
            self.owner.lost(self)
        else:
            self.owner.heard(self, message)


class Network:
    """Carries messages between processes; faults are asked for one by one.

    The listener outlives its process, as a listening socket does that a
    parent still holds: who connects meanwhile waits in its backlog.
    """

    def __init__(
        self,
        schedule: Schedule,
        now: Callable[[], float],
        delay_s: Callable[[], float],
        *,
        as_bytes: bool = False,
    ) -> None:
        """`as_bytes`: every message goes through the codec, as it would between real processes."""
        self._schedule, self._now, self._delay_s, self._as_bytes = schedule, now, delay_s, as_bytes
        self._num_connections = 0
        self._acceptor: Acceptor | None = None
        self._backlog: list[End] = []
        self._silent_until: dict[str, float] = {}  # where -> nothing passes before

    def listen(self, acceptor: Acceptor | None) -> None:
        """`acceptor` takes connections from now on, those in the backlog first; None: nobody does."""
        self._acceptor = acceptor
        if acceptor is not None:
            backlog, self._backlog = self._backlog, []
            for end in backlog:
                end.adopt(acceptor)

    def connect(self, owner: Owner, where: str) -> End:
        """A new connection from `where` to whoever listens; it may speak at once."""
        self._num_connections += 1
        near = End(self, self._num_connections, owner, where)
        far = End(self, self._num_connections, None, where)
        near.peer, far.peer = far, near
        self._travel(near, self._reach, far)
        return near

    def silence(self, where: str, until: float) -> None:
        """A partition: nothing passes from or to `where` before `until`; then all of it does, in order."""
        self._silent_until[where] = max(until, self._silent_until.get(where, 0.0))

    def cut(self, end: End, *, notice_s: float, far_notice_s: float) -> None:
        """Break a connection: nothing is sent any more, and each side notices in its own time.

        What is under way still arrives where that side has not noticed yet,
        perhaps after what was said on the next connection.
        """
        end._is_mute = end.peer._is_mute = True
        self._schedule(notice_s, end.arrive, None)
        self._schedule(far_notice_s, end.peer.arrive, None)

    def carry(self, end: End, message: Message | None) -> None:
        """Bring a message, or the end of the stream, to the other side."""
        if end._is_mute:
            return
        if message is not None and self._as_bytes:
            message, _ = decode(b"".join(encode(message)))
        self._travel(end, end.peer.arrive, message)

    def _travel(self, end: End, arrive: Callable[[Any], None], what: object) -> None:
        now = self._now()
        start = max(now, self._silent_until.get(end.where, 0.0)) if self._silent_until else now
        end._arrives_at = max(end._arrives_at, start + self._delay_s() + end.lag_s)
        self._schedule(end._arrives_at - now, arrive, what)

    def _reach(self, far: End) -> None:
        if not far.is_open:
            return
        if self._acceptor is None:
            self._backlog.append(far)
        else:
            far.adopt(self._acceptor)
