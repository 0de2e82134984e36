"""All hosts of a job, behind the interface of one warm parent.

A job on one machine has only the local warm parent. With several hosts there are also the door
through which they join, and one `RemoteHost` each. Rank and server numbers have a home host, which
fixes the order of sums; if the home is lost, another host with capacity runs its processes.
"""

from __future__ import annotations

import contextlib
import platform
import queue
import select
import selectors
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from shoal import system
from shoal.cluster.hosts import placement
from shoal.cluster.hosts.remote_host import RemoteHost
from shoal.cluster.hosts.seats import JoinWait
from shoal.cluster.supervisor.warm_parent import WarmParent
from shoal.config.hosts import SERVER, WORKER, HostsConfig
from shoal.config.launch import HostFacts
from shoal.config.liveness import LivenessConfig
from shoal.engines.protocol import words_of
from shoal.errors import ClusterError, WaitTimedOut
from shoal.runtime.forkserver.messages import ChildExited
from shoal.runtime.health import BEAT_EVERY_S, Health
from shoal.runtime.transport import tls
from shoal.runtime.transport.tls import Credentials

if TYPE_CHECKING:  # a job on one host has neither, and skips their imports
    from shoal.cluster.hosts.authority import Authority
    from shoal.cluster.hosts.headship import Headship
    from shoal.cluster.hosts.joining import Door, JoinedHost
    from shoal.cluster.hosts.opening import SshStart
    from shoal.config.hosts import Resources
    from shoal.engines.protocol import Engine

HEAD = 0
"""Number of the head's own machine."""

CHECK_EVERY_S = 0.25
"""Interval of the check whether this host is still the head."""

FIRST_RETRY_S, REPLACE_EVERY_S = 0.25, 2.0
"""First and longest interval between requests for the same slot: the lost one may still be ending at the first request."""

MAX_REPLACEMENTS = 8
"""Slots requested from an engine to replace one lost slot, before its deadline applies: with these intervals, for 12 s."""

ENGINE_ANSWER_S = 0.25
"""Time that heartbeats wait for an engine's answer about a lost host; after that the loss is reported without it."""

END_TIMEOUT_S = 10.0
"""From the job's end to the end of every process on every host."""


@dataclass(slots=True, kw_only=True)
class Cluster:
    """Parts of a job on several hosts: absent on one."""

    config: HostsConfig
    authority: Authority
    door: Door
    starters: list[SshStart]
    join_address: str  # as `shoal join` takes it
    is_oversubscribed: bool = False  # more workers than cores are requested
    is_takeover: bool = False  # hosts of a lost head join, without that head
    engine: Engine | None = None  # gives the hosts
    slot: Resources | None = None  # of each host that the engine gives

    @property
    def address(self) -> str:
        """Address at which other hosts reach the head."""
        return self.config.advertise or self.config.bind


@dataclass(frozen=True, slots=True)
class HostLost:
    """A host is gone, and why. Exits of its processes follow."""

    number: int
    name: str
    reason: str
    has_left: bool = False  # on request, with no process of the job left there


@dataclass(frozen=True, slots=True)
class HostJoined:
    """A host's agent is at work."""

    number: int
    incarnation: int
    address: str
    hostname: str
    num_cores: int
    sees_run_dir: bool
    link: float


@dataclass(frozen=True, slots=True)
class HostLeaves:
    """A host's agent was asked to leave by a signal."""

    number: int
    signum: int


HostNews: TypeAlias = HostLost | HostJoined | HostLeaves


class Hosts:
    """Forks, signals and exits over all hosts."""

    def __init__(
        self,
        warm: WarmParent,
        cluster: Cluster | None,
        *,
        num_workers: int,
        server_numbers: Sequence[int],
        liveness: LivenessConfig,
        headship: Headship | None = None,
        health: Health | None = None,
    ) -> None:
        """`headship` is this process's, if another host may take over; `health` is called in every turn."""
        self.local, self.cluster, self.headship, self._health = warm, cluster, headship, health
        self._liveness, self._num_workers = liveness, num_workers
        self._server_numbers = list(server_numbers)
        self._remote: dict[int, RemoteHost] = {}
        self._selector: selectors.BaseSelector
        self._wait = JoinWait(time.monotonic(), cluster is not None and cluster.is_takeover)
        self._announced: set[int] = set()
        self._news: list[HostNews] = []
        self._names: dict[int, str] = {}
        self._leaving: dict[int, str] = {}  # by number: why
        self._exits: list[ChildExited] = []  # on hosts that were lost
        # Hosts that an engine was asked for in place of lost ones: how often.
        self._replacing: dict[int, int] = {}
        self._replaced_at, self._retry_s = 0.0, FIRST_RETRY_S
        # An engine may take seconds to answer, in which no heartbeat would be sent: it has one thread of its own.
        self._engine_calls = ThreadPoolExecutor(1, "engine")
        self._watching: Future[dict[int, str]] | None = None
        self._asking: Future[str] | None = None
        self._retrying: Future[list[int]] | None = None

    # ---- as one warm parent ---------------------------------------------------------------------

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        with self.local.in_use():
            try:
                yield
            finally:
                if self.cluster is not None:
                    self.cluster.door.close()
                    for starter in self.cluster.starters:
                        starter.close()
                    self._engine_calls.shutdown(cancel_futures=True)
                    if self.cluster.engine is not None:
                        # An engine that fails must not hide how the job ended; its hosts have already been
                        # told to stop.
                        with contextlib.suppress(Exception):
                            self.cluster.engine.stop()

    def register(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        selector.register(self.local, selectors.EVENT_READ)
        if self.cluster is not None:
            selector.register(self.cluster.door, selectors.EVENT_READ, self)

    @property
    def has_exits(self) -> bool:
        return (
            self.local.has_exits
            or bool(self._exits)
            or any(host.lost or host.has_exits for host in self._remote.values())
        )

    def exits(self) -> list[ChildExited]:
        """Deaths since the last call. Call `news` first, which reports lost hosts."""
        lost, self._exits = self._exits, []
        found = [*lost, *self.local.exits()]
        for host in self._remote.values():
            if not host.lost:  # else its loss is reported first
                found += host.exits()
        return found

    def signal(self, pid: int, signum: signal.Signals) -> None:
        if pid < 1 << 32:
            self.local.signal(pid, signum)
        for host in self._remote.values():
            host.signal(pid, signum)

    def when_forked(self, pid: int, tell: Callable[[int | None], None]) -> None:
        """Call with the pid of a process on its host, once known; None if the fork failed."""
        if pid < 1 << 32:
            tell(pid)
        for host in self._remote.values():
            host.when_forked(pid, tell)

    def where(self, host: int) -> dict[str, Any]:
        """Host field for events; empty with a single host."""
        if self.cluster is None:
            return {}
        seat = self.cluster.door.seats.get(host)
        return {"host": host, "hostname": seat.hostname if seat is not None else platform.node()}

    def is_stopped(self, pid: int) -> bool | None:
        """Whether a signal stopped a process of another host; None for one of this machine."""
        return None if pid < 1 << 32 else any(pid in host.stopped for host in self._remote.values())

    # ---- joining --------------------------------------------------------------------------------

    @property
    def num_hosts(self) -> int:
        return self.cluster.config.num_hosts if self.cluster is not None else 1

    @property
    def missing(self) -> list[int]:
        """Hosts that are not at work."""
        return [number for number in range(1, self.num_hosts) if not self.is_here(number)]

    @property
    def are_awaited(self) -> bool:
        """Whether the job has to wait for hosts before it begins."""
        is_coming = any(not host.lost and not host.is_ready for host in self._remote.values())
        return not self._wait.is_over(self.missing, is_coming=is_coming, now=time.monotonic())

    def is_here(self, number: int) -> bool:
        host = self._remote.get(number)
        return number == HEAD or (host is not None and host.is_ready and number not in self._leaving)

    def join_deadline_s(self) -> float:
        """Seconds that missing hosts still have; WaitTimedOut, naming them, where they have none."""
        assert self.cluster is not None
        for starter in self.cluster.starters:
            if not self.is_here(starter.number) and (problem := starter.problem()) is not None:
                raise ClusterError(
                    f"host {starter.number} could not be started: {problem}. Nothing was trained; the other hosts were let go."
                )
        self._check_engine()
        timeout_s = self.cluster.config.join_timeout_s
        left_s = self._wait.left_s(timeout_s, time.monotonic())
        if left_s <= 0:
            num_places = self.cluster.config.num_places
            raise WaitTimedOut(
                operation=f"the job on {num_places} host{'s' if num_places > 1 else ''}",
                waited_s=timeout_s,
                missing=[self._called(number) + self._last_words(number) for number in self.missing],
                setting=f"--join-timeout (now {timeout_s:g} s)",
            )
        return left_s

    def _check_engine(self) -> None:
        assert self.cluster is not None
        if self.cluster.engine is None:
            return
        before = self._watching
        if before is not None and not before.done():
            return
        self._watching = self._engine_calls.submit(self.cluster.engine.watch)
        if before is None:
            return
        try:
            ended = before.result()
        except Exception as error:  # engines raise any type of error
            raise ClusterError(
                f"{self.cluster.config.on} failed while the job waited for its hosts ({words_of(error)}). Nothing was trained; the "
                "hosts that had joined were let go."
            ) from error
        for number, problem in sorted(ended.items()):
            if not self.is_here(number):
                raise ClusterError(
                    f"host {number} was lost during the start: {problem}. Nothing was trained; the other hosts were let go."
                )

    def _last_words(self, number: int) -> str:
        """Last lines that the slot of a host printed, in brackets; empty where there are none."""
        said = ""
        if self.cluster is not None and self.cluster.engine is not None:
            with contextlib.suppress(Exception):  # the host is missing, whatever its engine says
                said = self.cluster.engine.logs(number)
        return f" ({said})" if said else ""

    def attend(self) -> None:
        """Take in agents that have connected."""
        assert self.cluster is not None
        for joined in self.cluster.door.joined():
            self._take_in(joined)

    def news(self) -> list[HostNews]:
        """Hosts that joined, were lost or asked to leave since the last call."""
        for number, host in list(self._remote.items()):
            if host.lost:
                self._forget(host)
                assert self.cluster is not None
                self.cluster.door.release(number, host.incarnation)
            elif host.is_ready and number not in self._announced:
                assert self.cluster is not None
                self._announced.add(number)
                seat = self.cluster.door.seats[number]
                self._names[number] = f"host {number} ({seat.hostname}, {host.address})"
                self._news.append(
                    HostJoined(
                        number,
                        host.incarnation,
                        host.address,
                        seat.hostname,
                        seat.num_cores,
                        seat.sees_run_dir,
                        host.link,
                    )
                )
            elif host.leaves and number not in self._leaving:
                self._news.append(HostLeaves(number, host.leaves))
                host.leaves = 0
        found, self._news = self._news, []
        return found

    def tell_saved(self) -> None:
        for host in self._remote.values():
            host.tell_saved()

    def refused(self) -> list[str]:
        """Machines refused since the last call, with the reasons."""
        found = []
        with contextlib.suppress(queue.Empty):
            while self.cluster is not None:
                found.append(self.cluster.door.refusals.get_nowait())
        return found

    def tick(self) -> float | None:
        """Send heartbeats and detect silent hosts; returns the seconds until the next call. HeadFenced
        if another host may be head.
        """
        waits = [host.tick() for host in self._remote.values()]
        if self.headship is not None:
            self.headship.check()
            waits.append(CHECK_EVERY_S)
        if self._replacing:
            self._replace_again()
            waits.append(self._retry_s)
        if self._health is not None:
            self._health.waits_for = ""  # from here on hosts are admitted
            num_missing = len(self.missing)
            self._health.beat(
                shoal_hosts_joined=self.num_hosts - 1 - num_missing, shoal_hosts_missing=num_missing
            )
            waits.append(BEAT_EVERY_S)
        return min(waits, default=None)

    def _replace_again(self) -> None:
        """Ask the engine again for slots that ended before they joined, or were still ending at the first request."""
        now = time.monotonic()
        if now < self._replaced_at + self._retry_s:
            return
        if self._retrying is not None:
            if not self._retrying.done():
                return
            for number in self._retrying.result():
                self._replacing[number] = self._replacing.get(number, 0) + 1
        self._replaced_at, self._retry_s = now, min(2 * self._retry_s, REPLACE_EVERY_S)
        self._replacing = {
            number: times
            for number, times in self._replacing.items()
            if number not in self._remote and times <= MAX_REPLACEMENTS
        }
        self._retrying = self._engine_calls.submit(self._start_ended, set(self._replacing))

    def _start_ended(self, numbers: set[int]) -> list[int]:
        """In the engine's thread: request again those of these slots that have ended; returns them."""
        assert self.cluster is not None
        assert self.cluster.engine is not None
        assert self.cluster.slot is not None
        asked = []
        # The wait for the host has a deadline of its own, which names what is missing.
        with contextlib.suppress(Exception):
            for number in numbers & self.cluster.engine.watch().keys():
                asked.append(number)
                self.cluster.engine.start([number], self.cluster.slot)
        return asked

    def _forget(self, host: RemoteHost) -> None:
        del self._remote[host.number]
        self._announced.discard(host.number)
        self._exits += host.exits()
        leaving = self._leaving.pop(host.number, "")
        reason = leaving or host.lost + self._asked_again(host.number)
        self._news.append(HostLost(host.number, self._called(host.number), reason, bool(leaving)))

    def _asked_again(self, number: int) -> str:
        """Ask the engine for another slot in place of a lost one; returns the result as a phrase."""
        if self.cluster is None or self.cluster.engine is None or self.cluster.slot is None:
            return ""
        if self.cluster.config.roles:
            return ""  # the service's own supervisor restarts it
        self._replacing[number] = 1
        self._replaced_at, self._retry_s = time.monotonic(), FIRST_RETRY_S
        is_idle = self._asking is None or self._asking.done()
        self._asking = self._engine_calls.submit(self._start_another, number)
        if is_idle:  # else it would also wait for the request before this one
            with contextlib.suppress(TimeoutError):
                return self._asking.result(ENGINE_ANSWER_S)
        return f"; {self.cluster.config.on} is being asked for another"

    def _start_another(self, number: int) -> str:
        """In the engine's thread: request a slot in place of a lost one."""
        cluster = self.cluster
        assert cluster is not None
        assert cluster.engine is not None
        assert cluster.slot is not None
        if number in self._remote:
            return ""  # it has rejoined while the engine was busy
        said = ""
        try:
            if problem := cluster.engine.watch().get(number, ""):
                said = f"; {problem}"
            cluster.engine.start([number], cluster.slot)
        except Exception as error:  # engines raise any type of error, and the job goes on without this host
            return f"{said}; {cluster.config.on} gives no other: {words_of(error)}"
        return f"{said}; {cluster.config.on} was asked for another"

    def _take_in(self, joined: JoinedHost) -> None:
        assert self.cluster is not None
        before = self._remote.get(joined.number)
        if before is not None:
            before.lose("it has joined anew")
            self._forget(before)
        self._remote[joined.number] = RemoteHost(
            joined.number,
            joined.incarnation,
            joined.stream,
            address=joined.address,
            servers=self._server_numbers if self.cluster.config.takes(joined.number, SERVER) else [],
            liveness=self._liveness,
            selector=self._selector,
        )

    def _called(self, number: int) -> str:
        names = self.cluster.config.names if self.cluster is not None else ()
        asked_for = f"host {number} ({names[number]})" if number < len(names) else f"host {number}"
        return self._names.get(number, asked_for)

    # ---- placement ------------------------------------------------------------------------------

    @property
    def rank_hosts(self) -> tuple[int, ...]:
        """Home of each rank; empty on one host."""
        if self.cluster is None:
            return ()
        config = self.cluster.config
        return tuple(config.host_of(rank, self._num_workers) for rank in range(self._num_workers))

    @property
    def places_of_ranks(self) -> tuple[int, ...]:
        """Home of each rank, numbered from 0 among the hosts that have workers: as workers know them."""
        return tuple(host - self._places.start for host in self.rank_hosts)

    def place_worker(self, rank: int, taken: Sequence[int]) -> int | None:
        """Host for a worker; None if it has to wait for one. `taken` are the hosts of the living workers."""
        if self.cluster is None:
            return HEAD
        rooms = {number: room - taken.count(number) for number, room in self.cores().items()}
        return placement.place(rank, self.rank_hosts, rooms, may_crowd=self.cluster.is_oversubscribed)

    @property
    def _places(self) -> range:
        """Hosts that may have workers and servers."""
        is_apart = self.cluster is not None and not self.cluster.config.head_takes_part
        return range(1 if is_apart else 0, self.num_hosts)

    @property
    def start_order(self) -> list[int]:
        """Ranks in placement order: first those whose home is present, then the others, in the remaining capacity."""
        homes = self.rank_hosts
        return sorted(
            range(self._num_workers), key=lambda rank: bool(homes) and not self.is_here(homes[rank])
        )

    def cores(self, without: int | None = None) -> dict[int, int]:
        """Cores of each present host that may have workers, except one that is about to leave.

        A service counts as many as it has workers: it was sized for them.
        """
        config = self.cluster.config if self.cluster is not None else None
        of_services = config.workers if config is not None and config.roles else None
        return {
            number: self._num_cores(number) if of_services is None else of_services[number]
            for number in self._places
            if self.is_here(number) and number != without and (config is None or config.takes(number, WORKER))
        }

    def resize(self, num_workers: int, config: HostsConfig | None, launches: Sequence[float]) -> None:
        """Change the number of workers, or their homes, from the next launch on; `launches` are those of the run so far."""
        self._num_workers = num_workers
        if self.cluster is not None and config is not None:
            self.cluster.config = config
            self.cluster.door.launched_again(launches)

    def open_seats(self, config: HostsConfig) -> None:
        """Let more hosts join; ranks keep their homes."""
        assert self.cluster is not None
        self.cluster.config = config
        self.cluster.door.open_seats(config.num_hosts)

    def leave(self, number: int, reason: str) -> None:
        """Release a host that has no process of the job left."""
        if number in self._remote:
            self._leaving[number] = reason
            self._remote[number].end(0, "it has left the job, which goes on without it")

    def _num_cores(self, number: int) -> int:
        if number == HEAD:
            return len(system.cores())
        assert self.cluster is not None
        seat = self.cluster.door.seats.get(number)
        return seat.num_cores if seat is not None else 0

    @property
    def server_hosts(self) -> tuple[int, ...]:
        """Home of each server there may be; empty on one host."""
        if self.cluster is None:
            return ()
        return tuple(self.cluster.config.host_of_server(number) for number in self._server_numbers)

    def place_server(self, number: int, taken: Sequence[int]) -> int | None:
        """Host for a server: its home, else the next host with the fewest servers (`taken`: the servers' hosts).

        None if it has to wait for its service.
        """
        if self.cluster is None:
            return HEAD
        home = self.server_hosts[number]
        if self.cluster.config.roles:
            return home if self.is_here(home) else None
        here = [host for host in range(self.num_hosts) if self.is_here(host)]
        # Fall back to the head, though it has no part in the job, while no other host is present: otherwise
        # state would be lost.
        here = [host for host in here if host in self._places] or here
        return placement.place_server(home, here, taken, self.num_hosts)

    def parent(self, host: int) -> WarmParent | RemoteHost:
        """The warm parent of this host."""
        return self.local if host == HEAD else self.remote(host)

    def remote(self, host: int) -> RemoteHost:
        return self._remote[host]

    def server_address(self, number: int, host: int) -> str:
        """Address of a server on a remote host."""
        ports = self._remote[host].ports
        assert ports is not None
        return self.tls_address(ports[number], host)

    def credentials(self, name: str, incarnation: int) -> Credentials | None:
        return self.cluster.authority.issue(name, incarnation) if self.cluster is not None else None

    def tls_address(self, port: int, host: int = HEAD) -> str:
        """Address of a port of a host."""
        assert self.cluster is not None
        scheme = tls.PLAIN if self.cluster.config.plaintext else tls.TLS
        address = self.cluster.address if host == HEAD else self._remote[host].address
        return tls.join_address(scheme, address, port)

    @property
    def share_run_dir(self) -> bool:
        """Whether all hosts see the head's run directory."""
        return self.cluster is None or all(
            seat.sees_run_dir for seat in list(self.cluster.door.seats.values())
        )

    @property
    def slowest_link(self) -> float:
        """Bytes per second from the head to the host with the slowest link; 0 where none was measured."""
        return min((host.link for host in self._remote.values() if host.link), default=0.0)

    def facts(self, num_servers: int) -> list[HostFacts]:
        """The hosts with their workers and servers, for config.json."""
        assert self.cluster is not None
        config, ranks = self.cluster.config, self.rank_hosts
        found = []
        for number in range(self.num_hosts):
            if not self.is_here(number):
                continue
            seat = self.cluster.door.seats.get(number)
            found.append(
                HostFacts(
                    number=number,
                    name=seat.hostname if seat is not None else platform.node(),
                    address=self.cluster.address if number == HEAD else self._remote[number].address,
                    cores=self._num_cores(number),
                    workers=[rank for rank, host in enumerate(ranks) if host == number],
                    servers=[each for each in range(num_servers) if config.host_of_server(each) == number],
                    shares_run_dir=number == HEAD or (seat is not None and seat.sees_run_dir),
                    link_bytes_per_s=round(self._remote[number].link) if number != HEAD else 0.0,
                )
            )
        return found

    def end(self, exit_code: int, reason: str) -> list[str]:
        """Tell all agents that the job is over, and wait until none of its processes is left; returns
        hosts that did not confirm.
        """
        hosts = list(self._remote.values())
        if self.headship is not None and self.headship.is_fenced:
            for host in hosts:
                host.lose("this host is no longer the head")  # so that their agents look for the next head
            return []
        for host in hosts:
            host.end(exit_code, reason)
        deadline = time.monotonic() + END_TIMEOUT_S
        while (left := [host for host in hosts if not host.lost]) and (
            left_s := deadline - time.monotonic()
        ) > 0:
            ready = select.select(left, [host for host in left if host.has_unsent], [], left_s)
            for host in {*ready[0], *ready[1]}:
                host.attend(selectors.EVENT_READ | selectors.EVENT_WRITE)
        for host in left:
            host.lose("the job is over")
        return [self._called(host.number) for host in left]
