"""A server core with a few clients, for tests: say something, look at what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.ps.server.actions import Action, DropPeer, Reply, Request, Send
from shoal.ps.server.core import ServerCore
from shoal.ps.server.steps import PushFilters
from shoal.runtime.transport.messages.client_server import (
    ChunkSpec,
    DeclareDense,
    DeclareMode,
    DeclareTable,
    DensePart,
    Hello,
    PsRefused,
    PullDense,
    PullRows,
    PushDense,
    PushRows,
    StepEnd,
    TableSpec,
    WriteChunk,
)
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.server_coordinator import ServerView

SPEC = TableSpec(0, "rows", 2, "float32", "sgd", {"lr": 1.0})
DENSE = DeclareDense([ChunkSpec(0, 3, "float32", [DensePart("w", [4], 0, 0)])], "SGD", [{"lr": 0.5}])


class Bench:
    """One server, worker-0 is peer 1, worker-1 peer 2, and so on."""

    def __init__(
        self,
        mode: DeclareMode,
        *,
        filters: PushFilters | None = None,
        spec: TableSpec = SPEC,
        core: ServerCore | None = None,
    ) -> None:
        self.core = core or ServerCore(0, filters=filters)
        self.core.view(ServerView(1, [[0]] * 256, {0: 0}))
        self.ticket = 0
        self.view = 1
        for rank in range(mode.num_workers):
            self.ask(rank + 1, Hello(f"worker-{rank}", 0))
        for message in (DeclareTable(spec), DENSE, mode):
            self.ask(1, message)
        self.ask(1, WriteChunk(1, 0, []), [np.ones(4, np.float32)])

    def ask(
        self, peer: int, message: Message, frames: Sequence[Any] = (), into: Sequence[Any] = ()
    ) -> list[Action]:
        self.ticket += 1
        views = [memoryview(frame if isinstance(frame, bytes) else frame.tobytes()) for frame in frames]
        return self.core.hear(
            Request(peer, self.ticket, message, views, [memoryview(buffer).cast("B") for buffer in into])
        )

    def push(
        self, rank: int, seq: int, value: float, *, stream: int | None = None, peer: int | None = None
    ) -> None:
        stream, peer = rank if stream is None else stream, peer or rank + 1
        rows = np.full((2, 2), value, np.float32)
        assert self.ask(peer, PushRows(self.view, stream, seq, 0), [np.array([1, 5]), rows]) == []
        assert self.ask(peer, PushDense(self.view, stream, seq, 0), [np.full(4, value, np.float32)]) == []

    def end(
        self, rank: int, seq: int, *, stream: int | None = None, peer: int | None = None, **others: Any
    ) -> list[Action]:
        num_workers = self.core.state.num_workers
        vector = others.pop("vector", None)
        if vector is None:
            losses = np.zeros(num_workers)
            losses[rank] = 1.0
            vector = np.array([1.0, 0.0, 0.0, 0.0, *losses])
        end = StepEnd(
            self.view,
            rank if stream is None else stream,
            seq,
            rank,
            others.pop("num_pushes", 2),
            seq,
            seq,
            factor=others.pop("factor", 1.0),
            **others,
        )
        return self.ask(peer or rank + 1, end, [vector, f"note of {rank} at {seq}".encode()])

    def rows(self, clock: int = 0, peer: int = 1) -> list[list[float]] | None:
        out = np.zeros((2, 2), np.float32)
        answers = self.ask(peer, PullRows(self.view, clock, 0), [np.array([1, 5])], [out])
        return out.tolist() if answers else None

    def chunk(self, clock: int = 0) -> list[float] | None:
        out = np.zeros(4, np.float32)
        return out.tolist() if self.ask(1, PullDense(self.view, clock, [0]), [], [out]) else None


def refusal(actions: Sequence[Action]) -> str:
    (reply,) = [action for action in actions if isinstance(action, Reply)]
    assert isinstance(reply.message, PsRefused), reply
    return reply.message.reason


def messages(actions: Sequence[Action]) -> list[Message]:
    return [action.message for action in actions if isinstance(action, Reply | Send)]


def drops(actions: Sequence[Action]) -> list[int]:
    return [action.peer for action in actions if isinstance(action, DropPeer)]
