"""examples/estimator.py, and what an Estimator refuses."""

from __future__ import annotations

import ast
import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from examples_expected import FOLDER, numbers
from launched import Launched
from torch import nn
from torchmetrics import MeanAbsoluteError

import shoal
from shoal import Faults
from shoal.callbacks import EMA, Callback
from shoal.config import job
from shoal.errors import ConfigError, NoCheckpoint
from shoal.estimator import (
    CheckpointSaverHook,
    Estimator,
    EstimatorSpec,
    EvalSpec,
    ModeKeys,
    RunConfig,
    StopAtStepHook,
    SummarySaverHook,
    TrainSpec,
    train_and_evaluate,
)
from shoal.train.checkpoint.checkpoint import list_checkpoints


def test_the_example_goes_on_where_it_was_and_survives_a_death(
    launch_script: Callable[..., Launched], tmp_path: Path
) -> None:
    said = []
    for steps, options in (
        ("120", {"faults": Faults().kill("worker-1", at_step=110)}),
        ("300", {"strategy": "ps", "servers": 2, "faults": Faults().kill("worker-1", at_step=250)}),
    ):
        args = ("--steps", steps, "--model-dir", str(tmp_path / "model"))
        done = launch_script(FOLDER / "estimator.py", workers=2, args=args, quiet=True, **options)
        assert done.exit_code == 0, f"{done.error}\n{done.stderr}"
        said.append(numbers(r"global step (\d+): loss ([\d.]+), accuracy ([\d.]+)", done.stdout))
    assert [each[0] for each in said] == [120, 300]
    assert said[1][2] > 0.95
    assert len(list_checkpoints(tmp_path / "model")) == 2  # keep_checkpoint_max
    program = torch.export.load(tmp_path / "out/estimator/program.pt2").module()
    assert program(torch.zeros(5, 8)).shape == (5, 2)


@pytest.fixture(autouse=True)
def _own_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_current", job.Job(name="test", run_dir=tmp_path / "run"))


def data(num_samples: int = 40) -> shoal.Dataset:
    x = torch.randn(num_samples, 4, generator=torch.Generator().manual_seed(0))
    return shoal.Dataset.from_arrays((x, x.sum(1, keepdim=True)))


def model_fn(features: Any, labels: Any, mode: ModeKeys, params: dict[str, Any]) -> EstimatorSpec:
    return EstimatorSpec(
        mode=mode,
        model=nn.Linear(features.shape[1], labels.shape[1]),
        loss=params.get("loss", {}).get(mode),
        optimizer=None if params.get("no optimizer") else lambda weights: torch.optim.SGD(weights, 0.1),
    )


ALL = {"loss": dict.fromkeys(ModeKeys, "mse")}


def test_steps_are_more_and_max_steps_is_the_whole(tmp_path: Path) -> None:
    one = Estimator(model_fn, ALL, RunConfig(model_dir=str(tmp_path / "model")))
    one.train(lambda: data().repeat().batch(8), steps=5).train(lambda: data().repeat().batch(8), max_steps=7)
    one.train(lambda: data().repeat().batch(8), max_steps=7)  # it is there already
    assert one.evaluate(lambda: data().batch(8))["global_step"] == 7
    one.train(lambda: data().batch(8), hooks=())
    later = Estimator(
        model_fn, ALL, model_dir=str(tmp_path / "model")
    )  # a later process finds the newest checkpoint
    assert later.evaluate(lambda: data().batch(8)) == pytest.approx(one.evaluate(lambda: data().batch(8)))
    later.train(lambda: data().repeat().batch(8), hooks=[StopAtStepHook(14)], max_steps=20)
    assert later.evaluate(lambda: data().batch(8), steps=1)["global_step"] == 14
    assert len(list(later.predict(lambda: data(3).batch(2)))) == 3


def by_mode(features: Any, labels: Any, mode: ModeKeys) -> EstimatorSpec:
    """As TF1 has them: each mode returns its own parts alone."""
    model = nn.Linear(4, 1)
    if mode is ModeKeys.PREDICT:
        return EstimatorSpec(mode=mode, model=model, predictions=lambda output: {"twice": 2 * output})
    if mode is ModeKeys.EVAL:
        return EstimatorSpec(
            mode=mode,
            model=model,
            loss=lambda output, target: 100 + nn.functional.mse_loss(output, target),
            eval_metric_ops={"error": MeanAbsoluteError()},
        )
    return EstimatorSpec(
        mode=mode, model=model, loss="mse", optimizer=lambda weights: torch.optim.SGD(weights, 0.1)
    )


def test_each_mode_has_its_own_spec_in_any_order(tmp_path: Path) -> None:
    one = Estimator(by_mode, model_dir=str(tmp_path / "model"))
    one.train(lambda: data().repeat().batch(8), steps=3)
    trained = one._built[ModeKeys.TRAIN][0]
    for estimator in (one, Estimator(by_mode, model_dir=str(tmp_path / "model"))):
        twice = torch.stack([each["twice"] for each in estimator.predict(lambda: data().batch(8))])
        assert torch.equal(twice, 2 * torch.as_tensor(trained.predict(data().batch(8))))
        measured = estimator.evaluate(lambda: data().batch(8))
        assert measured["loss"] == pytest.approx(100 + trained.evaluate(data().batch(8))["loss"])
        assert set(measured) == {"loss", "error", "global_step"}
    before = measured
    one.train(lambda: data().repeat().batch(8), steps=20)
    after = one.evaluate(lambda: data().batch(8))  # the newly trained weights come over
    assert (after["global_step"], after["loss"] < before["loss"]) == (23, True)
    with pytest.raises(ConfigError, match="no loss for mode 'infer'"):
        one._built[ModeKeys.PREDICT][0].evaluate(data().batch(8))


def test_hooks_are_those_of_their_train_and_steps_bound_endless_data(tmp_path: Path) -> None:
    one = Estimator(model_fn, ALL, RunConfig(model_dir=str(tmp_path / "model"), save_checkpoints_steps=2))
    one.train(lambda: data().repeat().batch(8), hooks=[StopAtStepHook(2)], steps=5)
    one.train(lambda: data().repeat().batch(8), hooks=[StopAtStepHook(4)], steps=5)
    endless = one.evaluate(lambda: data().repeat().batch(8), steps=2)
    assert endless == pytest.approx(one.evaluate(lambda: data(40).batch(8), steps=2))
    assert endless["global_step"] == 4
    with pytest.raises(ConfigError, match="EMA and SWA keep their average in the optimizer"):
        one.train(lambda: data().repeat().batch(8), hooks=[EMA()], steps=1)

    seen: list[dict[str, float]] = []

    class Watching(Callback):
        def on_validation_end(self, trainer: Any, logs: dict[str, float]) -> None:
            seen.append(logs)

    train = TrainSpec(lambda: data().repeat().batch(8), max_steps=6, hooks=[Watching()])
    measured, _ = train_and_evaluate(one, train, EvalSpec(lambda: data().repeat().batch(8), steps=2))
    assert seen[-1]["val_loss"] == pytest.approx(measured["loss"])
    later = Estimator(model_fn, ALL, model_dir=str(tmp_path / "model"))
    later.train(lambda: data().repeat().batch(8), max_steps=6)  # there already: nothing is trained
    assert later.evaluate(lambda: data().repeat().batch(8), steps=2) == pytest.approx(measured)


def test_validation_within_training_is_by_the_loss_and_metrics_of_eval(tmp_path: Path) -> None:
    def by_mode(features: Any, mode: ModeKeys) -> EstimatorSpec:
        is_eval = mode is ModeKeys.EVAL
        return EstimatorSpec(
            mode=mode,
            model=nn.Linear(4, 1),
            loss=nn.L1Loss() if is_eval else nn.MSELoss(),
            optimizer=lambda params: torch.optim.SGD(params, 0.01),
            eval_metric_ops=[MeanAbsoluteError()] if is_eval else (),
        )

    seen: list[dict[str, float]] = []

    class Watching(Callback):
        def on_validation_end(self, trainer: Any, logs: Any) -> None:
            seen.append(logs)

    one = Estimator(by_mode, model_dir=str(tmp_path / "model"))
    train = TrainSpec(lambda: data().repeat().batch(8), max_steps=6, hooks=[Watching()])
    measured, _ = train_and_evaluate(one, train, EvalSpec(lambda: data().batch(8)))
    assert seen[-1]["val_loss"] == pytest.approx(measured["loss"])
    assert seen[-1]["val_mean_absolute_error"] == pytest.approx(
        measured["loss"]
    )  # the L1 loss is that metric


def test_the_next_process_finds_the_average_that_this_one_evaluates(tmp_path: Path) -> None:
    config = RunConfig(model_dir=str(tmp_path / "model"), save_checkpoints_steps=2)
    one = Estimator(model_fn, ALL, config)
    one.train(
        lambda: data().repeat().batch(8), hooks=[EMA(0.9)], steps=4
    )  # whose last step is saved before its end
    averaged = one._built[ModeKeys.TRAIN][0].evaluate(data().batch(8))["loss"]
    for each in (one, Estimator(model_fn, ALL, config)):
        assert each.evaluate(lambda: data().batch(8))["loss"] == averaged


def test_a_try_of_one_batch_is_evaluated_and_saves_nothing(tmp_path: Path) -> None:
    def tried(features: Any, labels: Any, mode: ModeKeys, params: dict[str, Any]) -> EstimatorSpec:
        return dataclasses.replace(model_fn(features, labels, mode, params), scaffold={"fast_dev_run": True})

    one = Estimator(tried, ALL, model_dir=str(tmp_path / "model"))
    train = TrainSpec(lambda: data().repeat().batch(8), max_steps=1)
    assert train_and_evaluate(one, train, EvalSpec(lambda: data().batch(8)))[0]["global_step"] == 1
    assert not (tmp_path / "model").exists()


TWO = """
import shoal, torch
from shoal.estimator import Estimator, EstimatorSpec
x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
data = lambda: shoal.Dataset.from_arrays((x, x.sum(1, keepdim=True))).repeat().batch(8)
def model_fn(features, mode):
    return EstimatorSpec(mode=mode, model=torch.nn.Linear(4, 1), loss="mse", optimizer=lambda p: torch.optim.Adam(p, 0.1))
one, two = Estimator(model_fn, model_dir="model"), Estimator(model_fn, model_dir="model")
one.train(data, steps=3)
steps = [two.evaluate(data, steps=2)["global_step"]]
two.train(data, steps=3)
losses = [each.evaluate(data, steps=2) for each in (one, two)]
one.train(data, max_steps=9)
steps += [each["global_step"] for each in losses] + [two.evaluate(data, steps=2)["global_step"]]
if shoal.rank() == 0:
    print("steps", *steps, losses[0] == losses[1])
"""


def test_estimators_of_one_launched_script_share_their_model_dir(
    launch_script: Callable[..., Launched],
) -> None:
    done = launch_script(TWO, workers=2, quiet=True, faults=Faults().kill("worker-1", at_step=5))
    assert done.exit_code == 0, f"{done.error}\n{done.stderr}"
    assert "steps 3.0 6.0 6.0 9.0 True" in done.stdout


def steps_of(folder: Path) -> list[int]:
    """Steps whose loss TensorBoard would show."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return [each.step for each in EventAccumulator(str(folder)).Reload().Scalars("step/loss")]


@pytest.mark.filterwarnings("ignore")  # tensorboard's own
def test_hooks_save_checkpoints_and_summaries_where_and_as_often_as_they_say(tmp_path: Path) -> None:
    own, summaries = tmp_path / "own", tmp_path / "summaries"
    config = RunConfig(model_dir=str(tmp_path / "model"), log_step_count_steps=100)
    one = Estimator(model_fn, ALL, config.replace(save_summary_steps=3))
    hooks = [
        CheckpointSaverHook(str(own), save_steps=4),
        SummarySaverHook(save_steps=2, output_dir=str(summaries)),
    ]
    one.train(lambda: data().repeat().batch(8), hooks=hooks, steps=9)
    assert [Path(path).name for path in list_checkpoints(own)] == ["step-000000004", "step-000000008"]
    assert steps_of(summaries) == [2, 4, 6, 8]
    assert steps_of(tmp_path / "run/tensorboard") == [3, 6, 9]
    assert config.save_summary_steps is None


def test_throttled_evaluation_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = Estimator(model_fn, ALL, model_dir=str(tmp_path / "model"))
    spec = EvalSpec(lambda: data().batch(8), throttle_secs=600)
    train_and_evaluate(one, TrainSpec(lambda: data().repeat().batch(8), max_steps=2), spec)
    assert "throttle_secs and start_delay_secs of EvalSpec have no effect" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (lambda: Estimator(model_fn).train(lambda: data().batch(8)), "without loss for mode 'train'"),
        (
            lambda: Estimator(model_fn, ALL | {"no optimizer": 1}).train(lambda: data().batch(8)),
            "without optimizer for mode 'train'",
        ),
        (
            lambda: Estimator(model_fn, ALL).train(lambda: data().batch(8), steps=100),
            "gives 5 batches, and 100 steps were asked for",
        ),
        (
            lambda: Estimator(model_fn, ALL).train(
                lambda: shoal.Dataset.from_generator(lambda: iter(data(16))).batch(8), steps=100
            ),
            "input_fn ended after 2 steps, and 100 were asked for",
        ),
        (lambda: Estimator(lambda features: 3).train(lambda: data().batch(8)), "model_fn returned a int"),
        (lambda: Estimator(model_fn, ALL).train(data().batch(8)), "input_fn must be a function"),  # type: ignore[arg-type]
        (lambda: Estimator(model_fn, ALL).evaluate(lambda: data().batch(8)), "nothing was trained in it yet"),
        (
            lambda: RunConfig(train_distribute=None),
            r"RunConfig\(train_distribute=\): .* shoal run --strategy",
        ),
        (lambda: SummarySaverHook(save_secs=60), "by steps: give it save_steps"),
    ],
)
def test_bad_input_of_an_estimator_is_one_paragraph(run: Callable[[], object], said: str) -> None:
    with pytest.raises((ConfigError, NoCheckpoint), match=said):
        run()


HEAD = """
import shoal, torch
from pathlib import Path
from shoal.estimator import Estimator, EstimatorSpec, RunConfig
x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
once = lambda: shoal.Dataset.from_arrays((x, x.sum(1, keepdim=True))).batch(8)
data = lambda: shoal.Dataset.from_arrays((x, x.sum(1, keepdim=True))).repeat().batch(8)
def model_fn(features, mode):
    return EstimatorSpec(mode=mode, model=torch.nn.Linear(4, 1), loss="mse", optimizer=lambda p: torch.optim.Adam(p, 0.1))
class Cut(shoal.callbacks.Callback):
    def on_step_end(self, trainer, logs):
        if Path("cut").exists() and trainer.step == int(Path("cut").read_text()):
            raise RuntimeError("cut")
"""

TWO_TRAINS = (
    HEAD
    + """
estimator = Estimator(model_fn, model_dir="model", config=RunConfig(save_checkpoints_steps=1, keep_checkpoint_max=KEPT))
estimator.train(data, steps=3)
early = estimator.evaluate(data, steps=2)
first = next(estimator.predict(once)).item() if KEPT > 4 else 0.0
estimator.train(data, steps=2)
estimator.train(data, max_steps=9, hooks=[Cut()])
measured = estimator.evaluate(data, steps=2)
if shoal.rank() == 0:
    print("measured", {**measured, "early": early["loss"], "early_step": early["global_step"], "first": first})
"""
)


@pytest.mark.parametrize("num_kept", [5, 2], ids=["early-checkpoint-kept", "early-checkpoint-pruned"])
def test_a_resumed_estimator_passes_over_the_trains_it_has_done(
    launch_script: Callable[..., Launched], tmp_path: Path, num_kept: int
) -> None:
    script = TWO_TRAINS.replace("KEPT", str(num_kept))
    (tmp_path / "cut").write_text("7")
    assert launch_script(script, workers=2, name="whole").exit_code == 1
    (tmp_path / "cut").unlink()
    done = launch_script(script, workers=1, name="whole", resume=True)
    assert done.exit_code == 0, f"{done.error}\n{done.stderr}"
    resumed = next(line for line in done.stdout.splitlines() if line.startswith("measured"))
    assert "'global_step': 9.0" in resumed
    shutil.rmtree(tmp_path / "model")
    whole = launch_script(script, workers=1, name="once")
    values = [
        ast.literal_eval(line.removeprefix("measured "))
        for line in (resumed, whole.stdout.strip().splitlines()[-1])
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-4)


STEPS = (
    HEAD
    + """
estimator = Estimator(model_fn, model_dir="model", config=RunConfig(save_checkpoints_steps=2))
estimator.train(data, steps=8, hooks=[Cut()])
measured = estimator.evaluate(data, steps=2)
if shoal.rank() == 0:
    print("global step", int(measured["global_step"]))
"""
)


def test_a_resumed_estimator_counts_its_steps_from_the_checkpoint_that_was_there_before(
    launch_script: Callable[..., Launched], tmp_path: Path
) -> None:
    assert "global step 8" in launch_script(STEPS, name="before").stdout
    (tmp_path / "cut").write_text("12")
    assert launch_script(STEPS, workers=2, name="cut").exit_code == 1
    (tmp_path / "cut").unlink()
    done = launch_script(STEPS, workers=1, name="cut", resume=True)
    assert "global step 16" in done.stdout, f"{done.error}\n{done.stderr}"


ONCE = (
    HEAD
    + """
estimator = Estimator(model_fn, model_dir="model", config=RunConfig(save_checkpoints_steps=4))
estimator.train(once, steps=STEPS)
measured = estimator.evaluate(once)
if shoal.rank() == 0:
    print("global step", int(measured["global_step"]))
"""
)


@pytest.mark.parametrize("steps", ["None", "8"])
def test_an_epoch_that_ends_with_a_checkpoint_is_over_for_the_next_process(
    launch_script: Callable[..., Launched], tmp_path: Path, steps: str
) -> None:
    script = ONCE.replace("STEPS", steps)
    assert "global step 8" in launch_script(script, workers=2, name="one").stdout
    assert "global step 16" in launch_script(script, workers=2, name="two").stdout
    (tmp_path / "plain.py").write_text(script)
    plain = subprocess.run([sys.executable, "plain.py"], cwd=tmp_path, capture_output=True, text=True)
    assert "global step 24" in plain.stdout, plain.stderr
