"""One step of one worker at the servers: pushes, then StepEnd, then (in two phases) Commit.

Keeps everything until it is acknowledged, and can send all of it again in
another view, cut anew over whoever holds the slots by then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from shoal.errors import LinkLost
from shoal.ps.client.pulls import split
from shoal.ps.client.server_group import Group, memory_of
from shoal.runtime.transport.arena import Buffer
from shoal.runtime.transport.messages.client_server import (
    Commit,
    Committed,
    PushDense,
    PushRows,
    StepEnd,
    Summed,
)
from shoal.runtime.transport.shared_client import Link

NUM_SLOTS = 256


@dataclass(slots=True)
class Decision:
    """The outcome of a summed step: the same on every rank."""

    factor: float
    apply: bool
    norm: float = 0.0


@dataclass(slots=True)
class _Rows:
    table: int
    keys: NDArray[np.int64]
    values: NDArray[Any]


@dataclass(slots=True)
class _Dense:
    chunk: int
    slot: int
    values: memoryview
    unused: list[int]
    frame: Buffer
    link: Link


@dataclass(slots=True)
class PushStep:
    """An operation that grows while backward runs: `push_*` sends at once, `end` makes it whole."""

    group: Group
    stream: int
    seq: int
    decide: Callable[[NDArray[np.float64], float], Decision] | None = None
    """In two phases: what follows from the vectors' sum and the gradient's norm, of which the square was summed."""

    wants_norm: bool = False
    sent_in: int = 0
    vector: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """The vectors' sum, once committed."""

    decision: Decision | None = None
    committed: Committed | None = None
    """Answer of the server with the fewest updates."""

    is_new: bool = True
    """True where it counts by this push, and not by one before it; relaxed strategies. The owner of slot 0 decides."""

    was_sent_again: bool = False
    """Then a push before it may have been this one."""

    num_updates: int = 0
    """As many as any server has made by then: each counts them all, in its own order; relaxed strategies."""

    is_late: bool = False
    """True where a server had ended the step before this push came; strategies that do not wait for all."""

    _rows: list[_Rows] = field(default_factory=list)
    _dense: list[_Dense] = field(default_factory=list)
    _end: StepEnd | None = None
    _frames: tuple[bytes, bytes] = (b"", b"")
    _pushed: dict[int, int] = field(default_factory=dict)  # server -> pushes sent in this view
    _tickets: dict[int, int] = field(default_factory=dict)
    _into: dict[int, list[Buffer]] = field(default_factory=dict)
    _held: list[tuple[Link, Buffer]] = field(default_factory=list)
    _is_broken: bool = False

    # ---- while backward runs --------------------------------------------------------------------

    def push_rows(self, table: int, keys: NDArray[np.int64], values: NDArray[Any]) -> None:
        """Gradients of rows; keys strictly increasing. Both must stay as they are until the step is committed."""
        rows = _Rows(table, keys, values)
        self._rows.append(rows)
        self._now(lambda: self._send_rows(rows))

    def chunk_memory(self, chunk: int, slot: int, nbytes: int) -> memoryview:
        """Memory for a chunk's gradient, to be written before `push_dense`."""
        link = self.group.link(self.group.owner(slot))
        frame = self._alloc(link, nbytes)
        self._dense.append(_Dense(chunk, slot, frame.view, [], frame, link))
        return frame.view

    def push_dense(self, chunk: int, unused: list[int]) -> None:
        """The chunk's gradient is written."""
        dense = next(each for each in reversed(self._dense) if each.chunk == chunk)
        dense.unused = unused
        self._now(lambda: self._send_dense(dense))

    def end(self, vector: NDArray[np.float64], note: bytes, *, rank: int, **others: Any) -> None:
        """All is pushed; `others` are fields of StepEnd. View and number of pushes are filled in for each server."""
        fields = {"exchange": 0, "anchored_at": 0, **others}
        self._end = StepEnd(view=0, stream=self.stream, seq=self.seq, rank=rank, num_pushes=0, **fields)
        self._frames = (vector.tobytes(), note)
        self._now(self._send_end)

    # ---- an operation ---------------------------------------------------------------------------

    def send(self, group: Group) -> None:
        """All of it again, in the present view."""
        self._is_broken = False
        self.was_sent_again = True
        self._pushed, self._tickets = {}, {}
        for rows in self._rows:
            self._send_rows(rows)
        for dense in self._dense:
            self._send_dense(dense)
        if self._end is not None:
            self._send_end()

    def receive(self, group: Group) -> None:
        """Wait until it counts everywhere."""
        if self._is_broken or not self._tickets:
            self.send(group)
        answers = {server: group.wait(server, ticket)[0] for server, ticket in self._tickets.items()}
        summed = [server for server, answer in answers.items() if isinstance(answer, Summed)]
        if summed:
            # A server that answers Committed at once was through with the step in an earlier view.
            if self.decision is None:
                assert self.decide is not None
                norm = self._norm(list(answers)) if self.wants_norm else 0.0
                self.decision = self.decide(self._vector_of(summed[0]), norm)
            decision = self.decision
            commit = Commit(group.view, self.seq, decision.factor, decision.apply, decision.norm)
            tickets = {server: group.send(server, commit, [], self._into[server][:1]) for server in summed}
            for server, ticket in tickets.items():
                answers[server] = group.wait(server, ticket)[0]
        done = [answer for answer in answers.values() if isinstance(answer, Committed)]
        assert len(done) == len(answers), answers
        self.committed = min(done, key=lambda answer: answer.updates)
        holder = answers.get(group.owner(0))
        self.is_new = holder.is_new if isinstance(holder, Committed) else True
        self.is_late = any(answer.late for answer in done)
        self.num_updates = max(answer.updates for answer in done)
        self.vector = self._vector_of(min(answers))

    def release(self) -> None:
        """Give the memory back: it is acknowledged."""
        for link, buffer in self._held:
            link.free(buffer)
        self._held, self._rows, self._dense, self._into = [], [], [], {}

    # ---- sending --------------------------------------------------------------------------------

    def _now(self, act: Callable[[], None]) -> None:
        """Do it now where the view is still good; where not, `send` does all of it later."""
        if self._is_broken:
            return
        try:
            act()
            self.sent_in = self.group.view
        except LinkLost:
            self._is_broken, self.sent_in = True, 0

    def _send_rows(self, rows: _Rows) -> None:
        group = self.group
        message = PushRows(group.view, self.stream, self.seq, rows.table)
        parts = (
            [(group.servers[0], slice(None))]
            if len(group.servers) == 1
            else split(rows.table, rows.keys, group)
        )
        for server, places in parts:
            link = group.link(server)
            frames = [self._copied(link, rows.keys[places]), self._copied(link, rows.values[places])]
            self._push(server, message, frames)

    def _send_dense(self, dense: _Dense) -> None:
        group = self.group
        server = group.owner(dense.slot)
        link = group.link(server)
        if dense.link is not link:
            frame = self._alloc(link, len(dense.values))
            frame.view[:] = dense.values
            dense.frame, dense.values, dense.link = frame, frame.view, link
        message = PushDense(group.view, self.stream, self.seq, dense.chunk, dense.unused)
        self._push(server, message, [dense.frame])

    def _push(self, server: int, message: PushRows | PushDense, frames: list[Buffer]) -> None:
        self.group.push(server, message, frames)
        self._pushed[server] = self._pushed.get(server, 0) + 1

    def _send_end(self) -> None:
        assert self._end is not None
        group, vector, note = self.group, *self._frames
        for server in group.servers:
            message = msgspec.structs.replace(
                self._end, view=group.view, num_pushes=self._pushed.get(server, 0)
            )
            link = group.link(server)
            into = [self._alloc(link, len(vector) + 16), self._alloc(link, NUM_SLOTS * 8)]
            self._into[server] = into
            frames = [vector, note if server == group.owner(0) else b""]
            self._tickets[server] = group.send(server, message, frames, into)

    def _vector_of(self, server: int) -> NDArray[np.float64]:
        return np.frombuffer(bytes(self._into[server][0].view), np.float64)

    def _norm(self, servers: list[int]) -> float:
        # By slot, then in the order of the slots: whoever holds them, the sum has the same bits.
        squares = np.zeros(NUM_SLOTS)
        for server in servers:
            squares += np.frombuffer(bytes(self._into[server][1].view), np.float64)
        total = 0.0
        for square in squares.tolist():
            total += square
        return float(np.sqrt(total))

    def _copied(self, link: Link, array: NDArray[Any]) -> Buffer:
        buffer = self._alloc(link, array.nbytes)
        buffer.view[:] = memory_of(array)
        return buffer

    def _alloc(self, link: Link, nbytes: int) -> Buffer:
        buffer = link.alloc(nbytes)
        self._held.append((link, buffer))
        return buffer
