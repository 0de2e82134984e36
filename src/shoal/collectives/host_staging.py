"""Sums of tensors that lie on an accelerator, made in the host's memory.

For workers whose devices cannot exchange by themselves: one computes on a GPU
and another on the CPU, two share a device, or an exchange was asked for that
works in host memory. Copied down into page-locked memory, summed by the
exchange underneath, copied back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.collectives.reducer import Reducer


class _Work(NamedTuple):
    far: Tensor
    near: Tensor
    under: Any


def _is_on_a_device(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


class Staged:
    """A reducer of host memory, for tensors anywhere."""

    def __init__(self, inner: Reducer, is_far: Callable[[Tensor], bool] = _is_on_a_device) -> None:
        self.rank, self.num_workers = inner.rank, inner.num_workers
        self._inner, self._is_far = inner, is_far

    def start_all_reduce(self, tensor: Tensor) -> Any:
        """Begin to sum `tensor` over the ranks, in place."""
        if not self._is_far(tensor):
            return self._inner.start_all_reduce(tensor)
        near = _down(tensor)
        return _Work(tensor, near, self._inner.start_all_reduce(near))

    def finish(self, work: Any, operation: str) -> None:
        """Wait until the sum is there, and give the device's stream the copy of it."""
        if not isinstance(work, _Work):
            self._inner.finish(work, operation)
            return
        self._inner.finish(work.under, operation)
        # Page-locked memory is not used again before the copies out of it are over: torch's allocator sees to that.
        work.far.copy_(work.near, non_blocking=True)

    def broadcast(self, tensor: Tensor) -> None:
        """Give everybody rank 0's values, in place."""
        if not self._is_far(tensor):
            self._inner.broadcast(tensor)
            return
        near = _down(tensor)
        self._inner.broadcast(near)
        tensor.copy_(near)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor, where this rank's is."""
        if not self._is_far(tensor):
            return self._inner.all_gather(tensor)
        return [part.to(tensor.device) for part in self._inner.all_gather(_down(tensor))]

    def during(self, operation: str) -> contextlib.AbstractContextManager[None]:
        """Name the operation in whatever breaks inside."""
        return self._inner.during(operation)

    def close(self) -> None:
        """Its view is over."""
        self._inner.close()


def _down(tensor: Tensor) -> Tensor:
    near = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return near.copy_(tensor)  # waits for the device's stream: whoever sums on the host reads it at once
