"""A model cut over a mesh of ranks: `fsdp`, and products with `dp`.

What travels beside gradients (losses, counts, wishes, BatchNorm's statistics)
goes the way of `ddp`, which this is built on; gradients are summed by the cut
itself while backward runs. Ranks hold parts that nobody else has, so a killed
one takes everybody back to the newest snapshot (docs/adr/0011).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoal.cluster.rendezvous import is_broken
from shoal.collectives.gradients import NothingToSend, Sums
from shoal.core import mesh_names, strategy_names
from shoal.core.errors import ConfigError, PeerLost
from shoal.core.job import Job
from shoal.data.slice import Slice
from shoal.data.tree import Tree
from shoal.strategies import fsdp_cut, tensor_cut, tensor_plan
from shoal.strategies.agreement import refuse_different_models
from shoal.strategies.ddp import Ddp
from shoal.strategies.hashed_rows import MODEL, plain_tensors
from shoal.strategies.protocol import LossSum, Piece, PieceReader, TrainJob, Verdict
from shoal.strategies.sharded_tensors import CutReader, whole_pieces
from shoal.strategies.state import load_state, state_pieces


class ModelParallel(Ddp):
    """Every rank holds its part of the model and computes its part of the batch."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.holds_parts = True
        axes = strategy_names.parse(job.strategy).axes
        assert axes is not None
        self._axes = mesh_names.fill(axes, job.num_workers, job.strategy)
        self._speakers = self._axes.speakers()
        self._data_rank = self._axes.data_rank(job.rank)
        self._is_cut = False
        self._speaks = job.rank in self._speakers

    def prepare(self, job: TrainJob) -> None:
        """Check that all ranks built the same model, give everybody rank 0's weights, then cut it."""
        self._job = job
        if job.build_optimizer is not None:
            self._refuse_rows(job.model)
        if not self._is_cut:
            job.model.to(job.device)
            refuse_different_models(job.model, super().gather)
            self._together.exchange(self._broadcast)
            self._cut(job.model)
            self._is_cut = True
        self._build(job, borrowed_run_back=True)
        self._together.hold(job.number, self)

    def forward_backward(self, batch: Slice) -> LossSum:
        """Compute this rank's part; gradients are summed and sharded while backward runs."""
        with self._unless_broken("forward and backward"):
            return super().forward_backward(batch)

    def commit(self) -> Verdict:
        """Agree, clip, decide and update, each rank its part."""
        with self._unless_broken("commit"):
            return super().commit()

    def forward(self, batch: Slice) -> Tree:
        """This rank's outputs, without gradients."""
        with self._unless_broken("forward"):
            return super().forward(batch)

    @contextlib.contextmanager
    def _unless_broken(self, operation: str) -> Iterator[None]:
        """A collective inside the model that breaks because a rank died is no error of the user's."""
        try:
            with tensor_cut.running() if self._axes.tp > 1 else contextlib.nullcontext():
                yield
            return
        except RuntimeError:
            if not is_broken():
                raise
        # Whoever holds parts goes with the one that died; the supervisor ends us while we wait.
        self._together.regroup()
        raise PeerLost(rank=self._rank, operation=operation, reason="a connection of the group was closed")

    def adopt(self, batch: Slice) -> None:
        """A loop of the user's own has run backward, and with it the exchange, before anybody knew its weight."""
        raise ConfigError(
            f"'{self._axes}' sums gradients while backward runs, and shoal.setup learns of a loop's own backward only after "
            "it. Nothing was trained; use shoal.Trainer, or --strategy ddp."
        )

    def _make_exchange(self, model: nn.Module) -> Sums:
        return NothingToSend()

    def _cut(self, model: nn.Module) -> None:
        """Cut the model, which is whole and the same on every rank."""
        mesh = self._mesh(self._job.device)
        if self._axes.tp > 1:
            plan = tensor_plan.find_plan(model, self._axes.tp, self._job.tensor_plan)
            tensor_cut.apply(plan, model, mesh["tp"])
            if self._rank == 0:
                print(plan.table(), file=sys.stderr, flush=True)
        if self._axes.num_data_ranks > 1:
            fsdp_cut.shard(model, mesh["dp", "fsdp"] if self._axes.dp > 1 else mesh["fsdp"])

    def _mesh(self, device: torch.device) -> DeviceMesh:
        _ = self._together.native  # the group is there
        axes = self._axes
        return init_device_mesh(
            device.type,
            (axes.pp, axes.dp, axes.fsdp, axes.tp),
            mesh_dim_names=("pp", "dp", "fsdp", "tp"),
        )

    def reduce(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over the parts of the batch: of ranks that compute the same part, one speaks."""
        return super().reduce(values if self._speaks else torch.zeros_like(values))

    def gather(self, value: torch.Tensor | None) -> list[torch.Tensor]:
        """The tensor of every part of the batch, in their order."""
        everybody = super().gather(value)
        return [everybody[rank] for rank in self._speakers]

    def state(self) -> Iterator[Piece]:
        """Model and optimizer, tensor by tensor, whole on rank 0. Collective."""
        with self._unless_broken("gathering the state"):
            yield from whole_pieces(state_pieces(self._job.model, self.optimizer), keep=self._rank == 0)

    def load(self, pieces: PieceReader) -> None:
        """Every rank reads the whole tensors and keeps its parts."""
        named = dict(self._job.model.named_parameters())
        like = {MODEL + name: tensor for name, tensor in plain_tensors(self._job.model).items()}
        for name in pieces.tensors:
            if name.startswith("optimizer/"):
                owner = named.get(name.removeprefix("optimizer/").rpartition("/")[0])
                if owner is not None:
                    like[name] = owner
        cut = PieceReader(CutReader(pieces.tensors, like), pieces.optimizer_settings, pieces.path)
        load_state(self._job.model, self.optimizer, cut)
