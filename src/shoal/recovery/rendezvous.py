"""Rendezvous of a view's workers: torch's default process group, formed through the coordinator.

Every socket it opens listens on one interface, loopback; the store goes over the coordinator's Unix
socket (torch's own TCPStore listens on every interface).

Forming and leaving a group must be quick, whatever the other ranks do. Gloo ends its threads only
when their collectives have ended, and a collective that waits for a stopped peer ends only at its
time-out. So connections are shut first, which ends the collectives at both ends at once.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import os
import secrets
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import FrameType
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import _set_pg_timeout, _world

from shoal import system
from shoal.cluster.coordinator.store_table import prefix_of
from shoal.cluster.worker import session
from shoal.cluster.worker.coordinator_client import GRACE_S, CoordinatorClient
from shoal.config import job as jobs
from shoal.config import placement
from shoal.config.job import Job
from shoal.config.liveness import LivenessConfig
from shoal.errors import ClusterError, ConfigError, PeerLost, StrangerInGroup, WaitTimedOut
from shoal.recovery import device_group, group_sockets
from shoal.recovery.group_sockets import GroupEnds, SocketsBefore
from shoal.runtime import events
from shoal.runtime.transport import interfaces
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.worker_coordinator import (
    StoreAdd,
    StoreAppend,
    StoreCheck,
    StoreCompareSet,
    StoreCount,
    StoreDelete,
    StoreDone,
    StoreFlag,
    StoreGet,
    StoreNumKeys,
    StoreSet,
    StoreValues,
    StoreWait,
)

LOOK_AFTER_S = 0.1
"""Forming a group takes milliseconds. After this time the rank starts to ask whether it can still succeed."""

LOOK_EVERY_S = 0.05

STUCK_AFTER_S = 0.25
"""An attempt that still runs by then is inside a blocking call: Python code takes microseconds."""


class GivenUp(RuntimeError):
    """Internal: the attempt cannot succeed any more, or its result is not needed. Users never see it."""


class _Attempt:
    """One call in a thread of its own. Holds the only reference to its error."""

    def __init__(self, act: Callable[[], None], inside: str) -> None:
        self.is_wanted = True
        self.raised: list[BaseException] = []
        self._act = act
        self._inside = inside
        self.thread = threading.Thread(target=self._run, name="forming a group", daemon=True)

    def _run(self) -> None:
        try:
            # The trace function runs at every Python call, so also at the first one after a long call into
            # C++ returned. It checks a flag instead of receiving an asynchronous exception: that could be
            # lost in a callback of the long call, or hit another thread that reused the thread id.
            sys.setprofile(self._check)
            self._act()
        except BaseException as error:
            if self.is_wanted:
                self.raised.append(error)
        finally:
            sys.setprofile(None)

    def _check(self, frame: FrameType, event: str, argument: object) -> None:
        # An error in a callback (the store's) would be caught by C++, and tried again.
        if not self.is_wanted and frame.f_globals.get("__name__") == self._inside:
            raise GivenUp("nobody waits for this group any more")


def abortable_init(is_over: Callable[[], bool], act: Callable[[], None], *, inside: str) -> None:
    """Run `act` and raise its error; raise GivenUp once it takes long and `is_over` returns True.

    An abandoned attempt ends at the next call made by the module named `inside`.
    """
    attempt = _Attempt(act, inside)
    attempt.thread.start()
    try:
        attempt.thread.join(LOOK_AFTER_S)
        while attempt.thread.is_alive():
            if is_over():
                raise GivenUp("a rank has left the view")
            attempt.thread.join(LOOK_EVERY_S)
    except BaseException:
        attempt.is_wanted = False
        attempt.thread.join(STUCK_AFTER_S)
        raise
    if attempt.raised:
        raise attempt.raised.pop()


QUICK_S = 60.0  # for requests that the coordinator answers at once: after this it counts as gone

A = TypeVar("A", bound=Message)


class StoreWaitTimedOut(WaitTimedOut, DistStoreError):
    """Keys were not set in time. Has torch's exception type and the details of shoal's."""


class ShoalStore(Store):
    """torch.distributed's Store over a coordinator connection.

    torch calls some methods by their C++ names, so both spellings are defined. Every failure is a
    DistStoreError, because torch's own waits catch only that.
    """

    timeout: timedelta  # torch's own property, which its stub leaves out

    def __init__(
        self, path: str, rank: int, incarnation: int = 0, *, num_workers: int, timeout: timedelta
    ) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self._clones: list[ShoalStore] = []
        self.published: deque[bytes] = deque(maxlen=256)
        """Newest values that were set, also by clones; the addresses of gloo's listeners are among them."""
        self._number = secrets.randbits(62) + 1
        self._serials = itertools.count(1)
        self._client = CoordinatorClient(
            path,
            rank,
            incarnation,
            num_workers=num_workers,
            liveness=LivenessConfig(join_timeout_s=timeout.total_seconds()),
        )

    def set(self, key: str, value: str | bytes) -> None:
        self.published.append(_bytes(value))
        self._ask(StoreSet({key: _bytes(value)}), StoreDone)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._ask(StoreSet({key: _bytes(value) for key, value in zip(keys, values, strict=True)}), StoreDone)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        timeout_s = self.timeout.total_seconds()
        return self._ask(StoreGet(list(keys), timeout_s), StoreValues, timeout_s).values

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        timeout_s = (timeout or self.timeout).total_seconds()
        self._ask(StoreWait(list(keys), timeout_s), StoreDone, timeout_s)

    def add(self, key: str, amount: int) -> int:
        return self._ask(StoreAdd(key, amount, *self._once()), StoreCount).value

    def append(self, key: str, value: str | bytes) -> None:
        self._ask(StoreAppend(key, _bytes(value), *self._once()), StoreDone)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        change = StoreCompareSet(key, _bytes(expected), _bytes(desired), *self._once())
        return self._ask(change, StoreValues).values[0]

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(StoreCheck(list(keys)), StoreFlag).value

    def delete_key(self, key: str) -> bool:
        return self._ask(StoreDelete(key, *self._once()), StoreFlag).value

    def num_keys(self) -> int:
        return self._ask(StoreNumKeys(), StoreCount).value

    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def has_extended_api(self) -> bool:
        """append, multi_get and multi_set are available: one request instead of many."""
        return True

    def clone(self) -> ShoalStore:
        """Second connection to the same keys, for a thread that must not queue behind this one's waits."""
        client = self._client
        clone = ShoalStore(
            client.path, client.rank, client.incarnation, num_workers=client.num_workers, timeout=self.timeout
        )
        # torch keeps only the C++ half alive, which cannot answer without its Python half.
        self._clones.append(clone)
        clone.published = self.published
        return clone

    def close(self) -> None:
        """Close the connection and those of all clones; torch may keep the object for longer."""
        self._client.close()
        for clone in self._clones:
            clone.close()

    def _once(self) -> tuple[int, int]:
        """Serial number of a request, by which the coordinator deduplicates retries after its own restart."""
        return self._number, next(self._serials)

    def _ask(self, message: Message, expected: type[A], timeout_s: float | None = None) -> A:
        try:
            answer = self._client.request(message, QUICK_S if timeout_s is None else timeout_s + GRACE_S)
        except WaitTimedOut as error:
            raise StoreWaitTimedOut(
                operation=error.operation,
                waited_s=error.waited_s,
                missing=error.missing,
                setting=f"the store's timeout (now {self.timeout.total_seconds():g} s)",
            ) from None
        except ClusterError as error:
            raise DistStoreError(str(error)) from error
        if not isinstance(answer, expected):
            raise DistStoreError(f"{type(message).__name__} was answered by {type(answer).__name__}")
        return answer


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


MEET_TIMEOUT_S = 10.0  # from all ranks having entered the view until all are here to form its group

CONNECT_TIMEOUT_S = 10.0  # from then until all are connected: milliseconds, unless a rank dies meanwhile

MAX_STRANGERS = 10
"""Attempts at forming a group before strangers that connect to it end the job."""

ASK_EVERY_S = 0.5
"""Interval at which a waiting rank asks the coordinator whether its view is over; only with several hosts."""

BURIAL_S = 0.25
"""Limit for the end of a group's threads: they take milliseconds, or all of their time-out."""

interface = system.LOOPBACK
"""Network interface of the group's connections: loopback on one host."""

_view: int | None = None  # view whose group this process is in

_sockets: dict[int, str] = {}  # sockets opened by forming the group: descriptor -> identity at that time

_sockets_within: dict[int, str] = {}
"""The same for subgroups. Not watched: they may be freed before the group, and end with it at the latest."""

_num_formed_within = 0
"""Number of times subgroups were formed in this view; equal on all its ranks."""

_num_refused: dict[str, int] = {}
"""Consecutive attempts that failed because of a stranger: at the group, and at a mesh within it."""

_pids: list[int] = []
"""Process id of every rank of the view; empty unless all ranks share a pid namespace."""

_probe_listener: socket.socket | None = None
"""Accepts nobody: the kernel completes the connections by which other hosts check that they reach this one.

Open from entering a view until its group is formed. Where that fails, until the next view begins, which is after all
ranks have probed: a refused connection is a firewall's then, and no rank's that was quicker.
"""

_probed: list[tuple[str, int]] = []
"""Address and port of every rank's probe listener, by rank, in the view that is being formed; only with several hosts."""

PROBE_TIMEOUT_S = 1.0

MAX_SILENT = 3
"""Unreachable hosts after which no other is probed: a silent one takes PROBE_TIMEOUT_S."""

_asked_at = 0.0
"""Time of the last request to the coordinator whether the view is over."""

_store: ShoalStore | None = None
"""Referenced as long as the group lives: torch holds only its C++ half."""


def group() -> dist.ProcessGroup:
    """The process group of this job's workers, formed at the first call. Collective then."""
    if _view is None:
        form_group(jobs.current(), session.enter_view(view_left=0, finished=-1).view)
    world = dist.group.WORLD
    assert world is not None
    return world


def form_group(job: Job, view: int) -> None:
    """Form torch's default group of all workers of `job`. Collective; each view has its own keys.

    Keys are never used twice: a group formed again on a store with old addresses would try to
    connect to dead ranks. Raises PeerLost if another rank dies meanwhile; then this view is over.
    """
    global _view, _sockets, interface
    if dist.is_initialized():
        raise ConfigError(
            "torch.distributed already has a default process group in this process, and shoal forms its own. Nothing "
            "was trained; leave init_process_group out of a script that is started with `shoal run`."
        )
    backend = device_group.backend_for(job)
    named = job.interfaces or (interface_of(job.bind_address) if job.bind_address else system.LOOPBACK)
    # Hosts may have different numbers of interfaces, which gloo does not support.
    interface = named.partition(",")[0]
    # Before gloo and NCCL read it: otherwise they take the interface that the host's name resolves to.
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    os.environ["TORCH_GLOO_LAZY_INIT"] = "0"  # connect everything now: the watch needs the connections
    if "nccl" in backend:
        device_group.set_up(job, named)
    # torch names groups by a counter that includes failed attempts, so ranks would look for each other
    # under different names.
    _world.group_count = 0
    before = SocketsBefore(on_loopback=interface == system.LOOPBACK)
    excepthook = sys.excepthook
    try:
        store = PrefixStore(prefix_of(view), _open_store(job, view))
        with group_sockets.all_descriptors():
            abortable_init(
                lambda: _is_over(job, view, before),
                lambda: _connect(job, backend, store),
                inside=dist.distributed_c10d.__name__,
            )
            sys.excepthook = excepthook  # torch wraps it once more for every group
            _set_pg_timeout(timedelta(seconds=job.liveness.step_timeout_s))
            _sockets = _accept_ranks_only(job, view, before, needs_all=True)
        _view = view
        _close_probe_listener()
        return
    except (dist.DistError, RuntimeError) as error:
        reason = str(error)  # not the error itself: it refers to parts of the group
    except BaseException:
        leave_group()
        raise
    leave_group()
    # Also where another rank was the first to give up: one that reaches all hosts times out as soon as the others.
    if job.rank_hosts and (silent := _silent_ranks(job)):
        raise NotConnected(rank=job.rank, view=view, silent=silent, reason=reason.splitlines()[0])
    raise PeerLost(rank=job.rank, operation=f"forming the group of view {view}", reason=reason)


class NotConnected(PeerLost):
    """This rank could not form the group of a view, and does not reach the hosts of some others."""

    def __init__(self, *, rank: int, view: int, silent: dict[int, str], reason: str) -> None:
        super().__init__(rank=rank, operation=f"forming the group of view {view}", reason=reason)
        self.silent = silent


def _silent_ranks(job: Job) -> dict[int, str]:
    """Ranks whose hosts this one does not reach, with their addresses; of MAX_SILENT hosts at most."""
    silent: set[str] = set()
    for address, port in dict(_probed).items():  # one rank of each host: a dead one is in no view after this
        if address != _group_address(job) and len(silent) < MAX_SILENT:
            try:
                socket.create_connection((address, port), PROBE_TIMEOUT_S).close()
            except OSError:
                silent.add(address)
    return {rank: address for rank, (address, _) in enumerate(_probed) if address in silent}


def _group_address(job: Job) -> str:
    """Address at which gloo listens on this host."""
    return job.bind_address or job.host_address


def _close_probe_listener() -> None:
    global _probe_listener
    if _probe_listener is not None:
        _probe_listener.close()
        _probe_listener = None


def interface_of(address: str) -> str:
    """Name of the network interface with this address."""
    if ipaddress.ip_address(address).is_loopback:
        return system.LOOPBACK
    if (name := interfaces.of_address(address)) is not None:
        return name
    raise ConfigError(
        f"no network interface of this host has the address {address}, by which the other hosts reach it. Nothing was trained."
    )


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
    """Register groups formed in this context (those of a mesh) so that they end with the view.

    Otherwise a rank that leaves the view would leave its peers waiting in a subgroup until its
    time-out.
    """
    global _num_formed_within
    before = SocketsBefore(on_loopback=interface == system.LOOPBACK)
    job, view = jobs.current(), _view
    try:
        with group_sockets.all_descriptors():
            yield
            _num_formed_within += 1
            if view is not None:
                _accept_ranks_only(job, view, before, needs_all=False)
    except dist.DistError as error:
        raise PeerLost(
            rank=job.rank, operation=f"forming the groups of a mesh in view {view}", reason=str(error)
        ) from None
    finally:
        _sockets_within.update(before.connections())


def is_broken() -> bool:
    """Whether a connection of the group was closed by either end, or the view is over.

    A host that loses power or its link closes nothing: with several hosts the coordinator is asked
    whether a replacement for a lost rank has joined.
    """
    if any(system.socket_identity(fd) != which for fd, which in _sockets.items()):
        return True
    return system.is_closed_by_peer(_sockets) or _is_closed_view()


def _is_closed_view() -> bool:
    global _asked_at
    now, job = time.monotonic(), jobs.current()
    if _store is None or _view is None or not job.rank_hosts or now < _asked_at + ASK_EVERY_S:
        return False
    _asked_at = now
    try:
        _store.check([f"{prefix_of(_view)}/here/{job.rank}"])
    except (ClusterError, RuntimeError):
        return True
    return False


def kept_for_view() -> tuple[ShoalStore, str] | None:
    """Store of this view's workers at the coordinator, and the prefix of its keys."""
    return (_store, prefix_of(_view)) if _store is not None and _view is not None else None


def leave_group() -> None:
    """Take the group down: its threads, sockets and coordinator connection. Not collective.

    Takes milliseconds, whether the other ranks are present, dead or stopped.
    """
    global _store, _view, _sockets, _num_formed_within
    group_sockets.shut(_sockets | _sockets_within)
    _sockets, _view, _num_formed_within = {}, None, 0
    _sockets_within.clear()
    if dist.is_initialized():
        held = [dist.group.WORLD]
        device_group.leave()
        # The threads end with the last reference. A collective that missed the closing of its connection
        # (gloo does, one kill in a hundred) holds them until its time-out; nothing can use it any more, so
        # it is left behind.
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
    # A missing rank is not waited for where it can be replaced.
    timeout_s = (
        min(MEET_TIMEOUT_S, job.liveness.step_timeout_s) if job.can_recover else job.liveness.join_timeout_s
    )
    timeout = timedelta(seconds=timeout_s)
    who = (job.coordinator, job.rank, job.incarnation)
    _store = ShoalStore(*who, num_workers=job.num_workers, timeout=timeout)
    _wait_for_ranks(_store, job, view)
    return _store


def _accept_ranks_only(job: Job, view: int, before: SocketsBefore, *, needs_all: bool) -> dict[int, str]:
    """Filter the new groups' listeners and check that each of their connections is with a rank; returns the connections.

    Collective: all ranks reach the same result, or their view is over.
    """
    if _store is None:
        return before.connections()
    what = "group" if needs_all else "mesh"
    listeners = before.listeners(_store.published)
    group_sockets.drop_packets(listeners)
    connections = before.connections()
    ends = group_sockets.ends_of(listeners, connections)
    prefix = f"{prefix_of(view)}/sockets/{_num_formed_within}"
    _store.set(f"{prefix}/ends/{job.rank}", msgspec.msgpack.encode(ends))
    told = _store.multi_get([f"{prefix}/ends/{rank}" for rank in range(job.num_workers)])
    by_rank = {rank: msgspec.msgpack.decode(each, type=GroupEnds) for rank, each in enumerate(told)}
    stranger = group_sockets.find_stranger(by_rank, job.rank)
    if stranger is None and needs_all and len(group_sockets.peers(by_rank, job.rank)) < job.num_workers - 1:
        # Closed before it was checked, and nothing would report it later.
        raise dist.DistError("a connection of the group was closed as soon as it was made")
    # A rank that found no stranger would go on, and wait in vain for one that did.
    _store.set(f"{prefix}/found/{job.rank}", stranger or "")
    found = _store.multi_get([f"{prefix}/found/{rank}" for rank in range(job.num_workers)])
    for rank, each in enumerate(found):
        if each:
            raise _refuse_stranger(job, rank, each.decode(), what)
    _num_refused[what] = 0
    return connections


def _refuse_stranger(job: Job, rank: int, stranger: str, what: str) -> Exception:
    """Error for a group that a stranger connected to: retried, and final after MAX_STRANGERS."""
    attempt = _num_refused[what] = _num_refused.get(what, 0) + 1
    if attempt > MAX_STRANGERS:
        return StrangerInGroup(rank=rank, stranger=stranger, num_attempts=attempt)
    if rank == job.rank:
        events.emit("stranger-refused", stranger=stranger, attempt=attempt)
        print(
            f"note: {stranger}. Nothing of it was used; the group is formed again ({attempt} of {MAX_STRANGERS} times)",
            file=sys.stderr,
            flush=True,
        )
    return dist.DistError(f"on rank {rank} {stranger}")


def _is_over(job: Job, view: int, before: SocketsBefore) -> bool:
    """Whether a rank has left this view already. Uses its own connection: the store's may be waiting.

    Raises if a stranger is found meanwhile, since the stranger may be the cause of the wait.
    """
    if job.coordinator is None:
        return False
    if _store is not None:
        stranger = group_sockets.foreign_connection(before.listeners(_store.published), _pids)
        if stranger is not None:
            raise _refuse_stranger(job, job.rank, stranger, "group")
    who = (job.coordinator, job.rank, job.incarnation)
    with contextlib.closing(CoordinatorClient(*who, num_workers=job.num_workers)) as client:
        try:
            client.request(StoreCheck([f"{prefix_of(view)}/here/{job.rank}"]), CONNECT_TIMEOUT_S)
        except ClusterError:
            return True
    return False


def _wait_for_ranks(store: ShoalStore, job: Job, view: int) -> None:
    """Wait until all ranks are here. torch would wait too, but could not name the missing ranks."""
    global _pids, _probed, _probe_listener
    _probed = []
    _close_probe_listener()
    rank_of = {f"{prefix_of(view)}/here/{rank}": f"rank {rank}" for rank in range(job.num_workers)}
    here, probed = f"{system.namespace()}@{job.host_address}", []
    if job.rank_hosts:
        address = _group_address(job)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        _probe_listener = socket.create_server((address, 0), family=family)
        probed = [address, _probe_listener.getsockname()[1]]
    said = " ".join(map(str, (os.getpid(), here, *probed)))
    store.set(f"{prefix_of(view)}/here/{job.rank}", said)
    try:
        told = [each.decode().split() for each in store.multi_get(list(rank_of))]
        _probed = [(each[2], int(each[3])) for each in told if each[2:]]
        # Pids of another machine would be taken for strangers here.
        _pids = [int(each[0]) for each in told] if {each[1] for each in told} == {here} else []
    except StoreWaitTimedOut as error:
        if job.can_recover:
            raise
        raise WaitTimedOut(
            operation=f"forming the group of view {view}",
            waited_s=error.waited_s,
            missing=[rank_of.get(key, key) for key in error.missing],
            setting=f"join_timeout_s (now {job.liveness.join_timeout_s:g} s)",
        ) from None


REPORT_GRACE_S = 0.75
"""Between the deadline and the report: a rank that arrived just before it has registered by then (it
polls four times a second).
"""


class CollectiveTimeout:
    """Time-out of one collective of the script's, naming the missing ranks.

    A waiting rank registers with the coordinator; on timeout it reads who else
    registered and reports the rest as missing. Free while no rank waits long.
    """

    def __init__(self, operation: str, timeout_s: float) -> None:
        self._operation, self._timeout_s = operation, timeout_s

    def begin(self, number: int) -> None:
        self._where, self._began_at, self._is_registered = f"waits/exchange-{number}", time.monotonic(), False
        self._thread = threading.get_ident()

    def look(self) -> None:
        """Raise WaitTimedOut if the wait is too long."""
        kept = kept_for_view()
        if threading.get_ident() != self._thread or kept is None:
            return  # a helper thread of the exchange: the thread that waits for it raises
        store, prefix = kept
        waited_s, job = time.monotonic() - self._began_at, jobs.current()
        keys = {rank: f"{prefix}/{self._where}/{rank}" for rank in range(job.num_workers)}
        missing: list[int] = []
        # The view is over, which the waiting thread will notice.
        with contextlib.suppress(ClusterError, RuntimeError):
            if not self._is_registered:
                self._is_registered = True
                store.set(keys[job.rank], b"")
            if waited_s >= self._timeout_s + REPORT_GRACE_S:
                missing = [rank for rank, key in keys.items() if rank != job.rank and not store.check([key])]
        if missing:
            raise WaitTimedOut(
                operation=self._operation,
                waited_s=waited_s,
                missing=[f"rank {rank}" for rank in missing],
                setting=f"its timeout_s (now {self._timeout_s:g} s)",
            )
