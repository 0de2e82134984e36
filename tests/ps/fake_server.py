"""A server process whose core keeps arrays and nothing else: `python fake_server.py SPEC NAME=FD ...`."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from shoal.cluster.launch import threads
from shoal.cluster.launch.roles import ServerSpec
from shoal.ps.server import process as server_process
from shoal.ps.server.actions import Action, DropPeer, Reply, Request, Send, Tell
from shoal.runtime.transport.messages.client_server import (
    Committed,
    Declared,
    Hello,
    Post,
    Posted,
    Pulled,
    PullRows,
    PushRows,
    Replicate,
    Replicated,
    Rest,
    Welcome,
)
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.server_coordinator import ServerView, SlotsFilled


class FakeCore:
    """Keeps the newest push. What it heard from the coordinator is what Post tells."""

    ships_at_once = has_pushes = False
    shared_bytes = 0

    def __init__(self, told: ServerSpec) -> None:
        self._told = told
        self._kept: list[bytearray] = []
        self._told_by_coordinator: list[str] = []
        self._view = 0
        self._posts: list[Request] = []
        self._hoard: list[bytearray] = []
        self._num_pieces = 0

    def hear(self, request: Request) -> Iterable[Action]:
        peer, ticket = request.peer, request.ticket
        match request.message:
            case Hello(name):
                yield Reply(peer, ticket, Welcome(name, self._told.incarnation, self._view))
            case PushRows(stream=13):
                yield DropPeer(peer, "thirteen")
            case PushRows():
                self._kept = [bytearray(frame) for frame in request.frames]
                yield Reply(peer, ticket, Committed(seq=1, updates=1, slowest=1))
            case PullRows():
                for into, kept in zip(request.into, self._kept, strict=True):
                    into[:] = kept
                yield Reply(peer, ticket, Pulled(updates=1, slowest=1))
            case Post():  # to be sent to the other server; answered when that has answered
                self._posts.append(request)
                yield Send(1, Replicate(1, len(self._posts), b""), list(map(bytes, request.frames)))
            case Replicate(number=number):
                self._kept = [bytearray(frame) for frame in request.frames]
                yield Reply(peer, ticket, Replicated(number))
            case Rest(rank=num_mib):  # hoard so many MiB
                self._hoard.append(bytearray(b"x") * (num_mib << 20))
                yield Reply(peer, ticket, Declared(is_new=True))

    def gone(self, peer: int) -> Iterable[Action]:
        return ()

    def answered(self, server: int, message: Message) -> Iterable[Action]:
        assert isinstance(message, Replicated)
        request = self._posts[message.number - 1]
        said = ",".join(self._told_by_coordinator).encode()
        return [Reply(request.peer, request.ticket, Posted(exchange=server), [said])]

    def lost(self, server: int) -> Iterable[Action]:
        self._told_by_coordinator.append(f"lost {server}")
        return ()

    def view(self, view: ServerView) -> Iterable[Action]:
        self._view = view.view
        return [Tell(SlotsFilled(view.view, [7]))]

    def rank_joined(self, rank: int, incarnation: int) -> Iterable[Action]:
        self._told_by_coordinator.append(f"joined {rank}.{incarnation}")
        return ()

    def rank_dead(self, rank: int, incarnation: int) -> Iterable[Action]:
        self._told_by_coordinator.append(f"dead {rank}.{incarnation}")
        return ()

    def tick(self) -> Iterable[Action]:
        return ()

    def work(self) -> tuple[Iterable[Action], bool]:
        self._num_pieces += 1
        return (), self._num_pieces < 100


if __name__ == "__main__":
    server_process.make_core = lambda told, device: FakeCore(told)  # type: ignore[assignment,return-value,arg-type]
    threads.use = lambda num_threads: None  # it would import torch: seconds
    named = dict(argument.split("=") for argument in sys.argv[2:])
    sys.exit(server_process.main(bytes.fromhex(sys.argv[1]), {name: int(fd) for name, fd in named.items()}))
