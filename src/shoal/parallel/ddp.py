"""`ddp`: every worker holds the whole model, computes a slice of the batch, and the gradients are summed.

Own buckets of a fixed layout over torch.distributed, overlapped with
backward; the count, the losses and the wishes of a step travel ahead of the
gradients in one small vector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from shoal.collectives.compression.compressor import Traffic, compressor
from shoal.collectives.gradients import GradientExchange, Sums
from shoal.collectives.reducer import Reducer, gather_any, sum_in_rank_order
from shoal.collectives.sync_batchnorm import synchronise
from shoal.config.choices import compressor_keeps_state
from shoal.config.job import Job
from shoal.data.slice import Slice
from shoal.data.tree import Tree
from shoal.errors import ConfigError, PeerLost
from shoal.parallel import residuals
from shoal.parallel.batchnorm_ranks import BatchNormRanks
from shoal.parallel.buffers import ChangingBuffers
from shoal.parallel.check_same_model import refuse_different_models
from shoal.parallel.compute import Compute
from shoal.parallel.hashed_rows import hash_embeddings, layer_of, plain_tensors
from shoal.parallel.optimizer_state import optimizer_settings
from shoal.parallel.own_gradients import OwnGradients
from shoal.parallel.protocol import LossSum, Piece, PieceReader, TrainJob, Verdict
from shoal.parallel.state import MODEL, load_state, state_pieces
from shoal.parallel.statistics import RunningStatistics
from shoal.parallel.step_result import contribution, decide
from shoal.parallel.update import update
from shoal.recovery.elastic_group import together
from shoal.recovery.replay_log import Timeline
from shoal.recovery.state_transfer import Part


class Ddp:
    """Data parallel over one process group; all ranks hold equal weights after every commit."""

    def __init__(self, job: Job) -> None:
        self._rank, self._num_workers = job.rank, job.num_workers
        self.optimizer: torch.optim.Optimizer | None = None
        self.step = 0
        self.timeline: Timeline | None = together()
        self._together = together()
        self._exchange: Sums | None = None
        self._data_rank = job.rank
        self._speaks = True
        self._tells_buffers = True
        """Whether this rank's buffers count: of those that compute the same with the same layers, one does."""
        self._told_besides: list[float] = []
        """What else is summed up with a step's losses."""
        self._tells_losses_last = False
        """Whether losses and wishes wait for `commit`: without them nobody else can finish the step."""
        self._compress = job.compress
        self.holds_parts = compressor_keeps_state(job.compress)
        """Whether this rank has something that no other has."""
        self._ranks: BatchNormRanks | None = None
        if job.batchnorm == "sync" and len(job.batch_ranks) > 1:
            self._ranks = BatchNormRanks(job, job.batch_ranks)
        self._norm_of: Callable[[], float] | None = None
        self._prepared_at: int | None = None
        self._buffers_before: dict[str, torch.Tensor] = {}
        self._has_kept_buffers = False
        self._own: OwnGradients | None = None  # in a loop of the user's own

    @property
    def traffic(self) -> Traffic | None:
        """What this rank has sent of its gradients; None where backward itself sends them."""
        return self._exchange.traffic if isinstance(self._exchange, GradientExchange) else None

    def prepare(self, job: TrainJob) -> None:
        """Check that all ranks built the same model, give everybody rank 0's weights, lay out the buckets."""
        self._job = job
        if job.build_optimizer is not None:
            self._refuse_rows(job.model)
        job.model.to(job.device)
        self._synchronise(job.model)
        waiting = self._together.waiting_part(job.number)
        done = waiting.plain["prepared_at"] if waiting is not None else None
        # A replacement: the others compared their models and shared their weights before the anchor it starts from.
        is_past = done is not None and done <= self._together.anchored_at
        if not is_past:
            refuse_different_models(job.model, self.gather)
        self._build(job)
        self._together.hold(job.number, self)
        if not is_past:
            self._together.exchange(self._broadcast)
            self._prepared_at = self._together.num_finished

    def _build(self, job: TrainJob, *, borrowed_run_back: bool = False) -> None:
        """What runs the model, as it now is."""
        self._compute = Compute(job, check_loss=True, borrowed_run_back=borrowed_run_back, ranks=self._ranks)
        self._statistics = RunningStatistics(job.model)
        self._changing = ChangingBuffers(job.model)
        self._parameters = list(job.model.parameters())
        if job.is_own_loop:
            self._own = OwnGradients(job.model)
        if job.build_optimizer is not None and self.optimizer is None:
            self.optimizer = job.build_optimizer(job.model)
            self._exchange = self._make_exchange(job.model)

    def _synchronise(self, model: nn.Module) -> None:
        """Let BatchNorm see whole batches, where that is asked for and there is any."""
        if self._ranks is not None and not synchronise(model, self._ranks):
            self._ranks = None

    def _refuse_rows(self, model: nn.Module) -> None:
        """Rows that are no parameters are in no bucket: every worker would train its own."""
        for name in hash_embeddings(model):
            raise ConfigError(
                f"the rows of the HashEmbedding '{layer_of(name)}' cannot be trained with 'ddp': they are no parameters, so "
                "nothing sums their gradients over the workers, and each would train rows of its own. Nothing was "
                "trained; run the script with --strategy ps, which keeps the rows on servers, or in one process."
            )

    def _make_exchange(self, model: nn.Module) -> Sums | None:
        """Of all that is trained; None where that is not known yet."""
        trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        return GradientExchange(
            trainable, sparse=sparse_parameters(model), compressor=compressor(self._compress)
        )

    def forward_backward(self, batch: Slice) -> LossSum:
        """Compute this rank's gradients; they leave bucket by bucket while backward runs."""
        if self._together.next_is_known:
            return LossSum(torch.zeros(()), 0.0, None)  # committed before this process came to be
        self._has_kept_buffers = False
        self.about_to_run()
        self._num_global = batch.num_global
        if self._ranks is None:
            return self._run(batch)
        # Others wait for this rank within the model: a step that breaks is run again from its beginning, by all of them.
        self._batch = batch
        return self._together.within(lambda: self._run(batch), abandon=self._undo)

    def _run(self, batch: Slice) -> LossSum:
        if self._ranks is not None:
            self._ranks.enter(self._together.view)
        share = batch.share
        return self._compute.forward_backward(
            batch,
            rank=self._data_rank,
            step=self.step,
            before_backward=lambda loss: self._contribute(loss, share),
        )

    def about_to_run(self) -> None:
        """Keep the buffers as they are at the last commit: a forward writes into them before the next one.

        A donor hands these over, and a step that is left out goes back to them.
        """
        if self._has_kept_buffers:
            return  # another batch of the same step
        self._has_kept_buffers = True
        self._keep_buffers()
        self._changing.look()

    def _keep_buffers(self) -> None:
        constants = self._changing.constants()
        self._buffers_before = {
            name: buffer.clone()
            for name, buffer in self._job.model.named_buffers()
            if id(buffer) not in constants
        }

    def weigh(self, batch: Slice) -> None:
        """Weight what the user's own backward leaves from now on by this slice's share of the global batch."""
        assert self._own is not None
        self._own.weight = batch.num_local / batch.num_global

    def sum_gradients(self, batch: Slice) -> None:
        """Exchange what the user's own backward left, now: `commit` then only updates."""
        assert self._own is not None
        if self._own.is_summed:
            return
        if not self._together.next_is_known:
            self._own.check()
        own, num_global = self._own, batch.num_global

        def summed(native: Reducer) -> dict[str, Any]:
            assert self._exchange is not None
            count = torch.tensor([float(batch.num_local)], dtype=torch.float64)
            work = native.start_all_reduce(count)
            self._exchange.arm(native)
            self._exchange.finish()
            native.finish(work, "the exchange of counts")
            # Copies: buckets are filled again by the next step, and a replacement may need this one's.
            return {"count": float(count), "gradients": [_kept(p.grad) for p in own.parameters]}

        result = self._together.exchange(summed, abandon=self._abandon, kind="a sum of gradients")
        # Backward divided by samples; bad ones may have been left out of the batch.
        factor = num_global / result["count"] if result["count"] else 0.0
        gradients = [
            given.to(p.device) if (given := _given(kept)) is not None else None
            for p, kept in zip(own.parameters, result["gradients"], strict=True)
        ]
        own.summed([g if factor == 1.0 or g is None else g * factor for g in gradients])

    def adopt(self, batch: Slice) -> None:
        """Take the gradients that the user's own backward left since the last commit."""
        assert self._own is not None
        self._has_kept_buffers = False
        if self._together.next_is_known:
            # The donor's state holds this step already: the forward that the user's loop ran has to leave no trace.
            self._restore_buffers()
            self._own.forget()
            return
        self._own.check()
        self._num_global = batch.num_global
        self._contribute(LossSum(torch.zeros(()), float(batch.num_local), None), batch.share)

    @property
    def _is_summed(self) -> bool:
        return self._own is not None and self._own.is_summed

    def commit(self) -> Verdict:
        """Finish the exchange, then clip, decide and update alike on every rank."""
        verdict: Verdict = self._together.exchange(
            self._finish, self._exchange_again, conclude=self._update, abandon=self._abandon, kind="a step"
        )
        return verdict

    def forward(self, batch: Slice) -> Tree:
        """This rank's outputs, without gradients."""
        return self._compute.forward(batch, rank=self._data_rank)

    def reduce(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in rank order."""
        summed: torch.Tensor = self._together.exchange(
            lambda native: sum_in_rank_order(native, values), kind="a sum over the workers"
        )
        return summed

    def gather(self, value: torch.Tensor | None) -> list[torch.Tensor]:
        """Every rank's tensor, in rank order."""
        gathered: list[torch.Tensor] = self._together.exchange(
            lambda native: gather_any(native, value), kind="a gathering"
        )
        return gathered

    def state(self) -> Iterator[Piece]:
        """Model and optimizer, whole: every rank holds all of it."""
        yield from state_pieces(self._job.model, self.optimizer)
        if isinstance(self._exchange, GradientExchange) and self._exchange.compressor is not None:
            yield from residuals.pieces(self._exchange.compressor, self.gather)

    def load(self, pieces: PieceReader) -> None:
        """Take over weights and optimizer state; every rank reads the same pieces."""
        load_state(self._job.model, self.optimizer, pieces)
        if isinstance(self._exchange, GradientExchange) and self._exchange.compressor is not None:
            residuals.load(self._exchange.compressor, pieces, self._rank, self._num_workers)

    def bring_home(self) -> None:
        """Every rank holds all of the model anyway."""

    # ---- what is handed to a rank that is behind ------------------------------------------------

    def give(self) -> Part:
        """Weights, optimizer and buffers as of the last commit."""
        # Not `self.state()`: rows that are on servers stay there.
        tensors = {piece.name: piece.tensor for piece in state_pieces(self._job.model, self.optimizer)}
        tensors |= {
            MODEL + name: buffer for name, buffer in self._buffers_before.items() if MODEL + name in tensors
        }
        settings = optimizer_settings(self._job.model, self.optimizer) if self.optimizer is not None else None
        return Part({"step": self.step, "prepared_at": self._prepared_at, "optimizer": settings}, tensors)

    def take(self, part: Part) -> None:
        """Stand where the donor stands."""
        self.step, self._prepared_at = part.plain["step"], part.plain["prepared_at"]
        self._load_given(PieceReader(part.tensors, part.plain["optimizer"]))
        self._buffers_before, self._has_kept_buffers = {}, False
        for parameter in self._parameters:
            parameter.grad = None

    def _load_given(self, pieces: PieceReader) -> None:
        """What a donor gave, as if it came from a checkpoint."""
        self.load(pieces)

    # ---- the exchange of a commit ---------------------------------------------------------------

    def _contribute(self, loss: LossSum, share: float) -> None:
        """Everything but the gradients is known now: send it, so that it travels under the backward."""
        self._my_vector = contribution(
            rank=self._rank,
            num_workers=self._num_workers,
            # Of those that compute the same part of a batch, one speaks.
            loss_total=loss.read() if self._speaks else 0.0,
            count=loss.count if self._speaks else 0.0,
            wishes=self._job.wishes,
        )
        besides = [*self._told_besides, *(self._changing.flags() if self._changing else ())]
        if besides:
            self._my_vector = torch.cat([self._my_vector, torch.tensor(besides, dtype=torch.float64)])
        self._my_share = share = share if self._tells_buffers else 0.0
        self._my_statistics = self._statistics.flat() * share if self._statistics else None
        try:
            self._announce(self._together.native)
        except PeerLost:
            self._is_broken = True  # backward first: commit will send it all again

    def _announce(self, native: Reducer) -> None:
        """Send copies: what this rank contributes stays apart from the sums."""
        assert self._exchange is not None
        self._is_broken = False
        self._vector = self._my_vector.clone()
        self._works = [] if self._tells_losses_last else [native.start_all_reduce(self._vector)]
        if self._my_statistics is not None:
            self._statistics_sum = self._my_statistics.clone()
            self._works.append(native.start_all_reduce(self._statistics_sum))
        if not self._is_summed:
            self._exchange.arm(native)

    def _finish(self, native: Reducer) -> None:
        assert self._exchange is not None
        if self._is_broken:
            raise PeerLost(rank=self._rank, operation="the exchange of losses", reason="a peer went away")
        for work in self._works:
            native.finish(work, "the exchange of losses and statistics")
        if not self._is_summed:
            self._exchange.send_rest()
        if self._tells_losses_last:
            native.finish(native.start_all_reduce(self._vector), "the exchange of losses")
        # Which buffers changed on any rank, all ranks read from the summed flags.
        flags = self._vector[len(self._vector) - len(self._changing) :].tolist()
        self._changed = [number for number, flag in enumerate(flags) if flag]
        if self._changed:
            self._changed_sum = self._changing.contribution(
                self._changed, share=self._my_share, rank=self._data_rank if self._tells_buffers else -1
            )
            native.finish(native.start_all_reduce(self._changed_sum), "the exchange of buffers")
        if not self._is_summed:
            self._exchange.finish()

    def _exchange_again(self, native: Reducer) -> None:
        if self._ranks is None:
            self._announce(native)
        else:
            self._run(self._batch)  # whoever was replaced computes its part with ours
        self._finish(native)

    def _abandon(self) -> None:
        assert self._exchange is not None
        self._works = []
        self._exchange.abandon()
        if self._ranks is not None:
            self._undo()

    def _undo(self) -> None:
        """As before the step's forward, which is run again."""
        assert self._exchange is not None
        assert self._ranks is not None
        self._ranks.leave()
        self._works = []
        self._exchange.abandon()
        self._restore_buffers()
        for parameter in self._parameters:
            parameter.grad = None

    def _take_buffers(self) -> torch.Tensor:
        """Write the buffers that all agreed on; gives what else was summed up with the losses."""
        if self._statistics:
            self._statistics.write(self._statistics_sum)
        if self._changed:
            self._changing.write(self._changed, self._changed_sum)
        return self._vector[: len(self._vector) - len(self._changing)]

    def _update(self, _: None) -> Verdict:
        assert self.optimizer is not None
        verdict = decide(self._take_buffers())
        verdict = update(
            self._job,
            self.optimizer,
            self._parameters,
            verdict,
            # Gradients summed before the commit are divided by what was counted already.
            int(verdict.count) if self._is_summed else self._num_global,
            norm_of=self._norm_of,
        )
        if self._own is not None:
            self._own.forget()
        if not verdict.applied:  # a step that is left out leaves no trace
            self._restore_buffers()
        self._works, self._buffers_before = [], {}
        self.step += 1
        return verdict

    def _restore_buffers(self) -> None:
        for name, buffer in self._job.model.named_buffers():
            if name in self._buffers_before:
                buffer.copy_(self._buffers_before[name])

    def _broadcast(self, native: Reducer) -> None:
        with torch.no_grad():
            for tensor in plain_tensors(self._job.model).values():
                native.broadcast(tensor)


def _kept(gradient: torch.Tensor | None) -> Any:
    """A copy of a gradient as the log of exchanges holds it: of dense tensors."""
    if gradient is None or gradient.layout is not torch.sparse_coo:
        return gradient.clone() if gradient is not None else None
    gradient = gradient.coalesce()
    return {
        "indices": gradient.indices().clone(),
        "values": gradient.values().clone(),
        "shape": list(gradient.shape),
    }


def _given(kept: Any) -> torch.Tensor | None:
    """A gradient of its own, from what `_kept` made."""
    if not isinstance(kept, dict):
        return kept.clone() if kept is not None else None
    rows = torch.sparse_coo_tensor(
        kept["indices"].clone(), kept["values"].clone(), kept["shape"], check_invariants=False
    )
    return rows.coalesce()


def sparse_parameters(model: nn.Module) -> frozenset[str]:
    """Names of parameters whose gradients are rows: weights of embeddings built with sparse=True."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return frozenset(
        names[id(module.weight)]
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        and module.sparse
        and id(module.weight) in names
    )
