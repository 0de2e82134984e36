"""Steps and exchanges on a server: staged pushes, contributions and their sum, push filters, the mailbox.

Exact steps wait for every rank. `drop` and `stale` do not wait for the slowest few; `stale` reuses
the last contribution of a missing rank once. Sums are always in rank order, never in order of
arrival.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from shoal.cluster.coordinator.slot_map import NUM_SLOTS
from shoal.ps.server.actions import Frame
from shoal.ps.server.contents import Contents, Keys, Refusal, Update, Values, restrict
from shoal.ps.server.progress import Slots, Vector
from shoal.ps.server.replication import LastStep, MailboxState
from shoal.runtime.transport.framing import pack, unpack
from shoal.runtime.transport.messages.client_server import DeclareMode, Post, PushDense, PushRows, StepEnd

# ---- staging -------------------------------------------------------------------------------------


MAX_NAMES = 16
"""Names under which one connection may have pushed without a StepEnd: a client works on one step, or a few."""


@dataclass(slots=True)
class Staged:
    """Pushes of one (stream, seq) so far."""

    rows: dict[int, tuple[Keys, Values]] = field(default_factory=dict)
    dense: dict[int, tuple[Tensor, tuple[int, ...]]] = field(default_factory=dict)
    # Whole rows by table and first key, for a table may come in several pieces: keys, values and state.
    whole: dict[tuple[int, int | None], tuple[Keys, Values]] = field(default_factory=dict)

    @property
    def num_pushes(self) -> int:
        return len(self.rows) + len(self.dense) + len(self.whole)


@dataclass(slots=True)
class Contribution:
    """A whole push: what was staged, and its StepEnd."""

    end: StepEnd
    vector: Vector
    note: bytes
    staged: Staged

    def copy(self) -> Contribution:
        """A copy in the server's own memory, without control flags: they count once."""
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
        staged = self._named(peer, message.stream, message.seq)
        if message.is_whole:
            first = int(keys[0]) if len(keys) else None
            staged.whole.setdefault((message.table, first), (keys, values))
        else:
            staged.rows.setdefault(message.table, (keys, values))

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
        self._by_peer.get(peer, {}).pop((stream, seq), None)

    def forget(self, peer: int) -> None:
        self._by_peer.pop(peer, None)

    def forget_all(self) -> None:
        self._by_peer.clear()

    @property
    def num_staged(self) -> int:
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


# ---- summing -------------------------------------------------------------------------------------


COUNT, LOSSES = 0, 4
"""Places of the count and of the first rank's loss in a step's vector; see parallel/step.py."""

PARTIAL_MODES = ("drop", "stale")
"""Kinds of steps that do not wait for all ranks. The marks of a slot tell whose contributions are in it."""


@dataclass(slots=True)
class Sum:
    """A step whose contributions are all here."""

    seq: int
    update: Update
    vector: Vector
    squares: Vector  # by slot; zero if another server holds it, or if no norm is needed
    contributions: dict[int, Contribution]
    num_global: float

    def decide(self, num_workers: int) -> tuple[float, bool]:
        """Factor of the gradients in a step without a second phase, and whether they are applied at all."""
        count = float(self.vector[COUNT])
        losses = self.vector[LOSSES : LOSSES + num_workers]
        # Backward divided by samples. The real counts were sent with the losses.
        factor = self.num_global / count if count else 0.0
        return factor, bool(np.isfinite(losses).all() and np.isfinite(count))


@dataclass
class Steps:
    """The step under way, and the last one."""

    mode: DeclareMode
    # By rank: contributions whose StepEnd is here.
    ended: dict[int, Contribution] = field(default_factory=dict)
    summed: Sum | None = None
    last: LastStep | None = None
    # Of the last step, by slot, where this server has it.
    squares: Vector = field(default_factory=lambda: np.zeros(NUM_SLOTS))
    num_late: int = 0
    num_reused: int = 0
    _kept: dict[int, Contribution] = field(default_factory=dict)

    @property
    def waits_for(self) -> int:
        spared = self.mode.bound if self.mode.kind in PARTIAL_MODES else 0
        return max(self.mode.num_workers - spared, 1)

    @property
    def is_full(self) -> bool:
        """All required contributions are in, and not summed yet."""
        return self.summed is None and len(self.ended) >= self.waits_for

    def missing_ranks(self) -> list[int]:
        return [rank for rank in range(self.mode.num_workers) if rank not in self.ended]

    @staticmethod
    def order(parts: dict[int, Contribution]) -> list[int]:
        return sorted(parts)

    def forget(self) -> None:
        self.ended, self.summed = {}, None

    def forget_kept(self) -> None:
        """The view is over: kept data of the last steps lacks slots received since."""
        self._kept = {}

    def reused(self) -> dict[int, Contribution]:
        """Kept contributions that stand in for missing ranks; those of this step are kept for the next."""
        if self.mode.kind != "stale":
            return {}
        reused = {rank: kept for rank, kept in self._kept.items() if rank not in self.ended}
        self.num_reused += len(reused)
        finite = {rank: part for rank, part in self.ended.items() if np.isfinite(part.vector).all()}
        # Once only: a rank that is away for long would otherwise steer every step with its old gradient.
        self._kept = {rank: part.copy() for rank, part in finite.items()}
        return reused

    def sum(
        self,
        contents: Contents,
        slots: Slots,
        *,
        mine: Slots,
        step: int,
        parts: dict[int, Contribution] | None = None,
    ) -> Sum:
        """Add what was contributed to these slots, all or some of `mine`, in rank order; `parts`: of these ranks."""
        parts = self.ended if parts is None else parts
        ranks = self.order(parts)
        first = parts[ranks[0]]
        vector = first.vector.copy()
        for rank in ranks[1:]:
            vector += parts[rank].vector
        fresh = {rank: part for rank, part in parts.items() if self.ended.get(rank) is part}
        # Not from a reused contribution: its settings were those of its own step.
        end = fresh[min(fresh)].end
        update = Update(
            slots,
            step=step,
            settings=end.settings,
            table_settings=end.table_settings,
            model=end.model,
            whole_after=end.whole_after,
        )
        squares = np.zeros(NUM_SLOTS)
        only = None if (slots == mine).all() else slots
        for rank in ranks:  # one, where there are any
            for (number, _), piece in parts[rank].staged.whole.items():
                update.whole.append((number, *_inside(contents, number, piece, only)))
        for number in sorted({table for part in parts.values() for table in part.staged.rows}):
            table = contents.tables[number]
            for rank in ranks:
                rows = parts[rank].staged.rows.get(number)
                if rows is not None:
                    table.accumulate(*_inside(contents, number, rows, only))
            if self.mode.wants_norm:
                table.sum_of_squares(squares)
            update.rows[number] = table.take_sum()
        for number in contents.chunks_of(slots):
            pushed = [
                parts[rank].staged.dense[number] for rank in ranks if number in parts[rank].staged.dense
            ]
            if pushed:
                # A part is without gradient only if it is on every rank.
                unused = set.intersection(*(set(without) for _, without in pushed))
                total = contents.dense.summed(number, [gradient for gradient, _ in pushed])
                update.dense[number] = (total, tuple(sorted(unused)))
        if self.mode.wants_norm:
            contents.squares(update, squares)
            squares[~slots] = self.squares[~slots]  # of slots that have this step since before a failover
        seq = max(part.end.seq for part in fresh.values())
        return Sum(seq, update, vector, squares, fresh, end.factor)


def _inside(
    contents: Contents, number: int, rows: tuple[Keys, Values], slots: Slots | None
) -> tuple[Keys, Values]:
    if slots is None:
        return rows
    everywhere = np.ones(NUM_SLOTS, np.bool_)
    return restrict(Update(everywhere, rows={number: rows}), slots, contents.chunks).rows[number]


@dataclass(frozen=True, slots=True, kw_only=True)
class PushFilters:
    """Options of ssp, async and hybrid: see `shoal.config.parallel_options`."""

    # Longer gradients are scaled down to this norm, as far as they lie on this server; None: no bound.
    norm_bound: float | None = None
    # The learning rate is divided by 1 + staleness, the updates of others since the worker's last pull.
    divides_by_staleness: bool = False

    def factor(self, staged: Staged, contents: Contents, *, factor: float, staleness: int) -> float:
        """The factor of a push whose own is `factor`; 0.0 leaves it out, where its norm is not finite."""
        if not all(contents.table(number).rule.takes_gradients for number in staged.rows):
            return factor
        if self.norm_bound is not None:
            norm = abs(factor) * _norm(staged, contents)
            if not math.isfinite(norm):
                return 0.0
            if norm > self.norm_bound:
                factor *= self.norm_bound / norm
        return factor / (1 + staleness) if self.divides_by_staleness else factor


def _norm(staged: Staged, contents: Contents) -> float:
    squares = [float(np.square(values, dtype=np.float64).sum()) for _, values in staged.rows.values()]
    squares += [
        contents.dense.sum_of_squares(chunk, gradient) for chunk, (gradient, _) in staged.dense.items()
    ]
    return math.sqrt(sum(squares))


@dataclass(frozen=True, slots=True)
class Result:
    """Result of an exchange: all contributions packed, or for a commit the vectors' sum."""

    is_commit: bool
    frame: bytes


@dataclass(slots=True)
class _Open:
    contributions: dict[int, bytes]
    notes: dict[int, tuple[int, bytes]]


class Mailbox:
    """Exchanges, their results, and notes by rank."""

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}
        self.log: dict[int, Result] = {}
        # By rank: the first exchange after the note, and the note.
        self.notes: dict[int, tuple[int, bytes]] = {}

    def post(self, message: Post, frame: Frame, note: Frame, *, num_workers: int) -> bool:
        """A rank's contribution; of a repeat the first counts. True: all have posted now."""
        exchange, rank = message.exchange, message.rank
        if self.log and exchange < max(self.log):
            raise Refusal(
                f"exchange {exchange} is over and forgotten, the newest is {max(self.log)}: rank {rank} has made other "
                "calls than the others"
            )
        entry = self._open.setdefault(exchange, _Open({}, {}))
        entry.contributions.setdefault(rank, bytes(frame))
        entry.notes.setdefault(rank, (message.anchored_at, bytes(note)))
        return len(entry.contributions) == num_workers

    def close(self, exchange: int) -> tuple[Result, dict[int, tuple[int, bytes]]]:
        entry = self._open.pop(exchange)
        frames = [entry.contributions[rank] for rank in sorted(entry.contributions)]
        return Result(False, pack(frames)), entry.notes

    def finish(
        self,
        exchange: int | None,
        result: Result | None,
        notes: dict[int, tuple[int, bytes]],
        num_workers: int,
    ) -> None:
        """An exchange is over (None: only notes came), here or on the primary."""
        self.notes.update({rank: note for rank, note in notes.items() if note[1]})
        if exchange is None or result is None:
            return
        self.log[exchange] = result
        if len(self.notes) == num_workers:
            oldest = min(anchored_at for anchored_at, _ in self.notes.values())
            # One more than needed: a rank that waits for the last result may ask again after all others
            # went on.
            for number in [number for number in self.log if number < oldest - 1]:
                del self.log[number]

    def contributions(self, exchange: int) -> list[bytes]:
        result = self.log[exchange]
        if result.is_commit:
            raise Refusal(f"exchange {exchange} was the commit of a step, and nothing was posted to it")
        return unpack(result.frame)

    def since(self, rank: int) -> tuple[int, bytes, list[int]]:
        """The note from which a replacement of this rank resumes, and the exchanges to replay after it."""
        anchored_at, note = self.notes.get(rank, (0, b""))
        return anchored_at, note, [number for number in sorted(self.log) if number >= anchored_at]

    def forget_open(self) -> None:
        self._open.clear()

    def waiting_for(self, exchange: int, num_workers: int) -> list[int]:
        entry = self._open.get(exchange)
        return [rank for rank in range(num_workers) if entry is None or rank not in entry.contributions]

    # ---- between servers ------------------------------------------------------------------------

    def state(self) -> tuple[MailboxState, list[bytes]]:
        """All of it; frames: results, then notes."""
        numbers, ranks = sorted(self.log), sorted(self.notes)
        frames = [self.log[number].frame for number in numbers] + [self.notes[rank][1] for rank in ranks]
        return (
            MailboxState(
                log=[(number, self.log[number].is_commit) for number in numbers],
                notes=[(rank, self.notes[rank][0]) for rank in ranks],
            ),
            frames,
        )

    def restore(self, state: MailboxState, frames: list[Frame]) -> None:
        texts = [bytes(frame) for frame in frames]
        self.log = {number: Result(is_commit, texts[at]) for at, (number, is_commit) in enumerate(state.log)}
        offset = len(state.log)
        self.notes = {
            rank: (anchored_at, texts[offset + at]) for at, (rank, anchored_at) in enumerate(state.notes)
        }
        self._open.clear()
