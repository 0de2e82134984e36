"""`int8` compression: a quarter of the bytes; each block of elements is quantised by its largest one.

Sums of 8-bit numbers would overflow, so every rank gathers every rank's part
and adds them up in rank order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.collectives.compression import Gradient, Stateless
from shoal.collectives.reducer import Reducer

BLOCK = 1024  # elements that share a scale: 0.4 % more bytes
CHUNK = 1 << 17
"""Elements converted at a time: temporaries of a whole gradient would be new pages at every step."""


class Int8Compressor(Stateless):
    """Gradients as whole numbers of 8 bits and a scale per block."""

    def start(self, number: int, flat: Tensor, layout: Sequence[Gradient], reducer: Reducer) -> Any:
        packed = pack(flat)
        self.traffic.count(flat, packed)
        return flat, packed

    def finish(self, work: Any, reducer: Reducer, operation: str) -> None:
        flat, packed = work
        for number, part in enumerate(reducer.all_gather(packed)):
            unpack(part, flat, adds=number > 0)


def pack(flat: Tensor, block: int = BLOCK) -> Tensor:
    """Scales, then whole numbers, as bytes."""
    num_scales = -(-len(flat) // block)
    packed = torch.empty(4 * num_scales + len(flat), dtype=torch.uint8, device=flat.device)
    scales, numbers = packed[: 4 * num_scales].view(torch.float32), packed[4 * num_scales :].view(torch.int8)
    for some, elements in _chunks(flat, block):
        part = flat[elements].float()
        blocks = _blocks(part, block)
        scales[some] = torch.linalg.vector_norm(blocks, math.inf, dim=1).div_(127.0)
        # A block of zeros is divided by zero: nan_to_num. A non-finite block stays non-finite: its scale carries it.
        steps = (blocks / scales[some, None]).nan_to_num_().round_().clamp_(-127, 127)
        numbers[elements] = steps.view(-1)[: len(part)]
    return packed


def unpack(packed: Tensor, out: Tensor, block: int = BLOCK, *, adds: bool = False) -> None:
    """Write the numbers to `out`, or add them."""
    num_scales = -(-len(out) // block)
    scales = packed[: 4 * num_scales].clone().view(torch.float32)  # a received part may begin at any byte
    numbers = packed[4 * num_scales :].view(torch.int8)[: len(out)].view(len(out))
    for some, elements in _chunks(out, block):
        part = numbers[elements].float()
        values = _blocks(part, block).mul_(scales[some, None]).view(-1)[: len(part)].to(out.dtype)
        if adds:
            out[elements].add_(values)
        else:
            out[elements].copy_(values)


def _chunks(flat: Tensor, block: int) -> Iterator[tuple[slice, slice]]:
    """Blocks and their elements, as many at a time as stay in a cache; on an accelerator all at once."""
    num_blocks = -(-len(flat) // block)
    step = max(1, CHUNK // block) if flat.device.type == "cpu" else max(1, num_blocks)
    for begin in range(0, num_blocks, step):
        yield slice(begin, begin + step), slice(begin * block, (begin + step) * block)


def _blocks(flat: Tensor, block: int) -> Tensor:
    padding = -len(flat) % block
    return torch.nn.functional.pad(flat, (0, padding)).view(-1, block)
