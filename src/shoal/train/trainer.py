"""The Trainer: a model, a loss, an optimizer and data, under the strategy the job was launched with.

This module holds the calls of a user and the parts of a Trainer's state. The
loop of a fit is in loop.py, passes without updates in evaluation.py, state on
disk in checkpoint/saving.py, progress and replay anchors in progress.py.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shoal.cluster.worker import session
from shoal.config import job as jobs
from shoal.config import strategy as strategies
from shoal.config.parallel_options import refuse_plateau_of_steps
from shoal.data.batches import Batches
from shoal.data.slice import Slice
from shoal.data.tree import Tree
from shoal.errors import ConfigError, Interrupted
from shoal.parallel import create
from shoal.parallel.batch_dependence import describe_mixing, mixing_layers
from shoal.parallel.loss import LossRule, StepLoss, loss_rule
from shoal.parallel.loss_scale import LossScale
from shoal.parallel.parameter_file import ParameterFile
from shoal.parallel.protocol import ControlFlags, HoldsCopy, Strategy, TrainJob, Turn
from shoal.ps.weight_average import base_of, keep_average
from shoal.runtime import recorder, scratch
from shoal.train.arguments.arrays import batches_of_arrays, is_arrays
from shoal.train.arguments.by_name import (
    SCALES,
    check_params,
    describe_scaling,
    loss_named,
    optimizer_named,
    scale_learning_rates,
)
from shoal.train.arguments.initial_weights import initialise
from shoal.train.callbacks.base import Callback, CallbackList, average_decay
from shoal.train.calls import (
    OTHER_PRECISIONS,
    PRECISIONS,
    Call,
    OptimizerFactory,
    asked_to_leave,
    batches_of,
    build_model,
    build_optimizer,
    check_callable,
    check_choice,
    check_limit,
    described,
    device_of,
    drawn_here,
    first_slice,
    next_number,
    refuse_as_optimizers,
    refuse_beside_step,
    refuse_fp16,
    refuse_hooks,
    refuse_lookups,
    signals_finish_the_step,
    turns_of,
)
from shoal.train.checkpoint import reachable, saving
from shoal.train.checkpoint.background import BackgroundWriter
from shoal.train.evaluation import evaluate, metric_set, pass_reporter, predict
from shoal.train.graph import GraphReport
from shoal.train.loop import FitLoop
from shoal.train.planned import check_planned
from shoal.train.progress import FitStart, History, Position, TrainingProgress, inherit, restore, snapshot
from shoal.train.summary import LayerLine, layer_lines, summary_text
from shoal.train.verification import Verification, fingerprint_at_end

if TYPE_CHECKING:
    from shoal.train.leasing import Leasing

STRATEGY_NAMES = (
    *(
        "optimizer",
        "step",
        "replay_log",
        "prepare",
        "forward_backward",
        "commit",
        "forward",
        "reduce",
        "gather",
    ),
    *("state", "load"),
)
"""Methods that the Trainer requires of a Strategy (shoal.parallel.protocol)."""

SchedulerFactory = Callable[[torch.optim.Optimizer], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """Validated, immutable settings of a Trainer."""

    model: nn.Module | Callable[[], nn.Module]
    """The model, or a function that builds it under `seed`."""

    loss: LossRule
    """The loss, with the kind of outputs it takes."""

    optimizer: OptimizerFactory | torch.optim.Optimizer | Mapping[str, OptimizerFactory] | None
    """The optimizer, or a function of the parameters, or one for each part of the model; None for a Trainer that never fits."""

    scheduler: SchedulerFactory | LRScheduler | None
    """The learning-rate scheduler, or a function of the optimizer."""

    scheduler_every: Literal["step", "epoch"]
    """The moment at which the scheduler advances."""

    seed: int
    """Seed of everything random while training, together with rank and step."""

    device: torch.device
    """Device of this worker's model."""

    snapshot_every: int | None
    """Steps between snapshots, 0 for none; None leaves it to the job."""

    shows_progress: bool
    """Draw progress in a plain python process."""

    scale_lr: str | None
    """Rule by which learning rates follow the number of workers; None: they do not."""

    init_from: str | None
    """Weights to begin with."""

    init_partial: bool
    """Whether parts of the model missing in `init_from` may keep their initial values."""

    fast_dev_run: int
    """Batches of each pass, to try a script out; 0: all of them."""

    params: dict[str, Any]
    """The user's hyper-parameters: in the run directory and in checkpoints."""

    strategy: Callable[[Any], Strategy] | None
    """A user's class that replaces the launched strategy."""

    step: dict[str, Any]
    """Settings of a step, by the names of TrainJob's fields."""


class Trainer:
    """Trains, evaluates and saves a plain `nn.Module` in one process or many, with the same answer.

    Nothing is built or exchanged before the first call of fit, evaluate,
    predict, save or load: the same script works under any strategy.

    Its state has four parts: `config` (settings), `progress` (everything
    counted, in checkpoints and anchors), `control` (stop, save and leave flags
    that the next commit agrees on) and `callbacks`. A running fit has its own
    state in a FitLoop.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        *,
        loss: Any = None,
        training_step: Callable[..., Any] | None = None,
        optimizer: OptimizerFactory
        | torch.optim.Optimizer
        | Mapping[str, OptimizerFactory]
        | str
        | None = None,
        lr: float | None = None,
        optimizer_options: Mapping[str, Any] | None = None,
        scale_lr: Literal["linear", "sqrt"] | None = None,
        scheduler: SchedulerFactory | LRScheduler | None = None,
        scheduler_every: Literal["step", "epoch"] = "step",
        metrics: Sequence[Any] | dict[str, Any] = (),
        callbacks: Sequence[Callback] = (),
        seed: int = 0,
        clip_norm: float | None = None,
        accumulate: int | None = None,
        precision: str = "float32",
        compile: bool = False,
        checkpoint_activations: bool | Sequence[str] = False,
        tensor_plan: Mapping[str, str] | None = None,
        pipeline_cut: Sequence[str] | None = None,
        on_nonfinite: Literal["raise", "skip"] = "raise",
        snapshot_every: int | None = None,
        init_from: str | Path | None = None,
        init_partial: bool = False,
        params: Mapping[str, Any] | None = None,
        fast_dev_run: bool | int = False,
        strategy: Callable[[Any], Strategy] | None = None,
        device: str | torch.device | None = None,
        progress: bool = True,
    ) -> None:
        """
        Args:
            model: any module, or a function that builds it (then built under `seed`).
            loss: called as `loss(output, target)`, or `loss(output)` where batches have no target. May return a dict of named
                parts, of which "loss" is trained and all are logged. "model" takes the loss that the model's forward returns;
                "cross_entropy", "mse", "bce_with_logits" and others are torch's of that name.
            training_step: in the place of `loss`: called as `training_step(model, batch)`, with this worker's slice, and returns a
                mean over its samples, or a pair (sum, count). It decides what of the model is run, and how often. To check its
                loss, it is called again on the slice and its halves at steps 1, 2, 4, 8 and so on.
            optimizer: a function of the parameters, `lambda params: torch.optim.Adam(params)`, or an instance. With a
                `training_step`, also a dict of functions by the name of a part of the model, `{"critic": ..., "generator": ...}`:
                each updates its part in turn, by the loss of `training_step(model, batch, name)`.
                A name of torch.optim, "adamw", is built with `lr` and `optimizer_options`.
            lr: learning rate of an optimizer that is given by name.
            optimizer_options: its other settings, {"momentum": 0.9}.
            scale_lr: "linear" or "sqrt": multiply the learning rate by the number of workers, or its root, for batches of
                `batch(32, per_worker=True)`. A resume at another number of workers multiplies by that one.
            scheduler: a function of the optimizer, or one built on the optimizer that is given; advanced every step or epoch.
            metrics: "accuracy", "top5", "auroc", or torchmetrics objects; exact over all workers.
            callbacks: see `shoal.callbacks`.
            seed: of everything random while training, together with rank and step.
            clip_norm: largest global norm of the gradient.
            accumulate: parts in which a worker runs its slice of a batch, to save memory. The batch of one
                update stays what `batch()` says.
            precision: "bf16" and "fp16" run forward under autocast; "fp16" with a dynamic loss scale, and steps that overflow
                are skipped on all workers.
            compile: compile the model with torch.compile.
            checkpoint_activations: keep only the inputs of the model's blocks and run them again within backward, or of the
                layers with these names (patterns): less memory, more time.
            tensor_plan: how tp cuts layers, where it should not find out by itself: patterns of their names to "colwise",
                "rowwise", "heads" (an nn.MultiheadAttention), "sequence" or "replicated".
            pipeline_cut: where pp cuts, where it should not find out by itself: names of the layers at which the second
                stage and those after it begin.
            on_nonfinite: "raise", or "skip" steps whose loss or gradient is not finite.
            snapshot_every: steps between the snapshots to which workers that hold parts of the model go back when one dies, or
                0 for none; by default as `--snapshot-every` says, else 50.
            init_from: weights to begin with: a directory of `save` or of a checkpoint, a .safetensors file, or a .pth file, of which
                only weights are read. What was loaded, skipped and missing is said.
            init_partial: whether layers that `init_from` has nothing for may begin as they were built.
            params: hyper-parameters of your own: in params.json of the run directory, in checkpoints, and in `shoal status`.
            fast_dev_run: try the script out: one batch, or so many, of each pass, and no checkpoints.
            strategy: a class of your own, called with the Job, that gives a Strategy (shoal.parallel.protocol) in the place of the one
                that `--strategy` names. Derive it from the launched one's, such as shoal.parallel.ddp.Ddp.
            device: where the model lives; by default as `--device` says.
            progress: show how far it is, in a plain python process; `shoal run` shows it anyway.
        """
        check_choice("scheduler_every", scheduler_every, ("step", "epoch"))
        precision = OTHER_PRECISIONS.get(precision, precision)
        check_choice("precision", precision, tuple(PRECISIONS))
        if precision == "fp16":
            refuse_fp16(jobs.current())
        check_choice("on_nonfinite", on_nonfinite, ("raise", "skip"))
        check_callable("model", model, "an nn.Module, or a function that builds one", nn.Module)
        if (loss is None) == (training_step is None):
            raise ConfigError(
                "the Trainer takes a loss, called as loss(output, target), or a training_step, called as training_step(model, batch), "
                f"and was given {'both' if loss is not None else 'neither'}. Nothing was trained."
            )
        if training_step is not None:
            refuse_beside_step(training_step, compile=compile, metrics=metrics)
        if isinstance(loss, str) and loss != "model":
            loss = loss_named(loss)
        if isinstance(loss, type):
            raise ConfigError(
                f"loss={loss.__name__} is a class, and a loss is an object or a function of (output, target). Nothing was trained; write "
                f"loss={loss.__name__}()."
            )
        if isinstance(optimizer, str):
            optimizer = optimizer_named(optimizer, lr, optimizer_options)
        elif lr is not None or optimizer_options is not None:
            raise ConfigError(
                "lr= and optimizer_options= are for an optimizer that is given by name, optimizer='adamw'. Nothing was trained; set them "
                "where the optimizer is built: optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3)."
            )
        if scale_lr is not None:
            check_choice("scale_lr", scale_lr, tuple(SCALES))
            if isinstance(optimizer, torch.optim.Optimizer):
                raise ConfigError(
                    f"scale_lr='{scale_lr}' sets the learning rate where the optimizer is built, and an optimizer that was built already is "
                    "given. Nothing was trained; give a function: optimizer=lambda params: torch.optim.SGD(params, lr=0.1)."
                )
        check_limit("fast_dev_run", int(fast_dev_run), least=0)
        if strategy is not None and not callable(strategy):
            raise ConfigError(
                f"strategy= takes a class of your own, called with the Job, and got {strategy!r}. Nothing was trained; a strategy by its "
                "name is chosen at launch: shoal run --strategy ddp."
            )
        if isinstance(optimizer, Mapping):
            refuse_as_optimizers(optimizer, is_step=training_step is not None, job=jobs.current())
        elif optimizer is not None:
            hint = "a function such as lambda params: torch.optim.Adam(params), or a torch optimizer"
            check_callable("optimizer", optimizer, hint, torch.optim.Optimizer)
        if isinstance(scheduler, LRScheduler) and scheduler.optimizer is not optimizer:
            raise ConfigError(
                f"the {type(scheduler).__name__} given as scheduler= was built on another optimizer than optimizer=. Nothing was "
                "trained; give that optimizer too, or functions: optimizer=lambda params: ..., scheduler=lambda optimizer: ..."
            )
        if scheduler is not None and not callable(scheduler) and not isinstance(scheduler, LRScheduler):
            raise ConfigError(
                f"scheduler must be a function of the optimizer, or a torch scheduler, got {scheduler!r}."
            )
        asked = jobs.current().accumulate
        if None not in (asked, accumulate) and asked != accumulate:
            raise ConfigError(
                f"--accumulate {asked} and accumulate={accumulate} of the Trainer contradict each other. Nothing was trained; leave one of "
                "them out."
            )
        accumulate = (asked or 1) if accumulate is None else accumulate
        check_limit("accumulate", accumulate)
        check_limit("snapshot_every", snapshot_every, least=0)
        if clip_norm is not None and not clip_norm > 0:
            raise ConfigError(f"clip_norm must be positive, got {clip_norm!r}; leave it out for no clipping.")
        self.job = jobs.current()
        self.rank = self.job.rank
        # A batch is divided over ranks that compute different parts of it.
        self.data_rank, self.num_workers = self.job.data_rank, self.job.num_data_ranks
        self.config = TrainerConfig(
            model=model,
            loss=StepLoss() if training_step is not None else loss_rule(loss, is_compiled=compile),
            optimizer=optimizer,
            scheduler=scheduler,
            scheduler_every=scheduler_every,
            seed=seed,
            device=device_of(self.job, device),
            snapshot_every=snapshot_every,
            shows_progress=progress,
            scale_lr=scale_lr,
            init_from=str(init_from) if init_from is not None else None,
            init_partial=init_partial,
            fast_dev_run=int(fast_dev_run),
            params=check_params(params),
            strategy=strategy,
            step={
                "training_step": training_step,
                "clip_norm": clip_norm,
                "num_micro": accumulate,
                "autocast": PRECISIONS[precision],
                "compile": compile,
                "checkpoint_activations": checkpoint_activations or self.job.checkpoint_activations,
                "tensor_plan": tensor_plan,
                "pipeline_cut": pipeline_cut,
                "on_nonfinite": on_nonfinite,
            },
        )
        self.progress, self.control = TrainingProgress(), ControlFlags()
        kind, ignored = self.config.loss.outputs_are, getattr(loss, "ignore_index", None)
        self.train_metrics = metric_set(metrics, loss_kind=kind, ignore_index=ignored)
        self._evaluation_metrics = metric_set(metrics, loss_kind=kind, ignore_index=ignored)
        self._evaluation_loss: LossRule | None = None
        self.callbacks = self._callback_list(callbacks)
        self._average_decay = average_decay(self.callbacks)
        self.verification = Verification(self.job.verify, rank=self.rank) if self.job.verify else None
        self.checkpoints = BackgroundWriter()
        self.increments = saving.Increments()
        self.scheduler: Any = None
        """Built with the optimizer, if one was given."""

        self.turns: list[Turn | None] = [None]
        """The optimizers in their order, where there are several: each takes a turn in a step."""

        self.number = next_number()
        self._strategy: Strategy | None = None
        self._is_prepared = False
        self._graph: GraphReport | None = None  # until the first step is done
        self._fit: FitLoop | None = None
        self._trained: set[str] = set()  # parameters that were not frozen when the strategy was prepared
        self._layers: list[LayerLine] = []
        self._logged: dict[str, float] = {}
        self._at_hand: Batches | None = (
            None  # data of the next call: pp traces the model on its first samples
        )
        self._fit_data: Batches | None = None  # data of the last fit

    # ---- public calls ----------------------------------------------------------------------------

    def fit(
        self,
        data: Any,
        target: Any = None,
        *,
        epochs: int | None = None,
        max_steps: int | None = None,
        batch_size: int | None = None,
        shuffle: bool = True,
        validation_data: Any = None,
        validate_every: int | None = None,
        validation_steps: int | None = None,
        resume: str | None = None,
    ) -> History:
        """Train for `epochs` passes over `data` (one by default), or `max_steps` updates, whichever ends first.

        `validation_data` is measured after every epoch, and with
        `validate_every=N` also after every N steps: into metrics.jsonl and the
        callbacks' `on_validation_end`; `validation_steps` ends it after so many
        batches. `resume="auto"` goes on from the newest
        checkpoint of the run directory, if there is one; a path goes on from
        that checkpoint.

        Arrays, tensors and DataFrames are taken as they are, `fit(x, y)`, in
        batches of `batch_size` (32 by default, over all workers), in another
        order each epoch unless `shuffle=False`; `validation_data=(x, y)` too.
        """
        check_limit("epochs", epochs)
        check_limit("max_steps", max_steps)
        for name, limit in (("validate_every", validate_every), ("validation_steps", validation_steps)):
            check_limit(name, limit)
            if limit is not None and validation_data is None:
                raise ConfigError(
                    f"{name} needs validation_data. Nothing was trained; give both, or neither."
                )
        if self.config.optimizer is None:
            raise ConfigError(
                "fit needs an optimizer: Trainer(optimizer=lambda params: torch.optim.SGD(params, lr=0.1))."
            )
        if epochs is None and max_steps is None:
            epochs = 1
        config, progress = self.config, self.progress
        if config.fast_dev_run:
            epochs, max_steps = None, config.fast_dev_run
        data = batches_of_arrays(
            data, target, batch_size=batch_size, shuffle=shuffle, seed=config.seed, what="fit"
        )
        if is_arrays(validation_data):
            validation_data = batches_of_arrays(
                validation_data, None, batch_size=batch_size, shuffle=False, seed=config.seed, what="fit"
            )
        batches = batches_of(data, what="fit", seed=config.seed, may_be_endless=max_steps is not None)
        batches = batches.for_device(config.device)
        validation = None
        if validation_data is not None:
            self._refuse_evaluation("validation_data")
            validation = batches_of(
                validation_data,
                what="validation_data",
                seed=config.seed,
                may_be_endless=validation_steps is not None,
            )
            validation = validation.for_device(config.device)
        self._at_hand = batches
        limits = f"epochs={epochs}, max_steps={max_steps}"
        against = f", validation: {described(validation)}" if validation is not None else ""
        directories = reachable.directories_to_check(
            self.job, (each.checkpoint_directory for each in self.callbacks)
        )
        reachable.mark(self.job, directories)
        call = self._begin("fit", f"{limits}, {described(batches)}{against}")
        if call.is_over:
            return progress.histories[-1]
        self.refuse_unfrozen()
        reachable.check(self.job, directories)
        start = (
            inherit(self) or saving.resume(self, batches, self._resume_from(resume)) or self._anew(batches)
        )
        if start.is_finished:
            return call.end(start.history, kept=start.history.epochs)
        if config.scale_lr is not None:
            told = describe_scaling(batches, self.learning_rates, config.scale_lr, self.num_workers)
            if self.rank == 0:
                print(told, file=sys.stderr, flush=True)
        self._write_params()
        progress.begin_fit(start)
        progress.data_description, self._fit_data = batches.describe(), batches
        self.control.stop = False
        first_epoch, first_step = start.first
        began_step = first_step if start.is_inherited else self.step
        history = start.history
        self._fit = FitLoop(
            self,
            batches,
            start,
            last_epoch=first_epoch + epochs if epochs is not None else None,
            last_step=first_step + max_steps if max_steps is not None else None,
            validation=validation,
            validate_every=validate_every,
            validation_steps=validation_steps,
        )
        try:
            with signals_finish_the_step(), drawn_here(self.job, wanted=config.shows_progress):
                self._fit.run()
        except Interrupted as interrupted:
            if self.job.launched:
                raise
            print(f"{interrupted} Go on with fit(..., resume='auto').", file=sys.stderr, flush=True)
            raise SystemExit(interrupted.exit_code) from None
        finally:
            self._fit = None
            session.summary(
                metrics=history.epochs[-1] if history.epochs else {},
                samples=self.position.samples - start.began_samples,
                seconds=time.monotonic() - start.began_s,
                steps=self.step - began_step,
            )
        if self.verification is not None:
            self.verification.end(self.strategy)
        return call.end(history, kept=history.epochs)

    def evaluate(
        self, data: Any, target: Any = None, *, batch_size: int | None = None, steps: int | None = None
    ) -> dict[str, float]:
        """Mean loss and metrics over all of `data`, or of arrays `evaluate(x, y)`, equal on every rank.

        `steps` ends it after so many batches.
        """
        check_limit("steps", steps)
        self._refuse_evaluation("evaluate")
        batches, call = self._begin_pass(
            "evaluate", data, target, batch_size=batch_size, may_be_endless=steps is not None
        )
        if call.is_over:
            return dict(call.result)
        made = f"evaluate of {described(batches)}"
        if (passed := self.progress.passed_result(made)) is not None:
            return call.end(passed, kept=dict(passed))
        with drawn_here(self.job, wanted=self.config.shows_progress):
            measured = self.measure(
                batches,
                num_batches=steps,
                tick=pass_reporter("evaluate", batches.num_steps(self.num_workers), self.progress),
            )
        self.progress.keep_result(made, dict(measured))
        return call.end(measured, kept=dict(measured))

    def predict(
        self, data: Any, *, batch_size: int | None = None, out: str | Path | None = None
    ) -> Tree | dict[str, Any]:
        """The model's outputs for all of `data`, in the order of the data, the same on every rank.

        With `out`, a directory or an fsspec URL, nothing is gathered: each
        worker writes its rows to a Parquet file there as they come, with their
        `position` in the data, and the result is `{"out": ..., "rows": ...}`.
        """
        batches, call = self._begin_pass("predict", data, batch_size=batch_size)
        if call.is_over:
            return call.result
        made = f"predict of {described(batches)}"
        if (passed := self.progress.passed_result(made)) is not None:
            return call.end(passed)
        if out is not None and self.job.incarnation == 0:
            from shoal.train.prediction_files import refuse_written  # and with it pyarrow

            refuse_written(str(out))
        with drawn_here(self.job, wanted=self.config.shows_progress):
            predicted = predict(
                self.strategy,
                self.train_job,
                batches,
                rank=self.data_rank,
                num_workers=self.num_workers,
                tick=pass_reporter("predict", batches.num_steps(self.num_workers), self.progress),
                num_batches=self.config.fast_dev_run,
                out=str(out) if out is not None else None,
                is_writer=self.job.counts_samples,
            )
        if out is not None:
            self.progress.keep_result(made, dict(predicted))
        return call.end(predicted)

    def summary(self) -> str:
        """The model's layers and parameters, whatever a strategy makes of them; printed by rank 0."""
        call = self._begin("summary", "")
        job = self.job
        optimizer = self.strategy.optimizer
        footer = [f"strategy {job.strategy}, {job.num_workers} worker{'s' * (job.num_workers > 1)}"]
        if optimizer is not None:
            rates = ", ".join(f"{rate:g}" for rate in dict.fromkeys(self.learning_rates))
            footer.append(f"optimizer {base_of(type(optimizer)).__name__}, learning rate {rates}")
        text = summary_text(self._layers, title=type(self.local_model).__name__, footer=footer)
        if self.rank == 0 and not call.is_over:
            print(text, flush=True)
        return call.end(text)

    def save(self, path: str | Path) -> None:
        """Write the model to a directory: model.safetensors, which anything can read, and manifest.json."""
        call = self._begin("save", str(path))
        if call.is_over:
            return
        if self.progress.passed_results is None:
            saving.save_model(self, str(path))
        else:
            self._note_passed(f"save('{path}')")
        call.end(None)

    def load(self, weights: str | Path | Mapping[str, torch.Tensor]) -> None:
        """Take over weights under any strategy: of a directory that `save` or a checkpoint wrote, or a state_dict, the same on every rank."""
        given = weights if isinstance(weights, Mapping) else str(weights)
        call = self._begin("load", given if isinstance(given, str) else f"{len(given)} tensors")
        if not call.is_over:
            saving.load_model(self, given)
            call.end(None)

    def stop(self) -> None:
        """End the running fit. Decided with the next commit, so that all ranks end after the same step."""
        self.control.stop = True

    def replace_callbacks(self, callbacks: Sequence[Callback]) -> None:
        """Other callbacks for the fits to come; model, optimizer and counts stay."""
        given = self._callback_list(callbacks)
        if average_decay(given) != self._average_decay:
            raise ConfigError(
                "EMA and SWA keep their average in the optimizer, which is built already: they cannot come, go or change between two "
                "fits. Nothing was trained; give the same to every fit."
            )
        self.callbacks = given

    # ---- for callbacks ---------------------------------------------------------------------------

    @property
    def position(self) -> Position:
        """The place in the data, and what was counted on the way there."""
        return self.progress.position

    @property
    def step(self) -> int:
        """Steps trained so far."""
        return self.progress.position.step

    @property
    def epoch(self) -> int:
        """Epochs finished so far."""
        return self.progress.position.epoch

    @property
    def num_skipped_steps(self) -> int:
        """Steps left out because their loss or gradient was not finite."""
        return self.progress.num_skipped_steps

    @property
    def run_dir(self) -> Path:
        """The run's directory; under plain python it may not exist yet."""
        return self.job.run_dir

    @property
    def learning_rates(self) -> list[float]:
        """Learning rate of every parameter group."""
        optimizer = self.strategy.optimizer
        return [float(group["lr"]) for group in optimizer.param_groups] if optimizer is not None else []

    def wish_checkpoint(self) -> None:
        """Ask for a checkpoint with the next commit."""
        self.control.checkpoint = True

    def save_checkpoint(self, directory: str | None = None, *, background: bool = False) -> str:
        """Write everything needed to go on from here; every rank must call it at the same point.

        In the background, it is there when fit returns, or when the next one is saved; training goes on meanwhile.
        """
        if self.progress.passed_results is not None:
            newest = self.progress.newest_checkpoint or ""
            self._note_passed(f"save_checkpoint({directory or ''!r})")
            return newest
        with recorder.CHECKPOINT:
            path = saving.save_checkpoint(self, directory, background=background and self._fit is not None)
        if self._fit is not None and self._fit.ledger is not None:
            self._fit.ledger.reached()
        return path

    def log(self, name: str, value: float) -> None:
        """Put a value of your own into this step's line of metrics.jsonl."""
        self._logged[name] = value

    # ---- for the loop ----------------------------------------------------------------------------

    @property
    def strategy(self) -> Strategy:
        if self._strategy is None:
            self._strategy = self._create()
        if not self._is_prepared:
            self._is_prepared = True
            self._prepare(self._strategy)
        return self._strategy

    @property
    def model(self) -> nn.Module:
        """The model that is trained, with the newest weights. Under fsdp, tp and pp a worker has parts of it."""
        model = self.local_model
        if self._fit is not None and isinstance(self.strategy, HoldsCopy):
            self.strategy.refresh_copy()
            self.callbacks.weights_were_refreshed(self)
        return model

    @property
    def local_model(self) -> nn.Module:
        """The model as this worker holds it. Nothing is pulled, so collected pieces of it stay unchanged."""
        self.strategy  # builds it if model= is a function  # noqa: B018
        return self.train_job.model

    @property
    def leasing(self) -> Leasing | None:
        """Leases of the running fit, in a relaxed strategy."""
        return self._fit.leasing if self._fit is not None else None

    def refuse_unfrozen(self) -> None:
        """Refuse parameters that were frozen when the strategy was prepared: it exchanges no gradients of them.

        One process needs nothing but an optimizer that has them.
        """
        named = {name: p for name, p in self.train_job.model.named_parameters() if p.requires_grad}
        new = [name for name in named if name not in self._trained]
        if not new:
            return
        what = f"'{new[0]}'" + (f" and {len(new) - 1} more parameters" if len(new) > 1 else "")
        cure = "shoal.Trainer(model, ...), for the fits with more parameters"
        if self.job.num_workers > 1 or strategies.parse(self.job.strategy).has_servers:
            raise ConfigError(
                f"{what} of the model had requires_grad=False when this Trainer was prepared for '{self.job.strategy}', and was unfrozen "
                "since: no worker would get the others' gradients of it. Nothing was trained after step "
                f"{self.step}; make a second one, {cure}."
            )
        optimizer = self.strategy.optimizer
        known = {id(p) for group in optimizer.param_groups for p in group["params"]} if optimizer else set()
        if not any(id(named[name]) in known for name in new):
            print(
                f"note: {what} of the model had requires_grad=False when the optimizer was built, which does not have it: it stays as it is. "
                f"To train it make a second one, {cure}",
                file=sys.stderr,
                flush=True,
            )
        self._trained.update(new)

    def export_streams(self) -> list[dict[str, Any]]:
        """Offsets of the streams that the last fit reads, at its position."""
        return self._fit_data.export_streams(self.position.next_index) if self._fit_data is not None else []

    @property
    def data_description(self) -> dict[str, Any]:
        return self.progress.data_description

    def measure(
        self, batches: Batches, *, num_batches: int | None, tick: Callable[[Slice], None]
    ) -> dict[str, float]:
        """Loss and metrics over this data; `num_batches`: None for all of it."""
        return evaluate(
            self.strategy,
            self.train_job,
            batches,
            self._evaluation_metrics,
            rank=self.data_rank,
            num_workers=self.num_workers,
            tick=tick,
            num_batches=self.config.fast_dev_run or num_batches or 0,
            loss=self._evaluation_loss,
        )

    def measure_as(self, other: Trainer) -> None:
        """Measure with the loss and the metrics of another Trainer from now on."""
        self._evaluation_loss, self._evaluation_metrics = other.config.loss, other._evaluation_metrics

    def show(self, batches: Batches) -> None:
        """Data to prepare the model with, where no call has given any."""
        self._at_hand = batches

    def write_graph(self, *, num_local: int) -> None:
        """Write the drawing of the model after its first step. `num_local`: samples of this worker in it."""
        if self._graph is not None:
            self._graph.write(self.strategy, num_local=num_local, num_workers=self.job.num_workers)
            self._graph = None

    def close_graph(self) -> None:
        """End a recording whose step was never done."""
        if self._graph is not None:
            self._graph.close()
            self._graph = None

    def advance_scheduler(self, moment: str, logs: dict[str, float]) -> None:
        """Step the scheduler, if this is its moment; one that watches a plateau watches val_loss, else the loss."""
        if self.scheduler is None or moment != self.config.scheduler_every:
            return
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(logs["val_loss"] if "val_loss" in logs else logs["loss"])
        else:
            self.scheduler.step()

    def take_logged(self) -> dict[str, float]:
        """Values logged since the last step."""
        logged, self._logged = self._logged, {}
        return logged

    def _callback_list(self, callbacks: Sequence[Callback]) -> CallbackList:
        if self.config.fast_dev_run:
            callbacks = [each for each in callbacks if not each.runs_last]  # nothing is saved
        return CallbackList(callbacks, rank=self.rank)

    def _create(self) -> Strategy:
        if self.config.strategy is None:
            return create(self.job)
        made = self.config.strategy(self.job)
        lacking = [name for name in STRATEGY_NAMES if not hasattr(made, name)]
        if lacking:
            raise ConfigError(
                f"{getattr(self.config.strategy, '__name__', self.config.strategy)!r} gave a {type(made).__name__}, which is no Strategy: it "
                f"lacks {', '.join(lacking)}. Nothing was trained; derive it from the class of a strategy, such as shoal.parallel.ddp.Ddp."
            )
        return made

    def _build_optimizer(self, given: Any, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = build_optimizer(given, model)
        if self.config.scale_lr is not None:
            scale_learning_rates(optimizer, self.lr_scale)
        return self._keep_average(optimizer)

    def _keep_average(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        decay = self._average_decay
        return optimizer if decay is None else keep_average(optimizer, decay=decay)

    @property
    def lr_scale(self) -> float:
        """Factor of the learning rates by `scale_lr`."""
        if self.config.scale_lr is None:
            return 1.0
        stands_for = self.job.verify.stands_for if self.job.verify is not None else 1
        return SCALES[self.config.scale_lr](self.num_workers * stands_for)

    def _write_params(self) -> None:
        """params.json, which `shoal status` shows."""
        if self.config.params and self.rank == 0 and self.job.launched:
            (self.run_dir / "params.json").write_text(json.dumps(self.config.params, indent=1))

    def _initialise(self, model: nn.Module) -> None:
        path = self.config.init_from
        if path is not None:
            loaded = initialise(model, path, is_partial=self.config.init_partial)
            if self.rank == 0:
                print(loaded.describe(path), file=sys.stderr, flush=True)

    def _prepare(self, strategy: Strategy) -> None:
        is_cut = self.job.num_workers > 1 and strategies.parse_axes(self.job.strategy) is not None
        if not is_cut or isinstance(self.config.model, nn.Module):
            self._prepare_model(strategy, build_model(self.config.model, seed=self.config.seed))
            return
        # A rank of a mesh never has the whole model in memory: parameters are in a file until they are
        # partitioned.
        with ParameterFile(scratch.directory()).open() as file:
            model = build_model(self.config.model, seed=self.config.seed, into=file)
            if self.rank == 0 and (kept := file.kept_in_memory()) is not None:
                print(f"note: {kept}", file=sys.stderr, flush=True)
            self._prepare_model(strategy, model)
            file.settle(model)

    def _plan_dry_runs(self, verification: Verification, model: nn.Module) -> None:
        from shoal.train.dry_run import DryRuns  # imports torch's memory tracker

        runs = DryRuns(model, verification.plan.dry_runs)

        def run(strategy: Strategy) -> list[dict[str, Any]]:
            assert self._at_hand is not None
            # In the script's own precision, unlike the step of a verification.
            job = replace(self.train_job, autocast=self.config.step["autocast"])
            return runs.run(job, self._at_hand, strategy.optimizer)

        verification.dry_run = run

    def _prepare_model(self, strategy: Strategy, model: nn.Module) -> None:
        config = self.config
        settings = dict(config.step)
        if self.verification is not None:
            if self.verification.plan.dry_runs:
                self._plan_dry_runs(self.verification, model)
            self.verification.cast(model)
            settings |= {"autocast": None, "compile": False, "cast_inputs": self.verification.dtype}
            settings["checks_every_loss"] = self.verification.checks_every_loss
            if self.verification.plan.at_rest:
                # Without its BatchNorm a model may diverge, which is no error of the script.
                settings["on_nonfinite"] = "skip"
            settings["num_micro"] = self.verification.plan.num_micro or settings["num_micro"]
        self._initialise(model)
        if model.training and any(type(module).train is not nn.Module.train for module in _in_python(model)):
            model.train()  # of its own (it keeps a BatchNorm at rest, say), which a new module has not been through
        self._layers = layer_lines(model)
        given = config.optimizer
        if isinstance(given, torch.optim.Optimizer):
            self._keep_average(given)
        is_scaled = settings["autocast"] is torch.float16 and given is not None
        self.train_job = TrainJob(
            loss_scale=LossScale() if is_scaled else None,
            model=model,
            loss=config.loss,
            build_optimizer=partial(self._build_optimizer, given) if given is not None else None,
            given_optimizer=given if isinstance(given, torch.optim.Optimizer) else None,
            device=config.device,
            seed=config.seed,
            number=self.number,
            control=self.control,
            first_slice=first_slice(self._at_hand, self.num_workers) if self._at_hand is not None else None,
            **settings,
        )
        refuse_hooks(self.job, model)
        refuse_lookups(self.job, model)
        if self.job.launched and self.rank == 0 and self.number == 0:
            check_planned(model, self.run_dir)
            if not self.train_job.compile:
                self._graph = GraphReport(model, self.run_dir)
        self._trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        strategy.prepare(self.train_job)
        self.turns = turns_of(given, model)
        fingerprint_at_end(model)
        if self.num_workers > 1 and self.rank == 0:
            for note in describe_mixing(mixing_layers(model), sync_every=self.job.sync_every):
                print(f"note: {note}", file=sys.stderr, flush=True)
        if config.scheduler is not None and strategy.optimizer is not None:
            if not isinstance(config.scheduler, LRScheduler):
                self.scheduler = config.scheduler(strategy.optimizer)
            elif config.scheduler.optimizer is strategy.optimizer:
                self.scheduler = config.scheduler
            else:
                raise ConfigError(
                    f"under '{self.job.strategy}' the optimizer is built anew, and the scheduler that was given is bound to the first "
                    "one. Nothing was trained; give a function: scheduler=lambda optimizer: ..."
                )
            if config.scheduler_every == "step" and isinstance(self.scheduler, ReduceLROnPlateau):
                refuse_plateau_of_steps(self.job.sync_every)

    def _begin(self, kind: str, detail: str) -> Call:
        """Number this call, check that all ranks make it, and prepare everything."""
        if self._fit is not None:
            raise ConfigError(
                f"{kind} was called inside a running fit, on rank {self.rank}. Give validation_data= to fit, or use "
                "trainer.save_checkpoint() in a callback."
            )
        asked = asked_to_leave()
        if asked is not None:
            raise Interrupted(signal_name=asked, step=self.step, checkpoint=self.progress.newest_checkpoint)
        number = session.begin_call(kind, detail)
        if self._strategy is None:
            self._strategy = self._create()
        call = Call(number, self._strategy.replay_log, lambda: snapshot(self)())
        # Also if the call is over: the script's own variable may be the last user of the model.
        _ = self.strategy
        if call.after is not None:
            restore(self, call.after)
        return call

    def _note_passed(self, call: str) -> None:
        """Tell that a call writes nothing: the weights here are initial, and fits of the script are skipped."""
        if self.rank == 0:
            print(
                f"note: {call} was made before the checkpoint that this job goes on from; what it wrote is left as it is",
                file=sys.stderr,
                flush=True,
            )

    def _refuse_evaluation(self, what: str) -> None:
        if self.config.step["training_step"] is not None:
            raise ConfigError(
                f"{what} measures loss(output, target), and this Trainer has a training_step in its place. Nothing was evaluated; use "
                "predict, or a second Trainer with the trained model and a loss=."
            )

    def _begin_pass(
        self,
        kind: str,
        data: Any,
        target: Any = None,
        *,
        batch_size: int | None = None,
        may_be_endless: bool = False,
    ) -> tuple[Batches, Call]:
        data = batches_of_arrays(
            data, target, batch_size=batch_size, shuffle=False, seed=self.config.seed, what=kind
        )
        batches = batches_of(data, what=kind, seed=self.config.seed, may_be_endless=may_be_endless)
        batches = batches.for_device(self.config.device)
        self._at_hand = batches
        return batches, self._begin(kind, described(batches))

    def _anew(self, batches: Batches) -> FitStart:
        """Begin a fit at the end of the previous one."""
        position = self.position
        position.loss_total = position.loss_count = 0.0
        self.train_metrics.reset()
        if batches.describe() != self.progress.data_description:
            position.next_index = 0  # a position in other data is meaningless here
        return FitStart(
            history=History(),
            first=(position.epoch, position.step),
            began_s=time.monotonic(),
            began_samples=position.samples,
        )

    def _resume_from(self, asked: str | None) -> str | None:
        """A resumed job continues from its newest checkpoint, and so does a restarted one without a donor."""
        alone = self.job.incarnation > 0 and not (
            self.strategy.replay_log and self.strategy.replay_log.was_given_state
        )
        # Fits before this one were skipped: the checkpoint is of it, or of a later one.
        passing = self.progress.passed_results is not None
        return "auto" if asked is None and (self.job.resume or alone or passing) else asked


def _in_python(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
