from __future__ import annotations

import copy
import csv
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.callbacks import (
    Callback,
    CSVLog,
    EarlyStopping,
    JSONLog,
    LearningRateMonitor,
    ModelCheckpoint,
    StopAtStep,
    TensorBoard,
)
from shoal.config import job
from shoal.errors import ConfigError
from shoal.train.callbacks.average import WeightAverage
from shoal.train.callbacks.base import CallbackList, StepLogs
from shoal.train.calls import build_optimizer
from shoal.train.checkpoint.checkpoint import list_checkpoints, open_checkpoint

STEPS_PER_EPOCH = 5


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(job, "_current", job.Job(name="test", run_dir=tmp_path / "run"))
    return tmp_path / "run"


def data() -> Any:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(40, 3, generator=generator)
    return shoal.Dataset.from_arrays((inputs, (inputs.sum(1) > 0).float()))


def build(*callbacks: Callback, lr: float = 0.1, **options: Any) -> shoal.Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
    return shoal.Trainer(
        model,
        loss=nn.BCEWithLogitsLoss(),
        optimizer=lambda params: torch.optim.Adam(params, lr=lr),
        callbacks=callbacks,
        **options,
    )


def fit(trainer: shoal.Trainer, **options: Any) -> Any:
    batches = data().shuffle(seed=0).batch(40 // STEPS_PER_EPOCH)
    return trainer.fit(batches, **{"validation_data": data().batch(40), "epochs": 2, **options})


def steps(directory: Path) -> list[int]:
    return [int(path.rpartition("-")[2]) for path in list_checkpoints(directory)]


class Scripted(Callback):
    """Replaces the epochs' values by given ones, before the callbacks after it look."""

    ranks = "every"

    def __init__(self, name: str, values: list[float]) -> None:
        self._name, self._values = name, values

    def on_epoch_end(self, trainer: Any, logs: dict[str, float]) -> None:
        logs[self._name] = self._values[trainer.epoch - 1]


# ModelCheckpoint


def test_with_nothing_said_every_epoch_is_saved_and_three_are_kept(run_dir: Path) -> None:
    fit(build(ModelCheckpoint()), epochs=5)
    assert steps(run_dir / "checkpoints") == [15, 20, 25]


def test_every_so_many_steps(run_dir: Path) -> None:
    fit(build(ModelCheckpoint(every_steps=4, keep_last=9)), epochs=2)
    assert steps(run_dir / "checkpoints") == [4, 8]


def test_every_so_many_epochs_to_a_place_of_its_own(run_dir: Path, tmp_path: Path) -> None:
    fit(build(ModelCheckpoint(every_epochs=2, keep_last=9, directory=tmp_path / "mine")), epochs=5)
    assert steps(tmp_path / "mine") == [10, 20]
    assert not run_dir.exists()


def test_steps_and_epochs_that_meet_are_saved_once(run_dir: Path) -> None:
    saved: list[str] = []
    trainer = build(ModelCheckpoint(every_steps=STEPS_PER_EPOCH, every_epochs=1, keep_last=9))
    save = trainer.save_checkpoint
    trainer.save_checkpoint = lambda directory=None, **how: saved.append(save(directory, **how)) or saved[-1]  # type: ignore[method-assign, func-returns-value]
    fit(trainer)
    assert len(saved) == 2
    assert steps(run_dir / "checkpoints") == [5, 10]


def test_the_best_is_kept_beside_the_last(run_dir: Path) -> None:
    callback = ModelCheckpoint(best="val_loss", keep_last=1)
    fit(build(Scripted("val_loss", [0.9, 0.3, 0.5, math.nan, 0.4]), callback), epochs=5)
    assert steps(run_dir / "checkpoints") == [10, 25]
    assert callback.best_path == str(run_dir / "checkpoints" / "step-000000010")
    assert callback.best_value == 0.3


def test_the_best_is_saved_also_between_the_rhythms(run_dir: Path) -> None:
    fit(
        build(Scripted("val_auroc", [0.1, 0.9, 0.2]), ModelCheckpoint(every_epochs=3, best="val_auroc")),
        epochs=3,
    )
    assert steps(run_dir / "checkpoints") == [5, 10, 15]


def test_a_better_one_takes_the_place_of_the_best(run_dir: Path) -> None:
    callback = ModelCheckpoint(every_steps=STEPS_PER_EPOCH, best="val_loss", keep_last=1)
    fit(build(Scripted("val_loss", [0.9, 0.8, 0.7]), callback), epochs=3)
    assert steps(run_dir / "checkpoints") == [15]


def test_a_checkpoint_knows_that_it_is_the_best(run_dir: Path) -> None:
    callback = ModelCheckpoint(best="val_loss")
    fit(build(Scripted("val_loss", [0.9, 0.3]), callback))
    newest = open_checkpoint(run_dir / "checkpoints" / "step-000000010")
    (state,) = [
        each["state"] for each in newest.progress["callbacks"] if each["callback"] == "ModelCheckpoint"
    ]
    resumed = ModelCheckpoint(best="val_loss")
    resumed.load_state(state)
    assert (resumed.best_path, resumed.best_value) == (newest.path, 0.3)


def test_the_best_survives_a_resumed_run(run_dir: Path) -> None:
    values = [0.2, 0.9, 0.8, 0.7]
    fit(build(Scripted("val_loss", values), ModelCheckpoint(best="val_loss", keep_last=1)), epochs=2)
    callback = ModelCheckpoint(best="val_loss", keep_last=1)
    fit(build(Scripted("val_loss", values), callback), epochs=4, resume="auto")
    assert callback.best_value == 0.2
    assert steps(run_dir / "checkpoints") == [5, 20]


def test_time_is_told_by_rank_zero_and_a_wish_is_all_it_takes(run_dir: Path) -> None:
    callback = ModelCheckpoint(every_s=1e-9, keep_last=99)
    fit(build(callback), epochs=1)
    # The wish of each step is granted with the next commit.
    assert steps(run_dir / "checkpoints") == [2, 3, 4, 5]

    wishes: list[int] = []
    other = SimpleNamespace(rank=1, step=3, wish_checkpoint=lambda: wishes.append(1))
    callback.on_step_end(other, StepLogs(0, 3, 0.5, 8, 0.1, None))  # type: ignore[arg-type]
    assert wishes == []


def test_a_timed_checkpoint_elsewhere_does_not_stand_for_the_best_one(run_dir: Path, tmp_path: Path) -> None:
    callback = ModelCheckpoint(every_s=1e-9, best="val_loss", directory=tmp_path / "mine")
    fit(build(callback), epochs=1)
    assert callback.best_path == str(tmp_path / "mine" / "step-000000005")
    assert open_checkpoint(callback.best_path).progress["step"] == 5


def test_the_best_of_another_value_is_not_taken_over() -> None:
    before = ModelCheckpoint(best="val_loss")
    before.best_path = "saved/step-000000005"
    after = ModelCheckpoint(best="val_auroc")
    after.load_state(before.state())
    assert after.best_path is None


def test_an_hour_is_not_over_in_a_second(run_dir: Path) -> None:
    fit(build(ModelCheckpoint(every_s=3600)), epochs=1)
    assert not (run_dir / "checkpoints").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every_steps": 0}, "every_steps must be a positive integer, got 0"),
        ({"every_steps": 2.5}, r"every_steps must be a positive integer, got 2\.5"),
        ({"every_epochs": -1}, "every_epochs must be a positive integer"),
        ({"every_s": 0}, "every_s must be a positive number of seconds"),
        ({"keep_last": 0}, "keep_last must be a positive integer"),
        ({"best": "val_loss", "mode": "low"}, "mode must be 'min', 'max' or 'auto'"),
        ({"best": "val_strangeness"}, "cannot tell whether 'val_strangeness' is better when it falls"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ModelCheckpoint(**options)


@pytest.mark.parametrize("callback", [ModelCheckpoint(best="val_accuracy"), EarlyStopping("val_accuracy")])
def test_a_value_that_is_not_there_is_told_with_those_that_are(run_dir: Path, callback: Callback) -> None:
    with pytest.raises(
        ConfigError, match="'val_accuracy' is to be watched, but the epoch's values are loss, val_loss"
    ):
        fit(build(callback))


# A run that was stopped and goes on


@pytest.mark.parametrize("stop", [3, 5, 7])
def test_a_resumed_run_ends_as_an_undisturbed_one(run_dir: Path, tmp_path: Path, stop: int) -> None:
    def watched() -> list[Callback]:
        return [
            CSVLog(),
            JSONLog(),
            ModelCheckpoint(every_steps=1, keep_last=1, best="val_loss"),
            EarlyStopping(patience=9),
        ]

    straight = build(*watched(), metrics=["accuracy", "auroc"])
    expected = fit(straight, epochs=3)
    logs = {name: (run_dir / name).read_text() for name in ("log.csv", "log.jsonl")}
    run_dir.rename(tmp_path / "straight")

    fit(build(*watched(), StopAtStep(stop), metrics=["accuracy", "auroc"]), epochs=3)
    resumed = build(*watched(), metrics=["accuracy", "auroc"])
    history = fit(resumed, epochs=3, resume="auto")
    assert resumed.step == straight.step
    for key, tensor in straight.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[key], tensor), key
    assert {name: (run_dir / name).read_text() for name in logs} == logs
    assert history.epochs[-1] == expected.epochs[-1]


# EarlyStopping


def test_patience_is_counted_in_epochs_without_improvement(run_dir: Path) -> None:
    trainer = build(
        Scripted("val_loss", [0.5, 0.6, 0.4, 0.41, 0.42, 0.3]), stopping := EarlyStopping(patience=2)
    )
    fit(trainer, epochs=6)
    assert trainer.epoch == 5
    assert (stopping.best_value, stopping.stopped_at_epoch) == (0.4, 5)


def test_an_improvement_below_min_delta_is_none(run_dir: Path) -> None:
    trainer = build(Scripted("val_loss", [0.5, 0.45, 0.41, 0.4]), EarlyStopping(patience=2, min_delta=0.1))
    fit(trainer, epochs=4)
    assert trainer.epoch == 3


def test_auto_knows_that_an_accuracy_rises(run_dir: Path) -> None:
    trainer = build(Scripted("val_accuracy", [0.5, 0.6, 0.7, 0.8]), EarlyStopping("val_accuracy", patience=1))
    fit(trainer, epochs=4)
    assert trainer.epoch == 4


def test_not_a_number_is_no_improvement(run_dir: Path) -> None:
    trainer = build(Scripted("val_loss", [math.nan, math.nan, 0.1]), EarlyStopping(patience=2))
    fit(trainer, epochs=3)
    assert trainer.epoch == 2


def test_patience_goes_on_in_a_resumed_run(run_dir: Path) -> None:
    values = [0.5, 0.6, 0.7, 0.8, 0.9]
    fit(build(Scripted("val_loss", values), EarlyStopping(patience=3), ModelCheckpoint()), epochs=2)
    resumed = build(Scripted("val_loss", values), EarlyStopping(patience=3), ModelCheckpoint())
    fit(resumed, epochs=5, resume="auto")
    assert resumed.epoch == 4


def test_the_best_weights_come_back(run_dir: Path) -> None:
    class Remember(Callback):
        def __init__(self) -> None:
            self.weights: list[torch.Tensor] = []

        def on_epoch_end(self, trainer: Any, logs: dict[str, float]) -> None:
            self.weights.append(trainer.model[0].weight.detach().clone())

    remember = Remember()
    trainer = build(
        Scripted("val_loss", [0.5, 0.2, 0.3, 0.4]), remember, EarlyStopping(patience=2, restore_best=True)
    )
    fit(trainer, epochs=9)
    assert len(remember.weights) == 4
    assert torch.equal(trainer.model[0].weight, remember.weights[1])
    fresh = build()
    fresh.load(run_dir / "best")
    assert torch.equal(fresh.model[0].weight, remember.weights[1])


@pytest.mark.parametrize("patience", [0, -1, 1.5])
def test_patience_must_be_some_epochs(patience: Any) -> None:
    with pytest.raises(ConfigError, match="patience must be a positive number of epochs"):
        EarlyStopping(patience=patience)


@pytest.mark.parametrize("min_delta", [-0.1, math.nan, math.inf])
def test_min_delta_must_be_a_distance(min_delta: float) -> None:
    with pytest.raises(ConfigError, match="min_delta must be a number of at least 0"):
        EarlyStopping(min_delta=min_delta)


# StopAtStep


@pytest.mark.parametrize("step", [1, 2, STEPS_PER_EPOCH, STEPS_PER_EPOCH + 1])
def test_it_stops_after_that_very_step(run_dir: Path, step: int) -> None:
    trainer = build(StopAtStep(step))
    fit(trainer, epochs=3)
    assert trainer.step == step


def test_a_step_that_is_behind_stops_at_once(run_dir: Path) -> None:
    fit(build(StopAtStep(3), ModelCheckpoint(every_steps=3)))
    resumed = build(StopAtStep(3))
    fit(resumed, resume="auto")
    assert resumed.step == 3


def test_a_step_is_a_positive_number() -> None:
    with pytest.raises(ConfigError, match="StopAtStep's step must be a positive integer, got 0"):
        StopAtStep(0)


# Logs


def test_the_learning_rate_is_logged_by_group() -> None:
    logged: dict[str, float] = {}
    logs = StepLogs(0, 1, 0.5, 8, 0.1, None)
    for rates in ([0.1], [0.2, 0.3]):
        trainer: Any = SimpleNamespace(learning_rates=rates, log=logged.__setitem__)
        LearningRateMonitor().on_step_end(trainer, logs)
    assert logged == {"lr": 0.1, "lr_0": 0.2, "lr_1": 0.3}


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv_has_a_row_per_epoch(run_dir: Path) -> None:
    history = fit(build(CSVLog(), metrics=["accuracy"]))
    table = rows(run_dir / "log.csv")
    assert [(row["epoch"], row["step"]) for row in table] == [("0", "5"), ("1", "10")]
    for name in ("loss", "accuracy", "val_loss", "val_accuracy"):
        assert [float(row[name]) for row in table] == history[name]


def test_csv_has_a_row_per_step_when_asked(run_dir: Path, tmp_path: Path) -> None:
    fit(build(CSVLog(tmp_path / "deep" / "steps.csv", every="step"), clip_norm=1.0))
    table = rows(tmp_path / "deep" / "steps.csv")
    assert [row["step"] for row in table] == [str(step) for step in range(1, 11)]
    assert all(float(row["grad_norm"]) > 0 and row["samples"] == "8" for row in table)


def test_a_value_that_comes_later_gets_a_column(tmp_path: Path) -> None:
    log = CSVLog(tmp_path / "log.csv")
    trainer: Any = SimpleNamespace(step=0, epoch=0, run_dir=tmp_path)
    log.on_fit_begin(trainer)
    for epoch, logs in enumerate([{"loss": 1.0}, {"loss": 0.5, "val_loss": 0.7}, {"loss": 0.4}]):
        trainer.step, trainer.epoch = epoch * 5 + 5, epoch + 1
        log.on_epoch_end(trainer, logs)
    assert [row["val_loss"] for row in rows(tmp_path / "log.csv")] == ["", "0.7", ""]


def test_a_torn_row_is_dropped_when_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("epoch,step,loss\n0,5,0.5\n1,10,0.4\n2,1")
    trainer: Any = SimpleNamespace(step=15, epoch=2, run_dir=tmp_path)
    log = CSVLog()
    log.on_fit_begin(trainer)
    trainer.epoch = 3
    log.on_epoch_end(trainer, {"loss": 0.3})
    assert (tmp_path / "log.csv").read_text().split() == [
        "epoch,step,loss",
        "0,5,0.5",
        "1,10,0.4",
        "2,15,0.3",
    ]


def test_a_log_is_by_epoch_or_by_step() -> None:
    with pytest.raises(ConfigError, match="CSVLog's every must be 'epoch' or 'step', got 'day'"):
        CSVLog(every="day")  # type: ignore[arg-type]


def test_json_has_a_line_per_step_and_per_epoch(run_dir: Path) -> None:
    history = fit(build(JSONLog()))
    lines = [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == (["step"] * 5 + ["epoch"]) * 2
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10, 10]
    assert [line["val_loss"] for line in lines if line["event"] == "epoch"] == history["val_loss"]


def test_json_stays_json_when_a_value_is_not_finite(tmp_path: Path) -> None:
    log = JSONLog(tmp_path / "log.jsonl")
    trainer: Any = SimpleNamespace(step=0, epoch=0)
    log.on_fit_begin(trainer)
    log.on_step_end(trainer, StepLogs(0, 1, math.nan, 8, 0.1, math.inf))
    (line,) = (tmp_path / "log.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=pytest.fail)["loss"] is None


@pytest.mark.parametrize(("log", "name"), [(CSVLog(), "log.csv"), (JSONLog(), "log.jsonl")])
def test_a_run_from_the_beginning_begins_its_log_anew(run_dir: Path, log: Callback, name: str) -> None:
    fit(build(log))
    first = (run_dir / name).read_text()
    fit(build(log))
    assert (run_dir / name).read_text() == first


def test_a_second_fit_goes_on_in_the_same_log(run_dir: Path) -> None:
    trainer = build(CSVLog())
    fit(trainer)
    fit(trainer)
    assert [row["step"] for row in rows(run_dir / "log.csv")] == ["5", "10", "15", "20"]


# TensorBoard


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


@pytest.mark.filterwarnings("ignore")  # tensorboard's own
def test_tensorboard_gets_steps_and_epochs(run_dir: Path) -> None:
    history = fit(build(TensorBoard(), lr=0.25, clip_norm=1.0))
    read = scalars(run_dir / "tensorboard")
    assert [step for step, _ in read["step/loss"]] == list(range(1, 11))
    assert read["step/lr"] == [(step, 0.25) for step in range(1, 11)]
    assert [step for step, _ in read["step/grad_norm"]] == list(range(1, 11))
    assert [value for _, value in read["epoch/val_loss"]] == pytest.approx(history["val_loss"])


@pytest.mark.filterwarnings("ignore")  # tensorboard's own
def test_tensorboard_shows_no_step_twice_after_a_resume(run_dir: Path) -> None:
    fit(build(TensorBoard(every_steps=2), ModelCheckpoint(every_steps=4, keep_last=9), StopAtStep(7)))
    resumed = build(TensorBoard(every_steps=2), ModelCheckpoint(every_steps=4, keep_last=9))
    fit(resumed, resume=str(run_dir / "checkpoints" / "step-000000004"))
    assert [step for step, _ in scalars(run_dir / "tensorboard")["step/loss"]] == [2, 4, 6, 8, 10]


def test_its_warnings_are_not_the_users(run_dir: Path) -> None:
    fit(build(TensorBoard()), epochs=1)  # warnings are errors here


def test_without_tensorboard_it_says_what_to_install(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        fit(build(TensorBoard()))


# Callbacks of one's own


def test_what_a_callback_raises_is_the_scripts_own(run_dir: Path) -> None:
    class Broken(Callback):
        def on_step_end(self, trainer: Any, logs: StepLogs) -> None:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fit(build(Broken()))


def test_hooks_come_in_order_and_those_that_save_come_last(run_dir: Path) -> None:
    heard: list[str] = []

    def noting(name: str, last: bool) -> Callback:
        class Noting(Callback):
            runs_last = last

            def __getattribute__(self, hook: str) -> Any:
                if hook.startswith("on_"):
                    heard.append(f"{name}.{hook}")
                return super().__getattribute__(hook)

        return Noting()

    fit(build(noting("saving", True), noting("own", False)), epochs=1)
    by_hook: dict[str, list[str]] = {}
    for entry in heard:
        name, hook = entry.split(".")
        by_hook.setdefault(hook, []).append(name)
    hooks = ["on_fit_begin", "on_step_end", "on_validation_end", "on_epoch_end", "on_fit_end"]
    assert list(by_hook) == hooks
    assert all(names == ["own", "saving"] * (len(names) // 2) for names in by_hook.values())


def test_the_state_of_every_callback_is_json() -> None:
    callbacks: list[Callable[[], Callback]] = [
        Callback, ModelCheckpoint, EarlyStopping, lambda: StopAtStep(3), LearningRateMonitor, TensorBoard, CSVLog, JSONLog,
        lambda: ModelCheckpoint(best="val_loss"),
    ]  # fmt: skip
    for create in callbacks:
        state = json.loads(json.dumps(create().state()))
        create().load_state(state)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("on_epoch_ends", "Did you mean on_epoch_end?"),
        ("on_step_begin", "The hooks are on_fit_begin, on_step_end"),
        ("on_train_batch_end", "Did you mean on_step_end?"),
        ("on_validation_epoch_end", "Did you mean on_validation_end?"),
        ("on_fit_start", "Did you mean on_fit_begin?"),
    ],
)
def test_a_method_that_is_named_like_a_hook_and_is_none_is_refused(name: str, meant: str) -> None:
    Misspelt = type("Misspelt", (shoal.callbacks.Callback,), {name: lambda self, *args: None})
    with pytest.raises(ConfigError, match=name) as caught:
        shoal.Trainer(torch.nn.Linear(1, 1), loss=torch.nn.MSELoss(), callbacks=[Misspelt()])
    assert meant in str(caught.value)


def test_an_attribute_that_is_no_method_may_have_any_name() -> None:
    Named = type("Named", (shoal.callbacks.Callback,), {"on_disk": True})
    shoal.Trainer(torch.nn.Linear(1, 1), loss=torch.nn.MSELoss(), callbacks=[Named()])


class Clamps(Callback):
    def on_step_end(self, trainer: Any, logs: Any) -> None:
        with torch.no_grad():
            trainer.model.weight.clamp_(-0.1, 0.1)


class ClampsData(Callback):
    """By way of `.data`, of which torch keeps no count."""

    def on_epoch_end(self, trainer: Any, logs: Any) -> None:
        trainer.model.weight.data.clamp_(-0.1, 0.1)


class Freezes(Callback):
    def on_step_end(self, trainer: Any, logs: Any) -> None:
        trainer.model.weight.requires_grad_(False)


class Slows(Callback):
    def on_step_end(self, trainer: Any, logs: Any) -> None:
        trainer.strategy.optimizer.param_groups[0]["lr"] = 0.5


class Reads(Callback):
    def on_step_end(self, trainer: Any, logs: Any) -> None:
        self.mean = trainer.model.weight.detach().mean()


class Served:
    """A strategy whose weights are on servers."""

    def __init__(self, model: nn.Module) -> None:
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def refresh_copy(self) -> None: ...


def of_workers(num_workers: int, *, served: bool = False) -> Any:
    model = nn.Linear(3, 1)
    strategy = Served(model) if served else SimpleNamespace(optimizer=Served(model).optimizer)
    return SimpleNamespace(
        model=model,
        strategy=strategy,
        train_job=SimpleNamespace(model=model),
        job=SimpleNamespace(num_workers=num_workers, strategy="ddp"),
        step=3,
        refuse_unfrozen=lambda: None,
    )


@pytest.mark.parametrize(
    ("callback", "what"), [(Clamps(), "weights"), (Freezes(), "requires_grad"), (Slows(), "settings of the")]
)
def test_a_change_of_the_model_on_rank_0_alone_is_refused(callback: Callback, what: str) -> None:
    callbacks = CallbackList([callback, Reads()], rank=0)
    callbacks.call("on_step_end", of_workers(1), None)
    with pytest.raises(ConfigError, match=rf"changed {what}.*3 workers.*after step 3.*ranks = .every."):
        callbacks.call("on_step_end", of_workers(3), None)


def test_a_change_on_every_rank_is_lost_only_where_weights_are_on_servers(monkeypatch: Any) -> None:
    monkeypatch.setattr(Clamps, "ranks", "every")
    CallbackList([Clamps()], rank=1).call("on_step_end", of_workers(3), None)
    with pytest.raises(ConfigError, match="live on servers"):
        CallbackList([Clamps()], rank=1).call("on_step_end", of_workers(3, served=True), None)


def test_a_change_by_way_of_data_is_noticed_too() -> None:
    callbacks, trainer = CallbackList([ClampsData(), Reads()], rank=0), of_workers(3)
    with torch.no_grad():
        trainer.model.bias.fill_(math.nan)  # which is not unlike itself
    with pytest.raises(ConfigError, match="changed weights"):
        callbacks.call("on_epoch_end", trainer, {})
    trainer.step = 4
    callbacks.call("on_step_end", trainer, None)


class Averaged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.average = copy.deepcopy(self.layer).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def test_an_average_moves_with_each_update_of_the_last_turn_while_a_fit_lasts() -> None:
    model, callback = Averaged(), WeightAverage("average", of="layer", decay=0.5)
    trainer: Any = of_workers(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer.strategy.optimizer, trainer.train_job.model = optimizer, model
    first, last = object(), object()
    trainer.turns = [first, last]
    model(torch.ones(2, 3)).sum().backward()
    expected = model.average.weight.clone()
    for _ in range(2):
        callback.on_fit_begin(trainer)
        for turn in (first, last):
            trainer.train_job.turn = turn
            optimizer.step()
        expected = expected.lerp(model.layer.weight, 0.5)
    assert torch.equal(model.average.weight, expected)
    callback.on_fit_end(trainer)
    optimizer.step()
    assert torch.equal(model.average.weight, expected)


def test_adagrads_of_one_trainer_begin_with_sums_of_their_own() -> None:
    model = nn.ModuleDict({"one": nn.Linear(2, 1), "other": nn.Linear(2, 1)})
    whole = build_optimizer(
        {
            name: lambda params, first=first: torch.optim.Adagrad(params, initial_accumulator_value=first)
            for name, first in (("one", 0.5), ("other", 2.0))
        },
        model,
    )
    assert [float(whole.state[p]["sum"].max()) for p in model.parameters()] == [0.5, 0.5, 2.0, 2.0]
    model["one"](torch.ones(1, 2)).sum().backward()
    model["other"](torch.ones(1, 2)).sum().backward()
    whole.step()
