"""One seed, one schedule: run it, and where it breaks a promise tell its story."""

from __future__ import annotations

import traceback
from collections import Counter
from typing import NamedTuple

from simulation.cluster import Cluster
from simulation.world import Violated


class Broken(AssertionError):
    """A seed that broke a promise; the message is its story."""


class Ran(NamedTuple):
    """What a schedule amounted to."""

    num_events: int
    ended_at: float
    settled_s: float  # from the last fault to the end
    counts: Counter[str]


def run(seed: int, cluster_class: type[Cluster] = Cluster) -> Ran:
    """Run the schedule of a seed; Broken, with the story, where a promise was broken."""
    cluster = cluster_class(seed)
    try:
        cluster.run()
    except Exception as error:
        how = str(error) if isinstance(error, Violated) else traceback.format_exc()
        raise Broken(
            f"seed {seed}, {cluster.num_workers} workers, calls {[call.kind for call in cluster.calls]}\n"
            f"plan {cluster.faults.plan}\n{cluster.world.story()}\n\nseed {seed} at {cluster.world.now:.4f} s: {how}"
        ) from None
    world = cluster.world
    return Ran(
        world.num_events,
        world.now,
        world.now - cluster.faults.last_at,
        cluster.counts,
    )
