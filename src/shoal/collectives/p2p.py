"""Point-to-point sends and receives between two ranks, over which every exchange scheme is written."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.collectives.native import Native


class Wires(Protocol):
    """One rank's connections to the others. Messages between two ranks arrive in order."""

    rank: int
    num_ranks: int

    def swap(self, to: int, outgoing: Tensor, source: int, incoming: Tensor) -> None:
        """Send to one rank while receiving from another, or from the same."""

    def send(self, to: int, tensor: Tensor) -> Any:
        """Start sending; `wait` for it before the tensor is changed."""

    def receive(self, source: int, tensor: Tensor) -> Any:
        """Start receiving; the tensor is filled after `wait`."""

    def wait(self, *works: Any) -> None:
        """Wait until all of these are done."""


class TorchWires:
    """Wires over torch's group; `ranks` are the participants, by their numbers there. Another tag is another connection."""

    def __init__(self, native: Native, ranks: list[int] | None = None, *, tag: int = 0) -> None:
        self._native, self._tag = native, tag
        self._ranks = ranks if ranks is not None else list(range(native.num_workers))
        self.rank, self.num_ranks = self._ranks.index(native.rank), len(self._ranks)

    def swap(self, to: int, outgoing: Tensor, source: int, incoming: Tensor) -> None:
        self.wait(self.receive(source, incoming), self.send(to, outgoing))

    def send(self, to: int, tensor: Tensor) -> Any:
        if not tensor.numel():
            return None
        with self._native.during(f"sending to rank {self._ranks[to]}"):
            return f"sending to rank {self._ranks[to]}", dist.isend(
                _bytes(tensor), self._ranks[to], tag=self._tag
            )

    def receive(self, source: int, tensor: Tensor) -> Any:
        if not tensor.numel():
            return None
        with self._native.during(f"receiving from rank {self._ranks[source]}"):
            return f"receiving from rank {self._ranks[source]}", dist.irecv(
                _bytes(tensor), self._ranks[source], tag=self._tag
            )

    def wait(self, *works: Any) -> None:
        for work in works:
            if work is not None:
                # Without a time-out of its own: gloo gives up a send or a receive whose wait was too short. Whoever
                # waits for the sum looks at the connections meanwhile.
                with self._native.during(work[0]):
                    work[1].wait()


def _bytes(tensor: Tensor) -> Tensor:
    # Gloo knows some dtypes only; NCCL knows all of them, and bytes too.
    return tensor.view(torch.uint8)


def part_bounds(length: int, part: int, num_parts: int) -> tuple[int, int]:
    """Begin and end of one of `num_parts` even parts of `length` elements."""
    return length * part // num_parts, length * (part + 1) // num_parts


def parts_of(flat: Tensor, num_parts: int) -> list[Tensor]:
    """The parts themselves, as views; some are empty where there are fewer elements than parts."""
    return [flat[slice(*part_bounds(len(flat), part, num_parts))] for part in range(num_parts)]
