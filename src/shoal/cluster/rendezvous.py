"""How the workers of a view find each other: torch's default process group, formed through the coordinator.

Everything it opens listens on loopback. Which collectives run over the group
is not decided here.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from shoal.cluster.store import ShoalStore, StoreWaitTimedOut
from shoal.core import job as jobs
from shoal.core.errors import ConfigError, WaitTimedOut
from shoal.core.job import Job

_view: int | None = None
"""The view whose group this process is in."""

_store: ShoalStore | None = None
"""Kept as long as the group: torch holds the C++ half of it alone."""


def group() -> dist.ProcessGroup:
    """The process group of this job's workers, formed at the first call. Collective then."""
    if _view is None:
        form_group(jobs.current())
    world = dist.group.WORLD
    assert world is not None
    return world


def form_group(job: Job, view: int = 1) -> None:
    """Form torch's default group of all workers of `job`. Collective; each view gets keys of its own.

    Keys are never used twice: a group that is formed again on a store with
    the old addresses in it would try to connect to the dead.
    """
    global _view
    if dist.is_initialized():
        raise ConfigError(
            "torch.distributed already has a default process group in this process, and shoal forms its own. Nothing "
            "was trained; leave init_process_group out of a script that is started with `shoal run`."
        )
    backend = backend_for(job)
    # Before they look: otherwise they take the interface that the host's name leads to.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if "nccl" in backend:
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore(f"view-{view}", _open_store(job, view)),
            rank=job.rank,
            world_size=job.num_workers,
            timeout=timedelta(seconds=job.step_timeout_s),
        )
        _view = view
    except BaseException:
        leave_group()
        raise


def leave_group() -> None:
    """Take the group down: its threads, its sockets, its connection to the coordinator. Not collective."""
    global _store, _view
    if dist.is_initialized():
        dist.destroy_process_group()
    _view = None
    if _store is not None:
        _store.close()
        _store = None


def backend_for(job: Job) -> str:
    """Gloo; and NCCL beside it where every worker of this host can have a GPU of its own."""
    has_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= job.num_workers
    return "cpu:gloo,cuda:nccl" if has_gpus and dist.is_nccl_available() else "gloo"


def _open_store(job: Job, view: int) -> Store:
    global _store
    if job.coordinator is None:
        if job.num_workers != 1:
            raise ConfigError(
                f"{job.num_workers} workers cannot find each other without a coordinator. Nothing was started; start "
                "the script with `shoal run`."
            )
        return HashStore()
    timeout = timedelta(seconds=job.join_timeout_s)
    who = (job.coordinator, job.rank, job.incarnation)
    _store = ShoalStore(*who, num_workers=job.num_workers, timeout=timeout)
    _meet(_store, job, view)
    return _store


def _meet(store: ShoalStore, job: Job, view: int) -> None:
    """Wait until all ranks are here. torch would wait too, but could not say for whom."""
    rank_of = {f"view-{view}/here/{rank}": f"rank {rank}" for rank in range(job.num_workers)}
    store.set(f"view-{view}/here/{job.rank}", b"")
    try:
        store.wait(list(rank_of))
    except StoreWaitTimedOut as error:
        raise WaitTimedOut(
            operation=f"forming the group of view {view}",
            waited_s=error.waited_s,
            missing=[rank_of.get(key, key) for key in error.missing],
            setting=f"join_timeout_s (now {job.join_timeout_s:g} s)",
        ) from None
