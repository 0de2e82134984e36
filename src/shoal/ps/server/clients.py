"""Connections to a server, the fencing of replaced incarnations, and requests without an answer yet.

Pure bookkeeping: dropped peers are returned, not closed. A reply that confirms an update waits
until every other holder of the slots has acknowledged what was shipped by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.ps.server.actions import Frame, Request
from shoal.ps.server.contents import Keys, Refusal
from shoal.ps.server.state import ServerState
from shoal.runtime.transport.messages.client_server import PullDense, PullRows
from shoal.runtime.transport.messages.message import Message


class Clients:
    """Peers that said Hello. Of one name only the newest incarnation is accepted."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[str, int]] = {}
        self._ranks: dict[int, int] = {}  # of workers' connections
        self._newest: dict[str, int] = {}

    def __contains__(self, peer: int) -> bool:
        return peer in self._names

    def name(self, peer: int) -> str:
        return self._names[peer][0]

    def rank(self, peer: int) -> int | None:
        """Rank of a worker's connection; None for servers and low-level clients."""
        return self._ranks.get(peer)

    def newest(self, name: str) -> int:
        """Newest incarnation heard of; -1: none."""
        return self._newest.get(name, -1)

    def add(self, peer: int, name: str, incarnation: int) -> None:
        self._names[peer] = (name, incarnation)
        rank = rank_of(name)
        if rank is not None:
            self._ranks[peer] = rank

    def remove(self, peer: int) -> int | None:
        """Forget a closed connection; returns the rank that is thereby unreachable, if any."""
        name, incarnation = self._names.pop(peer, ("", 0))
        self._ranks.pop(peer, None)
        is_last = self._newest.get(name) == incarnation and (name, incarnation) not in self._names.values()
        return rank_of(name) if is_last else None

    def fence(self, name: str, incarnation: int) -> list[int]:
        """Raise the newest incarnation of a name; returns the peers of older ones, which are forgotten."""
        self._newest[name] = newest = max(incarnation, self._newest.get(name, 0))
        old = [peer for peer, (who, which) in self._names.items() if who == name and which < newest]
        for peer in old:
            del self._names[peer]
            self._ranks.pop(peer, None)
        return old


def rank_of(name: str) -> int | None:
    number = name.removeprefix("worker-")
    return int(number) if number != name and number.isascii() and number.isdigit() else None


@dataclass(slots=True)
class PendingReply:
    """A reply that waits for acknowledgements of other servers."""

    need: dict[int, int]
    request: Request
    message: Message
    frames: Sequence[Frame]


@dataclass(slots=True)
class WaitingRequests:
    """All requests without an answer. They end with their view: clients ask again."""

    pulls: list[tuple[Request, Keys | None]] = field(default_factory=list)  # for a clock
    step_ends: list[Request] = field(default_factory=list)  # for the other ranks of a step
    # For a step that is not summed here yet, or never will be.
    commits: list[Request] = field(default_factory=list)
    # For the other ranks of an exchange, by its number.
    posts: dict[int, list[Request]] = field(default_factory=dict)
    replies: list[PendingReply] = field(default_factory=list)  # for other servers
    # For the client that blocks pushes while it reads a checkpoint.
    held: list[Request] = field(default_factory=list)

    def end_all(self) -> list[Request]:
        """Forget all of them; returns those that must be answered."""
        waiting = [request for request, _ in self.pulls] + self.step_ends
        waiting += [request for posts in self.posts.values() for request in posts]
        waiting += [each.request for each in self.replies] + self.commits + self.held
        self.pulls, self.step_ends, self.commits = [], [], []
        self.posts, self.replies, self.held = {}, [], []
        return waiting

    def forget(self, peer: int) -> None:
        """Forget the requests of a closed connection. Held pushes stay: they are checked on release."""
        self.pulls = [pull for pull in self.pulls if pull[0].peer != peer]
        self.step_ends = [request for request in self.step_ends if request.peer != peer]
        self.commits = [request for request in self.commits if request.peer != peer]
        self.replies = [each for each in self.replies if each.request.peer != peer]
        for requests in self.posts.values():
            requests[:] = [request for request in requests if request.peer != peer]

    def missing_ranks(self, peer: int, state: ServerState) -> set[int]:
        """Ranks whose contributions the requests of a peer wait for."""
        steps, mode = state.steps, state.mode
        if steps is None or mode is None:
            return set()
        missing: set[int] = set()
        if any(request.peer == peer for request in (*self.step_ends, *self.commits)):
            missing.update(steps.missing_ranks())
        for exchange, requests in self.posts.items():
            if any(request.peer == peer for request in requests):
                missing.update(state.mailbox.waiting_for(exchange, mode.num_workers))
        for request, _ in self.pulls:
            if request.peer == peer and mode.kind == "ssp":
                assert isinstance(request.message, PullRows | PullDense)
                missing.update(state.clocks.behind(request.message.clock - mode.bound))
            elif request.peer == peer:
                missing.update(steps.missing_ranks())
        return missing


def expect_frames(request: Request, number: int, what: str) -> None:
    if len(request.frames) != number:
        kind = type(request.message).__name__
        raise Refusal(f"{kind} comes with {number} frames ({what}), got {len(request.frames)}")


def check_reply_buffer(request: Request, at: int, num_bytes: int, what: str) -> None:
    found = request.into[at].nbytes if at < len(request.into) else -1
    if found < num_bytes:
        raise Refusal(f"{what} take {num_bytes} bytes, the buffer for them has {max(found, 0)}")
