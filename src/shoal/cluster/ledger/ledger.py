"""Ledger of a run: which worker trained which samples, and whether each sample of an epoch was trained once.

Pure. Journal entries are processed in the order in which they were written, over all launches of a
run. A fit that begins, for example from a checkpoint, voids training by it or a later call beyond
that point: those samples are trained again, and their first results are in no weights.

Leased ranges need attribution, because whichever worker holds the lease pushes their batches. The
workers' own files (`trained_file.py`) and the coordinator's entries are combined per attempt of a
call: from its beginning, or restart from a checkpoint, to its end or next restart. Within an
attempt a batch counts by one push, which its worker knows from the servers' answer. A push of a
worker that was killed before the answer counts if another worker found it applied already, if the
range is done, or if a checkpoint includes it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

from shoal.cluster.ledger.entries import (
    EpochLeased,
    LedgerFact,
    RangesTrained,
    SampleSkipped,
    TrainedStretch,
    TrainingBegan,
    TrainingReached,
)
from shoal.cluster.ledger.trained_file import PushOutcome, Trained

Range: TypeAlias = tuple[int, int]
"""(start, stop), without stop."""


def merged(ranges: Iterable[Range]) -> Iterator[Range]:
    """The same samples in as few ranges as possible, in order."""
    begin = end = None
    for start, stop in sorted(each for each in ranges if each[0] < each[1]):
        if end is None or begin is None:
            begin, end = start, stop
        elif start <= end:
            end = max(end, stop)
        else:
            yield begin, end
            begin, end = start, stop
    if begin is not None and end is not None:
        yield begin, end


def both(some: Iterable[Range], others: Iterable[Range]) -> list[Range]:
    left, right = list(merged(some)), list(merged(others))
    found, i, j = list[Range](), 0, 0
    while i < len(left) and j < len(right):
        start, stop = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < stop:
            found.append((start, stop))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return found


def minus(some: Iterable[Range], others: Iterable[Range]) -> list[Range]:
    """Samples in `some` and not in `others`."""
    found, taken, j = list[Range](), list(merged(others)), 0
    for start, stop in merged(some):
        while j < len(taken) and taken[j][1] <= start:
            j += 1
        k = j
        while k < len(taken) and taken[k][0] < stop:
            if start < taken[k][0]:
                found.append((start, taken[k][0]))
            start, k = taken[k][1], k + 1
        if start < stop:
            found.append((start, stop))
    return found


def size(ranges: Iterable[Range]) -> int:
    """Number of samples, those in two ranges counted twice."""
    return sum(stop - start for start, stop in ranges)


class RankRange(NamedTuple):
    """One worker's part of an epoch."""

    rank: int
    start: int
    stop: int


@dataclass(slots=True)
class SettledEpoch:
    """Result of an epoch within one attempt."""

    counted: list[RankRange] = field(default_factory=list)
    lost: list[RankRange] = field(default_factory=list)
    """Pushed, and not in the checkpoint from which the call restarted."""

    num_repeated: int = 0
    """Samples computed after they counted already: the result was not used."""


@dataclass(slots=True)
class CallAttempt:
    """One attempt of a call whose ranges are leased."""

    launch: int
    began: TrainingBegan
    first: dict[int, int]
    """The first incarnation of each rank that is in it."""

    done: list[RangesTrained] = field(default_factory=list)

    def is_of(self, entry: Trained, last: dict[int, int] | None) -> bool:
        """True for an entry made in this attempt; `last` holds its last incarnations, None: no limit."""
        if (entry.launch, entry.call) != (self.launch, self.began.call):
            return False
        is_last = last is None or entry.incarnation <= last.get(entry.rank, entry.incarnation)
        return is_last and entry.incarnation >= self.first.get(entry.rank, 0)


def kept_of(began: TrainingBegan, epoch: int) -> list[Range]:
    """Ranges of an epoch that count where a call begins."""
    stop = began.start if epoch == began.epoch else 0
    if epoch < began.epoch:
        stop = began.num_samples or 1 << 62
    return [(0, stop), *((start, end) for number, start, end in began.kept if number == epoch)]


def settle(
    life: CallAttempt,
    entries: Iterable[Trained],
    counted_before: dict[int, list[Range]],
    begins_anew: TrainingBegan | None,
) -> Iterator[tuple[int, SettledEpoch]]:
    """Results of an attempt by epoch; `begins_anew`: the call restarts from a checkpoint."""
    by_epoch: dict[int, list[Trained]] = defaultdict(list)
    done: dict[int, list[RankRange]] = defaultdict(list)
    for entry in entries:
        by_epoch[entry.epoch].append(entry)
    for told in life.done:
        done[told.epoch] += [RankRange(told.rank, start, stop) for start, stop in told.ranges]
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
    entries: list[Trained], done: list[RankRange], before: list[Range], kept: list[Range], *, is_lost: bool
) -> SettledEpoch:
    found = SettledEpoch()
    by_outcome: dict[PushOutcome, list[Trained]] = defaultdict(list)
    for entry in entries:
        by_outcome[entry.outcome].append(entry)
    not_new = [(each.start, each.stop) for each in by_outcome[PushOutcome.KNOWN]]
    known = [*not_new, *((piece.start, piece.stop) for piece in done), *kept]
    found.counted = [RankRange(each.rank, each.start, each.stop) for each in by_outcome[PushOutcome.COUNTED]]
    found.num_repeated = size(not_new)
    taken = [*before, *((piece.start, piece.stop) for piece in found.counted)]
    for each in by_outcome[PushOutcome.PUSHED]:
        own = [(each.start, each.stop)]
        found.num_repeated += size(both(own, taken))
        rest = minus(own, taken)
        counts = both(rest, known)
        found.counted += [RankRange(each.rank, *part) for part in counts]
        taken += counts
        if is_lost:
            found.lost += [RankRange(each.rank, *part) for part in minus(rest, known)]
            taken += minus(rest, known)
    unknown = minus(((piece.start, piece.stop) for piece in done), taken)
    # No worker has a record of it: attributed to the one that finished it; if two did, to both.
    for piece in done if unknown else []:
        found.counted += [RankRange(piece.rank, *part) for part in both([(piece.start, piece.stop)], unknown)]
    return found


@dataclass(frozen=True, slots=True)
class RankTotals:
    """Batches and samples of one worker."""

    batches: int = 0
    samples: int = 0

    def __add__(self, other: RankTotals) -> RankTotals:
        return RankTotals(self.batches + other.batches, self.samples + other.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSpan:
    """Samples start..stop-1 of an epoch, trained by one worker or by several together."""

    start: int
    stop: int
    launch: int
    call: int
    num_workers: int
    sharding: str
    by_rank: dict[int, RankTotals]
    """Samples per rank; empty if unknown."""

    batch_size: int = 0

    @property
    def is_accounted_for(self) -> bool:
        return sum(had.samples for had in self.by_rank.values()) == self.stop - self.start

    def cut(self, start: int, stop: int) -> SampleSpan:
        if (start, stop) == (self.start, self.stop):
            return self
        (only,) = self.by_rank if len(self.by_rank) == 1 else (None,)
        # A single worker's part is known; how several together shared a part is not.
        kept = (
            {only: RankTotals(num_batches(start, stop, self.batch_size), stop - start)}
            if only is not None
            else {}
        )
        return replace(self, start=start, stop=stop, by_rank=kept)


def num_batches(start: int, stop: int, batch_size: int) -> int:
    """Batches of a range; 0 where they are of any size."""
    return -(-(stop - start) // batch_size) if batch_size else 0


@dataclass(slots=True)
class Epoch:
    """One pass of one trainer over its data."""

    trainer: int
    data: str
    number: int
    num_samples: int | None
    """That are to be trained; None for a stream."""

    num_left_out: int = 0
    """Samples of an incomplete last batch that the user chose to drop."""

    spans: list[SampleSpan] = field(default_factory=list)
    """Ranges that count, in training order."""

    again: list[SampleSpan] = field(default_factory=list)
    """Ranges trained, lost with a dead job, and trained again."""

    skipped: set[int] = field(default_factory=set)
    """Numbers of samples that were bad and left out."""

    num_samples_twice: int = 0
    """Samples of ranges that two workers were given; the first result counted."""

    num_repeated: int = 0
    """Samples computed after they counted already; the result was dropped."""

    end: int | None = None
    """Its end, once it is over."""

    @property
    def total(self) -> int | None:
        return (
            self.num_samples
            if self.end is None or self.num_samples is None
            else max(self.end, self.num_samples)
        )

    @property
    def reached(self) -> int:
        """Samples that count."""
        return sum(span.stop - span.start for span in self.spans)

    @property
    def missing(self) -> list[Range]:
        """Ranges that no worker has trained, up to where the epoch ended or should end."""
        total = self.total if self.total is not None else self.end or 0
        gaps, at = [], 0
        for start, stop in sorted((span.start, span.stop) for span in self.spans):
            if start > at:
                gaps.append((at, start))
            at = max(at, stop)
        return [*gaps, (at, total)] if at < total else gaps

    @property
    def doubled(self) -> list[Range]:
        """Ranges that count more than once."""
        found, at = [], 0
        for start, stop in sorted((span.start, span.stop) for span in self.spans):
            if start < at:
                found.append((start, min(at, stop)))
            at = max(at, stop)
        return found

    @property
    def is_exact(self) -> bool:
        """True once the epoch is over and every sample was trained exactly once."""
        accounted = all(span.is_accounted_for for span in self.spans)
        return self.end is not None and not self.missing and not self.doubled and accounted

    @property
    def by_rank(self) -> dict[int, RankTotals]:
        return _summed(self.spans)


@dataclass(slots=True)
class Ledger:
    """All epochs of a run."""

    epochs: dict[tuple[int, str, int], Epoch] = field(default_factory=dict)
    replaced: list[tuple[int, int, int]] = field(default_factory=list)
    """(launch, rank, incarnation) of every worker that took another's place."""

    trained: list[Trained] = field(default_factory=list)
    """Records in the workers' own files, over all launches."""

    _began: dict[int, tuple[int, TrainingBegan]] = field(default_factory=dict)  # by call: launch and fact
    _newest: int | None = None  # newest call
    _lives: list[CallAttempt] = field(default_factory=list)  # attempts not settled yet
    _joined: tuple[int, dict[int, int]] = (0, {})  # the launch, and by rank the newest incarnation

    def joined(self, launch: int, rank: int, incarnation: int) -> None:
        if self._joined[0] != launch:
            self._joined = (launch, {})
        if incarnation and self._joined[1].get(rank) != incarnation:
            self.replaced.append((launch, rank, incarnation))
        self._joined[1][rank] = incarnation

    def close(self) -> None:
        for life in self._lives:
            self._settle(life, None, None)
        self._lives.clear()

    def apply(self, launch: int, fact: LedgerFact) -> None:
        match fact:
            case TrainingBegan():
                self._begin(launch, fact)
            case TrainingReached(call=call, epoch=number, stretch=stretch, is_end=is_end):
                epoch = self._epoch(call, number, len(stretch.samples))
                self._reach(epoch, launch, call, stretch)
                if is_end:
                    epoch.end = stretch.stop
            case RangesTrained(call=call, epoch=number):
                self._epoch(call, number, 0)
                life = next((life for life in self._lives if life.began.call == call), None)
                if life is None:
                    life = CallAttempt(launch, self._began[call][1], {})
                    self._lives.append(life)
                life.done.append(fact)
            case EpochLeased(call=call, epoch=number, num_samples_twice=num_twice):
                epoch = self._epoch(call, number, 0)
                epoch.end, epoch.num_samples_twice = epoch.num_samples, epoch.num_samples_twice + num_twice
            case SampleSkipped(epoch=number, index=index):
                if self._newest is not None:
                    self._epoch(self._newest, number, 0).skipped.add(index)

    @property
    def current(self) -> Epoch | None:
        """The epoch that was trained last."""
        trained = [epoch for epoch in self.epochs.values() if epoch.spans]
        return trained[-1] if trained else None

    @property
    def by_rank(self) -> dict[int, RankTotals]:
        """Totals of each worker over everything that counts."""
        return _summed(span for epoch in self.epochs.values() for span in epoch.spans)

    @property
    def by_launch(self) -> dict[int, dict[int, RankTotals]]:
        """The same by launch."""
        spans = sorted(
            (span for epoch in self.epochs.values() for span in epoch.spans), key=lambda span: span.launch
        )
        return {launch: _summed(had) for launch, had in itertools.groupby(spans, lambda span: span.launch)}

    def _begin(self, launch: int, began: TrainingBegan) -> None:
        self._settle_before(launch, began)
        before = self._began.get(began.call)
        for epoch in self.epochs.values():
            self._void(epoch, began)
        self._began[began.call] = (launch, began)
        self._newest = began.call
        if began.is_leased:
            joined = self._joined[1] if self._joined[0] == launch else {}
            self._lives.append(CallAttempt(launch, began, dict(joined)))
        for number, start, stop in began.again:
            self._lose(began.call, number, start, stop, before)
        if began.before is not None and began.before.stop > began.before.start:
            earlier = before[0] if before is not None else launch
            epoch = self._epoch(began.call, began.epoch, 0)
            epoch.spans = [
                span for span in epoch.spans if not began.before.start <= span.start < began.before.stop
            ]
            self._reach(epoch, earlier, began.call, began.before, before[1] if before is not None else None)

    def _settle_before(self, launch: int, began: TrainingBegan) -> None:
        """A call begins: settle the attempts before it."""
        for life in self._lives:
            joined = self._joined[1] if self._joined[0] == launch == life.launch else None
            goes_back = began.call <= life.began.call
            if joined is not None and goes_back:  # by now all workers have been replaced
                joined = {rank: incarnation - 1 for rank, incarnation in joined.items()}
            self._settle(life, joined, began if goes_back else None)
        self._lives.clear()

    def _settle(
        self, life: CallAttempt, last: dict[int, int] | None, begins_anew: TrainingBegan | None
    ) -> None:
        call, began = life.began.call, life.began
        counted: dict[int, list[Range]] = defaultdict(list)
        for epoch in self.epochs.values():
            if (epoch.trainer, epoch.data) == (began.trainer, began.data):
                counted[epoch.number] += [(span.start, span.stop) for span in epoch.spans]
        entries = [each for each in self.trained if life.is_of(each, last)]
        for number, found in settle(life, entries, counted, begins_anew):
            epoch = self._epoch(call, number, 0)
            epoch.spans += [self._piece(life, piece) for piece in found.counted]
            epoch.again += [self._piece(life, piece) for piece in found.lost]
            epoch.num_repeated += found.num_repeated

    def _piece(self, life: CallAttempt, piece: RankRange) -> SampleSpan:
        rank, start, stop = piece
        had = RankTotals(num_batches(start, stop, life.began.batch_size), stop - start)
        return self._span(life.launch, life.began.call, start, stop, {rank: had}, life.began)

    def _void(self, epoch: Epoch, began: TrainingBegan) -> None:
        """Move the spans beyond the start of a fit to `again`."""
        kept: list[SampleSpan] = []
        for span in epoch.spans:
            own = [(span.start, span.stop)]
            counts = own
            if span.call == began.call:
                counts = both(own, kept_of(began, epoch.number))
            elif span.call > began.call:
                counts = []
            kept += [span.cut(*part) for part in counts]
            epoch.again += [self._lost(span.cut(*part)) for part in minus(own, counts)]
        if kept != epoch.spans:
            epoch.spans, epoch.end = kept, None

    @staticmethod
    def _lost(span: SampleSpan) -> SampleSpan:
        return span if len(span.by_rank) == 1 else replace(span, by_rank={})

    def _lose(
        self, call: int, number: int, start: int, stop: int, before: tuple[int, TrainingBegan] | None
    ) -> None:
        """Record a stretch that is trained again and was not reported in full the first time."""
        epoch = self._epoch(call, number, 0)
        launch, of = before if before is not None else (0, None)
        known = [span.stop for span in epoch.again if span.launch == launch and span.stop > start]
        if max(known, default=start) < stop:
            epoch.again.append(self._span(launch, call, max(known, default=start), stop, {}, of))

    def _reach(
        self, epoch: Epoch, launch: int, call: int, stretch: TrainedStretch, of: TrainingBegan | None = None
    ) -> None:
        by_rank = {
            rank: RankTotals(batches, samples)
            for rank, (batches, samples) in enumerate(zip(stretch.batches, stretch.samples, strict=False))
        }
        span = self._span(launch, call, stretch.start, stretch.stop, by_rank, of)
        same = [
            each
            for each in epoch.spans
            if (each.launch, each.call, each.start) == (launch, call, stretch.start)
        ]
        if same and same[0].stop > stretch.stop:
            return  # repeated by a replacement
        epoch.spans = [each for each in epoch.spans if each not in same]
        epoch.spans.append(span)

    def _span(
        self,
        launch: int,
        call: int,
        start: int,
        stop: int,
        by_rank: dict[int, RankTotals],
        of: TrainingBegan | None = None,
    ) -> SampleSpan:
        began = of or self._began[call][1]
        return SampleSpan(
            start=start,
            stop=stop,
            launch=launch,
            call=call,
            num_workers=began.num_workers,
            sharding=began.sharding,
            by_rank=by_rank,
            batch_size=began.batch_size,
        )

    def _epoch(self, call: int, number: int, num_workers: int) -> Epoch:
        if call not in self._began:  # the worker died before it reported the beginning
            began = TrainingBegan(
                call=call,
                trainer=0,
                data="",
                epoch=number,
                start=0,
                num_samples=None,
                num_workers=num_workers,
                sharding="",
            )
            self._began[call] = (0, began)
            self._newest = call
        began = self._began[call][1]
        key = (began.trainer, began.data, number)
        if key not in self.epochs:
            self.epochs[key] = Epoch(*key, began.num_samples, began.num_left_out)
        return self.epochs[key]


def joined(spans: Iterable[SampleSpan]) -> list[SampleSpan]:
    """Spans in order, neighbours of the same workers joined."""
    found: list[SampleSpan] = []
    for span in sorted(spans, key=lambda span: (span.start, span.launch)):
        last = found[-1] if found else None
        if last is not None and last.stop == span.start and _is_alike(last, span):
            found[-1] = replace(last, stop=span.stop, by_rank=_summed([last, span]))
        else:
            found.append(span)
    return found


def _is_alike(one: SampleSpan, other: SampleSpan) -> bool:
    same = ("launch", "call", "num_workers", "sharding")
    return all(getattr(one, name) == getattr(other, name) for name in same) and [*one.by_rank] == [
        *other.by_rank
    ]


def _summed(spans: Iterable[SampleSpan]) -> dict[int, RankTotals]:
    total: dict[int, RankTotals] = {}
    for rank, had in itertools.chain.from_iterable(span.by_rank.items() for span in spans):
        total[rank] = total.get(rank, RankTotals()) + had
    return dict(sorted(total.items()))
