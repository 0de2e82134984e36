"""One seed, one schedule: run it, and where it breaks a promise tell its story."""

from __future__ import annotations

import traceback
from collections import Counter
from typing import NamedTuple, Protocol

from simulation.cluster import Cluster
from simulation.fencing import Fencing
from simulation.hosts import HostedCluster
from simulation.joining import Joining
from simulation.leasing import Leasing
from simulation.planted import PLANTED
from simulation.planted_fences import PLANTED_FENCES
from simulation.planted_hosts import PLANTED_HOSTS
from simulation.planted_joins import PLANTED_JOINS
from simulation.planted_leases import PLANTED_LEASES
from simulation.planted_slots import PLANTED_SLOTS
from simulation.planted_takeover import PLANTED_TAKEOVERS
from simulation.serving import Serving
from simulation.takeover import Takeover
from simulation.world import Violated, World


class Scenario(Protocol):
    """A cluster made from a seed."""

    world: World
    counts: Counter[str]

    def __init__(self, seed: int) -> None: ...

    def run(self) -> None:
        """To its end, or until a promise is broken."""

    def describe(self) -> str:
        """Who is in it, and what will go wrong."""


SCENARIOS: dict[str, type[Scenario]] = {
    "training": Cluster,
    "leasing": Leasing,
    "serving": Serving,
    "fencing": Fencing,
    "hosts": HostedCluster,
    "takeover": Takeover,
    "joining": Joining,
}
"""What is simulated: exact training through views, leases of samples, slots on servers, pushes of the replaced, lost hosts,
lost heads, hosts that join."""

BUGS: dict[str, type[Scenario]] = {
    **PLANTED,
    **PLANTED_LEASES,
    **PLANTED_SLOTS,
    **PLANTED_FENCES,
    **PLANTED_HOSTS,
    **PLANTED_TAKEOVERS,
    **PLANTED_JOINS,
}
"""What is wrong: a scenario in which it is."""


class Broken(AssertionError):
    """A seed that broke a promise; the message is its story."""

    def __init__(self, seed: int, why: str, story: str) -> None:
        self.seed, self.why = seed, why
        super().__init__(f"{story}\n\n{why}")

    def __reduce__(self) -> tuple[type[Broken], tuple[int, str, str]]:
        return Broken, (self.seed, self.why, str(self)[: -len(self.why) - 2])


class Ran(NamedTuple):
    """What a schedule amounted to."""

    num_events: int
    lasted_s: float
    counts: Counter[str]


def run(seed: int, scenario: type[Scenario] = Cluster) -> Ran:
    """Run the schedule of a seed; Broken, with the story, where a promise was broken."""
    made = scenario(seed)
    try:
        made.run()
    except Exception as error:
        why = str(error) if isinstance(error, Violated) else traceback.format_exc(limit=-4)
        name = next(
            (name for name, each in (SCENARIOS | BUGS).items() if each is scenario), scenario.__name__
        )
        raise Broken(
            seed,
            f"{name}, seed {seed}, at {made.world.now:.4f} s: {why}",
            f"{made.describe()}\n{made.world.story()}",
        ) from None
    return Ran(made.world.num_events, made.world.now, made.counts)


def first_broken(scenario: type[Scenario], *, num_seeds: int) -> Broken | None:
    """The first seed that breaks a promise; None where none of so many does."""
    for seed in range(num_seeds):
        try:
            run(seed, scenario)
        except Broken as broken:
            return broken
    return None
