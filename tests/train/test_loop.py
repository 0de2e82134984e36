"""Counters, events and decisions of the loop, step by step."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import LABEL, N, X, assert_same_bits, batches, dataset, mlp, trainer, weights

from shoal.callbacks import ModelCheckpoint
from shoal.cluster.worker import session
from shoal.errors import ConfigError, NonFiniteLoss
from shoal.runtime.transport.messages.supervisor import Progress
from shoal.train.callbacks.base import Callback, StepLogs
from shoal.train.calls import asked_to_leave
from shoal.train.checkpoint.checkpoint import list_checkpoints


class Watch(Callback):
    def __init__(self) -> None:
        self.steps: list[StepLogs] = []
        self.epochs: list[dict[str, float]] = []

    def on_step_end(self, trainer: Any, logs: StepLogs) -> None:
        self.steps.append(logs)

    def on_epoch_end(self, trainer: Any, logs: dict[str, float]) -> None:
        self.epochs.append(dict(logs))


def test_steps_are_numbered_over_all_epochs_and_carry_their_samples() -> None:
    watch = Watch()
    run = trainer(callbacks=[watch])
    history = run.fit(batches(), epochs=2)
    assert [(logs.step, logs.epoch, logs.samples) for logs in watch.steps] == [
        *((step, 0, size) for step, size in zip((1, 2, 3, 4), (10, 10, 10, 7), strict=True)),
        *((step, 1, size) for step, size in zip((5, 6, 7, 8), (10, 10, 10, 7), strict=True)),
    ]
    assert (run.step, run.position.samples) == (8, 2 * N)
    assert watch.epochs == history.epochs
    assert all(logs.grad_norm is None for logs in watch.steps)


def test_an_epoch_cut_short_is_in_the_history_but_is_no_epoch() -> None:
    watch = Watch()
    run = trainer(callbacks=[watch])
    history = run.fit(batches(), max_steps=6, validation_data=batches())
    assert len(history["loss"]) == len(history["val_loss"]) == 2
    assert len(watch.epochs) == 1
    assert history["loss"][1] == pytest.approx(sum(logs.loss for logs in watch.steps[4:]) / 2)


def test_progress_is_told_with_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Progress] = []
    monkeypatch.setattr(session, "_session", session._Session(sink=told.append))
    trainer(metrics=["accuracy"]).fit(batches(), epochs=2, validation_data=batches())
    last = told[-1]
    assert (last.phase, last.step, last.num_steps, last.epoch, last.num_epochs) == ("fit", 8, 8, 2, 2)
    assert last.samples == 2 * N
    assert set(last.metrics) == {"loss", "accuracy", "val_loss", "val_accuracy"}
    trainer().fit(batches(), max_steps=3, epochs=2)
    assert (told[-1].step, told[-1].num_steps) == (3, 3)


def test_a_wish_for_a_checkpoint_is_granted_once(run_dir: Path) -> None:
    paths: list[str] = []

    class ControlFlags(Callback):
        def on_step_end(self, trainer: Any, logs: StepLogs) -> None:
            if logs.step == 2:
                trainer.wish_checkpoint()

        def on_checkpoint(self, trainer: Any, path: str) -> None:
            paths.append(path)

    trainer(callbacks=[ControlFlags()]).fit(batches(), epochs=2)
    assert (
        paths
        == [str(run_dir / "checkpoints" / "step-000000003")]
        == list_checkpoints(run_dir / "checkpoints")
    )


def test_samples_of_a_stream_are_named_by_their_place_in_it() -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            for row, label in zip(X, LABEL, strict=True):
                yield row * torch.inf, label

    loader = torch.utils.data.DataLoader(Stream(), batch_size=10)
    with pytest.raises(NonFiniteLoss, match="at step 1") as raised:
        trainer().fit(loader)
    assert raised.value.samples == list(range(10))


# ---- asked to leave, in a plain process ----------------------------------------------------------


class AsksToLeave(Callback):
    def __init__(self, signum: signal.Signals, *, at_step: int, times: int = 1) -> None:
        self.signum, self.at_step, self.times = signum, at_step, times

    def on_step_end(self, trainer: Any, logs: StepLogs) -> None:
        if logs.step == self.at_step:
            for _ in range(self.times):
                os.kill(os.getpid(), self.signum)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("at_step", [2, 3, 4])
def test_asked_once_it_finishes_the_step_saves_and_can_go_on(
    run_dir: Path, capsys: pytest.CaptureFixture[str], signum: signal.Signals, code: int, at_step: int
) -> None:
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as left:
        trainer(callbacks=[AsksToLeave(signum, at_step=at_step)]).fit(batches(), epochs=2)
    assert left.value.code == code
    saved = list_checkpoints(run_dir / "checkpoints")
    said = capsys.readouterr().err
    # Asked after a step, it is decided with the next; asked after an epoch's last, between the epochs.
    assert [Path(path).name for path in saved] == [f"step-{at_step + (at_step < 4):09d}"]
    assert f"stopped by {signum.name} after step {at_step + (at_step < 4)}" in said
    assert f"the newest checkpoint is {saved[0]}. Go on with fit(..., resume='auto')." in said
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert asked_to_leave() is None
    ours, theirs = mlp(), mlp()
    resumed = trainer(ours).fit(batches(), epochs=2, resume="auto")
    whole = trainer(theirs).fit(batches(), epochs=2)
    assert_same_bits(weights(ours), weights(theirs))
    assert resumed.epochs == whole.epochs


def test_asked_twice_it_leaves_now(run_dir: Path) -> None:
    run = trainer(callbacks=[AsksToLeave(signal.SIGINT, at_step=2, times=2)])
    with pytest.raises(KeyboardInterrupt):
        run.fit(batches(), epochs=2)
    assert run.step == 2
    assert list_checkpoints(run_dir / "checkpoints") == []
    assert asked_to_leave() is None
    run.fit(batches(), max_steps=1)
    assert run.step == 3, "the Trainer can be used again"


def test_an_error_in_a_fit_leaves_the_trainer_usable(run_dir: Path) -> None:
    class Fails(Callback):
        def on_step_end(self, trainer: Any, logs: StepLogs) -> None:
            if logs.step == 2:
                raise OSError("mine")

    run = trainer(callbacks=[Fails(), ModelCheckpoint(every_steps=1)])
    with pytest.raises(OSError, match="mine"):
        run.fit(dataset().batch(10))
    assert set(run.evaluate(dataset().batch(10))) == {"loss"}


def test_validation_is_measured_every_so_many_steps_and_after_epochs(run_dir: Path) -> None:
    measured: list[tuple[int, float]] = []

    class Noting(Callback):
        def on_validation_end(self, trainer: Any, logs: dict[str, float]) -> None:
            measured.append((trainer.step, logs["val_loss"]))

    plain, run = trainer(), trainer(callbacks=[Noting()])
    options: dict[str, Any] = {"epochs": 2, "validation_data": dataset().batch(20)}
    expected = plain.fit(batches(), **options)
    history = run.fit(batches(), validate_every=3, **options)
    assert [step for step, _ in measured] == [3, 4, 6, 8]
    assert history.epochs == expected.epochs, "measuring changes nothing"
    assert_same_bits(weights(run.model), weights(plain.model))
    with pytest.raises(ConfigError, match="validate_every needs validation_data"):
        run.fit(batches(), validate_every=3)
