"""`shoal.spark`: training on a DataFrame from a Spark driver, and the trained model over a DataFrame.

def train(data):
    trainer = shoal.Trainer(make_model(), loss=nn.MSELoss(), optimizer="sgd")
    trainer.fit(data.map(columns_to_tensor).batch(256), epochs=3)
    return trainer

trained = shoal.spark.run(train, df, workers=4, label="price")
scored = trained.transform(df, make_model(), inputs=["rooms", "size"])
"""

from __future__ import annotations

import copy
import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from shoal.cluster.launch import api
from shoal.cluster.launch.function_script import write_script
from shoal.data import Dataset
from shoal.data.formats import frames
from shoal.engines.protocol import FRAME_VARIABLE
from shoal.errors import ConfigError
from shoal.train.checkpoint.storage import Place

__all__ = ["SparkResult", "data", "keep", "run", "transform"]


@dataclass(frozen=True, slots=True)
class SparkResult:
    """A job that was trained on a DataFrame."""

    result: api.RunResult
    model_url: str

    def transform(
        self,
        frame: Any,
        model: nn.Module,
        *,
        inputs: Sequence[str],
        output: str = "prediction",
        batch: Callable[[Any], Any] | None = None,
    ) -> Any:
        """`transform` of a model with the trained weights, which are loaded into `model`."""
        place = Place.at(self.model_url)
        if not place.has("model.safetensors"):
            raise ConfigError(
                f"the job {self.result.run_dir.name} left no model: its function returned no Trainer, or its script never called "
                "shoal.spark.keep(trainer). Nothing was computed."
            )
        from safetensors.torch import load

        with place.open("model.safetensors") as file:
            model.load_state_dict(load(file.read()))
        return transform(model, frame, inputs=inputs, output=output, batch=batch)


def run(
    train: str | os.PathLike[str] | Callable[[Dataset], Any],
    frame: Any,
    *,
    workers: int = 4,
    label: str | Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    folder: str | None = None,
    hosts: int | None = None,
    **options: Any,
) -> SparkResult:
    """Train on a DataFrame with this driver's executors as hosts; returns when the job has ended.

    `train` is a function of a Dataset, called on every worker (its source is
    sent, as by `shoal.run`); the Trainer it returns has its weights kept. Or
    it is a script, which calls `shoal.spark.data()` and `shoal.spark.keep`.
    The rows are written as for `Dataset.from_spark`, to `folder` where
    executors are on other machines. `hosts` executors are asked for: as many
    as there are workers, or as Spark has room for at once. `options` are
    those of `shoal.run`.
    """
    if not hasattr(frame, "sparkSession"):
        raise ConfigError(
            f"shoal.spark.run takes a DataFrame of Spark, but got a {type(frame).__name__}. Nothing was started."
        )
    context = getattr(frame.sparkSession, "sparkContext", None)
    if context is None:
        raise ConfigError(
            "shoal.spark.run starts tasks in executors, which a session of Spark Connect cannot. Nothing was started; use a session "
            "of the driver itself."
        )
    room = context.defaultParallelism // int(context.getConf().get("spark.task.cpus", "1"))
    url = frames.write_spark(frame, label=label, columns=columns, folder=folder)
    model_url = f"{url}-model-{secrets.token_hex(4)}"
    told = {"rows": url, "label": label, "model": model_url}
    if not isinstance(train, (str, os.PathLike)):
        call = f"import shoal.spark\n\nshoal.spark.keep({{}}(shoal.spark.data({told!r})), {told!r})"
        train = write_script(train, Path(options.get("run_dir", "runs")), call=call, given=1)
    before = os.environ.get(FRAME_VARIABLE)
    os.environ[FRAME_VARIABLE] = json.dumps(told)
    try:
        result = api.run(
            train, workers=workers, on="spark", hosts=hosts or max(1, min(workers, room)), **options
        )
    finally:
        if before is None:
            del os.environ[FRAME_VARIABLE]
        else:
            os.environ[FRAME_VARIABLE] = before
    return SparkResult(result, model_url)


def data(told: Mapping[str, Any] | None = None) -> Dataset:
    """Rows of the DataFrame, in a script that `shoal.spark.run` started."""
    told = told or _told("data")
    return Dataset.from_parquet(told["rows"], label=told["label"])


def keep(trainer: Any, told: Mapping[str, Any] | None = None) -> None:
    """Give this Trainer's model to the driver, in a script that `shoal.spark.run` started. On every worker."""
    if hasattr(trainer, "save"):
        trainer.save((told or _told("keep"))["model"])


def _told(name: str) -> dict[str, Any]:
    if FRAME_VARIABLE not in os.environ:
        raise ConfigError(
            f"shoal.spark.{name}() is for a script that shoal.spark.run started, and this one was started in another way."
        )
    return dict(json.loads(os.environ[FRAME_VARIABLE]))


def transform(
    model: nn.Module,
    frame: Any,
    *,
    inputs: Sequence[str],
    output: str = "prediction",
    batch: Callable[[Any], Any] | None = None,
) -> Any:
    """The DataFrame with a column of model outputs for each row: a number, or a list of them.

    Rows go to the model in batches, as one float tensor with a column for each of `inputs` (lists
    of numbers side by side), or as the result of `batch` on their pandas DataFrame. Executors need
    torch and, unless the model's class is of the driver's own script or notebook, its package.
    """
    from pyspark.sql.functions import pandas_udf, struct

    missing = [name for name in inputs if name not in frame.columns]
    if missing or not inputs:
        raise ConfigError(
            f"transform: the DataFrame has no column {', '.join(map(repr, missing)) or 'among inputs='}; it has "
            f"{', '.join(frame.columns)}. Nothing was computed."
        )
    model = copy.deepcopy(model).cpu()  # the driver's own stays in its mode, on its device
    predict = _predictor(batch)
    example = frame.select(*inputs).limit(1).toPandas()
    if not len(example):
        raise ConfigError("transform: the DataFrame has no rows. Nothing was computed.")
    try:
        kind = "double" if predict(model, example).ndim == 1 else "array<double>"
    except Exception as error:
        raise ConfigError(
            f"transform: the model fails for the first row's {', '.join(inputs)}: {type(error).__name__}: {error}. Nothing was "
            "computed; say with batch= how the model's input is made of a pandas DataFrame of these columns."
        ) from error
    sent = frame.sparkSession.sparkContext.broadcast(model)

    def predicted(rows: Any) -> Any:
        import pandas

        values = predict(sent.value, rows)
        return pandas.Series(values if values.ndim == 1 else list(values))

    # Spark reads the kind of function off its annotations.
    predicted.__annotations__ = {"rows": type(example), "return": type(example[inputs[0]])}
    return frame.withColumn(output, pandas_udf(predicted, kind)(struct(*[frame[name] for name in inputs])))


def _predictor(batch: Callable[[Any], Any] | None) -> Callable[[nn.Module, Any], Any]:
    """Function from a pandas DataFrame to a model's outputs; defined here, so that Spark sends it by value."""

    def predict(model: nn.Module, rows: Any) -> Any:
        import numpy
        import torch

        if batch is None:
            columns = [numpy.stack(rows[name].to_numpy()).astype("float32") for name in rows.columns]
            parts = [each[:, None] if each.ndim == 1 else each for each in columns]
            given: Any = torch.from_numpy(numpy.concatenate(parts, axis=1))
        else:
            given = batch(rows)
        model.eval()
        with torch.inference_mode():
            said = model(*given) if isinstance(given, tuple) else model(given)
        values = said.double().numpy()
        return values.reshape(len(rows)) if values.size == len(rows) else values.reshape(len(rows), -1)

    return predict
