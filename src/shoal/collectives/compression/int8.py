"""`int8`: a quarter of the bytes: each block of elements as whole numbers of its largest one's 127th.

Sums of such numbers would overflow, so every rank gets every rank's part and
adds them up in rank order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.collectives.compression.compressor import Gradient, Traffic
from shoal.collectives.reducer import Reducer

BLOCK = 1024
"""Elements that share a scale: 0.4 % more bytes."""


class Int8:
    """Gradients as whole numbers of 8 bits and a scale per block."""

    def __init__(self) -> None:
        self.traffic = Traffic()

    def start(self, number: int, flat: Tensor, layout: Sequence[Gradient], reducer: Reducer) -> Any:
        """Quantise a bucket; it travels when it is waited for."""
        packed = pack(flat)
        self.traffic.count(flat, packed)
        return flat, packed

    def finish(self, work: Any, reducer: Reducer, operation: str) -> None:
        """Gather every rank's part and add them up."""
        flat, packed = work
        parts = reducer.all_gather(packed)
        flat.copy_(unpack(parts[0], flat))
        for part in parts[1:]:
            flat.add_(unpack(part, flat))

    def commit(self) -> None:
        """Nothing is kept."""

    def abandon(self) -> None:
        """Nothing was."""

    def state(self) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def load(self, state: Mapping[str, Tensor], num_ranks_before: int) -> None:
        """Nothing."""


def pack(flat: Tensor) -> Tensor:
    """Scales, then whole numbers, as bytes."""
    blocks = _blocks(flat.float())
    scales = blocks.abs().amax(1) / 127.0
    # A block that is not finite stays so: its scale says it.
    steps = torch.where(scales > 0, blocks.T / scales, torch.zeros_like(blocks.T)).T
    numbers = steps.nan_to_num().round().clamp(-127, 127).to(torch.int8)
    return torch.cat([scales.view(torch.uint8), numbers.reshape(-1)[: len(flat)].view(torch.uint8)])


def unpack(packed: Tensor, like: Tensor) -> Tensor:
    """The numbers that `pack` stands for."""
    num_blocks = -(-len(like) // BLOCK)
    scales = packed[: 4 * num_blocks].clone().view(torch.float32)
    numbers = packed[4 * num_blocks :].view(torch.int8).float()
    return (_blocks(numbers) * scales[:, None]).reshape(-1)[: len(like)].to(like.dtype)


def _blocks(flat: Tensor) -> Tensor:
    padding = -len(flat) % BLOCK
    return torch.nn.functional.pad(flat, (0, padding)).view(-1, BLOCK)
