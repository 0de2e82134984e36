"""Files in blocks: what travels between hosts and what their caches hold. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

BLOCK_BYTES = 4 << 20
"""Of a block, but for the last one of a file. Large enough that a request costs little beside its bytes."""


class Block(NamedTuple):
    """One block of one version of a file."""

    url: str
    stamp: str
    number: int

    @property
    def name(self) -> str:
        """A file name for it, the same at every host."""
        digest = hashlib.blake2b(f"{self.url}\0{self.stamp}".encode(), digest_size=16).hexdigest()
        return f"{digest}-{self.number}"


class Piece(NamedTuple):
    """A part of a block: bytes begin..end-1 of it."""

    number: int
    begin: int
    end: int


def num_blocks(num_bytes: int) -> int:
    """Blocks of a file."""
    return -(-num_bytes // BLOCK_BYTES)


def pieces(begin: int, end: int) -> Iterator[Piece]:
    """What makes up bytes begin..end-1 of a file, in order."""
    while begin < end:
        number = begin // BLOCK_BYTES
        first = number * BLOCK_BYTES
        stop = min(end, first + BLOCK_BYTES)
        yield Piece(number, begin - first, stop - first)
        begin = stop


def numbers_of(ranges: Iterable[tuple[int, int]]) -> list[int]:
    """The blocks that hold these byte ranges."""
    return sorted({piece.number for begin, end in ranges for piece in pieces(begin, end)})


def routes(how: str, wanted: dict[int, Sequence[int]]) -> Iterator[tuple[int, list[list[int]]]]:
    """Block after block, along which ways the host that has them all sends it: every way is a list of hosts.

    `wanted` are the blocks that each host wants. By `broadcast` the sender
    sends to each; along a `chain` it sends once, and each host gives it on.
    """
    sets = {host: set(numbers) for host, numbers in sorted(wanted.items())}
    for number in sorted(set().union(*sets.values())):
        hosts = [host for host, numbers in sets.items() if number in numbers]
        yield number, [hosts] if how == "chain" else [[host] for host in hosts]
