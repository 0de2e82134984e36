"""A resumed fit ends where the undisturbed one ends, and says why where it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from by_hand import LABEL, N, X, adam, assert_same_bits, batches, dataset, trainer, weights
from torch import nn
from torch.optim import lr_scheduler

import shoal
from shoal.callbacks import EarlyStopping, ModelCheckpoint, StopAtStep
from shoal.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointMismatch,
    NoCheckpoint,
    OptimizerMismatch,
)
from shoal.train.checkpoint.checkpoint import list_checkpoints


def with_dropout() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.4), nn.Linear(16, 4)).double()


def build(*callbacks: Any, **options: Any) -> shoal.Trainer:
    settings = {
        "optimizer": adam,
        "scheduler": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
        "metrics": ["accuracy", "auroc"],
        "callbacks": [
            *callbacks,
            EarlyStopping("val_loss", patience=2),
            ModelCheckpoint(every_steps=1, keep_last=99),
        ],
    }
    return trainer(with_dropout(), **(settings | options))


def fit(run: shoal.Trainer, **options: Any) -> shoal.History:
    return run.fit(batches(), **{"epochs": 3, "validation_data": dataset().batch(20), **options})


@pytest.mark.parametrize("stopped_at", [1, 3, 4, 5, 8, 11, 12])
def test_a_resumed_fit_ends_with_the_bits_of_an_undisturbed_one(run_dir: Path, stopped_at: int) -> None:
    whole = build(callbacks=[])
    expected = fit(whole)
    fit(build(StopAtStep(stopped_at)))
    resumed = build()
    history = fit(resumed, resume="auto")
    assert (resumed.step, resumed.epoch) == (12, 3)
    assert_same_bits(weights(resumed.model), weights(whole.model))
    assert history.epochs == expected.epochs, "the interrupted epoch's loss and metrics included"
    assert resumed.learning_rates == whole.learning_rates


def test_a_fit_that_had_reached_its_end_is_not_trained_again(run_dir: Path) -> None:
    for limits in ({"epochs": 2}, {"epochs": 9, "max_steps": 6}):
        first = build()
        done = fit(first, **limits)
        again = build()
        history = fit(again, **limits, resume="auto")
        assert history.epochs == done.epochs
        assert again.step == first.step
        assert_same_bits(weights(again.model), weights(first.model))


def test_auto_without_a_checkpoint_begins_anew(run_dir: Path) -> None:
    run = build()
    fit(run, resume="auto", epochs=1)
    assert run.step == 4


def test_the_callbacks_of_a_resumed_fit_go_on(run_dir: Path) -> None:
    early = EarlyStopping("val_loss", patience=3, min_delta=100.0)
    first = build(callbacks=[early, ModelCheckpoint(every_steps=1)])
    fit(first, epochs=2)
    assert early.num_epochs_without == 1
    later = EarlyStopping("val_loss", patience=3, min_delta=100.0)
    # One more before it and one fewer after it: each still finds its own.
    second = build(callbacks=[StopAtStep(99), later])
    fit(second, epochs=9, resume="auto")
    assert (second.epoch, later.stopped_at_epoch) == (4, 4)


@pytest.mark.parametrize("stopped_at", [2, 4, 6, 7])
def test_a_script_of_two_fits_goes_on_in_the_one_that_was_running(run_dir: Path, stopped_at: int) -> None:
    def script(run: shoal.Trainer, **options: Any) -> list[list[dict[str, float]]]:
        first = run.fit(batches(), epochs=1, **options)
        second = run.fit(batches(), epochs=1, **options)
        return [first.epochs, second.epochs]

    whole = build(callbacks=[])
    expected = script(whole)
    script(build(StopAtStep(stopped_at), callbacks=[StopAtStep(stopped_at), ModelCheckpoint(every_steps=1)]))
    resumed = build(callbacks=[ModelCheckpoint(every_steps=1)])
    assert script(resumed, resume="auto") == expected
    assert_same_bits(weights(resumed.model), weights(whole.model))


def test_a_named_checkpoint_is_meant_for_this_fit(run_dir: Path) -> None:
    first = build()
    fit(first, epochs=1)
    fit(first, max_steps=2)
    [*_, newest] = list_checkpoints(run_dir / "checkpoints")
    run = build()
    run.fit(batches(), max_steps=3, resume=newest)
    assert run.step == 7, "limits count from the step at which that fit had begun, 4"


def test_skipped_steps_are_remembered(run_dir: Path) -> None:
    x = X.clone()
    x[5] = torch.inf
    data = dataset(x, LABEL).batch(10)
    first = trainer(on_nonfinite="skip", callbacks=[ModelCheckpoint(every_steps=1)])
    first.fit(data, max_steps=3)
    assert first.num_skipped_steps == 1
    second = trainer(on_nonfinite="skip")
    second.fit(data, max_steps=4, resume="auto")
    assert second.num_skipped_steps == 1


def test_other_metrics_than_the_checkpoints_begin_at_zero(run_dir: Path) -> None:
    fit(build(), max_steps=2)
    run = build(metrics=["accuracy"])
    history = fit(run, epochs=1, resume="auto")
    assert set(history) == {"loss", "accuracy", "val_loss", "val_accuracy"}


# ---- refusals ------------------------------------------------------------------------------------


def test_resuming_on_data_of_another_length_is_refused(run_dir: Path) -> None:
    fit(build(), max_steps=2)
    run = build()
    before = weights(run.model)
    with pytest.raises(CheckpointError, match=rf"dataset of {N} samples, but fit was given one of 30"):
        run.fit(batches(10, X[:30], LABEL[:30]), epochs=3, resume="auto")
    assert_same_bits(weights(run.model), before)


def test_a_checkpoint_of_another_model_names_keys_and_shapes(run_dir: Path, tmp_path: Path) -> None:
    fit(build(), max_steps=1)
    build().save(tmp_path / "model")
    other = trainer(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)).double())
    before = weights(other.model)
    for load in (lambda: other.load(tmp_path / "model"), lambda: other.fit(batches(), resume="auto")):
        with pytest.raises(CheckpointMismatch) as raised:
            load()
        assert raised.value.missing == []
        assert "3.weight" in raised.value.unexpected
        assert "0.weight is float64[16, 6] in the checkpoint and float64[8, 6] in the model" in str(
            raised.value
        )
        assert_same_bits(weights(other.model), before)


def test_another_optimizer_than_the_checkpoints_is_refused_by_name(run_dir: Path) -> None:
    fit(build(), max_steps=1)
    with pytest.raises(OptimizerMismatch, match="it is Adam, the script builds SGD") as raised:
        fit(build(optimizer=lambda p: torch.optim.SGD(p, lr=0.1)), resume="auto")
    assert raised.value.path == list_checkpoints(run_dir / "checkpoints")[-1]


def test_a_model_alone_cannot_be_resumed_from(tmp_path: Path) -> None:
    run = build()
    run.save(tmp_path / "model")
    with pytest.raises(NoCheckpoint, match=r"weights only.*use load\(\)"):
        run.fit(batches(), resume=str(tmp_path / "model"))
    with pytest.raises(NoCheckpoint, match="does not exist"):
        run.fit(batches(), resume=str(tmp_path / "nothing"))
    with pytest.raises(NoCheckpoint, match="does not exist"):
        run.load(tmp_path / "nothing")


def damage(path: Path, how: str) -> None:
    file = path / "optimizer.safetensors"
    content = bytearray(file.read_bytes())
    if how == "flipped":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif how == "torn":
        file.write_bytes(content[:-9])
    else:
        (path / "manifest.json").unlink()


@pytest.mark.parametrize("how", ["flipped", "torn", "unfinished"])
def test_a_damaged_checkpoint_is_told_and_the_one_before_it_is_used(
    run_dir: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    whole = build(callbacks=[])
    fit(whole)
    fit(build(StopAtStep(6)))
    [*_, before, newest] = list_checkpoints(run_dir / "checkpoints")
    damage(Path(newest), how)
    run = build()
    fit(run, resume="auto")
    said = capsys.readouterr().err
    assert f"the checkpoint {newest} is damaged" in said
    assert f"going on from {before}: step 5, epoch 2, sample 10" in said
    assert_same_bits(weights(run.model), weights(whole.model))


def test_a_damaged_checkpoint_that_was_named_is_refused(run_dir: Path) -> None:
    fit(build(), max_steps=2)
    newest = list_checkpoints(run_dir / "checkpoints")[-1]
    damage(Path(newest), "flipped")
    with pytest.raises(CheckpointDamaged, match=r"optimizer\.safetensors has changed"):
        fit(build(), resume=newest)


def test_a_run_that_begins_anew_sets_the_checkpoints_of_the_old_one_aside(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(build(callbacks=[ModelCheckpoint(every_steps=2)]), max_steps=8)
    run = build(callbacks=[ModelCheckpoint(every_steps=2)])
    fit(run, max_steps=2)
    names = [Path(path).name for path in list_checkpoints(run_dir / "checkpoints")]
    assert names == ["step-000000002"]
    aside = run_dir / "checkpoints" / "before-1"
    assert f"moved to {aside}" in capsys.readouterr().err
    assert [Path(path).name[-1] for path in list_checkpoints(aside)] == ["4", "6", "8"]
    again = build()
    fit(again, max_steps=3, resume="auto")
    assert again.step == 3


def test_setting_aside_works_where_directories_cannot_be_renamed(run_dir: Path) -> None:
    home = "memory://aside"
    saves = [ModelCheckpoint(every_steps=2, directory=home)]
    fit(build(callbacks=saves), max_steps=6)
    fit(build(callbacks=saves), max_steps=2)
    assert [path[-1] for path in list_checkpoints(home)] == ["2"]
    assert [path[-1] for path in list_checkpoints(f"{home}/before-1")] == ["4", "6"]
    again = build(callbacks=[ModelCheckpoint(directory=home)])
    fit(again, max_steps=3, resume="auto")
    assert again.step == 3
    fsspec.filesystem("memory").rm("/aside", recursive=True)
