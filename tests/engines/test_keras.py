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
    [["-n", "3"], ["-n", "2", "--strategy", "fsdp"], ["-n", "2", "--strategy", "ps"]],
    ids=["ddp", "fsdp", "ps"],
)
def test_keras_models_train_as_by_keras_alone(
    keras: Any, alone: list[float], options: list[str], start_job: Callable[..., EngineJob]
) -> None:
    job = start_job(*options, str(EXAMPLE), env=BACKEND)
    assert job.wait() == 0, job.output()
    assert _numbers(job.output()) == pytest.approx(alone, abs=1e-3)


@pytest.fixture
def start(keras: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Compiled models of one layer, all with the same first weights."""
    import shoal
    from shoal.config import job

    monkeypatch.setattr(job, "_current", job.Job(name="test", run_dir=tmp_path / "run"))

    def build(options: dict[str, Any] | None = None, *, plain: bool = False, **compiled: Any) -> Any:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1, name="dense")])
        model = model if plain else shoal.keras.distribute(model, progress=False, **options or {})
        model.compile(**{"optimizer": keras.optimizers.Adam(0.05), "loss": "mse"} | compiled)
        return model

    return build


def _data() -> tuple[Any, Any]:
    import numpy as np

    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    return x, x.sum(1, keepdims=True)


@pytest.mark.filterwarnings("ignore")
def test_weights_and_losses_set_after_a_fit_are_those_that_count(start: Callable[..., Any]) -> None:
    import numpy as np

    from shoal.callbacks import Callback

    x, y = _data()
    ours, plain = start(), start(plain=True)
    first = ours.get_weights()
    for model in (ours, plain):
        model.fit(x, y, epochs=2, shuffle=False, verbose=0)
        model.set_weights([2 * each for each in first])
    assert ours.evaluate(x, y) == pytest.approx(plain.evaluate(x, y, verbose=0), rel=1e-4)
    assert np.allclose(ours.predict(x), plain.predict(x, verbose=0), atol=1e-5)
    seen: list[int] = []

    class Watching(Callback):
        def on_epoch_end(self, trainer: Any, logs: dict[str, float]) -> None:
            seen.append(trainer.step)

    ours.fit(x, y, shuffle=False, callbacks=Watching())  # with the moments of the fit before
    plain.fit(x, y, shuffle=False, verbose=0)
    ours.fit(x, y, shuffle=False)
    plain.fit(x, y, shuffle=False, verbose=0)
    assert seen == [6]
    for one, other in zip(ours.get_weights(), plain.get_weights(), strict=True):
        assert np.allclose(one, other, atol=1e-4)
    for model in (ours, plain):
        model.compile(optimizer=model.optimizer, loss="mae")
    assert ours.evaluate(x, y) == pytest.approx(plain.evaluate(x, y, verbose=0), rel=1e-3)


@pytest.mark.filterwarnings("ignore")
def test_a_model_of_ones_own_class_trains_as_by_keras_alone(keras: Any, start: Callable[..., Any]) -> None:
    import numpy as np

    import shoal

    class Own(keras.Model):  # type: ignore[misc]
        """One layer, called without a word of training."""

        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.dense(x)

    x, y = _data()
    trained = []
    for is_plain in (True, False):
        keras.utils.set_random_seed(0)
        model = Own() if is_plain else shoal.keras.distribute(Own(), progress=False)
        model.compile(optimizer="sgd", loss="mse")
        model.fit(x, y, epochs=2, shuffle=False, verbose=0)
        trained.append(model.get_weights())
    for one, other in zip(*trained, strict=True):
        assert np.allclose(one, other, atol=1e-5)


def test_a_host_without_the_run_directory_is_refused(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from shoal.config import job
    from shoal.errors import ConfigError

    monkeypatch.setattr(job, "_current", replace(job.current(), shares_run_dir=False))
    with pytest.raises(
        ConfigError, match=r"Nothing was trained; give --run-dir on a file system that all hosts"
    ):
        start().fit(*_data())


@pytest.mark.filterwarnings("ignore")
def test_cures_that_errors_name_are_cures(keras: Any, start: Callable[..., Any]) -> None:
    import numpy as np
    import torch
    from torchmetrics import MeanAbsoluteError

    x, y = _data()
    for metrics in ([MeanAbsoluteError()], {"mean_absolute_error": MeanAbsoluteError()}):
        measured = start({"metrics": metrics}, metrics=["mse"]).evaluate(x, y, return_dict=True)
        assert list(measured) == ["loss", "mse", "mean_absolute_error"]
        assert measured["mse"] == pytest.approx(measured["loss"], rel=1e-5)
    own = start({"optimizer": lambda params: torch.optim.SGD(params, 0.1)}, optimizer="ftrl")
    losses = own.fit(x, y, epochs=3).history["loss"]
    assert losses[-1] < losses[0] / 2
    rates = keras.optimizers.schedules
    for optimizer in (
        lambda: keras.optimizers.RMSprop(0.01, rho=0.5, centered=True),
        lambda: keras.optimizers.SGD(rates.CosineDecay(0.0, 8, warmup_target=0.1, warmup_steps=4)),
    ):
        ours, plain = start(optimizer=optimizer()), start(plain=True, optimizer=optimizer())
        ours.fit(x, y, batch_size=8, shuffle=False)
        plain.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        for one, other in zip(ours.get_weights(), plain.get_weights(), strict=True):
            assert np.allclose(one, other, atol=1e-4)


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
