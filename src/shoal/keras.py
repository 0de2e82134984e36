"""`shoal.keras`: a compiled Keras 3 model, on Keras's torch backend, trained by shoal.

    model = shoal.keras.distribute(keras.Sequential([...]))
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(x, y, epochs=3)        # under `shoal run -n 4`, by any exact strategy

Layers and loss run as Keras wrote them, through its stateless call, on parameters that a strategy
may shard, move to servers, or replace. Optimizers are torch's of the same name. After fit the
weights are in the Keras model again.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from shoal.config import job as jobs
from shoal.config.extras import install_command
from shoal.data.tree import leaves, map_leaves
from shoal.errors import ConfigError
from shoal.train.arguments.arrays import is_arrays
from shoal.train.callbacks.base import Callback
from shoal.train.trainer import Trainer


def distribute(model: Any, **options: Any) -> Any:
    """The same model, whose fit, evaluate and predict are shoal's. `options` are those of a Trainer (callbacks, params, ...)."""
    try:
        import keras
    except ModuleNotFoundError as error:
        if error.name != "keras":  # a backend of Keras that is not installed
            raise
        raise ConfigError(
            f"shoal.keras needs Keras 3, which is not installed. Nothing was trained; {install_command('keras')}."
        ) from None
    if (backend := keras.backend.backend()) != "torch":
        raise ConfigError(
            f"Keras runs on its '{backend}' backend here, whose weights are no tensors of torch: shoal cannot cut or exchange them. Nothing "
            "was trained; set KERAS_BACKEND=torch in the environment, or os.environ['KERAS_BACKEND'] = 'torch' before keras is imported."
        )
    if not isinstance(model, keras.Model):
        raise ConfigError(
            f"shoal.keras.distribute takes a keras.Model, and got a {type(model).__name__}; a module of torch goes to shoal.Trainer."
        )
    trained = DistributedModel(model, options)
    model.fit, model.evaluate, model.predict = trained.fit, trained.evaluate, trained.predict
    return model


class KerasModule(nn.Module):
    """The layers of a Keras model as one module of torch, with parameters and buffers of its own."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._call: Callable[..., Any] = model.stateless_call
        self._takes_training: bool = model._call_has_training_arg
        self._trained = [each.path for each in model.trainable_variables]
        self._kept = [each.path for each in model.non_trainable_variables]
        # State of random generators is no state to average: it is drawn from torch's, which shoal seeds by rank and step.
        self._seeds = {each.path for each in model.non_trainable_variables if "seed_generator" in each.path}
        if len({*self._trained, *self._kept}) < len(self._trained) + len(self._kept):
            raise ConfigError(
                "two variables of the Keras model have one path. Nothing was trained; give each layer a name."
            )
        for each in model.trainable_variables:
            self.register_parameter(each.path, nn.Parameter(each.value.detach().clone()))
        for each in model.non_trainable_variables:
            if each.path not in self._seeds:
                self.register_buffer(each.path, each.value.detach().clone())
        self.names = {*self._trained, *self._kept} - self._seeds
        self.penalties = [
            (each.path, each.regularizer) for each in model.trainable_variables if each.regularizer
        ]

    def forward(self, *args: Any, **named: Any) -> Any:
        inputs = named or (args[0] if len(args) == 1 else list(args))
        kept = [
            torch.randint(1 << 31, (2,), dtype=torch.int64) if path in self._seeds else getattr(self, path)
            for path in self._kept
        ]
        trained = [getattr(self, path) for path in self._trained]
        mode = {"training": self.training} if self._takes_training else {}
        output, changed = self._call(trained, kept, inputs, **mode)
        if self.training:
            for path, value in zip(self._kept, changed, strict=True):
                if path not in self._seeds and value is not getattr(self, path):
                    getattr(self, path).copy_(value.detach())
        return output


class DistributedModel:
    """fit, evaluate and predict of a Keras model, with Keras's arguments and results."""

    def __init__(self, model: Any, options: dict[str, Any]) -> None:
        self._model, self._options = model, options
        self._trainer: Trainer | None = None
        self._compiled: tuple[Any, ...] = ()
        self._names: set[str] = set()
        self._known: dict[str, Tensor] = {}  # values of the variables that the Trainer has too

    def fit(
        self,
        x: Any,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        validation_batch_size: int | None = None,
        **others: Any,
    ) -> Any:
        import keras

        _refuse("fit", others)
        if not jobs.current().shares_run_dir:
            raise ConfigError(
                f"after a fit every worker reads the Keras model's weights in {jobs.current().run_dir}, which this host "
                f"({jobs.current().host_address}) does not share with the first one. Nothing was trained; give --run-dir on a file system "
                "that all hosts see."
            )
        if validation_split:
            num = int(len(next(leaves(x))) * (1 - validation_split))
            validation_data = map_leaves(lambda _, each: each[num:], (x, y))
            x, y = map_leaves(lambda _, each: each[:num], (x, y))
        trainer = self._built(x, callbacks, is_fit=True)
        said: dict[str, Any] = (
            {} if y is None and not is_arrays(x) else {"batch_size": batch_size, "shuffle": shuffle}
        )
        history = trainer.fit(x, y, epochs=epochs, validation_data=validation_data, **said)
        self._take_weights(trainer)
        told = keras.callbacks.History()
        told.history, told.epoch = dict(history), list(range(len(history.epochs)))
        return told

    def evaluate(
        self,
        x: Any,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Any = "auto",
        return_dict: bool = False,
        **others: Any,
    ) -> Any:
        _refuse("evaluate", others)
        measured = self._built(x).evaluate(x, y, batch_size=batch_size)
        return measured if return_dict else list(measured.values()) if len(measured) > 1 else measured["loss"]

    def predict(self, x: Any, batch_size: int | None = None, verbose: Any = "auto", **others: Any) -> Any:
        _refuse("predict", others)
        predicted = self._built(x).predict(x, batch_size=batch_size)
        return map_leaves(lambda _, each: each.numpy() if isinstance(each, Tensor) else each, predicted)

    def _built(self, x: Any, callbacks: Any = None, *, is_fit: bool = False) -> Trainer:
        """The Trainer of this compile(), built with the first data."""
        model = self._model
        if not getattr(model, "compiled", False):
            raise ConfigError(
                "the Keras model is not compiled. Nothing was trained; call model.compile(optimizer=..., loss=...) first."
            )
        if callbacks is not None and not isinstance(callbacks, (list, tuple)):
            callbacks = [callbacks]  # as Keras takes one
        for each in callbacks or ():
            if not isinstance(each, Callback):
                raise ConfigError(
                    f"{type(each).__name__} is a callback of Keras, which would run on one worker's part of a batch. Nothing was trained; "
                    "shoal.callbacks has EarlyStopping, ModelCheckpoint, ReduceLROnPlateau, TensorBoard and CSVLog."
                )
        own = [*self._options.get("callbacks", ()), *(callbacks or ())]
        metrics = [each for each in _metric_names(model) if each is not None]
        compiled = (model.optimizer, model.loss, *metrics)
        if self._trainer is not None and self._compiled == compiled:
            if is_fit:
                self._trainer.replace_callbacks(own)
            self._give_weights(self._trainer)
            return self._trainer
        if self._compiled and self._compiled[0] is model.optimizer and jobs.rank() == 0:
            print(
                "note: compile() gave the optimizer of before another loss or other metrics: what it has gathered (moments, steps of a "
                "schedule) begins anew",
                file=sys.stderr,
                flush=True,
            )
        if not model.built:
            with torch.no_grad():
                model(map_leaves(lambda _, each: torch.as_tensor(np.asarray(each[:1])), x))
        module, given = KerasModule(model), self._options
        options: dict[str, Any] = {
            **(_optimizer_options(model.optimizer) if "optimizer" not in given else {}),
            "progress": True,
            **given,
            "metrics": _all_metrics(metrics, given.get("metrics", {})),
            "callbacks": own,
        }
        self._trainer, self._compiled = Trainer(module, loss=_loss(model, module), **options), compiled
        self._names = module.names
        self._remember()
        return self._trainer

    def _remember(self) -> None:
        self._known = {name: value.clone() for name, value in self._values().items()}

    def _values(self) -> dict[str, Tensor]:
        return {each.path: each.value.detach() for each in self._model.variables if each.path in self._names}

    def _give_weights(self, trainer: Trainer) -> None:
        """Pass weights that load_weights, set_weights or assign put into the Keras model to the Trainer."""
        now = self._values()
        if any(not torch.equal(value, self._known[name]) for name, value in now.items()):
            trainer.load(now)
            self._remember()

    def _take_weights(self, trainer: Trainer) -> None:
        """Copy the trained weights into the Keras model, for save() and get_weights(), under any strategy."""
        # One for each fit, the newest kept: a resumed job that passes over fits reads what they left.
        number = len(trainer.progress.histories)
        path = trainer.run_dir / f"keras-{number}"
        trainer.save(path)
        if jobs.rank() == 0:
            shutil.rmtree(trainer.run_dir / f"keras-{number - KEPT_FITS}", ignore_errors=True)
        if trainer.progress.passed_results is not None and not path.is_dir():
            print(
                f"note: weights after fit {number} were not kept; those of the model are its first ones",
                file=sys.stderr,
                flush=True,
            )
            return
        held = load_file(path / "model.safetensors")
        for each in self._model.variables:
            if each.path in held:
                each.assign(held[each.path])
        self._remember()


KEPT_FITS = 8
"""Number of fits whose weights are kept in the run directory."""


def _loss(model: Any, module: KerasModule) -> Callable[[Any, Any], Tensor]:
    from keras.src.trainers.compile_utils import get_loss

    if not isinstance(model.loss, (str, Callable)):  # type: ignore[arg-type]  # a class of abc
        raise ConfigError(
            f"compile(loss={model.loss!r}): shoal trains one loss of one output. Nothing was trained; give a name, a keras.losses.Loss or a "
            "function."
        )
    if any(getattr(layer, "activity_regularizer", None) is not None for layer in model._flatten_layers()):
        raise ConfigError(
            "an activity_regularizer adds a loss within forward, which shoal does not see. Nothing was trained; leave it out."
        )
    known: list[Any] = []

    def keras_loss(output: Any, target: Any) -> Tensor:
        if not known:
            known.append(get_loss(model.loss, target, output))
        total: Tensor = known[0](target, output)
        for path, regularizer in module.penalties:
            total = total + regularizer(getattr(module, path))
        return total

    return keras_loss


_OPTIMIZERS = {
    "SGD": {"momentum": "momentum", "nesterov": "nesterov"},
    "Adam": {"eps": "epsilon", "amsgrad": "amsgrad"},
    "RMSprop": {"alpha": "rho", "eps": "epsilon", "momentum": "momentum", "centered": "centered"},
    "Adagrad": {"initial_accumulator_value": "initial_accumulator_value", "eps": "epsilon"},
}
"""Keras's name of an optimizer -> torch's name of a setting -> Keras's. torch.optim has them under the same names."""


def _optimizer_options(optimizer: Any) -> dict[str, Any]:
    """torch optimizer, clipping and schedule equivalent to Keras's compiled ones."""
    config, kind = optimizer.get_config(), type(optimizer).__name__
    unsupported = ["clipnorm", "clipvalue", "use_ema", "loss_scale_factor", "gradient_accumulation_steps"]
    asked = [name for name in unsupported if config.get(name)]
    if asked:
        raise ConfigError(
            f"keras.optimizers.{kind}({asked[0]}=...) has no counterpart here. Nothing was trained; shoal has global_clipnorm, accumulate= "
            "and the callback EMA, as options of shoal.keras.distribute(model, ...)."
        )
    decay = config.get("weight_decay") or 0.0
    name = "Adam" if kind == "AdamW" else kind
    if name not in _OPTIMIZERS or (decay and name != "Adam"):
        what = f" with weight_decay={decay}" if name in _OPTIMIZERS else ""
        raise ConfigError(
            f"keras.optimizers.{kind}{what} has no counterpart in torch.optim that does the same. Nothing was trained; use one of "
            f"{', '.join(_OPTIMIZERS)} or AdamW, or give one of torch's to shoal.keras.distribute(model, optimizer=...)."
        )
    settings = {ours: config[theirs] for ours, theirs in _OPTIMIZERS[name].items()}
    if name == "Adam":
        settings |= {"betas": (config["beta_1"], config["beta_2"]), "weight_decay": decay}
    rate, schedule = _rate(optimizer)
    options = {"optimizer": "adamw" if decay else name.lower(), "lr": rate, "optimizer_options": settings}
    if config.get("global_clipnorm"):
        options["clip_norm"] = config["global_clipnorm"]
    return options | ({"scheduler": schedule} if schedule is not None else {})


def _rate(optimizer: Any) -> tuple[float, Callable[[Any], Any] | None]:
    planned = optimizer._learning_rate
    if not callable(planned):
        return float(optimizer.learning_rate), None

    def schedule(built: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(built, lambda step: float(planned(step)))

    return 1.0, schedule  # of which the plan is a multiple, wherever it begins


def _metric_names(model: Any) -> list[Any]:
    given = (
        getattr(model._compile_metrics, "_user_metrics", None) if model._compile_metrics is not None else None
    )
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _all_metrics(compiled: list[Any], given: Any) -> Any:
    """Metrics of compile(), then those of torchmetrics that distribute() was given."""
    named = {_name(each): mean_metric(each) for each in compiled}
    if not named or isinstance(given, Mapping):
        return {**named, **given} if named else given
    from torchmetrics import MetricCollection

    return [*(MetricCollection({name: each}) for name, each in named.items()), *given]


def _name(metric: Any) -> str:
    return (
        metric
        if isinstance(metric, str)
        else str(getattr(metric, "name", getattr(metric, "__name__", "metric")))
    )


def mean_metric(given: Any) -> Any:
    """A metric of Keras that is a mean over samples, as one of torchmetrics: exact over workers."""
    from keras.metrics import MeanMetricWrapper
    from keras.src.trainers.compile_utils import get_metric
    from torchmetrics import Metric

    known: list[Any] = []

    class KerasMean(Metric):
        """Sum and count of a Keras metric's values."""

        total: Tensor
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
            self.add_state("count", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

        def update(self, output: Tensor, target: Tensor) -> None:
            # Keras computes a value per row of a matrix.
            output = output.unsqueeze(-1) if output.dim() == 1 else output
            if target.dim() == output.dim() - 1 and output.shape[-1] == 1:
                target = target.unsqueeze(-1)
            if not known:
                known.append(get_metric(given, target, output))
            found = known[0]
            if not isinstance(found, MeanMetricWrapper):
                raise ConfigError(
                    f"the metric {_name(given)} of Keras is no mean over samples. Nothing was trained; leave it out of compile(), and give "
                    "shoal.keras.distribute(model, metrics=[...]) one of torchmetrics."
                )
            values = found._fn(target, output, **found._fn_kwargs)
            self.total += values.sum()
            self.count += values.numel()

        def compute(self) -> Tensor:
            return self.total / self.count

    return KerasMean()


def _refuse(what: str, others: Mapping[str, Any]) -> None:
    asked = [
        name
        for name, value in others.items()
        if value is not None and not (isinstance(value, (bool, int, float)) and not value)
    ]
    if asked:
        raise ConfigError(
            f"{what}({asked[0]}=...) of Keras has no counterpart here. Nothing was started; leave it out (a dataset of shoal has weights, "
            "repeats and limits of its own)."
        )
