"""Servers of one job in one process, for clients of `shoal.ps`: real cores, made-up connections, any order, deaths.

Whatever is on its way arrives in the order in which it was sent over one
connection; between connections a seed decides. Memory that a client gave back
is overwritten, so whoever still reads it is found.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Any

from shoal.errors import LinkLost
from shoal.ps.server.actions import Action, DropPeer, Reply, Request, Send
from shoal.ps.server.core import ServerCore
from shoal.runtime.transport.arena import Buffer
from shoal.runtime.transport.messages.client_server import Hello
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.server_coordinator import ServerView
from shoal.runtime.transport.shared_client import LinkReply

NUM_SERVERS = 3


class World:
    """Three servers, two copies of every slot."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.cores = {number: ServerCore(number) for number in range(NUM_SERVERS)}
        self.kills: dict[int, int] = {}
        """By turn: the server that dies then."""
        self.turn = 0
        self._peers: dict[int, Link | int] = {}
        self._on_the_way: dict[Any, deque[Any]] = {}
        self._holders = [[slot % 3, (slot + 1) % 3] for slot in range(256)]
        self._connected: set[tuple[int, int]] = set()
        self._next_view()
        while self.step():
            pass

    def ask_view(self, after: int, timeout_s: float) -> ServerView:
        assert self.view.view > after, "somebody waits for a view, and nobody died"
        return self.view

    def step(self) -> bool:
        """One thing happens; False where there is nothing more to happen."""
        self.turn += 1
        if (dies := self.kills.pop(self.turn, None)) is not None:
            self._kill(dies)
            return True
        waiting = [key for key in sorted(self._on_the_way, key=str) if self._on_the_way[key]]
        copying = [number for number, core in self.cores.items() if core.replication.next_copy is not None]
        if copying and (not waiting or self.random.random() < 0.2):
            number = self.random.choice(copying)
            self._act(number, self.cores[number].work()[0])
            return True
        if not waiting:
            return False
        key = self.random.choice(waiting)
        match key:
            case ("view", number):
                self._act(number, self.cores[number].view(self._on_the_way[key].popleft()))
            case ("server", source, number):
                ticket, message, frames = self._on_the_way[key].popleft()
                self._hear(number, -1 - source, ticket, message, frames)
            case ("client", number, peer):
                ticket, message, frames, into = self._on_the_way[key].popleft()
                self._hear(number, peer, ticket, message, frames, into)
        return True

    def connect(self, link: Link, number: int) -> int:
        """A client's connection; its number."""
        peer = len(self._peers) + 1
        self._peers[peer] = link
        self._on_the_way["client", number, peer] = deque()
        return peer

    def send(self, number: int, peer: int, *request: Any) -> None:
        self._on_the_way["client", number, peer].append(request)

    def abandon(self, link: Link) -> None:
        """The client died; of what is on its way some arrives."""
        key = ("client", link.number, link.peer_number)
        left = self._on_the_way[key]
        while left and self.random.random() < 0.8:
            self._hear(link.number, link.peer_number, *left.popleft())
        left.clear()
        link.is_lost = True
        if link.number in self.cores:
            self._act(link.number, self.cores[link.number].gone(link.peer_number))

    # ---- inside ---------------------------------------------------------------------------------

    def _hear(
        self,
        number: int,
        peer: int,
        ticket: int,
        message: Message,
        frames: Sequence[memoryview],
        into: Sequence[memoryview] = (),
    ) -> None:
        if number in self.cores:
            request = Request(peer, ticket, message, list(frames), list(into))
            self._act(number, self.cores[number].hear(request))

    def _act(self, number: int, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Reply(peer, ticket, message, frames) if peer < 0:
                    source = -1 - peer
                    if source in self.cores and ticket:
                        self._act(source, self.cores[source].answered(number, message))
                case Reply(peer, ticket, message, frames):
                    link = self._peers[peer]
                    assert isinstance(link, Link)
                    link.arrived(ticket, message, [memoryview(bytes(frame)) for frame in frames])
                case Send(other, message, frames) if other in self.cores:
                    line = self._on_the_way.setdefault(("server", number, other), deque())
                    if (number, other) not in self._connected:
                        self._connected.add((number, other))
                        line.append((0, Hello(f"server-{number}", 0), []))
                    line.append((1, message, [memoryview(frame).cast("B") for frame in frames]))
                case DropPeer(peer):
                    link = self._peers[peer]
                    assert isinstance(link, Link)
                    link.is_lost = True

    def _kill(self, dead: int) -> None:
        del self.cores[dead]
        for key, line in self._on_the_way.items():
            if key[0] == "server" and key[1] == dead:  # of what it said to others some arrives
                while line and self.random.random() < 0.5:
                    line.pop()
            elif key[1] == dead or (key[0] == "server" and key[2] == dead):
                line.clear()
        for link in self._peers.values():
            if isinstance(link, Link) and link.number == dead:
                link.is_lost = True
        for number, core in self.cores.items():
            self._act(number, core.lost(dead))
        self._holders = [[each for each in holders if each != dead] for holders in self._holders]
        self._next_view()

    def _next_view(self) -> None:
        number = self.view.view + 1 if hasattr(self, "view") else 1
        self.view = ServerView(number, self._holders, dict.fromkeys(self.cores, 0))
        for server in self.cores:
            self._on_the_way.setdefault(("view", server), deque()).append(self.view)


class Link:
    """In place of shoal.runtime.transport.shared_client.Link."""

    world: World
    is_remote = False

    def __init__(self, number: int) -> None:
        self.number, self.is_lost = number, False
        self.unasked: list[LinkReply] = []
        self._wanted: set[int] = set()
        self._answers: dict[int, tuple[Message, list[memoryview]]] = {}
        self._held: list[Any] = []
        self._ticket = 0
        self.in_use: set[Buffer] = set()
        self.peer_number = self.world.connect(self, number)

    @classmethod
    def connect(cls, path: str, hello: Hello, timeout_s: float, peer: str = "", arena: object = None) -> Link:
        link = cls(int(path))
        link.wait(link.send(hello), timeout_s)
        return link

    def alloc(self, nbytes: int) -> Buffer:
        buffer = Buffer(memoryview(bytearray(nbytes)), 1, 0, nbytes, None)  # type: ignore[arg-type]
        self.in_use.add(buffer)
        return buffer

    def free(self, buffer: Buffer) -> None:
        self.in_use.remove(buffer)
        buffer.view[:] = b"\xa5" * buffer.nbytes

    def send(
        self,
        message: Message,
        frames: Any = (),
        into: Any = (),
        *,
        wants_reply: bool = True,
        is_held: bool = False,
    ) -> int:
        self._check()
        self._ticket += 1
        if wants_reply:
            self._wanted.add(self._ticket)
        views = [frame.view if isinstance(frame, Buffer) else memoryview(frame) for frame in frames]
        self._held.append((self._ticket, message, views, [buffer.view for buffer in into]))
        if not is_held:
            self.flush()
        return self._ticket

    def flush(self) -> None:
        held, self._held = self._held, []
        for request in held:
            if not self.is_lost:
                self.world.send(self.number, self.peer_number, *request)

    def wait(self, ticket: int, timeout_s: float) -> tuple[Message, list[memoryview]]:
        self.flush()
        while ticket not in self._answers:
            self._check()
            assert ticket in self._wanted
            assert self.world.step(), f"server {self.number} never answers request {ticket}"
        return self._answers.pop(ticket)

    def take(self, ticket: int) -> tuple[Message, list[memoryview]] | None:
        for _ in range(self.world.random.randrange(4)):
            self.world.step()
        if ticket not in self._answers:
            self._check()
        return self._answers.pop(ticket, None)

    def arrived(self, ticket: int, message: Message, frames: list[memoryview]) -> None:
        if self.is_lost:
            return
        if ticket in self._wanted:
            self._answers[ticket] = (message, frames)
        else:
            self.unasked.append(LinkReply(ticket, message, frames))

    def close(self) -> None:
        self.is_lost = True

    def _check(self) -> None:
        if self.is_lost or self.number not in self.world.cores:
            self.is_lost = True
            raise LinkLost(peer=f"server-{self.number}", reason="it died")
