"""Requests that a server has not answered yet, by what they wait for.

A reply that says "it counts" waits here until every other holder of the slots
has acknowledged what was shipped by then. Nothing here decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.ps.server.actions import Frame, Request
from shoal.ps.server.contents import Keys, Refusal
from shoal.ps.server.state import ServerState
from shoal.runtime.transport.messages.client_server import PullDense, PullRows
from shoal.runtime.transport.messages.message import Message


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

    pulls: list[tuple[Request, Keys | None]] = field(default_factory=list)
    """For a clock."""

    step_ends: list[Request] = field(default_factory=list)
    """For the other ranks of a step."""

    commits: list[Request] = field(default_factory=list)
    """For a step that is not summed here yet, or never will be."""

    posts: dict[int, list[Request]] = field(default_factory=dict)
    """For the other ranks of an exchange, by its number."""

    replies: list[PendingReply] = field(default_factory=list)
    """For other servers."""

    held: list[Request] = field(default_factory=list)
    """For the client that holds pushes back while it reads a checkpoint."""

    def end_all(self) -> list[Request]:
        """Forget all of them; those that must be told so."""
        waiting = [request for request, _ in self.pulls] + self.step_ends
        waiting += [request for posts in self.posts.values() for request in posts]
        waiting += [each.request for each in self.replies] + self.commits + self.held
        self.pulls, self.step_ends, self.commits = [], [], []
        self.posts, self.replies, self.held = {}, [], []
        return waiting

    def forget(self, peer: int) -> None:
        """Forget the requests of a closed connection. Held pushes stay: they are checked when they are let go."""
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
    """Refuse another number of frames."""
    if len(request.frames) != number:
        kind = type(request.message).__name__
        raise Refusal(f"{kind} comes with {number} frames ({what}), got {len(request.frames)}")


def expect_into(request: Request, at: int, num_bytes: int, what: str) -> None:
    """Refuse a buffer that is too small for the answer."""
    found = request.into[at].nbytes if at < len(request.into) else 0
    if found < num_bytes:
        raise Refusal(f"{what} take {num_bytes} bytes, the buffer for them has {found}")
