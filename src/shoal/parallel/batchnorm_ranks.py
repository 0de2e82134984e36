"""The sums of synchronised BatchNorm over the ranks of the data axes: a way of their own, made anew in every view.

Not the way of the gradients: a bucket leaves when its gradients are there,
which may differ from rank to rank, and sums are matched by their order.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence

from torch import Tensor

from shoal.collectives.adapters import Threaded
from shoal.collectives.native import Native
from shoal.collectives.p2p import TorchWires
from shoal.collectives.reducer import Reducer
from shoal.collectives.schemes import broadcast
from shoal.collectives.shm import Shm
from shoal.collectives.sync_batchnorm import RanksOfBatch
from shoal.config.job import Job
from shoal.recovery.rendezvous import is_broken

TAG = 1
"""Of what is sent from rank to rank: apart from what exchanges send meanwhile."""


class BatchNormRanks(RanksOfBatch):
    """The ranks that compute different parts of a batch with the same layers, this one among them."""

    def __init__(self, job: Job, ranks: Sequence[int]) -> None:
        super().__init__(rank=list(ranks).index(job.rank), num_ranks=len(ranks), add_up=self._over_ranks)
        self._job, self._ranks = job, list(ranks)
        self._way: Reducer | None = None
        self._view: int | None = None

    def enter(self, view: int) -> None:
        """Before a forward: what was for another view is of no use. Collective in a new one."""
        if view == self._view:
            return
        self.leave()
        native = Native(rank=self._job.rank, num_workers=self._job.num_workers, is_broken=is_broken)
        if self._job.num_hosts == 1 and platform.machine() in ("x86_64", "AMD64"):
            self._way = Shm.open(self._job, native, self._ranks)
        else:
            wires = TorchWires(native, self._ranks, tag=TAG)
            self._way = Threaded(native, lambda flat: broadcast.all_reduce(wires, flat))
        self._view = view

    def leave(self) -> None:
        """The view is over."""
        if self._way is not None:
            self._way.close()
        self._way, self._view = None, None

    def _over_ranks(self, tensor: Tensor) -> None:
        assert self._way is not None, "entered before the forward"
        self._way.finish(self._way.start_all_reduce(tensor), "the sums of BatchNorm")
