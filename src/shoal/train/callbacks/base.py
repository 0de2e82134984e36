"""The callback interface, and the monitored value that several callbacks share."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.errors import ConfigError
from shoal.parallel.protocol import HoldsCopy
from shoal.runtime.serialization import unlike

if TYPE_CHECKING:
    from shoal.train.trainer import Trainer


_ELSEWHERE = {
    "on_train_begin": "on_fit_begin",
    "on_train_start": "on_fit_begin",
    "on_fit_start": "on_fit_begin",
    "on_train_end": "on_fit_end",
    "on_train_batch_end": "on_step_end",
    "on_batch_end": "on_step_end",
    "on_train_epoch_end": "on_epoch_end",
    "on_validation_epoch_end": "on_validation_end",
    "on_test_end": "on_epoch_end",
    "on_save_checkpoint": "on_checkpoint",
    "on_evaluate": "on_epoch_end",
    "on_save": "on_checkpoint",
    "on_log": "on_step_end",
}
"""Hooks of Keras, Lightning and transformers, and the equivalent one here."""


@dataclass(frozen=True, slots=True)
class StepLogs:
    """Values of a committed step; equal on every rank."""

    epoch: int
    """The epoch it belongs to, from 0."""

    step: int
    """Its number, from 1."""

    loss: float
    """Mean loss over the global batch."""

    samples: int
    """Samples in the global batch."""

    lr: float
    """Learning rate of the first parameter group."""

    grad_norm: float | None
    """Norm of the gradient before clipping, where clipping asked for it."""


class Callback:
    """Base of callbacks. Every hook is optional.

    An exception in a hook is the script's own error and ends the run with its traceback. A hook of
    a callback that runs on rank 0 alone must not call anything collective (saving, evaluating): the
    other ranks would not take part.
    """

    ranks: ClassVar[Literal["zero", "every"]] = "zero"
    """Where it runs: on rank 0 (to write, print, report) or on every rank (to save or decide)."""

    runs_last: ClassVar[bool] = False
    """True for callbacks that save, so that the checkpoint has the others' state of the same moment."""

    last_step: int | None = None
    """Step after which every fit ends. Known in advance and equal on all ranks, so that no exchange is needed."""

    checkpoint_directory: str | None = None
    """Where it saves checkpoints, if not in the run directory: a resumed fit looks there too."""

    average_decay: float | None = None
    """Not None if the optimizer keeps an average of the weights: its decay, or 0 if the callback decides when."""

    full_every: int = 1
    """One of this many checkpoints holds tables on servers completely, the others only changed rows."""

    def on_fit_begin(self, trainer: Trainer) -> None:
        """A fit begins, or goes on from a checkpoint: `trainer.step` says where."""

    def on_step_end(self, trainer: Trainer, logs: StepLogs) -> None:
        """A step is committed."""

    def on_validation_end(self, trainer: Trainer, logs: dict[str, float]) -> None:
        """The validation data was measured, after an epoch or as `fit(validate_every=N)` asks: its val_* values."""

    def on_epoch_end(self, trainer: Trainer, logs: dict[str, float]) -> None:
        """An epoch is over and validated: its loss and metrics, and those of the validation as val_*."""

    def on_fit_end(self, trainer: Trainer) -> None:
        """The fit came to its end; not called when an error ended it."""

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """An error or a signal (`shoal.errors.Interrupted`) ends the fit, and is raised again after this."""

    def on_checkpoint(self, trainer: Trainer, path: str) -> None:
        """A requested checkpoint is written."""

    def state(self) -> dict[str, Any]:
        """State for a checkpoint: numbers, strings, lists and dicts."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the result of `state`."""


def refuse_unknown_hooks(callback: Callback) -> None:
    """Refuse a method named like another library's hook, which would never be called."""
    hooks = [name for name in vars(Callback) if name.startswith("on_")]
    for name in dir(type(callback)):
        if not name.startswith("on_") or name in hooks or not callable(getattr(type(callback), name)):
            continue
        close = [_ELSEWHERE[name]] if name in _ELSEWHERE else difflib.get_close_matches(name, hooks, n=1)
        meant = f"Did you mean {close[0]}? " if close else ""
        raise ConfigError(
            f"the callback {type(callback).__name__} has a method '{name}', which is no hook and would never be called. {meant}"
            f"The hooks are {', '.join(hooks)}; give a method that is no hook a name without 'on_'."
        )


class CallbackList:
    """The callbacks of a Trainer, in the order they run."""

    def __init__(self, callbacks: Sequence[Callback], *, rank: int) -> None:
        if isinstance(callbacks, Callback):
            raise ConfigError(
                f"callbacks must be a list, got {type(callbacks).__name__} alone. Write callbacks=[...] around it."
            )
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise ConfigError(
                    f"callbacks must hold instances of shoal.callbacks.Callback, got {callback!r}."
                )
            refuse_unknown_hooks(callback)
        # Callbacks that save come last, so that the checkpoint has the others' state of the same moment.
        self._all = sorted(callbacks, key=lambda callback: callback.runs_last)
        self._here = [callback for callback in self._all if callback.ranks == "every" or rank == 0]
        self._standing: list[Any] | None = None
        self._tensors: _ModelTensors | None = None
        self._is_deep = False

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._all)

    @property
    def last_steps(self) -> list[int]:
        return [callback.last_step for callback in self._all if callback.last_step is not None]

    def call(self, hook: str, trainer: Trainer, *args: Any) -> None:
        for callback in self._here:
            run = getattr(callback, hook)
            if trainer.job.num_workers == 1 or getattr(run, "__module__", "shoal.").startswith("shoal."):
                run(trainer, *args)
                continue
            # Reading all weights takes time: at other steps only torch's version counters are compared.
            is_watched = callback.ranks == "zero" or isinstance(trainer.strategy, HoldsCopy)
            self._is_deep = is_watched and (hook != "on_step_end" or trainer.step.bit_count() == 1)
            self._standing = self._look(trainer)
            run(trainer, *args)
            before, self._standing = self._standing, None
            after = self._look(trainer)
            if before != after:
                changed = [name for name, was, now in zip(_PARTS, before, after, strict=True) if was != now]
                _refuse_changes(callback, hook, trainer, changed)
                trainer.refuse_unfrozen()

    def failed(self, trainer: Trainer, error: BaseException) -> None:
        """Report the end of the fit by an error. An exception in a hook is printed, and does not hide the error."""
        for callback in self._here:
            try:
                callback.on_exception(trainer, error)
            except Exception as another:
                print(
                    f"note: on_exception of {type(callback).__name__} failed: {type(another).__name__}: {another}",
                    file=sys.stderr,
                    flush=True,
                )

    def weights_were_refreshed(self, trainer: Trainer) -> None:
        """shoal itself wrote into the model, while a callback runs."""
        if self._standing is not None:
            self._standing = self._look(trainer)

    def _look(self, trainer: Trainer) -> list[Any]:
        """Values that change when a callback changes the model or the optimizer, in the order of `_PARTS`.

        With `_is_deep` also writes through `.data`, which torch does not count.
        """
        model, optimizer = trainer.train_job.model, trainer.strategy.optimizer
        if self._tensors is None or not self._tensors.are_of(model):
            self._tensors = _ModelTensors(model)
        parameters, buffers = self._tensors.now()
        groups = optimizer.param_groups if optimizer is not None else []
        return [
            [[parameter._version for parameter in parameters], _norms(parameters) if self._is_deep else ()],
            [buffer._version for buffer in buffers],
            [parameter.requires_grad for parameter in parameters],
            # A tensor or a list may be changed in place: what it is now is its text.
            [
                {k: v if type(v) in _UNCHANGING else str(v) for k, v in group.items() if k != "params"}
                for group in groups
            ],
        ]

    def has_own(self, hook: str) -> bool:
        """Whether a callback of the user's has this hook."""
        return any(not getattr(type(each), hook).__module__.startswith("shoal.") for each in self._all)

    def state(self) -> list[dict[str, Any]]:
        return [{"callback": type(each).__name__, "state": each.state()} for each in self._all]

    def load_state(self, saved: list[dict[str, Any]]) -> None:
        """Load by class, in order: a script may have more or fewer callbacks than the one that saved."""
        left = list(saved)
        for callback in self._all:
            own = next((entry for entry in left if entry["callback"] == type(callback).__name__), None)
            if own is not None:
                left.remove(own)
                # A user's callback may save anything.
                if type(callback).__module__.startswith("shoal.") and (
                    problem := unlike(
                        own["state"], callback.state(), type(callback).__name__, may_be_none=True
                    )
                ):
                    raise ValueError(problem)
                callback.load_state(own["state"])


def average_decay(callbacks: CallbackList) -> float | None:
    """Decay of the average that the optimizer keeps; None if no callback asks for one."""
    asking = [each for each in callbacks if each.average_decay is not None]
    if len(asking) > 1:
        raise ConfigError(
            f"{' and '.join(type(each).__name__ for each in asking)} both average the weights, and an optimizer keeps one average. Nothing "
            "was trained; leave one of them out."
        )
    return asking[0].average_decay if asking else None


_PARTS = ("weights", "buffers", "requires_grad", "settings of the optimizer")


class _ModelTensors:
    """Parameters and buffers of a model, read twice a step: modules are walked again only once one was exchanged."""

    def __init__(self, model: nn.Module) -> None:
        # Kept, so that no other module has the id of one that went.
        self._model, self._modules = model, (modules := list(model.modules()))
        self._children = [module._modules for module in modules]
        self._parameters = [module._parameters for module in modules]
        self._buffers = [module._buffers for module in modules]
        self._ids = self._ids_of_children()

    def are_of(self, model: nn.Module) -> bool:
        return self._model is model and self._ids == self._ids_of_children()

    def now(self) -> tuple[list[nn.Parameter], list[Tensor]]:
        """They may be others each time, and one that modules share is there several times."""
        parameters = [each for held in self._parameters for each in held.values() if each is not None]
        return parameters, [each for held in self._buffers for each in held.values() if each is not None]

    def _ids_of_children(self) -> list[int]:
        return [id(child) for children in self._children for child in children.values()]


_UNCHANGING = {float, int, bool, type(None)}


@torch.no_grad()
def _norms(parameters: Sequence[Tensor]) -> list[Any]:
    # Local values only: a norm over the ranks would be a collective.
    here = [each.to_local() if isinstance(each, DTensor) else each for each in parameters]
    held = [each for each in here if each.is_floating_point() and not each.is_meta and each.numel()]
    norms = [float(norm) for norm in torch._foreach_norm(held)] if held else []
    return [*(each.data_ptr() for each in held), *map(repr, norms)]  # by repr, since nan != nan


def _refuse_changes(callback: Callback, hook: str, trainer: Trainer, changed: list[str]) -> None:
    name, what = type(callback).__name__, " and ".join(changed)
    if callback.ranks == "zero":
        raise ConfigError(
            f"the callback {name} changed {what} of the model in {hook}, and it runs on rank 0 alone: the {trainer.job.num_workers} "
            f"workers would go on with different models. Nothing was trained after step {trainer.step}; give the class "
            '`ranks = "every"`, so that every worker makes the same change.'
        )
    if isinstance(trainer.strategy, HoldsCopy) and "weights" in changed:
        raise ConfigError(
            f"the callback {name} changed weights of the model in {hook}, and under '{trainer.job.strategy}' they live on servers: the "
            f"change of a worker's copy would be lost. Nothing was trained after step {trainer.step}; use --strategy ddp."
        )


Mode = Literal["min", "max", "auto"]

_FALLS = ("loss", "error", "mse", "mae", "perplexity", "deviance", "distance")
_RISES = (
    "accuracy",
    "auroc",
    "top",
    "f1",
    "fbeta",
    "precision",
    "recall",
    "score",
    "auc",
    "iou",
    "kappa",
    "r2",
    "jaccard",
)


class Monitor:
    """Watches one value of the epochs' logs and knows the best so far."""

    def __init__(self, name: str, *, mode: Mode = "auto", min_delta: float = 0.0) -> None:
        if mode not in ("min", "max", "auto"):
            raise ConfigError(f"mode must be 'min', 'max' or 'auto', got {mode!r}.")
        if not min_delta >= 0 or math.isinf(min_delta):
            raise ConfigError(f"min_delta must be a number of at least 0, got {min_delta!r}.")
        self.name = name
        self.best = math.nan
        """The best value so far; nan before the first."""

        self._rises = _rises(name) if mode == "auto" else mode == "max"
        self._min_delta = min_delta
        self._seen = False

    def improved(self, logs: dict[str, float]) -> bool | None:
        """True if this epoch is the best so far, by more than `min_delta`; None when it was not measured."""
        value = logs.get(self.name)
        if value is None:
            if not self._seen:
                raise ConfigError(
                    f"'{self.name}' is to be watched, but the epoch's values are {', '.join(sorted(logs))}. A name with "
                    "val_ needs validation_data= in fit, a metric needs metrics= in the Trainer."
                )
            return None
        self._seen = True
        ahead = value - self.best if self._rises else self.best - value
        if math.isnan(value) or ahead <= self._min_delta:  # a comparison with nan, before the first, is False
            return False
        self.best = value
        return True

    def state(self) -> dict[str, Any]:
        return {"name": self.name, "best": self.best, "seen": self._seen}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from `state`, if the same value was watched."""
        if state["name"] == self.name:
            self.best, self._seen = state["best"], state["seen"]


def _rises(name: str) -> bool:
    words = name.removeprefix("val_")
    if any(word in words for word in _FALLS):
        return False
    if any(word in words for word in _RISES):
        return True
    raise ConfigError(
        f"shoal cannot tell whether '{name}' is better when it falls or when it rises. Say mode='min' or mode='max'."
    )
