"""`ddp`: every worker holds the whole model, computes a slice of the batch, and the gradients are summed.

Own buckets of a fixed layout over torch.distributed, overlapped with
backward; the count, the losses and the wishes of a step travel ahead of the
gradients in one small vector.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import torch
from torch import nn

from shoal.cluster.rendezvous import group
from shoal.collectives.gather import gather_any, sum_in_rank_order
from shoal.collectives.gradients import GradientExchange
from shoal.collectives.native import Native
from shoal.core.errors import ModelsDiffer
from shoal.core.job import Job
from shoal.data.slice import Slice
from shoal.data.tree import Tree
from shoal.strategies.compute import Compute
from shoal.strategies.protocol import LossSum, Piece, PieceReader, TrainJob, Verdict
from shoal.strategies.state import load_state, state_pieces
from shoal.strategies.statistics import RunningStatistics
from shoal.strategies.update import update
from shoal.strategies.verdict import contribution, decide


class Ddp:
    """Data parallel over one process group; all ranks hold equal weights after every commit."""

    def __init__(self, job: Job) -> None:
        self._rank, self._num_workers = job.rank, job.num_workers
        self.optimizer: torch.optim.Optimizer | None = None
        self.step = 0
        group()
        self._native = Native(rank=job.rank, num_workers=job.num_workers)
        self._exchange: GradientExchange | None = None

    def prepare(self, job: TrainJob) -> None:
        """Check that all ranks built the same model, give everybody rank 0's weights, lay out the buckets."""
        self._job = job
        job.model.to(job.device)
        self._refuse_different_models(job.model)
        with torch.no_grad():
            for tensor in job.model.state_dict().values():
                if isinstance(tensor, torch.Tensor):
                    self._native.broadcast(tensor)
        self._compute = Compute(job, check_loss=True)
        self._statistics = RunningStatistics(job.model)
        self._kept: tuple[torch.Tensor, list[torch.Tensor]] | None = None
        self._parameters = list(job.model.parameters())
        if job.build_optimizer is not None and self.optimizer is None:
            self.optimizer = job.build_optimizer(job.model)
            trainable = [(name, p) for name, p in job.model.named_parameters() if p.requires_grad]
            self._exchange = GradientExchange(trainable, self._native, sparse=_sparse_parameters(job.model))

    def forward_backward(self, batch: Slice) -> LossSum:
        """Compute this rank's gradients; they leave bucket by bucket while backward runs."""
        assert self._exchange is not None
        self._num_global = batch.num_global
        if self._statistics and self._job.on_nonfinite == "skip":
            self._kept = self._statistics.keep()
        share = batch.num_local / batch.num_global
        contributed = self._compute.forward_backward(
            batch, rank=self._rank, step=self.step, before_backward=lambda loss: self._announce(loss, share)
        )
        return contributed

    def adopt(self, batch: Slice) -> None:
        """Take gradients of the slice's mean that the user's own backward computed, weighted by its samples."""
        self._num_global = batch.num_global
        share = batch.num_local / batch.num_global
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad = (
                    parameter.grad * share if share else None
                )  # a borrowed sample gives nothing, NaN or not
        self._announce(LossSum(torch.zeros(()), float(batch.num_local), None), share)

    def commit(self) -> Verdict:
        """Finish the exchange, then clip, decide and update alike on every rank."""
        assert self._exchange is not None
        assert self.optimizer is not None
        self._native.finish(self._vector_work, "the exchange of losses and counts")
        self._exchange.finish()
        if self._statistics:
            self._native.finish(self._statistics_work, "the exchange of BatchNorm statistics")
            self._statistics.write(self._statistics_sum)
        verdict = update(self._job, self.optimizer, self._parameters, decide(self._vector), self._num_global)
        if self._kept is not None and not verdict.applied:
            self._statistics.take_back(self._kept)
        self.step += 1
        return verdict

    def forward(self, batch: Slice) -> Tree:
        """This rank's outputs, without gradients."""
        return self._compute.forward(batch, rank=self._rank)

    def reduce(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in rank order."""
        return sum_in_rank_order(self._native, values)

    def gather(self, value: torch.Tensor | None) -> list[torch.Tensor]:
        """Every rank's tensor, in rank order."""
        return gather_any(self._native, value)

    def state(self) -> Iterator[Piece]:
        """Model and optimizer, whole: every rank holds all of it."""
        return state_pieces(self._job.model, self.optimizer)

    def load(self, pieces: PieceReader) -> None:
        """Take over weights and optimizer state; every rank reads the same pieces."""
        load_state(self._job.model, self.optimizer, pieces)

    def _announce(self, loss: LossSum, share: float) -> None:
        """Everything but the gradients is known now: send it, so that it travels under the backward."""
        assert self._exchange is not None
        self._vector = contribution(
            rank=self._rank,
            num_workers=self._num_workers,
            loss_total=float(loss.total),
            count=loss.count,
            wishes=self._job.wishes,
        )
        self._vector_work = self._native.start_all_reduce(self._vector)
        if self._statistics:
            self._statistics_sum = self._statistics.flat() * share
            self._statistics_work = self._native.start_all_reduce(self._statistics_sum)
        self._exchange.arm()

    def _refuse_different_models(self, model: nn.Module) -> None:
        frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        mine = {
            name: f"{tuple(t.shape)} {t.dtype}" + (", frozen" if name in frozen else "")
            for name, t in model.state_dict().items()
            if isinstance(t, torch.Tensor)
        }
        raw = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
        described = [json.loads(bytes(part.tolist())) for part in gather_any(self._native, raw)]
        for rank, other in enumerate(described):
            differences = [
                f"'{name}' is {described[0].get(name, 'absent')} on rank 0 and {other.get(name, 'absent')} on rank {rank}"
                for name in dict.fromkeys([*described[0], *other])
                if described[0].get(name) != other.get(name)
            ]
            if not differences and list(other) != list(described[0]):
                differences = ["its parameters come in another order"]
            if differences:
                raise ModelsDiffer(rank=rank, differences=differences)


def _sparse_parameters(model: nn.Module) -> frozenset[str]:
    """Names of parameters whose gradients are rows: weights of embeddings built with sparse=True."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return frozenset(
        names[id(module.weight)]
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        and module.sparse
        and id(module.weight) in names
    )
