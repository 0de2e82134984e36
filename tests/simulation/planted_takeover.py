"""Bugs on purpose where a head is followed by another."""

from __future__ import annotations

from typing import Any

from shoal.cluster.hosts.takeover import Campaign, CampaignAction, HeadLease, Seen
from simulation.takeover import EtcdStore, Host, Takeover

PLANTED_TAKEOVERS: dict[str, type[Takeover]] = {}
"""What is wrong: the job in which it is."""


def _plant(name: str, **parts: Any) -> None:
    PLANTED_TAKEOVERS[name] = type("PlantedTakeover", (Takeover,), parts)


class CountsFromTheAnswer(Host):
    def renewed(self, token: int, sent_at: float) -> None:
        super().renewed(token, self.world.now)


class _WaitsForRefusal(HeadLease):
    def left_s(self, now: float) -> float:
        return 1.0


class WaitsToBeRefused(Host):
    lease_class = _WaitsForRefusal


class _TakesAnyCopy(Campaign):
    def decide(self, seen: Seen | None, now: float) -> CampaignAction:
        if seen is not None and seen.record is not None:
            self._launches = list(seen.record.launches)
        return super().decide(seen, now)


class TakesAnyCopy(Host):
    campaign_class = _TakesAnyCopy


class TrainsUnrecorded(Host):
    def may_train(self) -> bool:
        return True


class ClaimsWithoutGuard(EtcdStore):
    def may_claim(self, revision: int) -> bool:
        return self.head is None


class WritesWithoutGuard(EtcdStore):
    def may_write(self, token: int) -> bool:
        return self.head is not None


_plant("a lease is counted from the answer to its renewal", host_class=CountsFromTheAnswer)
_plant("a head ends only when etcd says that its lease is over", host_class=WaitsToBeRefused)
_plant("a claim does not compare the job's record", etcd_class=ClaimsWithoutGuard)
_plant("a write of a former head counts", etcd_class=WritesWithoutGuard)
_plant("a copy without the newest launch is gone on with", host_class=TakesAnyCopy)
_plant("a new head trains before its launch is in etcd", host_class=TrainsUnrecorded)
