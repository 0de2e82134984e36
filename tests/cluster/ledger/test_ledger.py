"""Whatever died and whoever went on, the ledger says who trained what, and whether each sample was trained once."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shoal.cluster.ledger.entries import (
    EpochLeased,
    LedgerFact,
    RangesTrained,
    SampleSkipped,
    TrainedStretch,
    TrainingBegan,
    TrainingReached,
    decode,
    encode,
    of_event,
)
from shoal.cluster.ledger.ledger import Ledger, RankTotals, merged


def began(epoch: int = 0, start: int = 0, **about: Any) -> TrainingBegan:
    told: dict[str, Any] = {"call": 1, "trainer": 0, "data": "d", "num_samples": 100, "num_workers": 2}
    return TrainingBegan(epoch=epoch, start=start, **told | {"sharding": "equal", "batch_size": 10} | about)


def reached(start: int, stop: int, *, epoch: int = 0, call: int = 1, is_end: bool = False) -> TrainingReached:
    half, batches = (stop - start) // 2, (stop - start) // 10
    stretch = TrainedStretch(start, stop, [half, stop - start - half], [batches, batches])
    return TrainingReached(call=call, epoch=epoch, stretch=stretch, is_end=is_end)


def trained(rank: int, *ranges: tuple[int, int], epoch: int = 0) -> RangesTrained:
    return RangesTrained(call=1, rank=rank, epoch=epoch, ranges=list(ranges))


def ledger(*facts: tuple[int, LedgerFact]) -> Ledger:
    made = Ledger()
    for launch, fact in facts:
        made.apply(launch, decode(encode(fact)) or fact)
    made.close()
    return made


def test_an_epoch_that_all_workers_trained_together_is_exact() -> None:
    made = ledger((1, began()), (1, reached(0, 40)), (1, reached(0, 100, is_end=True)))
    (epoch,) = made.epochs.values()
    assert epoch.is_exact
    assert epoch.by_rank == {0: RankTotals(10, 50), 1: RankTotals(10, 50)}
    assert made.by_rank == epoch.by_rank


def test_an_epoch_under_way_is_not_over() -> None:
    made = ledger((1, began()), (1, reached(0, 40)))
    assert made.current is not None
    assert (made.current.is_exact, made.current.reached, made.current.missing) == (False, 40, [(40, 100)])


def test_a_job_resumed_at_another_number_of_workers_goes_on_in_the_same_epoch() -> None:
    before = TrainedStretch(0, 30, [15, 15], [3, 3])
    made = ledger(
        (1, began()),
        (1, reached(0, 50)),  # 20 more than the checkpoint
        (2, began(start=30, num_workers=3, before=before)),
        (
            2,
            TrainingReached(
                call=1, epoch=0, stretch=TrainedStretch(30, 100, [30, 20, 20], [7, 7, 7]), is_end=True
            ),
        ),
    )
    (epoch,) = made.epochs.values()
    assert epoch.is_exact
    assert [(span.launch, span.start, span.stop, span.num_workers) for span in epoch.spans] == [
        (1, 0, 30, 2),
        (2, 30, 100, 3),
    ]
    assert [(span.start, span.stop) for span in epoch.again] == [(30, 50)]
    assert epoch.by_rank == {0: RankTotals(10, 45), 1: RankTotals(10, 35), 2: RankTotals(7, 20)}


def test_what_nobody_told_of_before_a_job_died_the_checkpoint_knows() -> None:
    made = ledger(
        (1, began()),
        (2, began(start=30, before=TrainedStretch(0, 30, [15, 15], [3, 3]))),
        (2, reached(30, 100, is_end=True)),
    )
    (epoch,) = made.epochs.values()
    assert epoch.is_exact
    assert epoch.spans[0].launch == 1


def test_what_was_trained_after_the_last_word_is_known_from_the_metrics() -> None:
    made = ledger(
        (1, began()),
        (1, reached(0, 50)),
        (2, began(start=30, before=TrainedStretch(0, 30, [15, 15], [3, 3]), again=[(0, 30, 80)])),
        (3, began(start=30, before=TrainedStretch(0, 30, [15, 15], [3, 3]), again=[(0, 30, 40)])),
    )
    (epoch,) = made.epochs.values()
    assert [(span.launch, span.start, span.stop) for span in epoch.again] == [
        (1, 30, 50),
        (1, 50, 80),
        (2, 30, 40),
    ]


def test_a_job_that_begins_anew_voids_everything() -> None:
    made = ledger((1, began()), (1, reached(0, 100, is_end=True)), (2, began()), (2, reached(0, 10)))
    (epoch,) = made.epochs.values()
    assert (epoch.is_exact, epoch.reached, len(epoch.again)) == (False, 10, 1)


def test_going_back_voids_later_calls_and_epochs_and_keeps_earlier_ones() -> None:
    made = ledger(
        (1, began()),
        (1, reached(0, 100, is_end=True)),
        (1, reached(0, 100, epoch=1, is_end=True)),
        (1, began(epoch=2, call=2)),
        (1, reached(0, 60, epoch=2, call=2)),
        (2, began(epoch=1, start=0)),
    )
    first, second, third = made.epochs.values()
    assert first.is_exact
    assert (second.is_exact, second.reached, third.reached) == (False, 0, 0)


def test_leased_ranges_in_any_order_make_an_epoch() -> None:
    made = ledger(
        (1, began(is_leased=True, sharding="dynamic")),
        (1, trained(1, (20, 40))),
        (1, trained(0, (0, 20), (60, 100))),
        (1, trained(1, (40, 60))),
        (1, EpochLeased(call=1, epoch=0, num_samples_twice=20)),
    )
    (epoch,) = made.epochs.values()
    assert epoch.is_exact
    assert epoch.num_samples_twice == 20
    assert epoch.by_rank == {0: RankTotals(6, 60), 1: RankTotals(4, 40)}


def test_of_leases_a_resumed_job_keeps_what_is_done_below() -> None:
    made = ledger(
        (1, began(is_leased=True)),
        (1, trained(0, (0, 20))),
        (1, trained(1, (40, 60))),  # beyond the first that was not done: it is handed out again
        (2, began(start=20, is_leased=True, num_workers=1)),
        (2, trained(0, (20, 40), (40, 60), (60, 80), (80, 100))),
        (2, EpochLeased(call=1, epoch=0, num_samples_twice=0)),
    )
    (epoch,) = made.epochs.values()
    assert epoch.is_exact
    assert [(span.start, span.stop) for span in epoch.again] == [(40, 60)]


def test_what_is_wrong_is_told_by_number() -> None:
    made = ledger(
        (1, began(is_leased=True)),
        (1, trained(0, (0, 20), (10, 40))),
        (1, trained(1, (60, 80))),
        (1, EpochLeased(call=1, epoch=0, num_samples_twice=0)),
    )
    (epoch,) = made.epochs.values()
    assert not epoch.is_exact
    assert (epoch.doubled, epoch.missing) == ([(10, 20)], [(40, 60), (80, 100)])


def test_workers_whose_parts_do_not_add_up_are_not_exact() -> None:
    told = TrainingReached(call=1, epoch=0, stretch=TrainedStretch(0, 100, [50, 49], [10, 10]), is_end=True)
    (epoch,) = ledger((1, began()), (1, told)).epochs.values()
    assert not epoch.missing
    assert not epoch.is_exact


def test_a_stream_is_over_where_it_ends() -> None:
    made = ledger((1, began(num_samples=None)), (1, reached(0, 60, is_end=True)))
    (epoch,) = made.epochs.values()
    assert epoch.is_exact


def test_skipped_samples_count_once_however_often_they_are_met() -> None:
    fact = of_event("sample skipped", 1, {"epoch": 0, "index": 7, "where": "x.csv", "reason": "?", "row": 8})
    assert isinstance(fact, SampleSkipped)
    made = ledger((1, began()), (1, fact), (2, fact))
    assert made.epochs[0, "d", 0].skipped == {7}
    assert of_event("sample skipped", 1, {"index": "x"}) is None
    assert of_event("saved", 1, {}) is None


def test_a_fit_of_which_nobody_told_the_begin_is_in_it_all_the_same() -> None:
    (epoch,) = ledger((1, reached(0, 60, is_end=True))).epochs.values()
    assert epoch.reached == 60


lives = st.tuples(st.integers(1, 4), st.integers(0, 10), st.integers(0, 10), st.booleans())


@given(st.lists(lives, max_size=5), st.integers(1, 4))
def test_however_often_it_is_killed_an_epoch_comes_out_exact(
    story: list[tuple[int, int, int, bool]], num_last: int
) -> None:
    """Each launch goes on from the last checkpoint; of what came after it some is told and some is not."""
    made, kept = Ledger(), 0
    stretch: TrainedStretch | None = None
    for launch, (num_workers, num_run, num_saved, is_told) in enumerate(story, start=1):
        made.apply(launch, began(start=kept, num_workers=num_workers, before=stretch))
        stop = min(kept + 10 * num_run, 90)
        if stop > kept and is_told:
            made.apply(launch, _told(kept, stop, num_workers))
        saved = min(kept + 10 * num_saved, stop)
        stretch, kept = _told(kept, saved, num_workers).stretch, saved
    made.apply(9, began(start=kept, num_workers=num_last, before=stretch))
    made.apply(9, _told(kept, 100, num_last, is_end=True))
    (epoch,) = made.epochs.values()
    assert epoch.is_exact
    assert sum(had.samples for had in epoch.by_rank.values()) == 100


def _told(start: int, stop: int, num_workers: int, *, is_end: bool = False) -> TrainingReached:
    size = stop - start
    samples = [size * (rank + 1) // num_workers - size * rank // num_workers for rank in range(num_workers)]
    stretch = TrainedStretch(start, stop, samples, [size // 10] * num_workers)
    return TrainingReached(call=1, epoch=0, stretch=stretch, is_end=is_end)


def test_ranges_are_merged() -> None:
    assert list(merged([(20, 30), (0, 10), (10, 20), (50, 60)])) == [(0, 30), (50, 60)]
    assert list(merged([])) == []
