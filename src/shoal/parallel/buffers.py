"""Buffers of the user's own that a forward changes: a centre that follows the data, a counter, a queue.

Each worker's forward changes its own copy. With the commit all get the same:
floating buffers the average over the workers weighted by their samples, as
BatchNorm's statistics (which travel ahead, see statistics.py); any other
rank 0's. Constants (masks, tables of positions) never travel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.parallel.statistics import device_of

_ALWAYS_KEPT_NUMEL = 1 << 16


class ChangingBuffers:
    """Watches a model's buffers from one commit to the next, without reading them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._places = [
            (module, key)
            for module in model.modules()
            if not isinstance(module, _BatchNorm)
            for key, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._seen: list[tuple[int, int]] = []
        self._have_changed: set[int] = set()

    def __len__(self) -> int:
        return len(self._places)

    def numel(self, number: int) -> int:
        """Elements of a buffer."""
        return self._buffer(number).numel()

    def identity(self, number: int) -> int:
        """Which object the buffer is at present."""
        return id(self._buffer(number))

    def look(self) -> None:
        """From here on, changes count."""
        self._seen = [_standing(self._buffer(number)) for number in range(len(self._places))]

    def flags(self) -> list[float]:
        """1 for each buffer that was changed since `look`, 0 for the others."""
        return [float(_standing(self._buffer(number)) != seen) for number, seen in enumerate(self._seen)] or [
            0.0
        ] * len(self._places)

    def contribution(self, numbers: Sequence[int], *, share: float, rank: int) -> Tensor:
        """What this rank adds to the new values of these buffers."""
        buffers = [self._buffer(number).detach() for number in numbers]
        here = device_of(self._model)
        parts = []
        for buffer in buffers:
            if buffer.is_meta:  # another stage of a pipeline holds it
                parts.append(torch.zeros(buffer.numel(), dtype=torch.float64, device=here))
                continue
            weight = share if buffer.is_floating_point() else float(rank == 0)
            parts.append(buffer.reshape(-1).to(torch.float64) * weight)
        return torch.cat(parts)

    def write(
        self, numbers: Sequence[int], flat: Tensor, *, total_share: float = 1.0, has_first: bool = True
    ) -> None:
        """Give these buffers the values all ranks agreed on; without the first of them, numbers that it tells stay."""
        at = 0
        for number in numbers:
            buffer = self._buffer(number)
            value = flat[at : at + buffer.numel()].view(buffer.shape)
            if buffer.is_floating_point():
                buffer.copy_(value / total_share)
            elif has_first:
                buffer.copy_(value)
            at += buffer.numel()
        self._have_changed.update(numbers)

    def constants(self) -> set[int]:
        """Ids of large buffers that never changed: nobody needs a copy of them before a forward."""
        return {
            id(self._buffer(number))
            for number in range(len(self._places))
            if number not in self._have_changed and self._buffer(number).numel() > _ALWAYS_KEPT_NUMEL
        }

    def _buffer(self, number: int) -> Tensor:
        module, key = self._places[number]
        buffer = module._buffers[key]
        assert buffer is not None
        return buffer


def _standing(buffer: Tensor) -> tuple[int, int]:
    """Changes with every write in place, and with a new tensor in its stead."""
    return id(buffer), buffer._version
