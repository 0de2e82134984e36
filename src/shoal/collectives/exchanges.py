"""Every way of summing over the ranks, by its name."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import replace

from shoal.collectives.adapters import BySize, HostStaged, Threaded
from shoal.collectives.native import Native
from shoal.collectives.p2p import TorchWires
from shoal.collectives.reducer import Reducer
from shoal.collectives.schemes import allgather, chain, halving, mapreduce, ring, tree
from shoal.collectives.schemes import broadcast as everyone
from shoal.collectives.schemes.hierarchical import Hierarchical
from shoal.collectives.shm import Shm
from shoal.config import exchange_rule, placement
from shoal.config.job import Job

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
    if job.num_workers == 1:
        return native
    placed = placement.of_job(job)
    reducer = _automatic(job, native, is_broken) if job.exchange == "auto" else _named(job, native, is_broken)
    # Of devices that can exchange by themselves, torch's own is the fastest; the others work in the host's memory.
    if placed.accelerator is None or (placement.meet_on_devices(job) and job.exchange in ("auto", "native")):
        return reducer
    return HostStaged(reducer)


def best(job: Job) -> str:
    """What `auto` means here where nothing was measured."""
    return exchange_rule.built_in(num_hosts=job.num_hosts, processor=platform.machine())


def _automatic(job: Job, native: Native, is_broken: Callable[[], bool]) -> Reducer:
    parts = [
        (most, _named(replace(job, exchange=name), native, is_broken))
        for most, name in exchange_rule.parse(job.exchange_rule or best(job))
    ]
    is_one = len(parts) == 1 and placement.of_job(job).accelerator is None
    return parts[0][1] if is_one else BySize(native, parts)


def _named(job: Job, native: Native, is_broken: Callable[[], bool]) -> Reducer:
    name = job.exchange
    if name == "native":
        return native
    if name == "shm":
        return Shm(native, is_broken=is_broken, timeout_s=job.step_timeout_s)
    if name == "hierarchical":
        return Threaded(native, _hierarchical(job, native, is_broken).all_reduce)
    scheme, wires = SCHEMES[name], TorchWires(native)
    return Threaded(native, lambda flat: scheme(wires, flat))


def _hierarchical(job: Job, native: Native, is_broken: Callable[[], bool]) -> Hierarchical:
    hosts = [rank * job.num_hosts // job.num_workers for rank in range(job.num_workers)]
    mine = [rank for rank, host in enumerate(hosts) if host == job.host]
    speakers = [hosts.index(host) for host in range(job.num_hosts)]
    within = Shm(native, is_broken=is_broken, timeout_s=job.step_timeout_s, ranks=mine)
    return Hierarchical(within, TorchWires(native, speakers) if native.rank in speakers else None)
