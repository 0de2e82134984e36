"""Names people know: losses and optimizers by name, arrays, weights to begin with, params, tries, files of predictions."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import shoal
from shoal.callbacks import EMA, SWA, ModelCheckpoint, ReduceLROnPlateau, StopAtConvergence
from shoal.errors import CheckpointError, CheckpointMismatch, ConfigError
from shoal.parallel.single import Single
from shoal.ps.layout import optimizer_class
from shoal.ps.weight_average import averaged
from shoal.train.arguments.by_name import LR_SCALE, loss_named, rescale_learning_rates, scale_learning_rates
from shoal.train.callbacks.base import Callback, StepLogs
from shoal.train.checkpoint.checkpoint import list_checkpoints, open_checkpoint, spaced_by_hours

X = np.random.default_rng(0).normal(size=(40, 4))
Y = (X.sum(1) > 0).astype(int)
BATCHES = shoal.Dataset.from_arrays((torch.tensor(X, dtype=torch.float32), torch.tensor(Y))).batch(8)


def net(num_classes: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, num_classes))


def trainer(model: nn.Module | None = None, **options: Any) -> shoal.Trainer:
    given = {"loss": "cross_entropy", "optimizer": "sgd", "lr": 0.1, "progress": False} | options
    return shoal.Trainer(model if model is not None else net(), **given)


def test_names_and_arrays_train_what_objects_and_datasets_do() -> None:
    named = trainer(optimizer="adamw", lr=0.01, optimizer_options={"weight_decay": 0.1})
    named.fit(pd.DataFrame(X), pd.Series(Y, name="label"), batch_size=8, epochs=2, validation_data=(X, Y))
    spelt = shoal.Trainer(
        net(),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
        progress=False,
    )
    data = shoal.Dataset.from_arrays((torch.tensor(X, dtype=torch.float32), torch.tensor(Y)))
    spelt.fit(data.shuffle(seed=0).batch(8), epochs=2)
    for one, other in zip(named.model.parameters(), spelt.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert named.evaluate(X, Y) == spelt.evaluate(data.batch(32))
    assert torch.equal(torch.as_tensor(named.predict(X)), torch.as_tensor(spelt.predict(data.batch(32))))


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: trainer(loss="cross_entrpy"), "Did you mean 'cross_entropy'"),
        (
            lambda: trainer(optimizer="adamx"),
            "Did you mean 'adamw'|Did you mean 'adamax'|Did you mean 'adam'",
        ),
        (
            lambda: trainer(loss="sparse_categorical_cross_entropy"),
            "Did you mean 'sparse_categorical_crossentropy'",
        ),
        (lambda: trainer(loss=nn.CrossEntropyLoss), r"is a class.*write loss=CrossEntropyLoss\(\)"),
        (lambda: shoal.Dataset((X, Y)), r"made by one of its from_ methods, and was given a tuple"),  # type: ignore[arg-type]
        (lambda: trainer(callbacks=EMA()), "callbacks must be a list, got EMA alone"),
        (lambda: trainer(metrics=["acc"]), "Did you mean 'accuracy'"),
        (lambda: trainer().fit(X.tolist(), Y.tolist()), r"make arrays of lists, numpy.asarray\(x\)"),
        (lambda: shoal.setup(net(), BATCHES, "adam"), "in this order, and got Sequential, Batches, str"),  # type: ignore[type-var]
        (lambda: trainer(optimizer_options={"momentums": 0.9}), "SGD has no setting 'momentums'"),
        (lambda: trainer(lr=-1.0), "optimizer='sgd' cannot be built"),
        (
            lambda: trainer(optimizer=lambda p: torch.optim.SGD(p, 0.1)),
            "are for an optimizer that is given by name",
        ),
        (lambda: trainer(scale_lr="cubic"), "scale_lr must be one of"),
        (lambda: trainer(params={"a": object()}), "as JSON, and cannot be"),
        (lambda: trainer(strategy="ddp"), "is chosen at launch"),
        (lambda: trainer(strategy=lambda job: object()).summary(), "lacks optimizer, step, replay_log"),
        (lambda: trainer(callbacks=[EMA(), SWA(1)]), "an optimizer keeps one average"),
        (lambda: trainer(scale_lr="linear").fit(X, Y), "per_worker=True"),
        (lambda: trainer().fit(X, Y[:-1]), "different numbers of rows, 39 and 40"),
        (lambda: trainer().fit(X, "labels"), "takes arrays, tensors and DataFrames, and was given a str"),
        (
            lambda: trainer().fit(net(), X),
            r"model is the Trainer's: shoal.Trainer\(model, loss=...\).fit\(data\)",
        ),
        (
            lambda: trainer().fit(net()),
            r"model is the Trainer's: shoal.Trainer\(model, loss=...\).fit\(data\)",
        ),
        (lambda: trainer().fit(BATCHES, BATCHES), "measured on is validation_data="),
        (lambda: trainer().fit(pd.DataFrame({"word": ["a"] * 40}), Y), "column 'word' holds no numbers"),
        (
            lambda: trainer(net(1), loss="mse").fit(X, X[:, 0], batch_size=8),
            r"the output has shape \(8, 1\), the target \(8,\).*write y.reshape\(-1, 1\)",
        ),
        (lambda: trainer().fit(X, np.array(3.0)), "a single number in the place of an array"),
        (lambda: trainer(optimizer="muon").fit(X, Y), "optimizer='muon' cannot be built"),  # of a bias
        (lambda: optimizer_class("Averaged" * 5000 + "SGD"), "an optimizer keeps one average"),
        (lambda: EMA(1.0), "decay must be above 0 and below 1"),
        (lambda: ModelCheckpoint(keep_every_hours=0), "positive number of hours"),
    ],
)
def test_bad_input_is_one_paragraph(build: Callable[[], object], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        build()
    assert "\n" not in str(raised.value)


def test_names_of_torchs_functions_are_theirs() -> None:
    assert isinstance(loss_named("binary_cross_entropy"), nn.BCELoss)
    assert isinstance(loss_named("binary_crossentropy"), nn.BCEWithLogitsLoss)
    assert isinstance(loss_named("l1_loss"), nn.L1Loss)
    assert optimizer_class("AveragedSGD") is averaged(torch.optim.SGD)
    trainer(nn.Linear(4, 2, bias=False), optimizer="muon", lr=0.01).fit(X, Y)


class ToFloat(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float()


def test_a_frame_of_integers_and_booleans_is_one_of_numbers() -> None:
    frame = pd.DataFrame({"a": Y, "b": Y > 0, "c": Y, "d": Y})
    one = trainer(nn.Linear(4, 2))
    one.fit(frame.to_numpy(dtype=np.float32), Y)
    found = trainer(nn.Sequential(ToFloat(), one.model)).predict(frame)
    assert torch.equal(torch.as_tensor(found), torch.as_tensor(one.predict(frame.to_numpy(dtype=np.float32))))


def test_the_summary_lists_layers_and_says_what_trains(capsys: pytest.CaptureFixture[str]) -> None:
    model = net()
    model[0].requires_grad_(False)
    text = trainer(model).summary()
    assert capsys.readouterr().out.strip() == text
    assert "58 parameters, 18 trained, 40 frozen" in text
    assert "frozen" in next(line for line in text.splitlines() if line.startswith("0 "))
    assert "optimizer SGD, learning rate 0.1" in text


def test_a_try_runs_one_batch_and_saves_nothing(run_dir: Path) -> None:
    tried = trainer(fast_dev_run=True, callbacks=[ModelCheckpoint(every_steps=1)])
    tried.fit(X, Y, epochs=5, validation_data=(X, Y))
    assert tried.step == 1
    assert not (run_dir / "checkpoints").exists()
    assert len(torch.as_tensor(tried.predict(X))) == 32  # one batch


def test_params_are_in_checkpoints(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"callbacks": [ModelCheckpoint(every_epochs=1)]}
    trainer(params={"depth": 2, "by": [1, 2]}, **options).fit(X, Y, epochs=1)
    [saved] = list_checkpoints(run_dir / "checkpoints")
    assert open_checkpoint(saved).progress["params"] == {"depth": 2, "by": [1, 2]}
    trainer(params={"depth": 3, "by": [1, 2]}, **options).fit(X, Y, epochs=2, resume=saved)
    assert "params differ from the checkpoint's: depth 2 -> 3" in capsys.readouterr().err


# ---- init_from ---------------------------------------------------------------------------------------


def test_weights_come_from_checkpoints_safetensors_and_pth_files(tmp_path: Path) -> None:
    trained = trainer()
    trained.fit(X, Y)
    trained.save(tmp_path / "saved")
    weights = {name: tensor.clone() for name, tensor in trained.model.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors")
    torch.save(
        {"state_dict": {f"module.{name}": each for name, each in weights.items()}, "epoch": 3},
        tmp_path / "a.pth",
    )
    for source in ("saved", "model.safetensors", "a.pth"):
        begun = trainer(init_from=tmp_path / source)
        assert begun.evaluate(X, Y) == trained.evaluate(X, Y)


def test_weights_are_taken_over_from_a_state_dict(tmp_path: Path) -> None:
    given, one = net(1).state_dict(), trainer(net(1))
    one.load({name: 2 * tensor for name, tensor in given.items()})
    for name, tensor in one.model.state_dict().items():
        assert torch.equal(tensor, 2 * given[name])
    torch.save(given, tmp_path / "a.pth")
    with pytest.raises(CheckpointError, match=r"it is a file; Trainer\(init_from=...\) begins with"):
        one.load(tmp_path / "a.pth")
    with pytest.raises(
        CheckpointMismatch, match=r"given to load\(\) belongs to another model: shapes differ"
    ):
        one.load(net(3).state_dict())


def test_a_partial_load_needs_its_word_and_tells_what_it_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(net(num_classes=5).state_dict(), tmp_path / "five.pth")
    with pytest.raises(ConfigError, match=r"so '2' would begin with random weights.*init_partial=True"):
        trainer(init_from=tmp_path / "five.pth").summary()
    begun = trainer(init_from=tmp_path / "five.pth", init_partial=True)
    begun.summary()
    said = capsys.readouterr().err
    assert "2 of 4 tensors loaded" in said
    assert "skipped 2.weight ([5, 8] there, [2, 8] in the model)" in said
    assert "missing 2.weight, 2.bias" in said


def test_what_holds_no_weights_is_refused_and_nothing_of_it_runs(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"state_dict": Evil()}, tmp_path / "evil.pth")
    (tmp_path / "empty.pth").write_bytes(b"")
    torch.save([1, 2], tmp_path / "list.pth")
    save_file({"other": torch.zeros(1)}, tmp_path / "other.safetensors")
    for name, said in {
        "evil.pth": "as weights alone \\(it holds other objects than tensors",
        "empty.pth": "cannot be read as weights alone",
        "list.pth": "no state_dict",
        "nowhere": "is neither a checkpoint nor a file of weights",
    }.items():
        with pytest.raises(CheckpointError, match=said):
            trainer(init_from=tmp_path / name).summary()
    with pytest.raises(ConfigError, match="none of them is one of the model's 4"):
        trainer(init_from=tmp_path / "other.safetensors", init_partial=True).summary()
    assert not (tmp_path / "ran").exists()


# ---- predictions in files, a strategy of one's own, callbacks ----------------------------------------


def test_predictions_are_streamed_to_files_and_not_written_over(tmp_path: Path) -> None:
    one = trainer()
    whole = torch.as_tensor(one.predict(X))
    assert one.predict(X, batch_size=7, out=tmp_path / "out") == {"out": str(tmp_path / "out"), "rows": 40}
    table = pq.read_table(tmp_path / "out" / "part-00000.parquet")
    assert table["position"].to_pylist() == list(range(40))
    assert np.allclose(np.array(table["output"].to_pylist()), whole.numpy(), atol=1e-6)
    assert json.loads((tmp_path / "out" / "_manifest.json").read_text())["rows"] == 40
    with pytest.raises(ConfigError, match="would write over the predictions that are there"):
        one.predict(X, out=tmp_path / "out")


def test_predictions_are_streamed_to_a_url() -> None:
    one, url = trainer(), f"memory://predictions-{uuid.uuid4()}"
    assert one.predict(X, batch_size=7, out=url) == {"out": url, "rows": 40}
    system = fsspec.filesystem("memory")
    try:
        manifest = json.loads(system.cat(f"{url}/_manifest.json"))
        assert (manifest["rows"], manifest["files"]) == (40, {"part-00000.parquet": 40})
        with system.open(f"{url}/part-00000.parquet") as file:
            table = pq.read_table(file)
        whole = torch.as_tensor(one.predict(X))
        assert np.allclose(np.array(table["output"].to_pylist()), whole.numpy(), atol=1e-6)
        with pytest.raises(ConfigError, match="would write over the predictions that are there"):
            one.predict(X, out=url)
    finally:
        system.rm(url, recursive=True)


class Named(nn.Module):
    """Gives what it was given under a name, and so many times as it was called."""

    def __init__(self, name: str, *, grows: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.name, self.grows, self.calls = name, grows, 0

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        return {self.name: (x * self.scale).repeat(1, self.calls if self.grows else 1)}


def test_rows_have_their_position_where_bad_samples_were_skipped(tmp_path: Path) -> None:
    def refuse_2_and_5(row: torch.Tensor) -> torch.Tensor:
        if float(row[0]) in (2.0, 5.0):
            raise ValueError("bad")
        return row

    data = shoal.Dataset.from_arrays(np.arange(8, dtype=np.float32)[:, None])
    out = tmp_path / "out"
    out.mkdir()
    (out / "part-00003.parquet").write_bytes(b"of a run that failed")
    (out / "part-00004.parquet.tmp").write_bytes(b"of the same")
    trainer(Named("value")).predict(data.map(refuse_2_and_5, on_error="skip").batch(4), out=out)
    table = pq.read_table(out)  # the directory
    assert table["position"].to_pylist() == [0, 1, 3, 4, 6, 7]
    assert [value for [value] in table["value"].to_pylist()] == [0, 1, 3, 4, 6, 7]
    assert sorted(path.name for path in out.iterdir()) == ["_manifest.json", "part-00000.parquet"]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Named("position"), "a tensor 'position', and the column of that name holds each row's position"),
        (
            Named("value", grows=True),
            r"column 'value' was fixed_size_list.*\[4\] in the first batch and is .*\[8\] after 8 rows",
        ),
    ],
)
def test_outputs_that_make_no_table_are_refused(model: nn.Module, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        trainer(model).predict(X, batch_size=8, out=tmp_path / "out")


def test_a_strategy_of_ones_own_takes_the_place_of_the_launched_one() -> None:
    class Counting(Single):
        commits = 0

        def __init__(self, job: Any) -> None:
            super().__init__()

        def commit(self) -> Any:
            Counting.commits += 1
            return super().commit()

    trainer(strategy=Counting).fit(X, Y, batch_size=8, epochs=2)
    assert Counting.commits == 10


def test_learning_rates_follow_a_resume_to_another_number_of_workers() -> None:
    optimizer = torch.optim.SGD(net().parameters(), lr=0.4)
    optimizer.param_groups[0] |= {LR_SCALE: 4.0, "initial_lr": 0.8}
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, last_epoch=1)
    rescale_learning_rates(optimizer, schedule, 2.0)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["initial_lr"], group[LR_SCALE]) == (
        pytest.approx(0.2),
        pytest.approx(0.4),
        2.0,
    )
    assert schedule.base_lrs == [pytest.approx(0.4)]


def test_schedulers_within_schedulers_follow_each_group_by_its_own_ratio() -> None:
    schedules = torch.optim.lr_scheduler
    first, second = (nn.Parameter(torch.zeros(1)) for _ in range(2))

    def begun(factor: float) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second], "lr": 0.3}], lr=0.1)
        scale_learning_rates(optimizer, factor)
        parts = [schedules.LinearLR(optimizer, 0.1, 1.0, 5), schedules.CosineAnnealingLR(optimizer, 20)]
        return optimizer, schedules.SequentialLR(optimizer, parts, [5])

    def rates(optimizer: torch.optim.Optimizer, schedule: Any, num_steps: int) -> list[list[float]]:
        found = []
        for _ in range(num_steps):
            optimizer.step()
            schedule.step()
            found.append([group["lr"] for group in optimizer.param_groups])
        return found

    expected = rates(*begun(2.0), 12)
    optimizer, schedule = begun(4.0)
    rates(optimizer, schedule, 3)
    rescale_learning_rates(optimizer, schedule, 2.0)
    assert np.allclose(rates(optimizer, schedule, 9), expected[3:])

    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second]}], lr=0.4)
    cyclic = schedules.CyclicLR(optimizer, 0.4, 4.0, cycle_momentum=False)
    for group, factor in zip(optimizer.param_groups, (4.0, 2.0), strict=True):
        group[LR_SCALE] = factor
    rescale_learning_rates(optimizer, cyclic, 2.0)
    assert (cyclic.base_lrs, cyclic.max_lrs) == ([0.2, 0.4], [2.0, 4.0])


def test_training_stops_once_the_loss_has_converged() -> None:
    converged = StopAtConvergence(steps=6, min_delta=10.0)
    one = trainer(callbacks=[converged])
    one.fit(X, Y, batch_size=8, epochs=50)
    assert (converged.stopped_at_step, one.step) == (
        7,
        8,
    )  # the first, and 6 without; decided with the next commit
    again = StopAtConvergence(steps=6)
    again.load_state(converged.state())
    assert again.num_steps_without >= 6


def test_a_smoothed_loss_that_falls_does_not_stop() -> None:
    watching = StopAtConvergence(steps=2, smoothing=0.5)
    for step in range(50):
        watching.on_step_end(object(), StepLogs(0, step + 1, 50.0 - step, 1, 0.1, None))  # type: ignore[arg-type]
    assert watching.num_steps_without == 0


def test_old_checkpoints_stay_one_for_every_so_many_hours(tmp_path: Path) -> None:
    saving = ModelCheckpoint(every_steps=1, keep_last=1, keep_every_hours=2, directory=tmp_path / "saved")
    one = trainer(callbacks=[saving])
    for hour in range(6):
        one.fit(X, Y, max_steps=1)
        newest = list_checkpoints(tmp_path / "saved")[-1]
        os.utime(Path(newest) / "manifest.json", (1e9 + 3600 * hour,) * 2)
    one.fit(X, Y, max_steps=1)
    kept = [Path(path).name for path in list_checkpoints(tmp_path / "saved")]
    assert kept == [f"step-{step:09d}" for step in (1, 3, 5, 7)]
    assert len(spaced_by_hours(tmp_path / "saved", 4)) == 3


def test_a_plateau_beside_a_scheduler_is_refused() -> None:
    schedule = {"scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1)}
    with pytest.raises(ConfigError, match="would both set learning rates"):
        trainer(callbacks=[ReduceLROnPlateau("loss")], **schedule).fit(X, Y)


def test_an_average_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    def run(epochs: int, resume: str | None = None) -> shoal.Trainer:
        one = trainer(callbacks=[SWA(1, use=False), ModelCheckpoint(directory=tmp_path / "saved")])
        one.fit(X, Y, batch_size=8, epochs=epochs, resume=resume)
        return one

    straight = run(3).run_dir / "average"
    expected = open_checkpoint(straight).pieces["model/0.weight"].clone()
    run(3, resume=list_checkpoints(tmp_path / "saved")[0])  # after the first epoch
    assert torch.equal(open_checkpoint(straight).pieces["model/0.weight"], expected)


class Late(nn.Module):
    """A part of it has its first gradient in the third epoch of 5 steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.early, self.late, self.calls = nn.Linear(4, 2), nn.Linear(4, 2), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        early: torch.Tensor = self.early(x)
        return early + self.late(x) if self.calls > 12 else early


@pytest.mark.parametrize("fits", [[4], [2, 2]])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_an_average_of_epochs_is_their_mean(optimizer: str, fits: list[int]) -> None:
    class Watching(Callback):
        def on_epoch_end(self, trainer: shoal.Trainer, logs: dict[str, float]) -> None:
            seen.append({name: each.detach().clone() for name, each in trainer.model.named_parameters()})

    seen: list[dict[str, torch.Tensor]] = []
    one = trainer(Late(), optimizer=optimizer, lr=0.05, callbacks=[SWA(1), Watching()])
    for epochs in fits:
        one.fit(X, Y, batch_size=8, epochs=epochs)
    assert len(seen) == 4
    for name, found in one.model.named_parameters():
        torch.testing.assert_close(found.detach(), torch.stack([each[name] for each in seen]).mean(0))
