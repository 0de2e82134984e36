"""Leased ranges are theirs who trained them, whoever finished them, and whatever was lost with a job is counted to the sample."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from shoal.cluster.ledger.entries import EpochLeased, RangesTrained, TrainingBegan
from shoal.cluster.ledger.ledger import Ledger, RankTotals
from shoal.cluster.ledger.trained_file import PushOutcome, Trained

COUNTED, KNOWN, PUSHED = PushOutcome


def began(*, start: int = 0, kept: tuple[tuple[int, int, int], ...] = (), epoch: int = 0) -> TrainingBegan:
    return TrainingBegan(
        call=1,
        trainer=0,
        data="d",
        epoch=epoch,
        start=start,
        num_samples=40,
        num_workers=2,
        sharding="dynamic",
        batch_size=10,
        is_leased=True,
        kept=list(kept),
    )


def entry(
    rank: int, start: int, stop: int, outcome: PushOutcome, *, launch: int = 1, incarnation: int = 0
) -> Trained:
    return Trained(launch, rank, incarnation, 1, 0, start, stop, outcome)


def finished(rank: int, *ranges: tuple[int, int]) -> RangesTrained:
    return RangesTrained(call=1, rank=rank, epoch=0, ranges=list(ranges))


ENDED = EpochLeased(call=1, epoch=0, num_samples_twice=0)


def test_batches_of_a_killed_worker_are_not_those_of_whoever_finished_its_lease() -> None:
    ledger = Ledger(
        trained=[
            entry(0, 0, 10, COUNTED),
            entry(0, 10, 20, PUSHED),  # it was killed before it heard that it counts
            entry(1, 0, 20, KNOWN),
            entry(1, 20, 40, COUNTED),
        ]
    )
    for fact in (began(), finished(1, (0, 40)), ENDED):
        ledger.apply(1, fact)
    ledger.close()
    (epoch,) = ledger.epochs.values()
    assert epoch.is_exact
    assert epoch.by_rank == {0: RankTotals(2, 20), 1: RankTotals(2, 20)}
    assert (epoch.num_repeated, epoch.again) == (20, [])


def test_a_push_that_did_not_count_is_no_part_of_it() -> None:
    ledger = Ledger(trained=[entry(0, 0, 10, PUSHED), entry(1, 0, 40, COUNTED)])
    for fact in (began(), finished(1, (0, 40)), ENDED):
        ledger.apply(1, fact)
    ledger.close()
    (epoch,) = ledger.epochs.values()
    assert epoch.by_rank == {1: RankTotals(4, 40)}
    assert epoch.num_repeated == 10


def test_what_a_checkpoint_has_stays_and_only_the_rest_is_trained_again() -> None:
    ledger = Ledger(
        trained=[
            entry(0, 0, 20, COUNTED),
            entry(1, 20, 30, COUNTED),
            entry(1, 30, 40, PUSHED),
            entry(0, 10, 20, COUNTED, launch=2),
            entry(0, 30, 40, COUNTED, launch=2),
        ]
    )
    ledger.apply(1, began())
    ledger.apply(2, began(start=10, kept=((0, 20, 30),)))
    for fact in (finished(0, (0, 20)), finished(0, (20, 40)), ENDED):
        ledger.apply(2, fact)
    ledger.close()
    (epoch,) = ledger.epochs.values()
    assert epoch.is_exact
    assert sorted((span.start, span.stop, span.launch, *span.by_rank) for span in epoch.spans) == [
        (0, 10, 1, 0),
        (10, 20, 2, 0),
        (20, 30, 1, 1),
        (30, 40, 2, 0),
    ]
    assert sorted((span.start, span.stop, span.launch, *span.by_rank) for span in epoch.again) == [
        (10, 20, 1, 0),
        (30, 40, 1, 1),
    ]


def test_a_job_that_goes_back_within_a_launch_is_told_apart_by_its_workers() -> None:
    ledger = Ledger(
        trained=[entry(0, 0, 30, COUNTED, incarnation=1), entry(0, 0, 40, COUNTED, incarnation=2)]
    )
    ledger.joined(1, 0, 1)
    ledger.apply(1, began())
    ledger.joined(1, 0, 2)
    ledger.apply(1, began())
    ledger.apply(1, finished(0, (0, 40)))
    ledger.apply(1, ENDED)
    ledger.close()
    (epoch,) = ledger.epochs.values()
    assert epoch.is_exact
    assert [(span.start, span.stop) for span in epoch.again] == [(0, 30)]


@given(st.integers(0, 2**32), st.integers(1, 3))
def test_everything_computed_counted_or_did_not_or_was_lost(seed: int, num_launches: int) -> None:
    """Workers that run batches in any order, die before they hear, and lose everything since a checkpoint."""
    draw = random.Random(seed)
    trained, by_whom, num_computed = list[Trained](), dict[int, tuple[int, int]](), 0
    ledger = Ledger(trained=trained)
    for launch in range(1, num_launches + 1):
        ledger.apply(launch, began(kept=tuple((0, 10 * batch, 10 * batch + 10) for batch in sorted(by_whom))))
        saved = dict(by_whom)
        for rank in range(3):
            for batch in draw.sample(range(4), draw.randint(1, 4)):
                num_computed += 1
                is_new = batch not in by_whom
                by_whom.setdefault(batch, (launch, rank))
                is_killed = draw.random() < 0.2
                outcome = PUSHED if is_killed else COUNTED if is_new else KNOWN
                trained.append(entry(rank, 10 * batch, 10 * batch + 10, outcome, launch=launch))
                if is_killed:
                    break
            if draw.random() < 0.3:
                saved = dict(by_whom)
        if launch < num_launches:
            by_whom = saved
    ledger.apply(num_launches, finished(0, *((10 * batch, 10 * batch + 10) for batch in by_whom)))
    ledger.close()
    (epoch,) = ledger.epochs.values()
    assert not epoch.doubled
    found = {span.start // 10: (span.launch, *span.by_rank) for span in _batches(epoch.spans)}
    assert found == by_whom
    num_again = sum(span.stop - span.start for span in epoch.again)
    assert epoch.reached + num_again + epoch.num_repeated == 10 * num_computed
    assert Counter(span.start for span in _batches(epoch.spans)).total() == len(by_whom)


def _batches(spans):  # type: ignore[no-untyped-def]
    return [span.cut(start, start + 10) for span in spans for start in range(span.start, span.stop, 10)]
