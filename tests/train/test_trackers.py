from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.callbacks import MLflow, WandB
from shoal.config import job
from shoal.errors import ConfigError, Interrupted
from shoal.train.callbacks import trackers
from shoal.train.callbacks.base import Callback, StepLogs
from shoal.train.callbacks.logs import StepInterval
from shoal.train.callbacks.trackers import FitOutcome, Tracker

NUM_STEPS = 10


class Remembering(Tracker):
    package = "remembering"

    def __init__(self, *, fails_at: int | None = None, problem: Exception | None = None) -> None:
        super().__init__(every_steps=2)
        self.fails_at, self.problem = fails_at, problem
        self.opened: list[str] = []
        self.reported: dict[int, dict[str, float]] = {}
        self.outcome: FitOutcome | None = None

    def _open(self, trainer: shoal.Trainer, known: str, about: dict[str, Any]) -> str:
        if self.problem is not None:
            raise self.problem
        self.opened.append(known)
        return known or "run-1"

    def _report(self, values: dict[str, float], step: int) -> None:
        if step == self.fails_at:
            raise ConnectionError("nobody there")
        self.reported.setdefault(step, {}).update(values)

    def _close(self, outcome: FitOutcome) -> None:
        self.outcome = outcome


def fit(callback: Tracker, *, epochs: int = 2, more: Sequence[Callback] = ()) -> shoal.Trainer:
    inputs = torch.randn(40, 3, generator=torch.Generator().manual_seed(1))
    data = shoal.Dataset.from_arrays((inputs, inputs.sum(1, keepdim=True)))
    trainer = shoal.Trainer(
        nn.Linear(3, 1),
        loss=nn.MSELoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        callbacks=[callback, *more],
    )
    trainer.fit(data.batch(8), epochs=epochs)
    return trainer


def test_steps_and_epochs_are_reported() -> None:
    tracker = Remembering()
    fit(tracker)
    assert sorted(tracker.reported) == [2, 4, 5, 6, 8, 10]
    assert tracker.reported[2].keys() == {"loss", "lr"}
    assert tracker.reported[4].keys() == {"loss", "lr", "samples_per_s"}
    assert tracker.reported[5].keys() == {"epoch/loss"}
    assert tracker.outcome is FitOutcome.FINISHED


class Stopping(Callback):
    def __init__(self, error: BaseException) -> None:
        self._error = error

    def on_step_end(self, trainer: shoal.Trainer, logs: StepLogs) -> None:
        if logs.step == 3:
            raise self._error


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ValueError("a bug"), FitOutcome.FAILED),
        (Interrupted(signal_name="SIGTERM", step=3, checkpoint=None), FitOutcome.KILLED),
    ],
)
def test_a_fit_that_fails_is_told_so(error: Exception, outcome: FitOutcome) -> None:
    tracker = Remembering()
    with pytest.raises((ValueError, SystemExit)):
        fit(tracker, more=[Stopping(error)])
    assert tracker.outcome is outcome


def test_an_error_within_on_exception_does_not_hide_the_first(capfd: pytest.CaptureFixture[str]) -> None:
    class Broken(Stopping):
        def on_exception(self, trainer: shoal.Trainer, error: BaseException) -> None:
            raise KeyError("another")

    with pytest.raises(ValueError, match="a bug"):
        fit(Remembering(), more=[Broken(ValueError("a bug"))])
    assert "on_exception of Broken failed: KeyError" in capfd.readouterr().err


def test_steps_that_end_many_at_once_are_reported_all_the_same() -> None:
    """Rounds of mapreduce with --sync-every 7 end at steps 7, 14, 21, ..., of which 10 divides one in ten."""
    interval = StepInterval(Remembering(), 10)
    interval.begin(0)
    assert [step for step in range(7, 71, 7) if interval.is_due(step)] == [14, 21, 35, 42, 56, 63, 70]
    interval.begin(25)  # resumed there
    assert [step for step in range(26, 45) if interval.is_due(step)] == [30, 40]


def test_a_tracker_that_goes_away_ends_no_training(capfd: pytest.CaptureFixture[str]) -> None:
    tracker = Remembering(fails_at=4)
    assert fit(tracker).step == NUM_STEPS
    assert list(tracker.reported) == [2]
    assert (
        capfd.readouterr().err.count("Remembering is left out from here on: ConnectionError: nobody there")
        == 1
    )


@pytest.mark.parametrize("problem", [ImportError("No module named 'x'"), ValueError("wrong key")])
def test_a_tracker_that_cannot_begin_is_refused_before_the_first_step(problem: Exception) -> None:
    with pytest.raises(ConfigError, match="Nothing was trained"):
        fit(Remembering(problem=problem))


def test_a_resumed_run_goes_on_with_its_run_at_the_tracker(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir.mkdir()
    launched = dataclasses.replace(job.current(), launched=True)
    monkeypatch.setattr(job, "_current", launched)
    trainer = shoal.Trainer(nn.Linear(3, 1), loss=nn.MSELoss())
    for known in ("", "run-1"):
        tracker = Remembering()
        tracker.on_fit_begin(trainer)
        assert tracker.opened == [known]
    # And where the tracker is away by then, it goes on without.
    Remembering(problem=ConnectionError("nobody there")).on_fit_begin(trainer)
    assert "left out from here on: ConnectionError" in capfd.readouterr().err
    (run_dir / "remembering.run").write_bytes(b"\xff")
    trainer.job = dataclasses.replace(launched, incarnation=1)
    Remembering(problem=ImportError("not on this host")).on_fit_begin(trainer)
    assert "left out from here on: ImportError" in capfd.readouterr().err


def test_a_second_fit_goes_on_with_the_same_run() -> None:
    tracker = Remembering()
    fit(tracker).fit(shoal.Dataset.from_arrays((torch.ones(8, 3), torch.ones(8, 1))).batch(8))
    assert tracker.opened == ["", "run-1"]


def test_a_tracker_that_never_ends_holds_no_job(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trackers, "CLOSE_S", 0.05)
    tracker, released = Remembering(), threading.Event()
    monkeypatch.setattr(tracker, "_close", lambda outcome: released.wait())
    assert fit(tracker).step == NUM_STEPS
    released.set()
    assert "left out from here on: TimeoutError" in capfd.readouterr().err


def test_every_steps_must_be_a_number() -> None:
    with pytest.raises(ConfigError, match="positive integer"):
        MLflow(every_steps=0)
    with pytest.raises(ConfigError, match="'offline'"):
        WandB(mode="later")
