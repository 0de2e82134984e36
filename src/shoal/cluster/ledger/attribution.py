"""Who trained what of the ranges that were leased: the workers' own files and the coordinator's word, put together.

Pure. A life is what a call of the script has from where it begins, or begins
anew from a checkpoint, to where it ends or begins anew again. Within one, a
batch counts by one push, which its worker knows by the servers' answer. A
worker that was killed before it heard is believed where others found its push
to count already, where the range is done, or where a checkpoint has it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.cluster.ledger.entries import RangesTrained, TrainingBegan
from shoal.cluster.ledger.ranges import Range, both, minus, size
from shoal.cluster.ledger.trained_file import Outcome, Trained


class Piece(NamedTuple):
    """One worker's part of an epoch."""

    rank: int
    start: int
    stop: int


@dataclass(slots=True)
class Settled:
    """What became of an epoch within a life."""

    counted: list[Piece] = field(default_factory=list)
    lost: list[Piece] = field(default_factory=list)
    """Pushed, and not in the checkpoint from which the call began anew."""

    num_repeated: int = 0
    """Samples that were computed when they counted already: the result was not used."""


@dataclass(slots=True)
class Life:
    """Of one call whose ranges are leased."""

    launch: int
    began: TrainingBegan
    first: dict[int, int]
    """By rank: the first incarnation that is in it."""

    done: list[RangesTrained] = field(default_factory=list)

    def is_of(self, entry: Trained, last: dict[int, int] | None) -> bool:
        """Whether an entry was made in it; `last` are the last incarnations that were in it, None: all there are."""
        if (entry.launch, entry.call) != (self.launch, self.began.call):
            return False
        is_last = last is None or entry.incarnation <= last.get(entry.rank, entry.incarnation)
        return is_last and entry.incarnation >= self.first.get(entry.rank, 0)


def kept_of(began: TrainingBegan, epoch: int) -> list[Range]:
    """What of an epoch counts where a call begins."""
    stop = began.start if epoch == began.epoch else 0
    if epoch < began.epoch:
        stop = began.num_samples or 1 << 62
    return [(0, stop), *((start, end) for number, start, end in began.kept if number == epoch)]


def settle(
    life: Life,
    entries: Iterable[Trained],
    counted_before: dict[int, list[Range]],
    begins_anew: TrainingBegan | None,
) -> Iterator[tuple[int, Settled]]:
    """By epoch, what came of a life; `begins_anew`: the same call does, from a checkpoint."""
    by_epoch: dict[int, list[Trained]] = defaultdict(list)
    done: dict[int, list[Piece]] = defaultdict(list)
    for entry in entries:
        by_epoch[entry.epoch].append(entry)
    for told in life.done:
        done[told.epoch] += [Piece(told.rank, start, stop) for start, stop in told.ranges]
    for epoch in sorted({*by_epoch, *done}):
        kept = kept_of(begins_anew, epoch) if begins_anew is not None else []
        yield (
            epoch,
            _settle_epoch(
                by_epoch[epoch],
                done[epoch],
                counted_before.get(epoch, []),
                kept,
                is_lost=begins_anew is not None,
            ),
        )


def _settle_epoch(
    entries: list[Trained], done: list[Piece], before: list[Range], kept: list[Range], *, is_lost: bool
) -> Settled:
    found = Settled()
    by_outcome: dict[Outcome, list[Trained]] = defaultdict(list)
    for entry in entries:
        by_outcome[entry.outcome].append(entry)
    not_new = [(each.start, each.stop) for each in by_outcome[Outcome.KNOWN]]
    known = [*not_new, *((piece.start, piece.stop) for piece in done), *kept]
    found.counted = [Piece(each.rank, each.start, each.stop) for each in by_outcome[Outcome.COUNTED]]
    found.num_repeated = size(not_new)
    taken = [*before, *((piece.start, piece.stop) for piece in found.counted)]
    for each in by_outcome[Outcome.PUSHED]:
        own = [(each.start, each.stop)]
        found.num_repeated += size(both(own, taken))
        rest = minus(own, taken)
        counts = both(rest, known)
        found.counted += [Piece(each.rank, *part) for part in counts]
        taken += counts
        if is_lost:
            found.lost += [Piece(each.rank, *part) for part in minus(rest, known)]
            taken += minus(rest, known)
    unknown = minus(((piece.start, piece.stop) for piece in done), taken)
    for piece in (
        done if unknown else []
    ):  # of which nobody has a file: whoever finished it; by two, it is two's
        found.counted += [Piece(piece.rank, *part) for part in both([(piece.start, piece.stop)], unknown)]
    return found
