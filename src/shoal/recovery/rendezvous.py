"""Rendezvous of a view's workers: torch's default process group, formed through the coordinator.

Everything it opens listens on one interface, loopback; the store goes over the
coordinator's Unix socket (torch's own TCPStore listens on every interface).

Neither forming nor leaving a group may take long, whatever became of the
others. Gloo ends its threads only when their collectives have ended, and one
that waits for a stopped peer does not before its time-out. So connections are
shut first: ours end at once, and so do the others'.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import os
import secrets
import select
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
"""Forming a group takes milliseconds: so long, and it is worth asking whether it will ever succeed."""

LOOK_EVERY_S = 0.05

STUCK_AFTER_S = 0.25
"""What is not over by then is inside of a call that takes its time; what runs in Python takes microseconds."""


class GivenUp(RuntimeError):
    """Not an error a user sees: it will not succeed any more, or nobody needs it."""


class _Attempt:
    """One call, in a thread of its own; its error, if any, is held here and nowhere else."""

    def __init__(self, act: Callable[[], None], inside: str) -> None:
        self.is_wanted = True
        self.raised: list[BaseException] = []
        self._act = act
        self._inside = inside
        self.thread = threading.Thread(target=self._run, name="forming a group", daemon=True)

    def _run(self) -> None:
        try:
            # Looks at every call that Python makes, so also at the first one after a long call into C++ has returned.
            # A flag and no exception thrown into the thread: that one could be lost in a callback of the long call, or
            # meet another thread under the same number.
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
    """Do `act`, and raise what it raises; GivenUp as soon as `is_over`, once it takes long.

    Given up, it ends at the next call made by the module named `inside`.
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


QUICK_S = (
    60.0  # for questions that the coordinator answers at once: so long without an answer, and it is gone
)

A = TypeVar("A", bound=Message)


class StoreWaitTimedOut(WaitTimedOut, DistStoreError):
    """Keys that nobody set in time: torch's kind of error, with the facts of ours."""


class ShoalStore(Store):
    """torch.distributed's Store over a coordinator connection.

    torch calls some methods by their C++ names, so those are here too. Every
    failure is a DistStoreError, because torch's own waits catch just that.
    """

    timeout: timedelta  # torch's own property, which its stub leaves out

    def __init__(
        self, path: str, rank: int, incarnation: int = 0, *, num_workers: int, timeout: timedelta
    ) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self._clones: list[ShoalStore] = []
        self.published: deque[bytes] = deque(maxlen=256)
        """The newest values that were set, also by clones: among them the addresses of gloo's listeners."""
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
        """append, multi_get and multi_set are here: one question where there would be many."""
        return True

    def clone(self) -> ShoalStore:
        """Another connection to the same keys: for a thread that must not queue behind this one's waits."""
        client = self._client
        clone = ShoalStore(
            client.path, client.rank, client.incarnation, num_workers=client.num_workers, timeout=self.timeout
        )
        # torch keeps the C++ half alone, and without its Python half that answers nothing.
        self._clones.append(clone)
        clone.published = self.published
        return clone

    def close(self) -> None:
        """Close the connection and those of all clones; torch may keep the object for longer."""
        self._client.close()
        for clone in self._clones:
            clone.close()

    def _once(self) -> tuple[int, int]:
        """Names a request, so that one which is repeated after the coordinator's death is not done twice."""
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


MEET_TIMEOUT_S = 10.0  # from the moment all ranks entered the view until all are here to form its group

CONNECT_TIMEOUT_S = 10.0  # from then until all are connected: milliseconds, unless one dies just then

MAX_STRANGERS = 10
"""How often a group is formed again because somebody else connected to it."""

ASK_EVERY_S = 0.5
"""How often a rank that waits asks the coordinator whether its view is over, where there are several hosts."""

BURIAL_S = 0.25
"""How long the end of a group's threads is waited for: they take milliseconds, or all of their time-out."""

interface = "lo"
"""Network interface of the group's connections: another one where the workers are on several hosts."""

_view: int | None = None  # the view whose group this process is in

_sockets: dict[int, str] = {}  # what forming the group opened: descriptor -> which socket it was then

_sockets_within: dict[int, str] = {}
"""The same of groups within the group. Not watched, for they may be freed before it; they end with it at the latest."""

_num_formed_within = 0
"""How often groups were formed within that of this process; equal on all ranks of a view."""

_num_refused: dict[str, int] = {}
"""Attempts in a row that a stranger spoilt: at the group, and at a mesh within it."""

_pids: list[int] = []
"""Process of every rank of the view, by rank; none where not all share a namespace of processes."""

_asked_at = 0.0
"""When the coordinator was last asked whether the view is over."""

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
    global _view, _sockets, interface
    if dist.is_initialized():
        raise ConfigError(
            "torch.distributed already has a default process group in this process, and shoal forms its own. Nothing "
            "was trained; leave init_process_group out of a script that is started with `shoal run`."
        )
    backend = device_group.backend_for(job)
    named = job.interfaces or (interface_of(job.bind_address) if job.bind_address else "lo")
    interface = named.partition(",")[0]  # hosts may have different numbers of them, which gloo cannot
    # Before they look: otherwise they take the interface that the host's name leads to.
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    os.environ["TORCH_GLOO_LAZY_INIT"] = "0"  # all connections now: they are what is watched
    if "nccl" in backend:
        device_group.set_up(job, named)
    # torch names groups by how often it has begun one, counting those that failed: the ranks would look for each other
    # under different names.
    _world.group_count = 0
    before = SocketsBefore(on_loopback=interface == "lo")
    excepthook = sys.excepthook
    try:
        store = PrefixStore(prefix_of(view), _open_store(job, view))
        with group_sockets.all_descriptors():
            abortable_init(
                lambda: _is_over(job, view, before),
                lambda: _connect(job, backend, store),
                inside=dist.distributed_c10d.__name__,
            )
            sys.excepthook = excepthook  # it wraps one more around it for every group
            _set_pg_timeout(timedelta(seconds=job.liveness.step_timeout_s))
            _sockets = _accept_ranks_only(job, view, before, needs_all=True)
        _view = view
        return
    except (dist.DistError, RuntimeError) as error:
        reason = str(error)  # and not the error itself: it holds what there is of the group
    except BaseException:
        leave_group()
        raise
    leave_group()
    raise PeerLost(rank=job.rank, operation=f"forming the group of view {view}", reason=reason)


def interface_of(address: str) -> str:
    """Name of the network interface with this address."""
    if ipaddress.ip_address(address).is_loopback:
        return "lo"
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
    """Groups that are formed in here (those of a mesh) end with the view, like the group they are within.

    Else a rank that leaves the view would let down those who wait for it in one of them: they would sit out the time-out.
    """
    global _num_formed_within
    before = SocketsBefore(on_loopback=interface == "lo")
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
    """Whether a connection of the group has been closed, by its other end or because of it; or the view is over.

    A host that loses power or its link closes nothing: with several hosts the
    coordinator is asked whether somebody has come to replace a lost rank.
    """
    watcher = select.poll()
    for fd, which in _sockets.items():
        try:
            if os.readlink(f"/proc/self/fd/{fd}") != which:
                return True
        except OSError:
            return True
        watcher.register(fd, select.POLLRDHUP)
    return bool(watcher.poll(0)) or _is_closed_view()


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
    """What the workers of this view can write down for each other at the coordinator, and how its keys begin."""
    return (_store, prefix_of(_view)) if _store is not None and _view is not None else None


def leave_group() -> None:
    """Take the group down: its threads, its sockets, its connection to the coordinator. Not collective.

    Takes milliseconds, whether the others are there, dead or stopped.
    """
    global _store, _view, _sockets, _num_formed_within
    group_sockets.shut(_sockets | _sockets_within)
    _sockets, _view, _num_formed_within = {}, None, 0
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
    _wait_for_ranks(_store, job, view)
    return _store


def _accept_ranks_only(job: Job, view: int, before: SocketsBefore, *, needs_all: bool) -> dict[int, str]:
    """Close the new groups' listeners to everybody, and check that each of their connections is with a rank.

    Collective: all ranks come to the same, or their view is over. The connections.
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
        # Closed before we could look: nothing would tell us later.
        raise dist.DistError("a connection of the group was closed as soon as it was made")
    # A rank that found nothing wrong would continue, and wait in vain for one that did.
    _store.set(f"{prefix}/found/{job.rank}", stranger or "")
    found = _store.multi_get([f"{prefix}/found/{rank}" for rank in range(job.num_workers)])
    for rank, each in enumerate(found):
        if each:
            raise _refuse_stranger(job, rank, each.decode(), what)
    _num_refused[what] = 0
    return connections


def _refuse_stranger(job: Job, rank: int, stranger: str, what: str) -> Exception:
    """The error for a group that a stranger got into: one more attempt, or the end where it has happened too often."""
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
    """Whether a rank has left this view already. Asked on a connection of its own: the store's may be waiting.

    Raises where a stranger is found meanwhile: it may be what is waited for.
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
    """Wait until all ranks are here. torch would wait too, but could not say for whom."""
    global _pids
    rank_of = {f"{prefix_of(view)}/here/{rank}": f"rank {rank}" for rank in range(job.num_workers)}
    here = f"{os.readlink('/proc/self/ns/pid')}@{job.host_address}"
    store.set(f"{prefix_of(view)}/here/{job.rank}", f"{os.getpid()} {here}")
    try:
        told = [each.decode().split() for each in store.multi_get(list(rank_of))]
        # Numbers of another machine's processes would be taken for strangers here.
        _pids = [int(pid) for pid, _ in told] if {each[1] for each in told} == {here} else []
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
"""Between the deadline and the report: who came just before it has said so by then (it looks around four times a second)."""


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
        """WaitTimedOut where the wait is too long."""
        kept = kept_for_view()
        if threading.get_ident() != self._thread or kept is None:
            return  # a helper thread of the exchange: the thread that waits for it raises
        store, prefix = kept
        waited_s, job = time.monotonic() - self._began_at, jobs.current()
        keys = {rank: f"{prefix}/{self._where}/{rank}" for rank in range(job.num_workers)}
        missing: list[int] = []
        with contextlib.suppress(ClusterError, RuntimeError):  # the view is over: who waits will notice
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
