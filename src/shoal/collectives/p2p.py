"""Point to point between two ranks: what every exchange that is not one call of torch's is written over."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.collectives.native import Native


class Wires(Protocol):
    """One rank's lines to the others. Between two ranks, what is sent first arrives first."""

    rank: int
    num_ranks: int

    def swap(self, to: int, outgoing: Tensor, source: int, incoming: Tensor) -> None:
        """Send to one rank while receiving from another, or from the same."""

    def send(self, to: int, tensor: Tensor) -> Any:
        """Begin to send; `wait` for it before the tensor is changed."""

    def receive(self, source: int, tensor: Tensor) -> Any:
        """Begin to receive; the tensor is filled after `wait`."""

    def wait(self, *works: Any) -> None:
        """Until all of these are done."""


class TorchWires:
    """Over torch's group; `ranks` are those that take part, by their numbers there. What has another tag is another line."""

    def __init__(self, native: Native, ranks: list[int] | None = None, *, tag: int = 0) -> None:
        self._native, self._tag = native, tag
        self._ranks = ranks if ranks is not None else list(range(native.num_workers))
        self.rank, self.num_ranks = self._ranks.index(native.rank), len(self._ranks)

    def swap(self, to: int, outgoing: Tensor, source: int, incoming: Tensor) -> None:
        """Send to one rank while receiving from another."""
        self.wait(self.receive(source, incoming), self.send(to, outgoing))

    def send(self, to: int, tensor: Tensor) -> Any:
        """Begin to send."""
        if not tensor.numel():
            return None
        with self._native.during(f"sending to rank {self._ranks[to]}"):
            return f"sending to rank {self._ranks[to]}", dist.isend(
                _bytes(tensor), self._ranks[to], tag=self._tag
            )

    def receive(self, source: int, tensor: Tensor) -> Any:
        """Begin to receive."""
        if not tensor.numel():
            return None
        with self._native.during(f"receiving from rank {self._ranks[source]}"):
            return f"receiving from rank {self._ranks[source]}", dist.irecv(
                _bytes(tensor), self._ranks[source], tag=self._tag
            )

    def wait(self, *works: Any) -> None:
        """Until all of these are done."""
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
    """Where one of `num_parts` even parts of `length` elements begins and ends."""
    return length * part // num_parts, length * (part + 1) // num_parts


def parts_of(flat: Tensor, num_parts: int) -> list[Tensor]:
    """The parts themselves, as views; some are empty where there are fewer elements than parts."""
    return [flat[slice(*part_bounds(len(flat), part, num_parts))] for part in range(num_parts)]
