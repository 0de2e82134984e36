"""A scheme as a reducer: tensors are summed by a thread, one after the other, while backward goes on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shoal.collectives.native import LOOK_AROUND_EVERY, Native, OverNative
from shoal.errors import PeerLost

Scheme: TypeAlias = Callable[[Tensor], None]
"""Sums a flat tensor over the ranks, in place."""


class _Work:
    __slots__ = ("done", "flat", "lost", "target")

    def __init__(self, target: Tensor, flat: Tensor) -> None:
        self.target, self.flat = target, flat
        self.done = threading.Event()
        self.lost: str | None = None


class Relayed(OverNative):
    """All-reduce by a scheme; everything else, and tensors that are not plain memory, by torch's own.

    One thread, in the order of starting: ranks can never wait for each other
    in different tensors.
    """

    def __init__(self, native: Native, scheme: Scheme) -> None:
        self.rank, self.num_workers = native.rank, native.num_workers
        self._native = native
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_run, args=(self._queue, scheme), name="shoal-exchange", daemon=True
        )
        self._thread.start()

    def start_all_reduce(self, tensor: Tensor) -> object:
        """Begin to sum `tensor` over the ranks, in place."""
        if tensor.layout is not torch.strided:
            return self._native.start_all_reduce(tensor)
        flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor.contiguous().reshape(-1)
        work = _Work(tensor, flat)
        self._queue.put(work)
        return work

    def finish(self, work: object, operation: str) -> None:
        """Wait until the sum is there."""
        if not isinstance(work, _Work):
            self._native.finish(work, operation)
            return
        while not work.done.wait(LOOK_AROUND_EVERY.total_seconds()):
            if self._native.is_broken():
                raise PeerLost(
                    rank=self.rank, operation=operation, reason="a connection of the group was closed"
                )
        if work.lost is not None:
            raise PeerLost(rank=self.rank, operation=operation, reason=work.lost)
        if work.flat.data_ptr() != work.target.data_ptr():
            work.target.copy_(work.flat.view(work.target.shape))

    def close(self) -> None:
        """Let the thread go, once what it has begun is over."""
        self._queue.put(None)


def _run(works: queue.SimpleQueue[Any], scheme: Scheme) -> None:
    lost: str | None = None
    while (work := works.get()) is not None:
        if lost is None:
            try:
                scheme(work.flat)
            except PeerLost as error:
                # The text and not the error: that holds the group, and with it everybody that waits on it. After it
                # nothing more can be summed: the ranks may stand at different places.
                lost = error.reason
        work.lost = lost
        work.done.set()
