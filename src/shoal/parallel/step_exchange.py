"""Step exchange: what the ranks of a group sum up to commit one step.

A small vector (losses, counts, control flags, flags of changed buffers) and
BatchNorm's running statistics leave before backward and overlap with it;
gradients leave bucket by bucket while it runs; changed buffers follow. A rank's
contribution stays apart from the sums, so a broken exchange is retried from it.
Decides nothing and updates nothing: `Ddp.commit` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.collectives.gradients import Sums
from shoal.collectives.reducer import Reducer
from shoal.errors import PeerLost
from shoal.parallel.buffers import ChangingBuffers
from shoal.parallel.protocol import ControlFlags, LossSum
from shoal.parallel.statistics import RunningStatistics
from shoal.parallel.step_result import contribution


class StepExchange:
    """Contribution and sums of the present step, of one model on one rank."""

    def __init__(
        self,
        model: nn.Module,
        gradients: Sums | None,
        *,
        rank: int,
        num_workers: int,
        data_rank: int | None = None,
        counts_loss: bool = True,
        counts_buffers: bool = True,
        losses_last: bool = False,
    ) -> None:
        """
        Args:
            gradients: how gradients are summed; None until that is known.
            data_rank: which part of the batch this rank computes, where several ranks compute one.
            counts_loss: of the ranks that compute the same part of a batch, one counts.
            counts_buffers: of the ranks that run the same layers on the same part, one counts.
            losses_last: losses and flags wait for `finish`: without them no other rank can end the step.
        """
        self.gradients = gradients
        self._model, self._rank, self._num_workers = model, rank, num_workers
        self._data_rank = rank if data_rank is None else data_rank
        self._counts_loss, self._counts_buffers, self._losses_last = counts_loss, counts_buffers, losses_last
        self._statistics, self._changing = RunningStatistics(model), ChangingBuffers(model)
        self._works: list[Any] = []
        self._is_broken = self._are_kept = False
        self.buffers_before: dict[str, Tensor] = {}
        """Buffers as of the last commit: a donor hands these over, and a step that is left out returns to them."""

    # ---- buffers around a forward ------------------------------------------------------------------

    def begin_step(self) -> None:
        """Before the first forward of a step: keep the buffers, and watch which of them it changes."""
        if not self._are_kept:  # else it is another batch of the same step
            self.keep_buffers()
            self.watch_buffers()

    def keep_buffers(self) -> None:
        """Keep the buffers before a forward writes into them."""
        self._are_kept = True
        constants = self._changing.constants()
        self.buffers_before = {
            name: buffer.clone()
            for name, buffer in self._model.named_buffers()
            if id(buffer) not in constants
        }

    def watch_buffers(self) -> None:
        """Changes of buffers count from here on."""
        self._changing.look()

    def restore_buffers(self) -> None:
        """Undo the forwards since `keep_buffers`."""
        for name, buffer in self._model.named_buffers():
            if name in self.buffers_before:
                buffer.copy_(self.buffers_before[name])

    def forget_buffers(self) -> None:
        """The step is over."""
        self.buffers_before, self._are_kept = {}, False

    # ---- one exchange ------------------------------------------------------------------------------

    def contribute(
        self,
        loss: LossSum,
        share: float,
        flags: ControlFlags,
        *,
        besides: Sequence[float] = (),
        with_gradients: bool = True,
    ) -> None:
        """Everything but the gradients is known: note what this rank adds to the sums. `besides` is summed with the losses."""
        counted = self._counts_loss
        self.vector = contribution(
            rank=self._rank,
            num_workers=self._num_workers,
            loss_total=loss.read() if counted else 0.0,
            count=loss.count if counted else 0.0,
            control=flags,
        )
        besides = [*besides, *(self._changing.flags() if self._changing else ())]
        if besides:
            self.vector = torch.cat([self.vector, torch.tensor(besides, dtype=torch.float64)])
        self._share = share if self._counts_buffers else 0.0
        self._my_statistics = self._statistics.flat() * self._share if self._statistics else None
        self._with_gradients = with_gradients

    def start(self, group: Reducer) -> None:
        """Send copies of the contribution; from now on gradients leave as backward makes them."""
        self._is_broken = False
        self._vector_sum = self.vector.clone()
        self._works = [] if self._losses_last else [group.start_all_reduce(self._vector_sum)]
        if self._my_statistics is not None:
            self._statistics_sum = self._my_statistics.clone()
            self._works.append(group.start_all_reduce(self._statistics_sum))
        if self._with_gradients:
            assert self.gradients is not None
            self.gradients.arm(group)

    def mark_broken(self) -> None:
        """A peer was lost in `start`: backward runs to its end first, then `finish` raises."""
        self._is_broken = True

    def finish(self, group: Reducer) -> None:
        """Wait for all sums. Until the last one is there, every gradient is this rank's own."""
        if self._is_broken:
            raise PeerLost(rank=self._rank, operation="the exchange of losses", reason="a peer went away")
        for work in self._works:
            group.finish(work, "the exchange of losses and statistics")
        sums = self.gradients if self._with_gradients else None
        if sums is not None:
            sums.send_rest()
        if self._losses_last:
            group.finish(group.start_all_reduce(self._vector_sum), "the exchange of losses")
        # Which buffers changed on any rank, all ranks read from the summed flags.
        flags = self._vector_sum[len(self._vector_sum) - len(self._changing) :].tolist()
        self._changed = [number for number, flag in enumerate(flags) if flag]
        if self._changed:
            self._changed_sum = self._changing.contribution(
                self._changed, share=self._share, rank=self._data_rank if self._counts_buffers else -1
            )
            group.finish(group.start_all_reduce(self._changed_sum), "the exchange of buffers")
        if sums is not None:
            sums.finish()

    def abandon(self) -> None:
        """Drop every reference to the group; contribution and gradients stay."""
        self._works = []
        if self.gradients is not None:
            self.gradients.abandon()

    def write_buffers(self) -> Tensor:
        """Write the buffers that all ranks agreed on; returns the sum of what was told besides them."""
        self._works = []
        if self._statistics:
            self._statistics.write(self._statistics_sum)
        if self._changed:
            self._changing.write(self._changed, self._changed_sum)
        return self._vector_sum[: len(self._vector_sum) - len(self._changing)]
