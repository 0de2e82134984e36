"""All-reduce schemes over point to point, one file each: `all_reduce(p2p, flat)` sums a flat tensor in place.

The order of a sum is a function of (rank, number of ranks, place): every rank gets the same bits,
always. The registry is `shoal.config.choices.EXCHANGES`.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Swaps(Protocol):
    """One rank's connections to the others, for schemes that send and receive at once."""

    rank: int
    num_ranks: int

    def swap(self, to: int, outgoing: Tensor, source: int, incoming: Tensor) -> None:
        """Send to one rank while receiving from another, or from the same."""


class P2P(Swaps, Protocol):
    """The same for all schemes. Messages between two ranks arrive in order."""

    def send(self, to: int, tensor: Tensor) -> Any:
        """Start sending; `wait` for it before the tensor is changed."""

    def receive(self, source: int, tensor: Tensor) -> Any:
        """Start receiving; the tensor is filled after `wait`."""

    def wait(self, *works: Any) -> None:
        """Wait until all of these are done."""


def part_bounds(length: int, part: int, num_parts: int) -> tuple[int, int]:
    """Begin and end of one of `num_parts` even parts of `length` elements."""
    return length * part // num_parts, length * (part + 1) // num_parts


def parts_of(flat: Tensor, num_parts: int) -> list[Tensor]:
    """The parts themselves, as views; some are empty where there are fewer elements than parts."""
    return [flat[slice(*part_bounds(len(flat), part, num_parts))] for part in range(num_parts)]


# Loaded with this module, so that the fork server has its compiled kernels before it forks.
