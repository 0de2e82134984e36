"""Connections to servers in virtual time: in order within one, in any order between them, lost when cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from shoal.ps.server.actions import Request
from shoal.runtime.transport.messages.message import Message
from simulation.world import Process

if TYPE_CHECKING:
    from simulation.ps_cluster import SimServer, Simulated


class Asker(Protocol):
    """Who made a connection."""

    process: Process

    def answered(
        self, connection: Connection, ticket: int, message: Message, frames: list[bytes]
    ) -> None: ...

    def lost(self, connection: Connection) -> None: ...


class Connection:
    """From a client or a server to a server."""

    def __init__(self, job: Simulated, asker: Asker, server: SimServer) -> None:
        job.num_connections += 1
        self.job, self.asker, self.server, self.peer = job, asker, server, job.num_connections
        self.is_open = True
        self._ticket = 0
        self._next = [0.0, 0.0]  # nothing overtakes on one connection
        job.connections.append(self)
        server.peers[self.peer] = self

    def ask(self, message: Message, frames: Sequence[Any] = (), into: Sequence[bytearray] = ()) -> int:
        self._ticket += 1
        request = Request(
            self.peer,
            self._ticket,
            message,
            [memoryview(frame) for frame in frames],
            [memoryview(buffer) for buffer in into],
        )
        self._later(0, self.server, self._hear, request)
        return self._ticket

    def reply(self, ticket: int, message: Message, frames: list[bytes]) -> None:
        if self.is_open:
            self._later(1, self.asker.process, self._answered, ticket, message, frames)

    def close(self) -> None:
        """Either end closes it, dies, or it is cut: what is under way is lost, both learn of it."""
        if not self.is_open:
            return
        self.is_open = False
        self.job.connections.remove(self)
        self.server.peers.pop(self.peer, None)
        world = self.job.world
        self.server.later(world.between(0.0001, 0.01), self.server.gone, self.peer)
        self.asker.process.later(world.between(0.0001, 0.01), self.asker.lost, self)

    def _later(self, way: int, to: Process, action: Any, *arguments: Any) -> None:
        world = self.job.world
        slow = 0.04 if world.random.random() < 0.05 else 0.002
        at = max(self._next[way], world.now + world.between(0.0001, slow))
        self._next[way] = at
        world.schedule(at - world.now, self._deliver, to, action, arguments)

    def _deliver(self, to: Process, action: Any, arguments: tuple[Any, ...]) -> None:
        if self.is_open:
            to.do(self._if_open, action, arguments)

    def _if_open(self, action: Any, arguments: tuple[Any, ...]) -> None:
        if self.is_open:
            action(*arguments)

    def _hear(self, request: Request) -> None:
        self.server.hear(request)

    def _answered(self, ticket: int, message: Message, frames: list[bytes]) -> None:
        self.asker.answered(self, ticket, message, frames)
