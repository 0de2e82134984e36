"""A moving average of weights, kept in a part of the model itself: saved, resumed, sharded and handed over with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from shoal.errors import ConfigError
from shoal.parallel.protocol import HoldsCopy
from shoal.train.callbacks.base import Callback

if TYPE_CHECKING:
    from shoal.train.trainer import Trainer


class WeightAverage(Callback):
    """After each step: average = decay * average + (1 - decay) * weights.

    The average is a part of the model, a frozen copy that its author made:
    `self.average = copy.deepcopy(self.generator).requires_grad_(False)`.
    """

    ranks: ClassVar[Literal["zero", "every"]] = "every"

    def __init__(self, average: str, *, of: str, decay: float = 0.999) -> None:
        """`average` and `of` are names of parts of the model."""
        if not 0 <= decay < 1:
            raise ConfigError(f"decay must be at least 0 and below 1, got {decay!r}.")
        self._average, self._of, self._decay = average, of, decay
        self._hook: RemovableHandle | None = None

    def on_fit_begin(self, trainer: Trainer) -> None:
        if isinstance(trainer.strategy, HoldsCopy):
            raise ConfigError(
                f"under '{trainer.job.strategy}' weights live on servers, and a worker that replaces another is not given the average "
                f"'{self._average}', which does not. Nothing was trained; use --strategy ddp or fsdp."
            )
        for average, weight in self._pairs(trainer.train_job.model):
            if _places(average) != _places(weight):
                raise ConfigError(
                    f"under '{trainer.job.strategy}' '{self._of}' is cut and its average '{self._average}' is not, or in another way: a rank "
                    "has not the parts of both. Nothing was trained; leave both whole with "
                    f"tensor_plan={{'{self._of}*': 'replicated', '{self._average}*': 'replicated'}}, or use --strategy ddp or fsdp."
                )
            if average.shape != weight.shape or average.requires_grad:
                raise ConfigError(
                    f"'{self._average}' is no frozen copy of '{self._of}'. Nothing was trained; make it one where the model is built: "
                    f"copy.deepcopy(self.{self._of}).requires_grad_(False)."
                )

        optimizer = trainer.strategy.optimizer
        assert optimizer is not None

        def update(*_: object) -> None:
            if trainer.train_job.turn is not trainer.turns[-1]:
                return
            with torch.no_grad():
                for average, weight in self._pairs(trainer.train_job.model):
                    average.lerp_(weight, 1 - self._decay)

        self._remove()  # of a fit that an error ended
        # Within the commit, not after it: a rank that is given the step by another has both, or neither.
        self._hook = optimizer.register_step_post_hook(update)

    def on_fit_end(self, trainer: Trainer) -> None:
        self._remove()

    def _remove(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _pairs(self, model: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
        try:
            averages, weights = (
                list(model.get_submodule(name).parameters()) for name in (self._average, self._of)
            )
        except AttributeError as error:
            raise ConfigError(f"WeightAverage: {error}. Nothing was trained.") from None
        if len(averages) != len(weights):
            raise ConfigError(
                f"'{self._average}' has {len(averages)} parameters and '{self._of}' {len(weights)}: it is no copy of it. Nothing was trained."
            )
        return list(zip(averages, weights, strict=True))


def _places(tensor: torch.Tensor) -> object:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
