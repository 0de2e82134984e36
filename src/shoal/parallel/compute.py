"""One slice through the user's model and loss: forward, loss sum, backward.

Shared by every strategy that runs the whole model in one process. Decides
what is seeded and in which precision; exchanges nothing and updates nothing.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.collectives.sync_batchnorm import RanksOfBatch
from shoal.data.slice import Slice, split_target, weight_of
from shoal.data.tree import Tree, concatenate, map_tensors
from shoal.parallel.activations import run_again
from shoal.parallel.model_call import ModelCall, num_compiled_graphs
from shoal.parallel.protocol import LossSum, TrainJob
from shoal.runtime.seeds import mix

M = TypeVar("M", bound=nn.Module)

_EVALUATION = 1 << 40  # keeps the seeds of evaluate and predict apart from those of steps


class Compute:
    """Runs slices of a job's model, with randomness that is a function of (seed, rank, step)."""

    def __init__(
        self,
        job: TrainJob,
        *,
        check_loss: bool,
        borrowed_run_back: bool = False,
        ranks: RanksOfBatch | None = None,
    ) -> None:
        """`borrowed_run_back` where backward is collective: then a borrowed sample runs it too, for nothing.

        `ranks` where BatchNorm is synchronised over them.
        """
        self._job, self._ranks = job, ranks
        self._borrowed_run_back = borrowed_run_back or ranks is not None
        self._call = ModelCall(job.model, compile=job.compile)
        self._tells_graphs = job.compile
        self._must_check_loss = check_loss
        if job.checkpoint_activations:
            run_again(job.model, job.checkpoint_activations)
        self._batchnorms = [module for module in job.model.modules() if isinstance(module, _BatchNorm)]
        # Left unsaid, torch warns about it at the first update of sparse rows; said, it stays as it was.
        if not torch.sparse.check_sparse_tensor_invariants.is_enabled():  # type: ignore[no-untyped-call]
            torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]

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
        if not job.model.training:
            job.model.train()
        pieces = batch.cut(job.num_micro)
        totals: list[Tensor] = []
        outputs: list[Tree] = []
        count = 0.0
        for number, piece in enumerate(pieces):
            seed_all(mix(job.seed, rank, step, number), job.device)
            if self._ranks is not None:
                self._ranks.is_borrowed = piece.borrowed
            placed = self._placed(piece.batch)
            (inputs, target), weight = split_target(placed), weight_of(placed)
            with autocast(self._job):
                output = self._output(inputs, piece)
                if self._tells_graphs:
                    self._tell_graphs(rank)
                num_samples = max(piece.num_local, 1)
                total, piece_count = job.loss(output, target, num_samples, piece.num_global, weight)
            if self._must_check_loss and piece.num_local > 1:  # one sample has no halves
                job.loss.check(output, target, piece.num_local, weight)
                self._must_check_loss = job.checks_every_loss
            if not piece.borrowed:
                totals.append(total.detach())
                count += piece_count
                outputs.append(map_tensors(lambda tensor: tensor.detach(), output))
            if number == len(pieces) - 1:
                whole = _sum(totals, total)
                contributed = LossSum(
                    total=whole,
                    count=count,
                    outputs=concatenate(outputs) if outputs else None,
                    on_its_way=_start_reading(whole),
                )
                if before_backward is not None:
                    before_backward(contributed)
            if not piece.borrowed:  # a borrowed sample ran to keep in step; its gradient is nobody's
                (total / batch.num_global).backward()  # type: ignore[no-untyped-call]
            elif self._borrowed_run_back:
                (total * 0.0).backward()  # type: ignore[no-untyped-call]
        return contributed

    def forward(self, batch: Slice, *, rank: int) -> Tree:
        """The outputs of a slice in evaluation mode, without gradients."""
        seed_all(mix(self._job.seed, rank, _EVALUATION + batch.start), self._job.device)
        with evaluating(self._job.model.modules()), torch.no_grad(), autocast(self._job):
            return self._call(split_target(self._placed(batch.batch))[0])

    def try_out(self, batch: Slice, *, rank: int) -> None:
        """Forward and loss of a slice, without gradients and without a trace."""
        output = self.forward(batch, rank=rank)
        placed = self._placed(batch.batch)
        with torch.no_grad(), autocast(self._job):
            self._job.loss(
                output, split_target(placed)[1], max(batch.num_local, 1), batch.num_global, weight_of(placed)
            )

    def _output(self, inputs: Tree, piece: Slice) -> Tree:
        try:
            rests = piece.borrowed and self._ranks is None
            with self._batchnorm_at_rest() if rests else contextlib.nullcontext():
                return self._call(inputs)
        except ValueError as error:
            if "more than 1 value per channel" in str(error):
                error.add_note(
                    f"This worker had {piece.num_local} sample to normalise, of a batch of {piece.num_global}. Leave a "
                    "last batch out that is not full with batch(..., drop_last=True), or use larger batches, fewer "
                    "workers or less accumulation."
                )
            raise

    def _tell_graphs(self, rank: int) -> None:
        """A model may be compiled whole, in parts, or not at all: only the first forward shows it."""
        self._tells_graphs = False
        name, graphs = type(self._job.model).__name__.removeprefix("FSDP"), num_compiled_graphs()
        said = f"{name} runs as {graphs} compiled graph{'s' if graphs > 1 else ''}"
        if rank == 0:
            print(
                f"note: compile: {said if graphs else f'nothing of {name} could be compiled'}",
                file=sys.stderr,
                flush=True,
            )

    @contextlib.contextmanager
    def _batchnorm_at_rest(self) -> Iterator[None]:
        """For a borrowed sample: BatchNorm takes no batch of one, and should keep nothing of it but the count."""
        with evaluating(self._batchnorms) as rested:
            yield
        for module in rested:
            if module.num_batches_tracked is not None:
                module.num_batches_tracked.add_(1)

    def _placed(self, batch: Tree) -> Tree:
        return place(batch, self._job.device, self._job.cast_inputs)


@contextlib.contextmanager
def evaluating(modules: Iterable[M]) -> Iterator[list[M]]:
    """Those of `modules` that train, in evaluation mode, then training again: what was frozen before stays frozen."""
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        yield training
    finally:
        for module in training:
            module.training = True


def autocast(job: TrainJob) -> contextlib.AbstractContextManager[object]:
    """The precision in which a job runs forward and loss."""
    if job.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast(job.device.type, dtype=job.autocast)


def seed_all(seed: int, device: torch.device) -> None:
    """Seed the generators that a model on `device` draws from."""
    # Not torch.manual_seed: it seeds every backend there is, at a hundred times the price.
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def place(batch: Tree, device: torch.device, dtype: torch.dtype | None = None) -> Tree:
    """The batch on the model's device; floating tensors in `dtype` where one is given."""
    if dtype is not None:
        batch = map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, batch)
    if device.type == "cpu":
        return batch
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)


def _start_reading(total: Tensor) -> tuple[Tensor, torch.Event] | None:
    """Have a device copy this number to the host before it begins what it is asked for next."""
    if total.device.type == "cpu":
        return None
    there = torch.empty((), dtype=total.dtype, pin_memory=True).copy_(total, non_blocking=True)
    event = torch.Event(total.device)
    event.record(torch.accelerator.current_stream(total.device))
    return there, event


def _sum(totals: list[Tensor], like: Tensor) -> Tensor:
    if not totals:
        return torch.zeros((), dtype=like.dtype, device=like.device)
    return totals[0] if len(totals) == 1 else torch.stack(totals).sum()
