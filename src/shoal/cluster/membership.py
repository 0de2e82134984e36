"""Who is in the job, decided from joins.

Pure: no clock, no socket. The first part of membership: who may join, and
which incarnation of a rank is the living one. Nobody is declared dead here.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.wire.messages import Join


class Member(NamedTuple):
    """The process that a rank is at present."""

    incarnation: int
    pid: int


class Membership:
    """The members by rank. An incarnation only ever gives way to a newer one."""

    view = 1

    def __init__(self, *, num_workers: int) -> None:
        self.num_workers = num_workers
        self.members: dict[int, Member] = {}

    def admit(self, join: Join) -> str | None:
        """Take this process in, or return why not."""
        if join.num_workers != self.num_workers:
            return f"it belongs to a job of {join.num_workers} workers, this one has {self.num_workers}"
        if join.rank >= self.num_workers:
            return f"there is no rank {join.rank} among {self.num_workers} workers"
        present = self.members.get(join.rank)
        if present is not None and join.incarnation < present.incarnation:
            return f"rank {join.rank} was replaced: incarnation {present.incarnation} is in, this is {join.incarnation}"
        if present is not None and join.incarnation == present.incarnation and join.pid != present.pid:
            return f"rank {join.rank} is already here as process {present.pid}, this is process {join.pid}"
        self.members[join.rank] = Member(join.incarnation, join.pid)
        return None

    def is_fenced(self, rank: int, incarnation: int) -> bool:
        """Has this incarnation been replaced by a newer one?"""
        present = self.members.get(rank)
        return present is not None and incarnation < present.incarnation
