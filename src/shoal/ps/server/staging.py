"""What was pushed and does not count yet: references into the memory of those who pushed it.

Nothing is copied, so a server's memory does not grow with what is staged.
Whatever has no StepEnd goes with the connection on which it came; what has
one stays, because others may rely on it by then.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from shoal.ps.server.contents import Keys, Refusal, Values, Vector
from shoal.runtime.transport.messages.client_server import PushDense, PushRows, StepEnd

MAX_NAMES = 16
"""Names under which one connection may have pushed without a StepEnd: a client works on one step, or a few."""


@dataclass(slots=True)
class Staged:
    """What one name holds so far."""

    rows: dict[int, tuple[Keys, Values]] = field(default_factory=dict)
    dense: dict[int, tuple[Tensor, tuple[int, ...]]] = field(default_factory=dict)

    @property
    def num_pushes(self) -> int:
        """Tables and chunks pushed."""
        return len(self.rows) + len(self.dense)


@dataclass(slots=True)
class Contribution:
    """A whole push: what was staged, and its StepEnd."""

    end: StepEnd
    vector: Vector
    note: bytes
    staged: Staged

    def copy(self) -> Contribution:
        """In memory of the server's own; wishes are not repeated."""
        vector = self.vector.copy()
        vector[1:4] = 0.0
        staged = Staged(
            {table: (keys.copy(), values.copy()) for table, (keys, values) in self.staged.rows.items()},
            {chunk: (gradient.clone(), unused) for chunk, (gradient, unused) in self.staged.dense.items()},
        )
        return Contribution(self.end, vector, b"", staged)


class Staging:
    """Pushes by connection and name."""

    def __init__(self) -> None:
        self._by_peer: dict[int, dict[tuple[int, int], Staged]] = {}

    def rows(self, peer: int, message: PushRows, keys: Keys, values: Values) -> None:
        """Keep a reference; of a repeat the first counts."""
        self._named(peer, message.stream, message.seq).rows.setdefault(message.table, (keys, values))

    def dense(self, peer: int, message: PushDense, gradient: Tensor) -> None:
        """Keep a reference; of a repeat the first counts."""
        staged = self._named(peer, message.stream, message.seq)
        staged.dense.setdefault(message.chunk, (gradient, tuple(message.unused)))

    def take(self, peer: int, end: StepEnd) -> Staged:
        """All that was pushed under the name of a StepEnd; refused where something is missing."""
        names = self._by_peer.get(peer, {})
        staged = names.pop((end.stream, end.seq), None) or Staged()
        if staged.num_pushes != end.num_pushes:
            raise Refusal(
                f"step end ({end.stream}, {end.seq}) speaks of {end.num_pushes} pushes, {staged.num_pushes} are here: tables "
                f"{sorted(staged.rows)} and {len(staged.dense)} chunks. None of them counts; push the step again"
            )
        return staged

    def forget_name(self, peer: int, stream: int, seq: int) -> None:
        """It counts already, or the first of its kind does."""
        self._by_peer.get(peer, {}).pop((stream, seq), None)

    def forget(self, peer: int) -> None:
        """The connection is over."""
        self._by_peer.pop(peer, None)

    def forget_all(self) -> None:
        """The view is over."""
        self._by_peer.clear()

    @property
    def num_staged(self) -> int:
        """Pushes without a StepEnd, over all connections."""
        return sum(staged.num_pushes for names in self._by_peer.values() for staged in names.values())

    def _named(self, peer: int, stream: int, seq: int) -> Staged:
        names = self._by_peer.setdefault(peer, {})
        if (stream, seq) not in names and len(names) >= MAX_NAMES:
            raise Refusal(
                f"this connection has pushed under {MAX_NAMES} names without a StepEnd, ({stream}, {seq}) would be one more"
            )
        return names.setdefault((stream, seq), Staged())


def read_vector(frame: bytes | memoryview, *, at_least: int) -> Vector:
    """The vector of a StepEnd, copied: it is small, and kept."""
    num_bytes = memoryview(frame).nbytes
    if num_bytes % 8 or num_bytes < at_least * 8:
        raise Refusal(f"a step's vector has at least {at_least} float64, got {num_bytes} bytes")
    return np.frombuffer(frame, dtype=np.float64).copy()
