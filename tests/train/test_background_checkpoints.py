"""Checkpoints in the background: the state of their step, errors at the next step, and old or new whatever happens."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.callbacks import Callback, ModelCheckpoint
from shoal.errors import CheckpointDamaged, CheckpointWriteFailed
from shoal.parallel.protocol import Piece
from shoal.train.checkpoint import background, saving, storage
from shoal.train.checkpoint.checkpoint import (
    PartedCheckpoint,
    newest_checkpoint,
    open_checkpoint,
    step_path,
    write_checkpoint,
)


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "LEAST_BYTES", 0)


class Watch(Callback):
    """Keeps the weights after every step, and says that step `release` is over."""

    def __init__(self, release: int) -> None:
        self.weights: dict[int, torch.Tensor] = {}
        self.reached, self._release = threading.Event(), release

    def on_step_end(self, trainer: shoal.Trainer, logs: Any) -> None:
        self.weights[trainer.step] = trainer.model.weight.detach().clone()
        if trainer.step == self._release:
            self.reached.set()


def fit(*callbacks: Callback, steps: int = 6) -> shoal.Trainer:
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
    trainer = shoal.Trainer(
        lambda: nn.Linear(3, 3),
        loss=nn.MSELoss(),
        optimizer=lambda params: torch.optim.Adam(params, lr=0.1),
        callbacks=callbacks,
    )
    trainer.fit(shoal.Dataset.from_arrays((x, x)).batch(4), max_steps=steps)
    return trainer


def test_training_goes_on_while_a_checkpoint_is_written_and_it_holds_its_own_step(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(release=4)

    def later(*args: Any, **kwargs: Any) -> None:
        assert watch.reached.wait(30)  # for a step that would never come if training waited
        write_checkpoint(*args, **kwargs)

    monkeypatch.setattr(saving, "write_checkpoint", later)
    fit(watch, ModelCheckpoint(every_steps=2, every_epochs=99))
    for step in (2, 4, 6):
        saved = open_checkpoint(step_path(run_dir / "checkpoints", step))
        assert torch.equal(saved.pieces["model/weight"], watch.weights[step])
        assert saved.progress["step"] == step


def test_error_of_the_disk_is_raised_at_the_next_step(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(release=99)

    def full(url: str, *_: Any, previous: str | None, **__: Any) -> None:
        raise CheckpointWriteFailed(path=url, reason="No space left on device", previous=previous)

    monkeypatch.setattr(saving, "write_checkpoint", full)
    started = background.BackgroundWriter.start

    def and_waits(self: background.BackgroundWriter, *args: Any, **kwargs: Any) -> None:
        started(self, *args, **kwargs)
        assert self._thread is not None
        self._thread.join()

    monkeypatch.setattr(background.BackgroundWriter, "start", and_waits)
    with pytest.raises(CheckpointWriteFailed, match="No space left on device"):
        fit(watch, ModelCheckpoint(every_steps=2, every_epochs=99))
    assert max(watch.weights) in (2, 3)


def test_second_checkpoint_waits_for_the_disk_and_says_so(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    joined, waits = threading.Event(), threading.Thread.join

    def join(thread: threading.Thread, timeout: float | None = None) -> None:
        if thread.name == "shoal-checkpoint-writer":
            joined.set()
        waits(thread, timeout)

    def slow(*args: Any, **kwargs: Any) -> None:
        assert joined.wait(30)  # until somebody waits for it
        write_checkpoint(*args, **kwargs)

    monkeypatch.setattr(threading.Thread, "join", join)
    monkeypatch.setattr(saving, "write_checkpoint", slow)
    fit(ModelCheckpoint(every_steps=2, every_epochs=99))
    assert capsys.readouterr().err.count("training waits for the disk") == 1
    assert len(list((run_dir / "checkpoints").iterdir())) == 3


def test_without_memory_for_a_copy_training_waits_for_the_disk(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background.memory, "available_bytes", lambda: 100)
    watch = Watch(release=99)
    fit(watch, ModelCheckpoint(every_steps=3, every_epochs=99))
    saved = open_checkpoint(step_path(run_dir / "checkpoints", 3))
    assert torch.equal(saved.pieces["model/weight"], watch.weights[3])


# ---- parts of several ranks -------------------------------------------------------------------------


def nobody(damaged: CheckpointDamaged) -> None:
    raise AssertionError(damaged)


def parts(rank: int, value: float) -> list[Piece]:
    return [Piece("model/w", torch.full((2, 4), value + rank), (6, 4), (2 * rank, 0))]


def write_together(path: str, value: float, ranks: tuple[int, ...] = (0, 1, 2)) -> None:
    each = {rank: PartedCheckpoint(path, rank=rank, num_ranks=3, previous=None) for rank in ranks}
    if 0 in each:
        each[0].begin()
    never = threading.Event()
    for rank in reversed(ranks):  # rank 0 waits for the others
        each[rank].write(parts(rank, value), {"step": int(value)}, never)


def test_parts_of_all_ranks_are_one_checkpoint(tmp_path: Path) -> None:
    path = step_path(tmp_path, 10)
    for value in (10.0, 20.0):  # the second one replaces the first
        write_together(path, value)
        saved = open_checkpoint(path)
        assert saved.pieces["model/w"][:, 0].tolist() == [
            value,
            value,
            value + 1,
            value + 1,
            value + 2,
            value + 2,
        ]
        assert saved.pieces.part("model/w", (1, 1), (3, 2)).tolist() == [[value] * 2, *[[value + 1] * 2] * 2]
        assert [each.name for each in tmp_path.iterdir()] == ["step-000000010"]


def test_checkpoint_without_the_last_rank_is_none_and_the_one_before_stays(tmp_path: Path) -> None:
    write_together(step_path(tmp_path, 10), 10.0)
    unfinished = step_path(tmp_path, 20)
    rank_0 = PartedCheckpoint(unfinished, rank=0, num_ranks=3, previous="the one before")
    rank_0.begin()
    PartedCheckpoint(unfinished, rank=1, num_ranks=3, previous=None).write(
        parts(1, 20.0), {}, threading.Event()
    )
    newest = newest_checkpoint(tmp_path, nobody)
    assert newest is not None
    assert newest.progress["step"] == 10
    given_up = threading.Event()
    given_up.set()
    with pytest.raises(
        CheckpointWriteFailed, match=r"another worker could not write its part.*the one before"
    ):
        rank_0.write(parts(0, 20.0), {}, given_up)
    assert [each.name for each in tmp_path.iterdir()] == ["step-000000010"]


def test_full_disk_of_one_rank_fails_the_checkpoint_on_that_rank_and_on_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = step_path(tmp_path, 10)
    ranks = [PartedCheckpoint(path, rank=rank, num_ranks=2, previous=None) for rank in range(2)]
    ranks[0].begin()

    def full(self: Any, data: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(storage._Whole, "write", full)
        with pytest.raises(CheckpointWriteFailed, match="No space left on device"):
            ranks[1].write(parts(1, 1.0), {}, threading.Event())
    with pytest.raises(CheckpointWriteFailed):
        ranks[0].write(parts(0, 1.0), {}, threading.Event())
    assert not list(tmp_path.iterdir())
