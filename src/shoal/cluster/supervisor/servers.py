"""Servers of a job as their supervisor sees them: processes, addresses, scaling, and news from the coordinator.

Does not decide about the job's course (`job_lifecycle.py`) or about slots (the coordinator's
`server_group.py`).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from shoal import system
from shoal.cluster.hosts.hosts import HEAD, Hosts
from shoal.cluster.launch.roles import MAX_SERVERS, ServerSpec, encode_spec, way_in
from shoal.cluster.launch.run_directory import RunDirectory
from shoal.cluster.supervisor import job_lifecycle as lifecycle
from shoal.cluster.supervisor import outcome as outcomes
from shoal.cluster.supervisor.activity_files import ActivityFiles, StatusLine
from shoal.cluster.supervisor.coordinator_handle import CoordinatorHandle
from shoal.cluster.supervisor.outcome import JobOutcome
from shoal.cluster.supervisor.output import LineCutter, Log, Pipe, Screen
from shoal.cluster.supervisor.sockets import Control, listen_unnamed
from shoal.cluster.worker.process import WorkerSpec
from shoal.runtime.transport import tls
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.server_coordinator import ServerView
from shoal.runtime.transport.messages.supervisor import (
    LeaseCounts,
    ReapedServer,
    ScaleBegun,
    ScaleRefused,
    ScaleServers,
    ServersScaled,
    SlotsLost,
    SuspectServer,
    WorkerDrained,
    WorkerReadmitted,
)

NUM_LAST_LINES = 8
"""Of a dead server's log, shown where its death ends the job."""

LEASES_EVERY_S = 1.0
"""Interval between lines of events.jsonl about leases."""


@dataclass(slots=True, kw_only=True)
class ServerHandle:
    """A running server process."""

    number: int
    incarnation: int
    pid: int
    pipes: list[Pipe]
    log: Log
    host: int
    status: StatusLine
    lost_with: str = ""
    """The host that was lost with it, and why."""

    @property
    def name(self) -> str:
        """Name of the process in faults."""
        return f"server-{self.number}"


class ServerProcesses:
    """Server processes of one job, and a listening socket for each server there may be.

    `spec` is server 0's; the others differ in their number alone.
    """

    def __init__(
        self,
        spec: ServerSpec,
        *,
        run: RunDirectory,
        screen: Screen,
        hosts: Hosts,
        selector: selectors.BaseSelector,
        activity: ActivityFiles,
    ) -> None:
        self.living: dict[int, ServerHandle] = {}  # by pid
        self._activity = activity
        self._newest: dict[int, int] = {}  # number -> incarnation started last
        self._spec, self._run, self._screen, self._hosts, self._selector = spec, run, screen, hosts, selector
        self._listeners: list[socket.socket] = []
        self._tcp_listeners: list[socket.socket] = []
        self._ways_in: list[int] = []
        try:
            for number in range(max_servers(spec.num_servers)):
                listener, leads_there = listen_unnamed(way_in(number))
                self._listeners.append(listener)
                self._ways_in.append(leads_there)
                if hosts.cluster is not None:
                    self._tcp_listeners.append(tls.listen(hosts.cluster.config.bind))
        except BaseException:
            self.close()
            raise

    @property
    def ways_in(self) -> dict[str, int]:
        """Descriptors that lead to the servers, by the names under which children inherit them."""
        return {way_in(number): fd for number, fd in enumerate(self._ways_in)}

    def start(
        self, number: int, incarnation: int, *, way_to_coordinator: int, coordinator: str
    ) -> ServerHandle | None:
        """Fork a server on its host; None if that is absent. `coordinator` is the coordinator's address for other hosts."""
        host = self._hosts.place_server(number, [each.host for each in self.living.values()])
        if host is None:
            return None
        log = Log(self._run.path / "logs" / f"server-{number}.log")
        (our_out, their_out), (our_err, their_err) = os.pipe(), os.pipe()
        prefix = LineCutter(f"[server {number}] ".encode())
        pipes = [Pipe(our_out, log), Pipe(our_err, log, self._screen.err, prefix)]
        status = StatusLine(
            self._activity, self._selector, process=f"server-{number}", incarnation=incarnation, host=host
        )
        server = ServerHandle(
            number=number, incarnation=incarnation, pid=0, pipes=pipes, log=log, host=host, status=status
        )
        try:
            spec = msgspec.structs.replace(
                self._spec,
                number=number,
                incarnation=incarnation,
                coordinator=coordinator,
                credentials=self._hosts.credentials(f"server-{number}", incarnation),
            )
            title = f"shoal server {number} [{self._spec.job}]"
            fds = {"stdout": their_out, "stderr": their_err, "status": status.theirs.fileno()}
            if host == HEAD:
                fds |= {"listener": self._listeners[number].fileno(), "coordinator": way_to_coordinator}
                if self._tcp_listeners:
                    fds["tcp_listener"] = self._tcp_listeners[number].fileno()
                    port = self._tcp_listeners[number].getsockname()[1]
                    spec = msgspec.structs.replace(spec, address=self._hosts.tls_address(port))
                server.pid = self._hosts.local.fork(
                    "server", title=title, spec=encode_spec(spec), fds={**fds, **self.ways_in}
                )
            else:
                spec = msgspec.structs.replace(spec, address=self._hosts.server_address(number, host))
                server.pid = self._hosts.remote(host).fork(
                    "server", title=title, spec=encode_spec(spec), fds=fds, server=number
                )
        except BaseException:
            _close(server)
            raise
        finally:
            os.close(their_out)
            os.close(their_err)
            status.theirs.close()
        self.living[server.pid] = server
        self._newest[number] = incarnation
        for pipe in pipes:
            self._selector.register(pipe, selectors.EVENT_READ, pipe)
        return server

    def next_incarnation(self, number: int) -> int:
        return self._newest.get(number, -1) + 1

    def exited(self, pid: int) -> ServerHandle | None:
        """Close the handle of an exited process; None if it was no server."""
        server = self.living.pop(pid, None)
        if server is not None:
            for pipe in server.pipes:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(pipe)
            _close(server)
        return server

    def of(self, number: int) -> ServerHandle | None:
        """Running server of this number."""
        return next((each for each in self.living.values() if each.number == number), None)

    def close(self) -> None:
        """Close all sockets. The servers must have exited."""
        for pid in list(self.living):
            self.exited(pid)
        for way in self._ways_in:
            system.close_way(way)
        for listener in (*self._listeners, *self._tcp_listeners):
            listener.close()
        self._ways_in, self._listeners, self._tcp_listeners = [], [], []

    def __enter__(self) -> ServerProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ServerSupervision:
    """Servers of one job, under one supervisor."""

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        run: RunDirectory,
        screen: Screen,
        hosts: Hosts,
        selector: selectors.BaseSelector,
        coordinator: CoordinatorHandle,
        activity: ActivityFiles,
        control: Control,
        outcome: JobOutcome,
        feed: Callable[[lifecycle.Event], None],
    ) -> None:
        self._run, self._hosts, self._coordinator, self._selector = run, hosts, coordinator, selector
        self._coordinator_address = spec.job.coordinator or ""
        self._outcome, self._feed = outcome, feed
        self._num_servers = outcome.num_servers = spec.job.num_servers
        self._processes = ServerProcesses(
            spec_for(spec), run=run, screen=screen, hosts=hosts, selector=selector, activity=activity
        )
        self._control = control
        self._anew: dict[int, int] = {}  # by number: the incarnations with which the job last restarted
        self._in_view: tuple[int, dict[int, int]] = (0, {})  # newest view, and its members
        self.is_scaling = False
        self._leases_noted_at = 0.0
        self._drained: dict[int, int] = {}  # rank: its incarnation
        self.homeless: dict[int, int] = {}  # number -> incarnation that waits for its service

    @property
    def living(self) -> dict[int, ServerHandle]:
        """Running servers by pid."""
        return self._processes.living

    @property
    def ways_in(self) -> dict[str, int]:
        return self._processes.ways_in

    def start_all(self) -> None:
        """Start the servers the job was launched with."""
        for number in range(self._num_servers):
            self.start(number)

    def start(self, number: int, incarnation: int = 0) -> None:
        server = self._processes.start(
            number,
            incarnation,
            way_to_coordinator=self._coordinator.way_in,
            coordinator=self._coordinator_address,
        )
        if server is None:
            self.homeless[number] = incarnation
            self._feed(lifecycle.ServerUnplaced(number, incarnation))
            return
        self.homeless.pop(number, None)
        kind = "server-replaced" if incarnation else "server-started"
        facts = {"incarnation": incarnation, **self._hosts.where(server.host)}
        self._hosts.when_forked(
            server.pid, lambda pid: self._run.event(kind, server=number, pid=pid, **facts)
        )
        self._feed(lifecycle.ServerStarted(number, incarnation))

    def place_homeless(self) -> None:
        """Start servers that waited for their service, once it has joined."""
        for number, incarnation in sorted(self.homeless.items()):
            self.start(number, incarnation)

    def start_anew(self, incarnations: dict[int, int]) -> None:
        """Restart the servers that are still wanted, after all were killed together."""
        self._anew = dict(incarnations)
        for number, incarnation in sorted(incarnations.items()):
            if number < self._num_servers:
                self.start(number, incarnation)

    def _was_ended_with(self, view: int) -> bool:
        """True if all servers of this view were killed when the job last restarted.

        One that was starting then may have joined in time to be reported lost again.
        """
        known, incarnations = self._in_view
        return (
            bool(self._anew)
            and known <= view
            and all(incarnation < self._anew.get(number, 0) for number, incarnation in incarnations.items())
        )

    def kill(self, numbers: tuple[int, ...]) -> None:
        for server in self.living.values():
            if server.number in numbers:
                self._hosts.signal(server.pid, signal.SIGKILL)

    def exited(self, pid: int, code: int) -> bool:
        """Handle the exit of a process; False if it was no server."""
        server = self._processes.exited(pid)
        if server is None:
            return False
        number = server.number
        self._outcome.server_last_lines[number] = server.log.last_lines()[-NUM_LAST_LINES:]
        self._run.event("server-exited", server=number, incarnation=server.incarnation, code=code)
        self._coordinator.tell(ReapedServer(number, server.incarnation, code))
        is_wanted = number < self._num_servers
        self._feed(lifecycle.ServerExited(number, code, is_wanted=is_wanted, lost_with=server.lost_with))
        return True

    def told(self, message: Message) -> None:
        """Handle a message of the coordinator about servers."""
        match message:
            case ServerView(view):
                self._run.event("server-view", view=view, servers=outcomes.slots_by_server(message))
                self._in_view = (view, dict(message.incarnations))
            case SuspectServer(number, incarnation, why):
                self._run.event("suspect", server=number, incarnation=incarnation, why=why, killed=True)
                self._feed(lifecycle.ServerSuspected(number, incarnation, why))
            case SlotsLost(_, view) if self._was_ended_with(view):
                pass  # about servers from before the restart, which has dealt with them
            case SlotsLost(_, view, num_slots, servers, None):
                self._run.event("slots-lost", view=view, slots=num_slots, servers=servers)
                self._feed(lifecycle.StateLost(tuple(servers)))
            case SlotsLost(_, view, rank=rank):
                self._run.event("step-lost", view=view, rank=rank)
                self._feed(lifecycle.StateLost((), rank=rank))
            case ScaleBegun(num_servers):
                self._scale(num_servers)
                self._answer(message, is_last=False)
            case ScaleRefused():
                self._answer(message, is_last=True)
            case ServersScaled(_, num_servers):
                # Servers beyond this number hold nothing any more.
                self.kill(tuple(each.number for each in self.living.values() if each.number >= num_servers))
                if self.is_scaling:
                    self.is_scaling = False
                    self._answer(message, is_last=True)
            case WorkerDrained(rank, incarnation, samples_per_s, others, slower_than):
                if self._drained.get(rank) != incarnation:  # else repeated by a restarted coordinator
                    self._drained[rank] = incarnation
                    self._event_of_pace(
                        "worker-drained", rank, samples_per_s, others, slower_than=slower_than
                    )
            case WorkerReadmitted(rank, samples_per_s, others):
                self._drained.pop(rank, None)
                self._event_of_pace("worker-readmitted", rank, samples_per_s, others)
            case LeaseCounts(by_rank):
                self._outcome.leases = by_rank
                self.note_leases(every_s=LEASES_EVERY_S)

    def asked(self, message: Message, *, is_running: bool) -> None:
        """Handle a request of the control socket."""
        refused = ""
        if not is_running or not isinstance(message, ScaleServers):
            refused = "the job is about to end"
        elif self.is_scaling:
            refused = "slots are still moving; try again in a moment"
        elif not self._coordinator.ask_to_scale(message.num_servers):
            refused = "its coordinator is being started again"
        if refused:
            self._answer(ScaleRefused(refused), is_last=True)

    def note_leases(self, *, every_s: float = 0.0) -> None:
        """Write the lease counts into events.jsonl."""
        if self._outcome.leases and time.monotonic() >= self._leases_noted_at + every_s:
            self._leases_noted_at = time.monotonic()
            self._run.event("leases", by_rank=self._outcome.leases)

    def _event_of_pace(
        self, kind: str, rank: int, samples_per_s: float, others: float, **more: float
    ) -> None:
        self._run.event(
            kind,
            rank=rank,
            samples_per_s=round(samples_per_s, 3),
            others_samples_per_s=round(others, 3),
            times_slower=round(others / max(samples_per_s, 1e-9), 2),
            **more,
        )

    def close(self) -> None:
        """Close all sockets. The servers must have exited."""
        self._processes.close()

    def __enter__(self) -> ServerSupervision:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _scale(self, num_servers: int) -> None:
        before, self._num_servers = self._num_servers, num_servers
        if num_servers == before:
            return  # repeated by a restarted coordinator
        self.is_scaling = True
        self._outcome.num_servers = num_servers
        self._run.event("servers-scaled", before=before, now=num_servers)
        for number in range(before, num_servers):
            if self._processes.of(number) is None:
                self.start(number, self._processes.next_incarnation(number))

    def _answer(self, message: Message, *, is_last: bool) -> None:
        with contextlib.suppress(OSError):
            self._control.answer(message, is_last=is_last)


def spec_for(worker: WorkerSpec) -> ServerSpec:
    """Spec of server 0 in the job of these workers."""
    job = worker.job
    return ServerSpec(
        job=job.name,
        number=0,
        num_workers=job.num_workers,
        num_servers=job.num_servers,
        num_replicas=job.num_replicas,
        strategy=job.strategy,
        run_dir=str(job.run_dir),
        interfaces=job.interfaces,
        env=worker.env,
        table_memory=job.table_memory,
        table_dir=job.table_dir,
        server_device=job.server_device,
        table_keep=job.table_keep,
        staleness_lr=job.staleness_lr,
        push_norm=job.push_norm,
        liveness=job.liveness,
        faults=job.faults,
    )


def max_servers(num_servers: int) -> int:
    """Number of servers to which a group launched with so many can grow."""
    return max(MAX_SERVERS, num_servers) if num_servers else 0


def _close(server: ServerHandle) -> None:
    for pipe in server.pipes:
        pipe.close()
    server.status.close()
    server.log.close()
