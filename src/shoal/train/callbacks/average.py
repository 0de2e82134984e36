"""Averages of weights: in a part of the model itself (WeightAverage), or of all weights beside the optimizer's state (EMA, SWA)."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from shoal.errors import ConfigError
from shoal.parallel.protocol import HoldsCopy, Piece
from shoal.parallel.state import MODEL, OPTIMIZER
from shoal.ps.weight_average import AVERAGE, TAKE
from shoal.train.callbacks.base import Callback, StepLogs
from shoal.train.checkpoint import saving
from shoal.train.checkpoint.checkpoint import write_checkpoint

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

        self._remove()  # left by a fit that an error ended
        # Within the commit, not after it: a rank that receives the step from a donor has both, or neither.
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


class KeptAverage(Callback):
    """An average of all weights, kept by the optimizer beside its own state (`ps/weight_average.py`).

    When fit ends, the averaged model is in `average` in the run directory, as
    `trainer.save` writes one, and with `use=True` in the Trainer too.
    """

    ranks: ClassVar[Literal["zero", "every"]] = "every"

    def __init__(self, *, decay: float, use: bool) -> None:
        self.average_decay = decay
        self._use = use
        self._name = type(self).__name__

    def on_fit_begin(self, trainer: Trainer) -> None:
        job = trainer.job
        if job.sync_every is not None:
            raise ConfigError(
                f"with --sync-every {job.sync_every} each worker steps alone, and {self._name} would average {job.num_workers} different "
                "models. Nothing was trained; leave one of the two out."
            )
        if self._has_mixed_batches(trainer) and trainer.rank == 0:
            print(
                f"note: {self._name} averages weights; the running statistics of BatchNorm stay those of the last step",
                file=sys.stderr,
                flush=True,
            )

    def on_fit_end(self, trainer: Trainer) -> None:
        path = str(trainer.run_dir / AVERAGE)
        pieces = {piece.name: piece for piece in trainer.strategy.state()}
        if trainer.rank == 0:
            kept = [self._averaged(piece, pieces) for name, piece in pieces.items() if name.startswith(MODEL)]
            write_checkpoint(path, kept, progress={"step": trainer.step, "epoch": trainer.epoch})
        trainer.strategy.reduce(torch.zeros(1))  # barrier: no rank goes on before it is written
        if self._use:
            saving.load_model(trainer, path)

    @torch.no_grad()
    def _averaged(self, piece: Piece, pieces: dict[str, Piece]) -> Piece:
        average = pieces.get(f"{OPTIMIZER}{piece.name.removeprefix(MODEL)}/{AVERAGE}")
        # A buffer, a frozen parameter, or one that never had a gradient: its own value.
        return piece if average is None else replace(piece, tensor=self._newest(average.tensor, piece.tensor))

    def _newest(self, average: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return average.clone()

    def _has_mixed_batches(self, trainer: Trainer) -> bool:
        modules = trainer.train_job.model.modules()
        return any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in modules)


class EMA(KeptAverage):
    """After each update: average = decay * average + (1 - decay) * weights; the first update begins it.

    `use=False` leaves the Trainer with the weights of the last step.
    """

    def __init__(self, decay: float = 0.999, *, use: bool = True) -> None:
        if not 0 < decay < 1:
            raise ConfigError(f"EMA's decay must be above 0 and below 1, got {decay!r}.")
        super().__init__(decay=decay, use=use)


class SWA(KeptAverage):
    """Stochastic weight averaging: the mean of the weights at the end of each epoch from `start_epoch` (from 1) on.

    A learning rate for it is a scheduler's matter: `torch.optim.swa_utils.SWALR`.
    """

    def __init__(self, start_epoch: int, *, use: bool = True) -> None:
        if not isinstance(start_epoch, int) or start_epoch < 1:
            raise ConfigError(f"SWA's start_epoch must be a positive integer, got {start_epoch!r}.")
        super().__init__(decay=0.0, use=use)
        self._start_epoch = start_epoch
        self.num_averaged = 0
        """Epochs in the average."""

        self._num_skipped = 0

    def on_fit_begin(self, trainer: Trainer) -> None:
        super().on_fit_begin(trainer)
        if trainer.leasing is not None or len(trainer.turns) > 1:
            why = (
                f"under '{trainer.job.strategy}' workers end an epoch at different updates"
                if trainer.leasing is not None
                else "optimizers that take turns make several updates of a step"
            )
            raise ConfigError(
                f"SWA takes the weights as they are at an epoch's end, and {why}. Nothing was trained; use EMA, "
                "or an exact strategy and one optimizer."
            )

    def on_step_end(self, trainer: Trainer, logs: StepLogs) -> None:
        if trainer.num_skipped_steps == self._num_skipped:
            self._set(trainer, 0.0)  # the update has included it
        self._num_skipped = trainer.num_skipped_steps

    def on_epoch_end(self, trainer: Trainer, logs: dict[str, float]) -> None:
        if trainer.epoch >= self._start_epoch:
            # By the next update, before it changes them; by on_fit_end if there is none.
            self.num_averaged += 1
            self._set(trainer, 1.0 / self.num_averaged)

    def on_fit_end(self, trainer: Trainer) -> None:
        if not self.num_averaged:
            if trainer.rank == 0:
                print(
                    f"note: SWA(start_epoch={self._start_epoch}) averaged nothing: {trainer.epoch} epochs were trained; the weights are those "
                    "of the last step",
                    file=sys.stderr,
                    flush=True,
                )
            return
        optimizer = trainer.strategy.optimizer
        assert optimizer is not None
        self._pending = float(optimizer.param_groups[0][TAKE])
        super().on_fit_end(trainer)
        if self._use and self._pending:
            self._set(trainer, 1.0)  # the weights are the average now; another fit starts from it

    def _averaged(self, piece: Piece, pieces: dict[str, Piece]) -> Piece:
        if self._pending == 1.0 and f"{OPTIMIZER}{piece.name.removeprefix(MODEL)}/{AVERAGE}" not in pieces:
            return piece  # the first average equals the weights
        return super()._averaged(piece, pieces)

    def _newest(self, average: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return torch.lerp(average, weights, self._pending) if self._pending else average.clone()

    def _set(self, trainer: Trainer, take: float) -> None:
        optimizer = trainer.strategy.optimizer
        assert optimizer is not None
        for group in optimizer.param_groups:
            group[TAKE] = take

    def state(self) -> dict[str, Any]:
        return {"num_averaged": self.num_averaged, "num_skipped": self._num_skipped}

    def load_state(self, state: dict[str, Any]) -> None:
        self.num_averaged, self._num_skipped = state["num_averaged"], state["num_skipped"]
