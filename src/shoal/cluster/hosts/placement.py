"""Placement of workers on hosts: at home, else where there is room. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def place(
    rank: int, homes: Sequence[int], rooms: Mapping[int, int], *, may_crowd: bool = False
) -> int | None:
    """Host for a worker: its home, else the host with most free capacity; None if there is none.

    `homes` is the home of each rank, `rooms` the number of further workers each present host could
    take; `may_crowd` allows more than that.
    """
    if homes[rank] in rooms:
        return homes[rank]
    best = max(rooms, key=lambda host: (rooms[host], -host), default=None)
    return best if best is not None and (may_crowd or rooms[best] > 0) else None


def place_server(home: int, here: Sequence[int], taken: Sequence[int], num_hosts: int) -> int:
    """Host for a server: its home, else the one with the fewest servers, so that copies of a slot stay apart.

    `here` are the present hosts, `taken` those of the living servers.
    """
    if home in here:
        return home
    return min(here, key=lambda host: (taken.count(host), (host - home) % num_hosts))


def spread(num_workers: int, cores: Mapping[int, int], num_hosts: int) -> tuple[int, ...]:
    """Workers of each host: in proportion to the cores of the present hosts, none on the others."""
    counts = [0] * num_hosts
    for _ in range(num_workers):
        counts[min(cores, key=lambda host: ((counts[host] + 1) / max(cores[host], 1), host))] += 1
    return tuple(counts)


def describe(placed: Mapping[int, int | None], *, is_service: bool = False) -> str:
    """Sentence that tells where ranks restart: "rank 2 starts again on host 0"; None is no host.
    `is_service`: one host per rank.
    """
    sentences = []
    for host in sorted({host for host in placed.values() if host is not None}):
        ranks = sorted(rank for rank, each in placed.items() if each == host)
        sentences.append(f"{ranks_of(ranks)} start{'s' if len(ranks) == 1 else ''} again on host {host}")
    if waiting := sorted(rank for rank, each in placed.items() if each is None):
        verb = "waits" if len(waiting) == 1 else "wait"
        where = "a service" if is_service else "a host: none that is left has a core to spare"
        sentences.append(f"{ranks_of(waiting)} {verb} for {where}")
    return "; ".join(sentences)


def ranks_of(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
