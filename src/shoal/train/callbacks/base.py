"""When a callback is called, on which ranks, and what it is told."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shoal.errors import ConfigError

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
    "on_validation_end": "on_epoch_end",
    "on_validation_epoch_end": "on_epoch_end",
    "on_test_end": "on_epoch_end",
    "on_save_checkpoint": "on_checkpoint",
    "on_evaluate": "on_epoch_end",
    "on_save": "on_checkpoint",
    "on_log": "on_step_end",
}
"""Hooks of Keras, Lightning and transformers, and the one that is called here at that moment."""


@dataclass(frozen=True, slots=True)
class StepLogs:
    """What is known of a step once it is committed; equal on every rank."""

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
    """Something to do beside training. Every hook may be left out.

    What a hook raises is the script's own error and ends the run with its
    traceback. A hook of a callback that runs on rank 0 alone must not call
    anything collective (saving, evaluating): the other ranks would not come.
    """

    ranks: ClassVar[Literal["zero", "every"]] = "zero"
    """Where it runs: on rank 0 (what writes, prints, reports) or on every rank (what saves or decides)."""

    runs_last: ClassVar[bool] = False
    """True for those that save, so that what they save holds the others' state of the same moment."""

    last_step: int | None = None
    """A step after which every fit ends. Known before it comes and equal on all ranks, so that nobody has to be asked."""

    def on_fit_begin(self, trainer: Trainer) -> None:
        """A fit begins, or goes on from a checkpoint: `trainer.step` says where."""

    def on_step_end(self, trainer: Trainer, logs: StepLogs) -> None:
        """A step is committed."""

    def on_epoch_end(self, trainer: Trainer, logs: dict[str, float]) -> None:
        """An epoch is over and validated: its loss and metrics, and those of the validation as val_*."""

    def on_fit_end(self, trainer: Trainer) -> None:
        """The fit came to its end; not called when an error ended it."""

    def on_checkpoint(self, trainer: Trainer, path: str) -> None:
        """A checkpoint that was wished for is written."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint must keep of this callback: numbers, strings, lists and dicts."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""


def refuse_unknown_hooks(callback: Callback) -> None:
    """A method that is named like a hook and is none would never be called."""
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
