"""Connections to a server by name and incarnation, and the fencing of replaced incarnations.

Pure bookkeeping: who is dropped is returned, not done.
"""

from __future__ import annotations


class Clients:
    """Peers that said Hello. Of one name only the newest incarnation is heard."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[str, int]] = {}
        self._ranks: dict[int, int] = {}  # of workers' connections
        self._newest: dict[str, int] = {}

    def __contains__(self, peer: int) -> bool:
        return peer in self._names

    def name(self, peer: int) -> str:
        return self._names[peer][0]

    def rank(self, peer: int) -> int | None:
        """Rank of a worker's connection; None for servers and low-level clients."""
        return self._ranks.get(peer)

    def newest(self, name: str) -> int:
        """Newest incarnation heard of; -1: none."""
        return self._newest.get(name, -1)

    def add(self, peer: int, name: str, incarnation: int) -> None:
        self._names[peer] = (name, incarnation)
        rank = rank_of(name)
        if rank is not None:
            self._ranks[peer] = rank

    def remove(self, peer: int) -> int | None:
        """Forget a closed connection; the rank that is thereby out of reach, if any."""
        name, incarnation = self._names.pop(peer, ("", 0))
        self._ranks.pop(peer, None)
        is_last = self._newest.get(name) == incarnation and (name, incarnation) not in self._names.values()
        return rank_of(name) if is_last else None

    def fence(self, name: str, incarnation: int) -> list[int]:
        """Raise the newest incarnation of a name; the peers of older ones, which are forgotten."""
        self._newest[name] = newest = max(incarnation, self._newest.get(name, 0))
        old = [peer for peer, (who, which) in self._names.items() if who == name and which < newest]
        for peer in old:
            del self._names[peer]
            self._ranks.pop(peer, None)
        return old


def rank_of(name: str) -> int | None:
    number = name.removeprefix("worker-")
    return int(number) if number != name and number.isdigit() else None
