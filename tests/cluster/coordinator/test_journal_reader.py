from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import pytest

from shoal.cluster.coordinator.journal import FILE_NAME, Journal, begin_launch
from shoal.cluster.coordinator.journal_entries import LeaseAsked
from shoal.cluster.coordinator.journal_reader import leases_of, ledger_of, read_launches
from shoal.cluster.ledger import entries as ledger_facts
from shoal.cluster.ledger.entries import RangesTrained, TrainedStretch, TrainingBegan, TrainingReached
from shoal.runtime.transport.messages.supervisor import Noted
from shoal.runtime.transport.messages.worker_coordinator import AskLease, Join

BEGAN = TrainingBegan(
    call=1, trainer=0, data="d", epoch=0, start=0, num_samples=40, num_workers=2, sharding="equal"
)
REACHED = TrainingReached(call=1, epoch=0, stretch=TrainedStretch(0, 40, [20, 20], [4, 4]), is_end=True)
ASK = AskLease(
    call=1,
    rank=1,
    incarnation=0,
    view=1,
    finished=[],
    num_samples=40,
    samples_per_lease=10,
    num_epochs=1,
    num_ahead=2,
    timeout_s=9.0,
)


def test_a_journal_is_read_while_its_coordinator_has_it_open(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    journal = Journal(path, launch=begin_launch(path, num_workers=2))
    journal.write([Join(0, 0, 11, 2), Noted(0, ledger_facts.encode(BEGAN), 1)])
    journal.write([Noted(0, ledger_facts.encode(REACHED), 2), Join(1, 1, 12, 2)])
    with pytest.raises(sqlite3.OperationalError):
        sqlite3.connect(path, timeout=0.0).execute("SELECT * FROM facts")
    (launch,) = read_launches(tmp_path)
    assert (launch.number, launch.num_workers, len(launch.facts)) == (1, 2, 4)
    ledger = ledger_of([launch], [])
    assert ledger.current is not None
    assert ledger.current.is_exact
    assert ledger.replaced == [(1, 1, 1)]
    journal.close()
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    assert [each.facts for each in read_launches(tmp_path)] == [launch.facts]
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before, "it only reads"


def test_it_is_read_whole_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    journal = Journal(path, launch=begin_launch(path, num_workers=1))
    stop, written = threading.Event(), [0]

    def write() -> None:
        inner = Journal(path, launch=1)  # SQLite's objects belong to their thread
        while not stop.wait(0.001):
            number = written[0]
            # Long, so that the log is moved into the file now and then.
            fact = RangesTrained(call=1, rank=0, epoch=0, ranges=[(number, number + 1)] * 400)
            inner.write([fact] * 2)
            written[0] += 1
        inner.close()

    journal.write([BEGAN])
    journal.close()
    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(20):
            before = written[0]
            (launch,) = read_launches(tmp_path)
            ranges = [fact.ranges[0][0] for _, fact in launch.facts if isinstance(fact, RangesTrained)]
            assert ranges == sorted(ranges)
            assert len(ranges) >= 2 * before
            assert len(ranges) % 2 == 0
    finally:
        stop.set()
        thread.join()


def test_who_holds_what_is_left_is_known_from_the_journal(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    journal = Journal(path, launch=begin_launch(path, num_workers=2))
    journal.write([LeaseAsked(1.0, ASK)])
    journal.close()
    (launch,) = read_launches(tmp_path)
    held = leases_of(launch).holdings
    assert held is not None
    assert held[1:] == ({1: [0, 1]}, 2)


@pytest.mark.parametrize("content", [None, b"", b"no database", b"SQLite format 3\0" + bytes(200)])
def test_what_is_no_journal_has_nothing_in_it(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / FILE_NAME).write_bytes(content)
    assert read_launches(tmp_path) == []


def test_entries_of_another_version_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    journal = Journal(path, launch=begin_launch(path, num_workers=2))
    journal.write([BEGAN])
    journal.close()
    with sqlite3.connect(path) as db:
        row = (1, 0.0, "x", '{"type":"x"}')
        db.execute("INSERT INTO facts (launch, time, kind, fact) VALUES (?, ?, ?, ?)", row)
    db.close()
    (launch,) = read_launches(tmp_path)
    assert [fact for _, fact in launch.facts] == [BEGAN]
