"""Reducers built over another reducer or over a gather.

`Threaded` runs a point-to-point scheme in a background thread, `BySize` picks
a reducer by tensor size, `HostStaged` stages device tensors in host memory,
`ViaGather` sums where ranks can only gather.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from shoal.collectives.native import LOOK_AROUND_EVERY, Native, OverNative
from shoal.collectives.reducer import Reducer, sum_in_rank_order
from shoal.errors import PeerLost

Scheme: TypeAlias = Callable[[Tensor], None]
"""Sums a flat tensor over the ranks, in place."""


class _ThreadedWork:
    __slots__ = ("done", "flat", "lost", "target")

    def __init__(self, target: Tensor, flat: Tensor) -> None:
        self.target, self.flat = target, flat
        self.done = threading.Event()
        self.lost: str | None = None


class Threaded(OverNative):
    """All-reduce by a scheme, in a thread that overlaps backward; other operations and sparse tensors go to torch.

    One thread, in the order of starting: ranks can never wait for each other
    in different tensors.
    """

    def __init__(self, native: Native, scheme: Scheme) -> None:
        self.rank, self.num_workers = native.rank, native.num_workers
        self._native = native
        self._queue: queue.SimpleQueue[_ThreadedWork | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_run, args=(self._queue, scheme), name="shoal-exchange", daemon=True
        )
        self._thread.start()

    def start_all_reduce(self, tensor: Tensor) -> object:
        if tensor.layout is not torch.strided:
            return self._native.start_all_reduce(tensor)
        flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor.contiguous().reshape(-1)
        work = _ThreadedWork(tensor, flat)
        self._queue.put(work)
        return work

    def finish(self, work: object, operation: str) -> None:
        if not isinstance(work, _ThreadedWork):
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
        """End the thread once the work it has begun is over."""
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


class _RoutedWork(NamedTuple):
    by: Reducer
    under: Any


class BySize(OverNative):
    """All-reduce by the first of `parts` whose limit in bytes a tensor keeps; device tensors go to torch.

    A function of the size alone, so that every rank takes the same one.
    """

    def __init__(self, native: Native, parts: Sequence[tuple[float, Reducer]]) -> None:
        self.rank, self.num_workers = native.rank, native.num_workers
        self._native, self._parts = native, list(parts)

    def start_all_reduce(self, tensor: Tensor) -> Any:
        by = self._native if tensor.device.type != "cpu" else self._by(tensor.numel() * tensor.element_size())
        return _RoutedWork(by, by.start_all_reduce(tensor))

    def finish(self, work: Any, operation: str) -> None:
        work.by.finish(work.under, operation)

    def close(self) -> None:
        for _, part in self._parts:
            part.close()

    def _by(self, num_bytes: int) -> Reducer:
        return next(part for most, part in self._parts if num_bytes <= most)


class _StagedWork(NamedTuple):
    far: Tensor
    near: Tensor
    under: Any


def _is_on_a_device(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


class HostStaged:
    """Stages device tensors in page-locked host memory and sums them there.

    For workers whose devices cannot exchange by themselves: one computes on a
    GPU and another on the CPU, two share a device, or the chosen exchange
    works in host memory.
    """

    def __init__(self, inner: Reducer, is_far: Callable[[Tensor], bool] = _is_on_a_device) -> None:
        self.rank, self.num_workers = inner.rank, inner.num_workers
        self._inner, self._is_far = inner, is_far

    def start_all_reduce(self, tensor: Tensor) -> Any:
        if not self._is_far(tensor):
            return self._inner.start_all_reduce(tensor)
        near = _copy_to_host(tensor)
        return _StagedWork(tensor, near, self._inner.start_all_reduce(near))

    def finish(self, work: Any, operation: str) -> None:
        if not isinstance(work, _StagedWork):
            self._inner.finish(work, operation)
            return
        self._inner.finish(work.under, operation)
        # Page-locked memory is not used again before the copies out of it are over: torch's allocator sees to that.
        work.far.copy_(work.near, non_blocking=True)

    def broadcast(self, tensor: Tensor) -> None:
        if not self._is_far(tensor):
            self._inner.broadcast(tensor)
            return
        near = _copy_to_host(tensor)
        self._inner.broadcast(near)
        tensor.copy_(near)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        if not self._is_far(tensor):
            return self._inner.all_gather(tensor)
        return [part.to(tensor.device) for part in self._inner.all_gather(_copy_to_host(tensor))]

    def during(self, operation: str) -> contextlib.AbstractContextManager[None]:
        return self._inner.during(operation)

    def close(self) -> None:
        self._inner.close()


def _copy_to_host(tensor: Tensor) -> Tensor:
    near = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return near.copy_(tensor)  # waits for the device's stream: the reducer on the host reads it at once


class ViaGather:
    """Reducer for workers that meet at parameter servers, or for a process that is alone: sums in rank order."""

    def __init__(self, rank: int, num_workers: int, gather: Callable[[Tensor], list[Tensor]]) -> None:
        self.rank, self.num_workers, self._gather = rank, num_workers, gather

    def start_all_reduce(self, tensor: Tensor) -> None:
        tensor.copy_(sum_in_rank_order(self, tensor).reshape(tensor.shape))

    def finish(self, work: None, operation: str) -> None:
        pass  # the sum was made when it was started

    def broadcast(self, tensor: Tensor) -> None:
        tensor.copy_(self.all_gather(tensor)[0])

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return self._gather(tensor.detach().contiguous())

    def close(self) -> None:
        pass

    def during(self, operation: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # the gather names what broke
