"""`int8` compression: a quarter of the bytes; each block of elements is quantised by its largest one.

Sums of 8-bit numbers would overflow, so every rank gathers every rank's part
and adds them up in rank order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.collectives.compression import Gradient, Stateless
from shoal.collectives.reducer import Reducer

BLOCK = 1024  # elements that share a scale: 0.4 % more bytes


class Int8Compressor(Stateless):
    """Gradients as whole numbers of 8 bits and a scale per block."""

    def start(self, number: int, flat: Tensor, layout: Sequence[Gradient], reducer: Reducer) -> Any:
        packed = pack(flat)
        self.traffic.count(flat, packed)
        return flat, packed

    def finish(self, work: Any, reducer: Reducer, operation: str) -> None:
        flat, packed = work
        parts = reducer.all_gather(packed)
        flat.copy_(unpack(parts[0], flat))
        for part in parts[1:]:
            flat.add_(unpack(part, flat))


def pack(flat: Tensor, block: int = BLOCK) -> Tensor:
    """Scales, then whole numbers, as bytes."""
    blocks = _blocks(flat.float(), block)
    scales = blocks.abs().amax(1) / 127.0
    # A block that is not finite stays so: its scale says it.
    steps = torch.where(scales > 0, blocks.T / scales, torch.zeros_like(blocks.T)).T
    numbers = steps.nan_to_num().round().clamp(-127, 127).to(torch.int8)
    return torch.cat([scales.view(torch.uint8), numbers.reshape(-1)[: len(flat)].view(torch.uint8)])


def unpack(packed: Tensor, like: Tensor, block: int = BLOCK) -> Tensor:
    num_blocks = -(-len(like) // block)
    scales = packed[: 4 * num_blocks].clone().view(torch.float32)
    numbers = packed[4 * num_blocks :].view(torch.int8).float()
    return (_blocks(numbers, block) * scales[:, None]).reshape(-1)[: len(like)].to(like.dtype)


def _blocks(flat: Tensor, block: int) -> Tensor:
    padding = -len(flat) % block
    return torch.nn.functional.pad(flat, (0, padding)).view(-1, block)
