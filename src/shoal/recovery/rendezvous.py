"""Rendezvous of a view's workers: torch's default process group, formed through the coordinator.

Everything it opens listens on one interface, loopback. Which collectives run
over the group is not decided here.

Leaving a group must not take long, whatever became of the others. Gloo ends
its threads only when their collectives have ended, and one that waits for a
stopped peer does not before its time-out (measured: the whole of it). So the
group's connections are shut first: ours end at once, and so do the others',
whoever still holds a reference to the group.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import select
import socket
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.distributed_c10d import _set_pg_timeout, _world

from shoal.cluster.coordinator.store_table import prefix_of
from shoal.cluster.worker import session
from shoal.cluster.worker.coordinator_client import CoordinatorClient
from shoal.config import job as jobs
from shoal.config import placement
from shoal.config.job import Job
from shoal.errors import ClusterError, ConfigError, PeerLost, WaitTimedOut
from shoal.recovery import abortable_init, device_group
from shoal.recovery.store import ShoalStore, StoreWaitTimedOut
from shoal.runtime.transport.messages.worker_coordinator import StoreCheck

MEET_TIMEOUT_S = 10.0
"""From the moment all ranks entered the view until all are here to form its group."""

CONNECT_TIMEOUT_S = 10.0
"""From then until all are connected: milliseconds, unless one dies just then."""

BURIAL_S = 0.25
"""How long the end of a group's threads is waited for: they take milliseconds, or all of their time-out."""

interface = "lo"
"""Network interface of the group's connections. Another one is for workers that do not share this host's network."""

_view: int | None = None
"""The view whose group this process is in."""

_sockets: dict[int, str] = {}
"""What forming the group opened: descriptor -> which socket it was then."""

_sockets_within: dict[int, str] = {}
"""The same of groups within the group. Not watched, for they may be let go of before it; they end with it at the latest."""

_store: ShoalStore | None = None
"""Kept as long as the group: torch holds the C++ half of it alone."""


def group() -> dist.ProcessGroup:
    """The process group of this job's workers, formed at the first call. Collective then."""
    if _view is None:
        form_group(jobs.current(), session.enter_view(view_left=0, finished=-1).view)
    world = dist.group.WORLD
    assert world is not None
    return world


def form_group(job: Job, view: int) -> None:
    """Form torch's default group of all workers of `job`. Collective; each view gets keys of its own.

    Keys are never used twice: a group that is formed again on a store with
    the old addresses in it would try to connect to the dead. PeerLost where
    another rank dies meanwhile: then this view is over.
    """
    global _view, _sockets
    if dist.is_initialized():
        raise ConfigError(
            "torch.distributed already has a default process group in this process, and shoal forms its own. Nothing "
            "was trained; leave init_process_group out of a script that is started with `shoal run`."
        )
    backend = device_group.backend_for(job)
    # Before they look: otherwise they take the interface that the host's name leads to.
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    os.environ["TORCH_GLOO_LAZY_INIT"] = "0"  # all connections now: they are what is watched
    if "nccl" in backend:
        device_group.set_up(job, interface)
    # torch names groups by how often it has begun one, counting those that failed: the ranks would look for each other
    # under different names.
    _world.group_count = 0
    before, excepthook = _open_sockets(), sys.excepthook
    try:
        store = PrefixStore(prefix_of(view), _open_store(job, view))
        abortable_init.unless(
            lambda: _is_over(job, view),
            lambda: _connect(job, backend, store),
            inside=dist.distributed_c10d.__name__,
        )
        sys.excepthook = excepthook  # it wraps one more around it for every group
        _set_pg_timeout(timedelta(seconds=job.liveness.step_timeout_s))
        _sockets = _new_connections(before)
        if len(_sockets) < job.num_workers - 1:
            # Closed before we could look: nothing would tell us later.
            raise RuntimeError("a connection of the group was closed as soon as it was made")
        _view = view
        return
    except (dist.DistError, RuntimeError) as error:
        reason = str(error)  # and not the error itself: it holds what there is of the group
    except BaseException:
        leave_group()
        raise
    leave_group()
    raise PeerLost(rank=job.rank, operation=f"forming the group of view {view}", reason=reason)


def _connect(job: Job, backend: str, store: Store) -> None:
    timeout_s = (
        min(CONNECT_TIMEOUT_S, job.liveness.step_timeout_s)
        if job.can_recover
        else job.liveness.step_timeout_s
    )
    dist.init_process_group(
        backend,
        store=store,
        rank=job.rank,
        world_size=job.num_workers,
        timeout=timedelta(seconds=timeout_s),
    )
    if "nccl" in backend:
        device_group.connect(torch.device(placement.of_job(job).devices[job.rank]))


@contextlib.contextmanager
def forming_within() -> Iterator[None]:
    """Groups that are formed in here (those of a mesh) end with the view, like the group they are within.

    Else a rank that leaves the view would let down those who wait for it in one of them: they would sit out the time-out.
    """
    before = _open_sockets()
    try:
        yield
    finally:
        _sockets_within.update(_new_connections(before))


def is_broken() -> bool:
    """Whether a connection of the group has been closed, by its other end or because of it."""
    watcher = select.poll()
    for fd, which in _sockets.items():
        try:
            if os.readlink(f"/proc/self/fd/{fd}") != which:
                return True
        except OSError:
            return True
        watcher.register(fd, select.POLLRDHUP)
    return bool(watcher.poll(0))


def tell_waiting(where: str) -> None:
    """Let the others of this view know that this rank waits at `where`."""
    if _store is not None and _view is not None:
        with contextlib.suppress(ClusterError, RuntimeError):  # the view is over: who waits will notice
            _store.set(f"{prefix_of(_view)}/waits/{where}/{jobs.current().rank}", b"")


def not_waiting(where: str) -> list[int]:
    """The other ranks of this view that did not say that they wait at `where`."""
    job = jobs.current()
    if _store is None or _view is None:
        return []
    try:
        return [
            rank
            for rank in range(job.num_workers)
            if rank != job.rank and not _store.check([f"{prefix_of(_view)}/waits/{where}/{rank}"])
        ]
    except (ClusterError, RuntimeError):
        return []


def kept_for_view() -> tuple[ShoalStore, str] | None:
    """What the workers of this view can write down for each other at the coordinator, and how its keys begin."""
    return (_store, prefix_of(_view)) if _store is not None and _view is not None else None


def leave_group() -> None:
    """Take the group down: its threads, its sockets, its connection to the coordinator. Not collective.

    Takes milliseconds, whether the others are there, dead or stopped.
    """
    global _store, _view, _sockets
    _shut(_sockets | _sockets_within)
    _sockets, _view = {}, None
    _sockets_within.clear()
    if dist.is_initialized():
        held = [dist.group.WORLD]
        device_group.leave()
        # Its threads end when the last reference goes. A collective that missed the end of its connection (gloo does,
        # one kill in a hundred) holds them to its time-out; nothing can reach it any more, so it is left to itself.
        burial = threading.Thread(target=held.clear, name="old group", daemon=True)
        burial.start()
        burial.join(BURIAL_S)
    if _store is not None:
        _store.close()
        _store = None


def _open_store(job: Job, view: int) -> Store:
    global _store
    if job.coordinator is None:
        if job.num_workers != 1:
            raise ConfigError(
                f"{job.num_workers} workers cannot find each other without a coordinator. Nothing was started; start "
                "the script with `shoal run`."
            )
        return HashStore()
    # Who does not come is not waited for, where it can be replaced.
    timeout_s = (
        min(MEET_TIMEOUT_S, job.liveness.step_timeout_s) if job.can_recover else job.liveness.join_timeout_s
    )
    timeout = timedelta(seconds=timeout_s)
    who = (job.coordinator, job.rank, job.incarnation)
    _store = ShoalStore(*who, num_workers=job.num_workers, timeout=timeout)
    _meet(_store, job, view)
    return _store


def _is_over(job: Job, view: int) -> bool:
    """Whether a rank has left this view already. Asked on a connection of its own: the store's may be waiting."""
    if job.coordinator is None:
        return False
    who = (job.coordinator, job.rank, job.incarnation)
    with contextlib.closing(CoordinatorClient(*who, num_workers=job.num_workers)) as client:
        try:
            client.request(StoreCheck([f"{prefix_of(view)}/here/{job.rank}"]), CONNECT_TIMEOUT_S)
        except ClusterError:
            return True
    return False


def _meet(store: ShoalStore, job: Job, view: int) -> None:
    """Wait until all ranks are here. torch would wait too, but could not say for whom."""
    rank_of = {f"{prefix_of(view)}/here/{rank}": f"rank {rank}" for rank in range(job.num_workers)}
    store.set(f"{prefix_of(view)}/here/{job.rank}", b"")
    try:
        store.wait(list(rank_of))
    except StoreWaitTimedOut as error:
        if job.can_recover:
            raise
        raise WaitTimedOut(
            operation=f"forming the group of view {view}",
            waited_s=error.waited_s,
            missing=[rank_of.get(key, key) for key in error.missing],
            setting=f"join_timeout_s (now {job.liveness.join_timeout_s:g} s)",
        ) from None


def _open_sockets() -> dict[int, str]:
    """This process's sockets: descriptor -> which socket that is."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed since it was listed
            which = os.readlink(f"/proc/self/fd/{fd}")
            if which.startswith("socket:"):
                found[int(fd)] = which
    return found


def _new_connections(before: dict[int, str]) -> dict[int, str]:
    """Those of groups that came to be since then."""
    return {
        fd: which for fd, which in _open_sockets().items() if before.get(fd) != which and _is_of_the_group(fd)
    }


def _is_of_the_group(fd: int) -> bool:
    """Whether it is a connection over our interface. What another thread opened at the same moment leads elsewhere."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
        is_listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if sock.family in (socket.AF_INET, socket.AF_INET6) and not is_listening:
            return ipaddress.ip_address(sock.getpeername()[0]).is_loopback == (interface == "lo")
    return False


def _shut(sockets: dict[int, str]) -> None:
    """End these connections. Their owners notice, and close them."""
    for fd, which in sockets.items():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}") != which:
                continue  # closed, and its number used for something else
            with socket.socket(fileno=os.dup(fd)) as sock:
                sock.shutdown(socket.SHUT_RDWR)
