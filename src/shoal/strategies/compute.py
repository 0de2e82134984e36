"""One slice through the user's model and loss: forward, loss sum, backward.

Shared by every strategy that runs the whole model in one process. Decides
what is seeded and in which precision; exchanges nothing and updates nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from shoal.core.seeds import mix
from shoal.data.slice import Slice, split_target
from shoal.data.tree import Tree, concatenate, map_tensors
from shoal.strategies.calling import ModelCall
from shoal.strategies.protocol import LossSum, TrainJob

_EVALUATION = 1 << 40  # keeps the seeds of evaluate and predict apart from those of steps


class Compute:
    """Runs slices of a job's model, with randomness that is a function of (seed, rank, step)."""

    def __init__(self, job: TrainJob, *, check_loss: bool) -> None:
        self._job = job
        self._call = ModelCall(job.model)
        self._must_check_loss = check_loss
        self._on_cuda = job.device.type == "cuda"
        self._frozen: list[nn.Module] = []
        if job.compile:
            job.model.compile()

    def forward_backward(
        self, batch: Slice, *, rank: int, step: int, before_backward: Callable[[LossSum], None] | None = None
    ) -> LossSum:
        """Accumulate the gradients of the slice's loss sum, divided by the samples of the global batch.

        That divisor is known on every rank before anything ran, and is the
        true one for a plain mean over samples; commit corrects it by the
        count that travelled. `before_backward` is called once, before the
        last backward, when everything but the gradients is known.
        """
        job = self._job
        self._train_mode()
        pieces = batch.cut(job.num_micro)
        totals: list[Tensor] = []
        outputs: list[Tree] = []
        count = 0.0
        for number, piece in enumerate(pieces):
            self._seed(mix(job.seed, rank, step, number))
            inputs, target = split_target(self._placed(piece.batch))
            with self._autocast():
                output = self._call(inputs)
                total, piece_count = job.loss(output, target, max(piece.num_local, 1), piece.num_global)
            if self._must_check_loss:
                job.loss.check(output, target, max(piece.num_local, 1))
                self._must_check_loss = False
            if not piece.borrowed:
                totals.append(total.detach())
                count += piece_count
                outputs.append(map_tensors(lambda tensor: tensor.detach(), output))
            if number == len(pieces) - 1:
                contributed = LossSum(
                    total=_sum(totals, total), count=count, outputs=concatenate(outputs) if outputs else None
                )
                if before_backward is not None:
                    before_backward(contributed)
            if not piece.borrowed:  # a borrowed sample ran to keep in step; its gradient is nobody's
                (total / batch.num_global).backward()  # type: ignore[no-untyped-call]
        return contributed

    def forward(self, batch: Slice, *, rank: int) -> Tree:
        """The outputs of a slice in evaluation mode, without gradients."""
        self._evaluation_mode()
        self._seed(mix(self._job.seed, rank, _EVALUATION + batch.start))
        with torch.no_grad(), self._autocast():
            return self._call(split_target(self._placed(batch.batch))[0])

    def _train_mode(self) -> None:
        model = self._job.model
        if not model.training:
            model.train()
            for module in self._frozen:
                module.training = False

    def _evaluation_mode(self) -> None:
        model = self._job.model
        if model.training:
            # Parts the user keeps in evaluation mode while training (a frozen BatchNorm) go back to it.
            self._frozen = [module for module in model.modules() if not module.training]
            model.eval()

    def _seed(self, seed: int) -> None:
        # Not torch.manual_seed: it seeds every backend there is, at a hundred times the price.
        torch.default_generator.manual_seed(seed)
        if self._on_cuda:
            torch.cuda.manual_seed(seed)

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        if self._job.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self._job.device.type, dtype=self._job.autocast)

    def _placed(self, batch: Tree) -> Tree:
        return place(batch, self._job.device, self._job.cast_inputs)


def place(batch: Tree, device: torch.device, dtype: torch.dtype | None = None) -> Tree:
    """The batch on the model's device; floating tensors in `dtype` where one is given."""
    if dtype is not None:
        batch = map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, batch)
    if device.type == "cpu":
        return batch
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)


def _sum(totals: list[Tensor], like: Tensor) -> Tensor:
    if not totals:
        return torch.zeros((), dtype=like.dtype, device=like.device)
    return totals[0] if len(totals) == 1 else torch.stack(totals).sum()
