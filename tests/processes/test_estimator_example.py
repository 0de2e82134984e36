"""examples/estimator.py, and what an Estimator refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from examples_expected import FOLDER, numbers
from launched import Launched
from torch import nn

import shoal
from shoal import Faults
from shoal.config import job
from shoal.errors import ConfigError, NoCheckpoint
from shoal.estimator import Estimator, EstimatorSpec, ModeKeys, RunConfig, StopAtStepHook
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
    ],
)
def test_bad_input_of_an_estimator_is_one_paragraph(run: Callable[[], object], said: str) -> None:
    with pytest.raises((ConfigError, NoCheckpoint), match=said):
        run()
