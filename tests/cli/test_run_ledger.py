from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal.cluster.coordinator.journal import FILE_NAME, Journal, begin_launch
from shoal.cluster.coordinator.journal_entries import LeaseAsked
from shoal.cluster.ledger import entries as ledger_facts
from shoal.cluster.ledger.entries import (
    EpochLeased,
    LedgerFact,
    RangesTrained,
    SampleSkipped,
    TrainedStretch,
    TrainingBegan,
    TrainingReached,
)
from shoal.observe import runs
from shoal.runtime.transport.messages.supervisor import Noted
from shoal.runtime.transport.messages.worker_coordinator import AskLease


def began(**about: Any) -> TrainingBegan:
    told: dict[str, Any] = {"call": 1, "trainer": 0, "data": "d", "epoch": 0, "start": 0, "num_samples": 1000}
    return TrainingBegan(**told | {"num_workers": 2, "sharding": "equal", "batch_size": 10} | about)


def reached(start: int, stop: int, *, epoch: int = 0, is_end: bool = False) -> TrainingReached:
    half = (stop - start) // 2
    stretch = TrainedStretch(start, stop, [half, half], [(stop - start) // 10] * 2)
    return TrainingReached(call=1, epoch=epoch, stretch=stretch, is_end=is_end)


def written(run: Path, *facts: LedgerFact | LeaseAsked) -> dict[str, Any]:
    path = run / FILE_NAME
    journal = Journal(path, launch=begin_launch(path, num_workers=2))
    entries = [
        fact
        if isinstance(fact, LeaseAsked | RangesTrained | EpochLeased)
        else Noted(0, ledger_facts.encode(fact), n)
        for n, fact in enumerate(facts, start=1)
    ]
    journal.write(entries)
    journal.close()
    return runs.read_ledger(run, is_alive=True)


def test_a_run_without_a_ledger_says_nothing(tmp_path: Path) -> None:
    found = written(tmp_path)
    assert found == {}
    assert list(runs.ledger_lines(found)) == list(runs.ledger_ranges(found)) == []
    assert runs.ledger_of_worker(found, 0) == ""


def test_whole_epochs_and_the_one_under_way(tmp_path: Path) -> None:
    skipped = SampleSkipped(rank=1, epoch=1, index=77)
    found = written(tmp_path, began(), reached(0, 1000, is_end=True), reached(0, 200, epoch=1), skipped)
    assert list(runs.ledger_lines(found)) == [
        "epoch 1: all 1,000 samples trained exactly once",
        "epoch 2: 200 of 1,000 samples trained so far; 1 bad and skipped",
        "left of the epoch: 800 samples, cut over all workers batch by batch",
    ]
    assert runs.ledger_of_worker(found, 1) == "; 120 batches, 600 samples"
    assert list(runs.ledger_ranges(found))[:2] == [
        "epoch 1: all 1,000 samples trained exactly once",
        "  0..999  launch 1, equal over 2 workers: rank 0 500, rank 1 500",
    ]
    assert "  sample 77 skipped" in list(runs.ledger_ranges(found))


def test_many_whole_epochs_are_one_line(tmp_path: Path) -> None:
    found = written(tmp_path, began(), *(reached(0, 1000, epoch=n, is_end=True) for n in range(6)))
    assert list(runs.ledger_lines(found)) == ["6 epochs, each: every sample trained exactly once"]


def test_what_is_wrong_is_said_by_number(tmp_path: Path) -> None:
    ranges = RangesTrained(call=1, rank=0, epoch=0, ranges=[(0, 200), (100, 300), (500, 1000)])
    ended = EpochLeased(call=1, epoch=0, num_samples_twice=0)
    found = written(tmp_path, began(is_leased=True), ranges, ended)
    (line,) = runs.ledger_lines(found)
    assert line == "epoch 1: 900 of 1,000 samples trained; TWICE: 100..199; NOT trained: 300..499"


def test_who_holds_the_rest_is_said_with_the_worker(tmp_path: Path) -> None:
    ask = AskLease(
        call=1,
        rank=1,
        incarnation=0,
        view=1,
        finished=[],
        num_samples=1000,
        samples_per_lease=100,
        num_epochs=1,
        num_ahead=2,
        timeout_s=9.0,
    )
    done = AskLease(**{name: getattr(ask, name) for name in ask.__struct_fields__} | {"finished": [0]})
    trained = RangesTrained(call=1, rank=1, epoch=0, ranges=[(0, 100)])
    found = written(tmp_path, LeaseAsked(1.0, ask), began(is_leased=True), trained, LeaseAsked(2.0, done))
    assert runs.ledger_of_worker(found, 1) == "; 10 batches, 100 samples; holds 100..299"
    assert list(runs.ledger_lines(found)) == [
        "epoch 1: 100 of 1,000 samples trained so far",
        "left of the epoch: 700 samples to hand out, beside what workers hold",
    ]


def test_neighbours_are_one_range_and_former_launches_are_told_apart(tmp_path: Path) -> None:
    leased = {"is_leased": True, "sharding": "dynamic"}
    first = [
        RangesTrained(call=1, rank=rank, epoch=0, ranges=[(at, at + 100)])
        for rank, at in ((2, 300), (0, 0), (0, 100))
    ]
    written(tmp_path, began(num_workers=3, **leased), *first)
    kept = began(start=200, kept=[(0, 300, 350)], **leased)
    rest = RangesTrained(call=1, rank=1, epoch=0, ranges=[(500, 1000), (200, 300), (300, 500)])
    found = written(tmp_path, kept, rest, EpochLeased(call=1, epoch=0, num_samples_twice=0))
    assert list(runs.ledger_ranges(found)) == [
        "epoch 1: all 1,000 samples trained exactly once; 50 trained again from an earlier checkpoint or the beginning",
        "  0..199  launch 1, rank 0",
        "  200..299  launch 2, rank 1",
        "  300..349  launch 1, rank 2",
        "  350..999  launch 2, rank 1",
        "  350..399  launch 1, rank 2: lost with it, and trained again",
    ]
    assert runs.ledger_of_worker(found, 1) == "; 75 batches, 750 samples"
    assert runs.ledger_of_worker(found, 0) == "", "it did nothing in this launch"
    assert list(runs.ledger_before(found)) == [
        "launch 1, before: rank 0 20 batches, 200 samples; rank 2 5 batches, 50 samples"
    ]


def test_costs_are_named_without_what_tells_them_apart(tmp_path: Path) -> None:
    costs = "balanced by an array of costs (0123456789ab)"
    found = written(tmp_path, began(sharding=costs), reached(0, 1000, is_end=True))
    assert "launch 1, balanced by an array of costs over 2 workers: " in list(runs.ledger_ranges(found))[1]
