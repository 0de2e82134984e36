"""Every way of summing over the ranks, by its name."""

from __future__ import annotations

import platform
from collections.abc import Callable

from shoal.collectives.native import Native
from shoal.collectives.reducer import Reducer
from shoal.collectives.relayed import Relayed
from shoal.collectives.schemes import allgather, chain, everyone, halving, mapreduce, ring, tree
from shoal.collectives.schemes.hierarchical import Hierarchical
from shoal.collectives.shm import Shm
from shoal.collectives.wires import TorchWires
from shoal.core.job import Job

SCHEMES = {
    "ring": ring.all_reduce,
    "tree": tree.all_reduce,
    "halving": halving.all_reduce,
    "broadcast": everyone.all_reduce,
    "allgather": allgather.all_reduce,
    "chain": chain.all_reduce,
    "mapreduce": mapreduce.all_reduce,
}
"""Those that are a function over point to point."""


def open_exchange(job: Job, native: Native, is_broken: Callable[[], bool]) -> Reducer:
    """The reducer of a new view, over the group that `native` stands for. Collective."""
    name = best(job) if job.exchange == "auto" else job.exchange
    if job.num_workers == 1 or name == "native":
        return native
    if name == "shm":
        return Shm(native, is_broken=is_broken, timeout_s=job.step_timeout_s)
    if name == "hierarchical":
        return Relayed(native, _hierarchical(job, native, is_broken).all_reduce)
    scheme, wires = SCHEMES[name], TorchWires(native)
    return Relayed(native, lambda flat: scheme(wires, flat))


def best(job: Job) -> str:
    """What `auto` means here."""
    # The rings in memory rely on stores that are seen in the order in which they were made.
    is_ordered = platform.machine() in ("x86_64", "AMD64")
    return "shm" if job.num_hosts == 1 and is_ordered else "native"


def _hierarchical(job: Job, native: Native, is_broken: Callable[[], bool]) -> Hierarchical:
    hosts = [rank * job.num_hosts // job.num_workers for rank in range(job.num_workers)]
    mine = [rank for rank, host in enumerate(hosts) if host == job.host]
    speakers = [hosts.index(host) for host in range(job.num_hosts)]
    within = Shm(native, is_broken=is_broken, timeout_s=job.step_timeout_s, ranks=mine)
    return Hierarchical(within, TorchWires(native, speakers) if native.rank in speakers else None)
