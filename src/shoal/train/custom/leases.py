"""An epoch of a script's own loop under a relaxed strategy: whole batches by lease, each pushed as one update.

Every `for` over the data is an epoch and a call: all workers begin it together and meet at its end,
however many batches each of them took.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.cluster.worker import session
from shoal.data.batches import Batches
from shoal.data.slice import Slice
from shoal.parallel.ps.relaxed import PsRelaxed
from shoal.train.calls import Call, described
from shoal.train.leasing import Leasing
from shoal.train.progress import Position


class LeasedEpoch:
    """Leases of one worker in one epoch; `position.step` counts the updates of all workers."""

    def __init__(
        self, strategy: PsRelaxed, batches: Batches, *, epoch: int, step: int, num_workers: int, number: int
    ) -> None:
        self._strategy = strategy
        self._call = Call(session.begin_call("epoch", described(batches)), strategy.replay_log)
        strategy.lay_out(None)  # by all workers, also those that will get no lease
        self.position = Position(epoch=epoch, step=step)
        self._leasing = Leasing(
            strategy,
            batches,
            call=session.num_calls(),
            first=(epoch, step),
            num_epochs=1,
            num_workers=num_workers,
            position=self.position,
            trainer=number,
        )

    def slices(self) -> Iterator[Slice]:
        return self._leasing.slices(self.position.epoch)

    def trained(self, part: Slice) -> int:
        """Record a pushed batch; returns the samples that all workers pushed since this worker's last one."""
        before = self.position.samples
        self._leasing.trained(part, self.position)
        return self.position.samples - before

    def give_back(self) -> None:
        """Stop taking batches of the epoch, so that no other worker waits for this one."""
        self._leasing.end()

    def end(self) -> None:
        """Meet the others; afterwards every worker has the trained weights. Collective."""
        self._leasing.epoch_is_over(self.position, over=False)
        self._leasing.share_statistics()
        self._strategy.pull_weights()
        self._leasing.close()
        self._call.end(None)
