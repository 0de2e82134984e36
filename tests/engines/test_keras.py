"""Keras models under shoal: what Keras alone computes, by every kind of strategy."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_jobs import EngineJob

EXAMPLE = Path(__file__).parents[2] / "examples" / "keras_model.py"
BACKEND = {"KERAS_BACKEND": "torch"}


@pytest.fixture
def keras(monkeypatch: pytest.MonkeyPatch) -> Any:
    if not os.environ.get("SHOAL_TEST_ENGINES"):
        pytest.skip("Keras is installed by `make test-engines` alone")
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    return pytest.importorskip("keras")


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """What Keras computes without shoal."""
    if not os.environ.get("SHOAL_TEST_ENGINES"):
        pytest.skip("Keras is installed by `make test-engines` alone")
    command = [sys.executable, str(EXAMPLE), "--plain"]
    ran = subprocess.run(command, env={**os.environ, **BACKEND}, capture_output=True, text=True, check=True)
    return _numbers(ran.stdout)


def _numbers(output: str) -> list[float]:
    found = re.search(r"numbers ((?:[\d.]+ ?)+)", output)
    assert found, output
    return [float(each) for each in found[1].split()]


@pytest.mark.parametrize(
    "options",
    [["-n", "3"], ["-n", "2", "--strategy", "fsdp"], ["-n", "2", "--servers", "2", "--strategy", "ps"]],
    ids=["ddp", "fsdp", "ps"],
)
def test_keras_models_train_as_by_keras_alone(
    keras: Any, alone: list[float], options: list[str], start_job: Callable[..., EngineJob]
) -> None:
    job = start_job(*options, str(EXAMPLE), env=BACKEND)
    assert job.wait() == 0, job.output()
    assert _numbers(job.output()) == pytest.approx(alone, abs=1e-3)


@pytest.mark.filterwarnings("ignore")
def test_what_has_no_counterpart_is_refused_in_one_paragraph(
    keras: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy as np

    import shoal
    from shoal.errors import ConfigError

    def compiled(**options: Any) -> Any:
        model = shoal.keras.distribute(keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)]))
        model.compile(**{"optimizer": "sgd", "loss": "mse"} | options)
        return model

    x, y = np.zeros((4, 2), "float32"), np.zeros((4, 1), "float32")
    stopping = keras.callbacks.EarlyStopping()
    for run, said in (
        (lambda: compiled(optimizer=keras.optimizers.SGD(clipvalue=1.0)).fit(x, y), "clipvalue"),
        (lambda: compiled(optimizer="ftrl").fit(x, y), "Ftrl has no counterpart"),
        (lambda: compiled(metrics=[keras.metrics.AUC()]).fit(x, y), "no mean over samples"),
        (lambda: compiled().fit(x, y, callbacks=[stopping]), "EarlyStopping is a callback of Keras"),
        (lambda: compiled().fit(x, y, sample_weight=y), r"fit\(sample_weight=...\) of Keras"),
    ):
        with pytest.raises(ConfigError, match=said):
            run()
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")  # which is not installed
    with pytest.raises(ConfigError, match=r"'jax' backend here.*KERAS_BACKEND=torch"):
        compiled()
