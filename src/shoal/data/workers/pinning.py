"""Batches in page-locked memory, from which a GPU takes them while the CPU goes on.

Who trains says where the batches are wanted; on a CPU nothing is done here.
The copy into such memory is the only one: it is made in the thread that reads
ahead where there is one (`prefetch`), and torch keeps the memory for the next
batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from shoal.data.slice import Slice
from shoal.data.tree import Tree, map_tensors


def wants_pinning(device: torch.device) -> bool:
    """Whether batches on their way to `device` are better page-locked."""
    return device.type not in ("cpu", "mps")  # memory that device and CPU share needs no copy


def pinned(slices: Iterator[Slice]) -> Iterator[Slice]:
    """The same slices with their tensors in page-locked memory."""
    for part in slices:
        yield replace(part, batch=pin(part.batch))


def pin(batch: Tree) -> Tree:
    """The batch with its tensors in page-locked memory; those that are there, or on a device, stay."""
    return map_tensors(_pin, batch)


def _pin(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_pinned():
        return tensor
    return tensor.pin_memory()
