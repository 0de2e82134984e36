"""torch's own collectives (gloo, NCCL) of the default group, with errors that name the operation.

A broken wait becomes a PeerLost: the rank that noticed is seldom the one at
fault, so the supervisor looks for the cause elsewhere first.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import PeerLost

LOOK_AROUND_EVERY = timedelta(seconds=0.25)
"""Interval at which a wait checks that the peers are still connected."""


ASK_EVERY_S = 50e-6
"""Interval at which the host polls a device's sum: the update of the weights waits for it."""


class _OnDevice(NamedTuple):
    """A collective that runs on a device."""

    work: Any


def _begun(tensor: Tensor, work: Any) -> Any:
    return work if tensor.device.type == "cpu" else _OnDevice(work)


class Native:
    """Collectives of the process's default group."""

    def __init__(
        self,
        *,
        rank: int,
        num_workers: int,
        is_broken: Callable[[], bool] = lambda: False,
        timeout_s: float = math.inf,
    ) -> None:
        """`is_broken` tells, from the connections themselves, whether a peer has left the group.

        `timeout_s` is for collectives on devices; those on the host have the group's own.
        """
        self.rank, self.num_workers, self.is_broken = rank, num_workers, is_broken
        self._timeout_s = timeout_s

    def start_all_reduce(self, tensor: Tensor) -> Any:
        with self.during("an all-reduce"):
            return _begun(tensor, dist.all_reduce(tensor, async_op=True))

    def finish(self, work: Any, operation: str) -> None:
        with self.during(operation):
            if isinstance(work, _OnDevice):
                self._finish_on_device(work.work)
                return
            while True:
                try:
                    work.wait(timeout=LOOK_AROUND_EVERY)
                    return
                except RuntimeError:
                    # Gloo may miss that a connection is closed, and wait for its whole time-out (measured: one kill
                    # in a hundred on a loaded machine, from 3 workers on).
                    if work.is_completed():
                        # Broken; or done between the end of this look and the question, and then there is nothing to
                        # complain of. The wait itself tells which.
                        work.wait()
                        return
                    if self.is_broken():
                        raise RuntimeError("a connection of the group was closed") from None

    def _finish_on_device(self, work: Any) -> None:
        """Poll until done: NCCL treats a wait that timed out as the end of the group."""
        began_at = looked_at = time.monotonic()
        while not work.is_completed():
            time.sleep(ASK_EVERY_S)
            now = time.monotonic()
            if now - looked_at < LOOK_AROUND_EVERY.total_seconds():
                continue
            looked_at = now
            if self.is_broken():
                raise RuntimeError("a connection of the group was closed")
            if now - began_at > self._timeout_s:
                raise RuntimeError(f"not done after {now - began_at:.1f} s")
        work.wait()  # raises where it is over because it broke

    def broadcast(self, tensor: Tensor) -> None:
        with self.during("a broadcast from rank 0"):
            work = _begun(tensor, dist.broadcast(tensor, src=0, async_op=True))
            self.finish(work, "a broadcast from rank 0")

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.num_workers)]
        with self.during("an all-gather"):
            self.finish(_begun(tensor, dist.all_gather(gathered, tensor, async_op=True)), "an all-gather")
        return gathered

    def close(self) -> None:
        pass  # the group is the rendezvous' to leave

    @contextlib.contextmanager
    def during(self, operation: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            # `from None`: a kept exception holds the old group, and with it every peer that waits on it.
            raise PeerLost(rank=self.rank, operation=operation, reason=str(error).splitlines()[0]) from None


class OverNative:
    """Base of exchanges that have an all-reduce of their own and leave the other collectives to torch."""

    _native: Native

    def broadcast(self, tensor: Tensor) -> None:
        self._native.broadcast(tensor)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return self._native.all_gather(tensor)

    def during(self, operation: str) -> contextlib.AbstractContextManager[None]:
        return self._native.during(operation)
