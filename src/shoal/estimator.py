"""`shoal.estimator`: TF1's Estimator over a Trainer: model_fn, input_fn, RunConfig, hooks, train_and_evaluate.

`model_fn(features, labels, mode, params)` is called once for each mode, with the
first batch, and returns the parts of a model in place of a graph. `model_dir`
holds the checkpoints: train goes on from the newest, evaluate and predict load it.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from shoal.config import job as jobs
from shoal.data.batches import Batches, as_batches
from shoal.data.slice import split_target
from shoal.data.tree import map_tensors, tensors
from shoal.errors import ConfigError, NoCheckpoint
from shoal.train.arguments.arrays import batches_of_arrays
from shoal.train.callbacks.base import Callback
from shoal.train.callbacks.logs import TensorBoard
from shoal.train.callbacks.monitored import ModelCheckpoint, StopAtStep
from shoal.train.calls import described
from shoal.train.checkpoint.checkpoint import open_checkpoint, step_path
from shoal.train.checkpoint.model_directory import FitOrigin, ModelDirectory
from shoal.train.checkpoint.saving import is_there
from shoal.train.trainer import Trainer

InputFn = Callable[[], Any]


class ModeKeys(StrEnum):
    """Purposes for which model_fn is called."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"


_STRATEGY = "a strategy is chosen at launch: shoal run --strategy"
_TRANSPORT = "shoal has transports of its own, and options of `shoal run` for them"
_ELSEWHERE = {
    "train_distribute": _STRATEGY,
    "eval_distribute": _STRATEGY,
    "experimental_distribute": _STRATEGY,
    "device_fn": "--strategy ps distributes parameters over the servers",
    "session_config": "devices and memory are options of `shoal run`: --device, --resources",
    "protocol": _TRANSPORT,
    "experimental_max_worker_delay_secs": "workers begin together",
    "session_creation_timeout_secs": "workers are waited for as long as --join-timeout says",
    "checkpoint_save_graph_def": "a model is a module, and export(..., serving_input_fn) writes its program",
}
"""Fields of tf.estimator.RunConfig whose counterpart is no field here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorConfig:
    """How to train, by the names of tf.estimator.RunConfig."""

    def __new__(cls, **given: Any) -> EstimatorConfig:
        for name in given.keys() & _ELSEWHERE.keys():
            raise ConfigError(f"RunConfig({name}=): {_ELSEWHERE[name]}. Nothing was trained; leave it out.")
        return object.__new__(cls)

    model_dir: str | None = None
    """Directory or URL of the checkpoints; by default `checkpoints` in the run directory."""

    tf_random_seed: int = 0
    """Seed of everything random while training."""

    save_checkpoints_steps: int | None = None
    """Steps between checkpoints."""

    save_checkpoints_secs: float | None = None
    """Seconds between checkpoints; 600 where no steps are given."""

    keep_checkpoint_max: int = 5
    """How many of the newest checkpoints stay."""

    keep_checkpoint_every_n_hours: float | None = None
    """Of the older ones, one is kept per this many hours."""

    save_summary_steps: int | None = None
    """Steps between values for TensorBoard; None: none are written."""

    log_step_count_steps: int | None = None
    """Without effect: progress shows the speed while it trains, and `shoal status` afterwards."""

    def replace(self, **changes: Any) -> EstimatorConfig:
        """A copy with other values."""
        return dataclasses.replace(self, **changes)


RunConfig = EstimatorConfig


@dataclass(slots=True)
class EstimatorSpec:
    """Result of a model_fn."""

    mode: ModeKeys
    _: KW_ONLY
    model: nn.Module
    loss: Any = None
    """Needed to train and to evaluate: a name or a function of (output, labels), as Trainer(loss=) takes it."""

    optimizer: Any = None
    """In the place of train_op; needed to train."""

    scheduler: Any = None
    eval_metric_ops: Any = ()
    """Metrics as Trainer(metrics=) takes them."""

    predictions: Callable[[Any], Any] | None = None
    """From the model's output to what predict gives; None: the output itself."""

    training_hooks: Sequence[Callback] = ()
    scaffold: Mapping[str, Any] = field(default_factory=dict)
    """Other arguments of the Trainer: clip_norm, init_from, precision, ..."""


@dataclass(frozen=True, slots=True)
class TrainSpec:
    """Training part of train_and_evaluate."""

    input_fn: InputFn
    max_steps: int | None = None
    hooks: Sequence[Callback] = ()


@dataclass(frozen=True, slots=True)
class EvalSpec:
    """Evaluation part of train_and_evaluate."""

    input_fn: InputFn
    steps: int | None = None
    start_delay_secs: float | None = None
    throttle_secs: float | None = None
    """Without effect, as start_delay_secs: all workers evaluate, after each epoch and checkpoint."""


class StopAtStepHook(StopAtStep):
    """Stops once the global step `last_step` is done."""

    def __init__(self, last_step: int) -> None:
        super().__init__(last_step)


class CheckpointSaverHook(ModelCheckpoint):
    """Saves checkpoints to `checkpoint_dir`, every `save_steps` or `save_secs`."""

    def __init__(
        self, checkpoint_dir: str, save_secs: float | None = None, save_steps: int | None = None
    ) -> None:
        super().__init__(directory=checkpoint_dir, every_s=save_secs, every_steps=save_steps)


class SummarySaverHook(TensorBoard):
    """Writes loss, learning rate and metrics for TensorBoard, every `save_steps`."""

    def __init__(
        self, save_steps: int | None = None, save_secs: float | None = None, output_dir: str | None = None
    ) -> None:
        if (save_steps is None) or save_secs is not None:
            raise ConfigError(
                "SummarySaverHook writes by steps: give it save_steps, and no save_secs. Nothing was trained."
            )
        super().__init__(output_dir, every_steps=save_steps)


class _Saver(ModelCheckpoint):
    """Saves the last step too, as an Estimator does: the next call goes on from there, with the weights that EMA left."""

    def on_fit_end(self, trainer: Trainer) -> None:
        self._saved_path = None
        self._save(trainer)


def _no_loss(output: Any, target: Any) -> Tensor:
    raise ConfigError("model_fn returned no loss for mode 'infer', and one was asked for.")


class Estimator:
    """Trains, evaluates and serves what `model_fn` builds; one process or many, by the strategy of the launch."""

    def __init__(
        self,
        model_fn: Callable[..., EstimatorSpec],
        params: Mapping[str, Any] | None = None,
        config: RunConfig | None = None,
        model_dir: str | None = None,
    ) -> None:
        self._model_fn, self.params, self.config = model_fn, dict(params or {}), config or RunConfig()
        if model_dir is not None and self.config.model_dir not in (None, model_dir):
            raise ConfigError(
                f"model_dir is '{model_dir}' in the Estimator and '{self.config.model_dir}' in its RunConfig. Nothing was trained; say it once."
            )
        named = model_dir or self.config.model_dir
        self.model_dir = named or str(jobs.current().run_dir / "checkpoints")
        self._directory = ModelDirectory(self.model_dir, is_named=named is not None)
        self._built: dict[ModeKeys, tuple[Trainer, EstimatorSpec]] = {}
        self._held: dict[ModeKeys, tuple[str, int]] = {}  # path and global step of the weights a pass has

    def train(
        self,
        input_fn: InputFn,
        hooks: Sequence[Callback] = (),
        steps: int | None = None,
        max_steps: int | None = None,
        validation: Any = None,
        validation_steps: int | None = None,
    ) -> Estimator:
        """Train `steps` more, or up to the global step `max_steps`, or else once over what input_fn gives."""
        if steps is not None and max_steps is not None:
            raise ConfigError(
                f"train(steps={steps}, max_steps={max_steps}): give one of them. Nothing was trained."
            )
        batches = _batches(input_fn)
        if self._trained() is not None:
            trainer, spec = self._built[ModeKeys.TRAIN]
            trainer.replace_callbacks(self._callbacks(spec, hooks))
            here = (trainer.epoch, trainer.step)
            origin = FitOrigin(None, here, here)
        else:  # built also where nothing is left to train: checkpoints know their Trainer by its number within the script
            trainer, spec = self._build(ModeKeys.TRAIN, batches, hooks)
            origin = self._directory.next_fit(trainer, batches)
        (epoch, step), (first_epoch, first_step) = origin.position, origin.first
        last = step + steps if steps is not None else max_steps
        if last is not None and last <= step:
            return self
        num_steps = batches.num_steps(trainer.num_workers) if not batches.is_endless else None
        if last is not None and num_steps is not None and num_steps < last - step:
            raise ConfigError(
                f"input_fn gives {num_steps} batches, and {last - step} steps were asked for: it would end early. Nothing was trained; "
                "let it return data.repeat().batch(...), or ask for fewer steps."
            )
        if validation is not None:
            self._validate_as_eval(trainer, validation)
        trainer.fit(
            batches,
            epochs=None if batches.is_endless else epoch - first_epoch + 1,
            max_steps=last - first_step if last is not None else None,
            validation_data=validation,
            validate_every=self.config.save_checkpoints_steps if validation is not None else None,
            validation_steps=validation_steps if validation is not None else None,
            resume=origin.resume,
        )
        self._built[ModeKeys.TRAIN] = trainer, spec
        self._directory.trained(trainer)
        # A hook may have ended it: at its step, or by trainer.stop().
        wanted = min([last, *trainer.callbacks.last_steps]) if last is not None else 0
        if last is not None and trainer.step < wanted and not trainer.control.stop:
            raise ConfigError(
                f"input_fn ended after {trainer.step - step} steps, and {last - step} were asked for. What was trained is in "
                f"{self.model_dir}; let input_fn return a dataset with .repeat(), or ask for fewer steps."
            )
        return self

    def evaluate(self, input_fn: InputFn, steps: int | None = None) -> dict[str, float]:
        """Loss, metrics and global_step of the newest weights."""
        batches, trained = _batches(input_fn), self._trained()
        self._of_mode(ModeKeys.EVAL, batches)
        made = f"evaluate of {described(batches)}, steps={steps}"
        if trained is not None and (kept := trained.progress.kept_result(made)) is not None:
            return kept
        trainer, _ = self._for_pass(ModeKeys.EVAL, batches)
        measured = trainer.evaluate(batches, steps=steps)
        measured["global_step"] = float(self._held[ModeKeys.EVAL][1])
        if trained is not None:  # whose next checkpoints serve a resumed job, in which these weights are gone
            trained.progress.keep_result(made, dict(measured))
        return measured

    def predict(self, input_fn: InputFn) -> Iterator[Any]:
        """A prediction for each sample, in their order."""
        batches = _batches(input_fn)
        trainer, spec = self._for_pass(ModeKeys.PREDICT, batches)
        output: Any = trainer.predict(batches)
        if spec.predictions is not None:
            output = spec.predictions(output)
        for row in range(len(tensors(output)[0])):
            yield map_tensors(lambda tensor, at=row: tensor[at], output)  # type: ignore[misc]

    def export(self, export_dir: str, serving_input_fn: Callable[[], Any] | None = None) -> str:
        """The newest weights as model/model.safetensors; with example inputs also program.pt2, which needs none of the code."""
        trainer = self._trained() or next((self._built[mode][0] for mode in self._held), None)
        if trainer is None:
            raise ConfigError(
                "export needs trained weights: call train or evaluate first. Nothing was written."
            )
        folder = Path(export_dir)
        trainer.save(folder / "model")
        if serving_input_fn is not None and jobs.rank() == 0:
            given = serving_input_fn()
            args = given if isinstance(given, tuple) else (given,)
            module = self._call_model_fn(
                ModeKeys.PREDICT, args if len(args) > 1 else args[0], None
            ).model.eval()
            module.load_state_dict(load_file(folder / "model" / "model.safetensors"))
            batch = torch.export.Dim("batch", min=1)
            shapes = tuple({0: batch} if isinstance(each, Tensor) else None for each in args)
            torch.export.save(
                torch.export.export(module, args, dynamic_shapes=shapes), folder / "program.pt2"
            )
        return export_dir

    # ---- building --------------------------------------------------------------------------------

    def _build(
        self, mode: ModeKeys, batches: Batches, hooks: Sequence[Callback] = ()
    ) -> tuple[Trainer, EstimatorSpec]:
        features, labels = _first(batches)
        spec, config = self._call_model_fn(mode, features, labels), self.config
        needed = {"loss": mode is not ModeKeys.PREDICT, "optimizer": mode is ModeKeys.TRAIN}
        lacking = [name for name, is_needed in needed.items() if is_needed and getattr(spec, name) is None]
        if lacking:
            raise ConfigError(
                f"model_fn returned an EstimatorSpec without {' and '.join(lacking)} for mode '{mode}'. Nothing was trained; to train it needs "
                "loss= and optimizer=, to evaluate loss=, to predict neither."
            )
        is_trained = mode is ModeKeys.TRAIN
        trainer = Trainer(
            spec.model,
            loss=spec.loss if spec.loss is not None else _no_loss,
            optimizer=spec.optimizer if is_trained else None,
            scheduler=spec.scheduler if is_trained else None,
            metrics=spec.eval_metric_ops if mode is not ModeKeys.PREDICT else (),
            callbacks=self._callbacks(spec, hooks) if is_trained else (),
            seed=config.tf_random_seed,
            params=self.params or None,
            **spec.scaffold,
        )
        return trainer, spec

    def _callbacks(self, spec: EstimatorSpec, hooks: Sequence[Callback]) -> list[Callback]:
        config = self.config
        saver = _Saver(
            directory=self.model_dir,
            every_steps=config.save_checkpoints_steps,
            every_s=config.save_checkpoints_secs or (None if config.save_checkpoints_steps else 600.0),
            every_epochs=1,
            keep_last=config.keep_checkpoint_max,
            keep_every_hours=config.keep_checkpoint_every_n_hours,
        )
        every = config.save_summary_steps
        summaries = [TensorBoard(every_steps=every)] if every is not None else []
        return [*spec.training_hooks, *hooks, saver, *summaries]

    def _call_model_fn(self, mode: ModeKeys, features: Any, labels: Any) -> EstimatorSpec:
        # The same first weights in every mode and on every rank.
        torch.manual_seed(self.config.tf_random_seed)
        named = {"labels": labels, "mode": mode, "params": self.params, "config": self.config}
        taken = inspect.signature(self._model_fn).parameters
        spec = self._model_fn(features, **{name: value for name, value in named.items() if name in taken})
        if not isinstance(spec, EstimatorSpec):
            raise ConfigError(
                f"model_fn returned a {type(spec).__name__}, not a shoal.estimator.EstimatorSpec. Nothing was trained."
            )
        return spec

    def _of_mode(self, mode: ModeKeys, batches: Batches) -> tuple[Trainer, EstimatorSpec]:
        if mode not in self._built:
            self._built[mode] = self._build(mode, batches)
        return self._built[mode]

    def _for_pass(self, mode: ModeKeys, batches: Batches) -> tuple[Trainer, EstimatorSpec]:
        """The mode's own Trainer, with the weights that were trained; else with those of model_dir's newest checkpoint."""
        trained = self._trained() or self._directory.last()
        if trained is not None:
            path, step = step_path(self.model_dir, trained.step), trained.step
            if trained.progress.passed_results is not None and not is_there(path):
                raise NoCheckpoint(
                    path=path,
                    reason=f"this job goes on from a later one, and {mode} of step {step} comes before it; leave the call out to go on",
                )
        elif (newest := self._directory.newest_before_job()) is not None:
            path, step = newest, int(open_checkpoint(newest, verify=False).progress["step"])
        else:
            raise NoCheckpoint(path=self.model_dir, reason="nothing was trained in it yet; call train first")
        trainer, spec = self._of_mode(mode, batches)
        if self._held.get(mode) != (path, step):
            if trained is not None and trained.config.fast_dev_run:  # which writes no checkpoints
                path = str(trained.run_dir / f"estimator-{trained.number}")
                trained.save(path)
            trainer.show(batches)
            trainer.load(path)
            self._held[mode] = path, step
        return trainer, spec

    def _validate_as_eval(self, trainer: Trainer, validation: Batches) -> None:
        """Measure within fit what `evaluate` measures: loss and metrics of mode EVAL."""
        measured, _ = self._of_mode(ModeKeys.EVAL, validation)
        if measured.config.loss.is_in_forward != trainer.config.loss.is_in_forward:
            raise ConfigError(
                "model_fn returned loss='model' for one of the modes 'train' and 'eval', and another loss for the other: one forward "
                "cannot serve both. Nothing was trained; compute the loss at the same place in both."
            )
        trainer.measure_as(measured)

    def _trained(self) -> Trainer | None:
        """The Trainer that has trained here, unless another Estimator has since continued from its checkpoint."""
        trainer = self._built[ModeKeys.TRAIN][0] if ModeKeys.TRAIN in self._built else None
        return trainer if self._directory.last() in (None, trainer) else None


def train_and_evaluate(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec
) -> tuple[dict[str, float], None]:
    """Train up to max_steps, with the evaluation data measured after each epoch and checkpoint, and at the end."""
    if (eval_spec.throttle_secs, eval_spec.start_delay_secs) != (None, None) and jobs.rank() == 0:
        print(
            "note: throttle_secs and start_delay_secs of EvalSpec have no effect: all workers evaluate, after each epoch and checkpoint",
            file=sys.stderr,
            flush=True,
        )
    estimator.train(
        train_spec.input_fn,
        hooks=train_spec.hooks,
        max_steps=train_spec.max_steps,
        validation=_batches(eval_spec.input_fn),
        validation_steps=eval_spec.steps,
    )
    return estimator.evaluate(eval_spec.input_fn, steps=eval_spec.steps), None


def _batches(input_fn: InputFn) -> Batches:
    if not callable(input_fn):
        raise ConfigError(
            f"input_fn must be a function without arguments that returns data, got a {type(input_fn).__name__}. Nothing was trained."
        )
    given = input_fn()
    if isinstance(given, tuple) and len(given) == 2:  # (features, labels)
        given = batches_of_arrays(*given, batch_size=None, shuffle=False, seed=0, what="input_fn")
    return as_batches(given, default_seed=0)


def _first(batches: Batches) -> tuple[Any, Any]:
    [part] = batches.slices(epoch=0, start=0, rank=0, num_workers=1, stop=1)
    return split_target(part.batch)
