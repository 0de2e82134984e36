"""Takeover of the head: a lease that fences the old one, and the campaign of the hosts that lost it.

Pure: no clock, no socket, no thread. `headship.py` keeps the lease in etcd and reads its records.
etcd has two records of a job: the head, which vanishes with its lease, and the job, which only the
head of the newest generation can write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

FENCED_AT = 0.75
"""Fraction of the lease after which a head that could not renew it ends its processes, so that all are
gone before another head begins.
"""

LOOK_EVERY_S = 0.5


class Head(msgspec.Struct, frozen=True):
    """The process that runs a job. In etcd under its lease."""

    job: str
    host: str
    address: str
    """As `shoal join` takes it; empty until it listens."""

    generation: int
    """Of heads of this job, from 1."""


class JobRecord(msgspec.Struct, frozen=True):
    """A job, as its next head has to know it."""

    generation: int
    launches: list[float]
    """Start time of each launch of the run: only a copy that has all of them may continue."""

    step: int = 0
    """Step of the newest complete checkpoint."""

    is_ended: bool = False
    """The job has ended, or its user ended it: nobody takes it over."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Both records at one moment. `revision` changes with every write of the job's."""

    head: Head | None = None
    record: JobRecord | None = None
    revision: int = 0


class HeadLease:
    """Lease from its holder's side: it may expire in etcd before an answer says so.

    Counted from the sending of a renewal; etcd counts from its later arrival.
    """

    def __init__(self, lease_s: float, *, sent_at: float) -> None:
        self._fenced_after_s = lease_s * FENCED_AT
        self._sent_at = sent_at
        self._refused = ""

    def renewed(self, sent_at: float) -> None:
        self._sent_at = max(self._sent_at, sent_at)

    def refused(self, why: str) -> None:
        """The lease has expired, or a write was refused: another head may be at work."""
        self._refused = self._refused or why

    def silent_s(self, now: float) -> float:
        return now - self._sent_at

    def left_s(self, now: float) -> float:
        return self._sent_at + self._fenced_after_s - now

    def fenced(self, now: float) -> str:
        """Reason why its holder is no longer the head; empty while it is."""
        if self._refused:
            return self._refused
        return "" if self.left_s(now) > 0 else f"its lease was not renewed for {self.silent_s(now):.1f} s"


@dataclass(frozen=True, slots=True)
class ClaimHead:
    """Become the head, if the job's record is still that of `revision` and there is no head."""

    revision: int
    record: JobRecord


@dataclass(frozen=True, slots=True)
class JoinHead:
    """Join this head; it may be the old one, if only this host lost it."""

    head: Head


@dataclass(frozen=True, slots=True)
class LookAgain:
    """Wait and look again, with the reason."""

    why: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Give up on this host, with the reason."""

    why: str


CampaignAction = ClaimHead | JoinHead | LookAgain | GiveUp


class Campaign:
    """Decision of a host that lost its head: join a head, become it, or end."""

    def __init__(
        self, *, launches: Sequence[float], step: int, began_at: float, yield_s: float, timeout_s: float
    ) -> None:
        """`launches` and `step` are those of the copy of the run on this host.

        A host whose newest checkpoint is older than the run's yields to others for `yield_s`.
        """
        self._launches, self._step = list(launches), step
        self._began_at, self._yield_s, self._timeout_s = began_at, yield_s, timeout_s
        self._free_since: float | None = None  # start of the time without a head

    def decide(self, seen: Seen | None, now: float) -> CampaignAction:
        """Next decision; `seen` is None if etcd does not answer."""
        action = self._wish(seen, now)
        if now < self._began_at + self._timeout_s:
            return action
        match action:
            case LookAgain(why):
                return GiveUp(f"for {self._timeout_s:g} s {why}")
            case JoinHead(head):
                return GiveUp(
                    f"the head on {head.host} ({head.address}) could not be joined for {self._timeout_s:g} s"
                )
        return action

    def _wish(self, seen: Seen | None, now: float) -> CampaignAction:
        if seen is None:
            return LookAgain("etcd does not answer")
        record = seen.record
        if record is None or record.is_ended:
            return GiveUp("the job has ended")
        if seen.head is not None:
            self._free_since = None
            if seen.head.address:
                return JoinHead(seen.head)
            return LookAgain(f"{seen.head.host} takes over and does not listen yet")
        if not knows_all(self._launches, record):
            return LookAgain(
                f"launch {len(record.launches)} of the run is not in the copy here, and no host that has it takes over"
            )
        if self._free_since is None:
            self._free_since = now
        if self._step < record.step and now < self._free_since + self._yield_s:
            return LookAgain(f"the checkpoint of step {record.step} is on another host")
        return ClaimHead(seen.revision, record)


def knows_all(launches: Sequence[float], record: JobRecord) -> bool:
    """Whether a copy with these launches has every launch of the run."""
    return list(launches[: len(record.launches)]) == record.launches
