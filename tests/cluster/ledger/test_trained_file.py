"""Pushes are on disk before they can count, in about one entry for each lease."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from shoal.cluster.ledger import trained_file
from shoal.cluster.ledger.trained_file import PushOutcome, Trained, TrainedFile
from shoal.config.job import Job


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(name="r", run_dir=tmp_path, rank=2, launch=3, incarnation=1)


def push(
    file: TrainedFile, start: int, outcome: PushOutcome | None, *, epoch: int = 0, stop: int | None = None
) -> None:
    file.pushing(call=1, epoch=epoch, start=start, stop=start + 10 if stop is None else stop)
    if outcome is not None:
        file.heard(outcome)


def entries(run: Path) -> list[tuple[int, int, int, PushOutcome]]:
    return [(each.epoch, each.start, each.stop, each.outcome) for each in trained_file.read(run)]


def test_neighbours_share_an_entry_and_a_kill_leaves_what_was_under_way(job: Job, tmp_path: Path) -> None:
    file = TrainedFile(job)
    for start in (0, 10, 20):
        push(file, start, PushOutcome.COUNTED)
    push(file, 30, PushOutcome.KNOWN)
    push(file, 40, PushOutcome.KNOWN)
    push(file, 70, PushOutcome.KNOWN)
    push(file, 0, PushOutcome.COUNTED, epoch=1)
    push(file, 10, PushOutcome.PUSHED, epoch=1)
    push(file, 20, PushOutcome.PUSHED, epoch=1)
    push(file, 30, None, epoch=1)
    file.close()
    assert trained_file.read(tmp_path)[0] == Trained(3, 2, 1, 1, 0, 0, 30, PushOutcome.COUNTED)
    assert entries(tmp_path) == [
        (0, 0, 30, PushOutcome.COUNTED),
        (0, 30, 50, PushOutcome.KNOWN),
        (0, 70, 80, PushOutcome.KNOWN),
        (1, 0, 10, PushOutcome.COUNTED),
        (1, 10, 20, PushOutcome.PUSHED),
        (1, 20, 30, PushOutcome.PUSHED),
        (1, 30, 40, PushOutcome.PUSHED),
    ]


def test_it_can_be_read_after_every_single_write(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As whoever kills its worker between any two of them would leave it."""
    seen = list[set[int]]()
    write = TrainedFile._write

    def watched(self: TrainedFile, number: int, entry: tuple[int, int, int, int, PushOutcome]) -> None:
        write(self, number, entry)
        found = entries(tmp_path)
        told = [at for _, start, stop, _ in found for at in range(start, stop, 10)]
        assert len(told) == len(set(told)), "nothing is told twice"
        seen.append(set(told))

    monkeypatch.setattr(TrainedFile, "_write", watched)
    file = TrainedFile(job)
    for start in range(0, 60, 10):
        push(file, start, PushOutcome.COUNTED if start != 30 else PushOutcome.KNOWN)
    file.close()
    assert all(before <= after for before, after in itertools.pairwise(seen))
    assert seen[-1] == set(range(0, 60, 10))


def test_what_is_no_entry_ends_the_reading_and_launches_of_another_journal_are_forgotten(
    job: Job, tmp_path: Path
) -> None:
    file = TrainedFile(job)
    push(file, 0, PushOutcome.COUNTED)
    file.close()
    (path,) = (tmp_path / trained_file.FOLDER).iterdir()
    path.write_bytes(path.read_bytes() + b"\xff" * 32)
    (path.parent / "1-x-0").write_bytes(b"")
    assert entries(tmp_path) == [(0, 0, 10, PushOutcome.COUNTED)]
    trained_file.forget_from(tmp_path, 4)
    assert path.exists()
    trained_file.forget_from(tmp_path, 3)
    assert not path.exists()


def test_a_disk_that_takes_nothing_ends_no_job(job: Job, tmp_path: Path) -> None:
    (tmp_path / trained_file.FOLDER).write_text("where a folder should be")
    file = TrainedFile(job)
    push(file, 0, PushOutcome.COUNTED)
    file.close()
    assert trained_file.read(tmp_path) == []
