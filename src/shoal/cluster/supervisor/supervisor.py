"""Supervisor: starts a job's processes, forwards their output, replaces the dead, and reaps every one of them.

One thread, one selector, nothing that blocks for long. `job_lifecycle.py` decides about the job's
course: the supervisor feeds it reports and deaths and carries out its actions. `supervise` returns
or raises only when no process of the job is left.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import msgspec

from shoal import system
from shoal.cluster.coordinator.process import CANNOT_GO_ON, CoordinatorSpec
from shoal.cluster.coordinator.server_registry import ServersConfig
from shoal.cluster.coordinator.state import CoordinationConfig
from shoal.cluster.hosts import placement
from shoal.cluster.hosts.hosts import HostJoined, HostLeaves, HostLost, HostNews, Hosts
from shoal.cluster.hosts.remote_host import RemoteHost
from shoal.cluster.launch.elastic import Elastic, Resize
from shoal.cluster.launch.run_directory import RunDirectory
from shoal.cluster.ledger import entries as ledger_entries
from shoal.cluster.supervisor import failure, servers, worker_handle
from shoal.cluster.supervisor import job_lifecycle as lifecycle
from shoal.cluster.supervisor import outcome as outcomes
from shoal.cluster.supervisor.activity_files import ActivityFiles, StatusLine
from shoal.cluster.supervisor.coordinator_handle import CoordinatorHandle
from shoal.cluster.supervisor.display import Display
from shoal.cluster.supervisor.job_lifecycle import LEAVE_SIGNALS, JobLifecycle, JobPhase, RestartConfig
from shoal.cluster.supervisor.outcome import JobOutcome
from shoal.cluster.supervisor.output import Pipe
from shoal.cluster.supervisor.servers import ServerHandle, ServerSupervision
from shoal.cluster.supervisor.sockets import Control
from shoal.cluster.supervisor.worker_handle import WorkerHandle
from shoal.cluster.worker.process import WorkerSpec
from shoal.config.faults import Faults, Injector
from shoal.errors import ClusterError, ConfigError, ShoalError
from shoal.runtime import scratch
from shoal.runtime.events import LOOP_SAVES, OWN_LOOP, OWN_PROCESS_GROUP, RESULTS_LET_GO
from shoal.runtime.signal_names import signal_name
from shoal.runtime.transport import tls
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.supervisor import (
    Activity,
    Failed,
    Finished,
    Happened,
    LeaveHost,
    Live,
    Noted,
    Progress,
    Reaped,
    Resized,
    Resizing,
    Saved,
    ScaleHosts,
    ScaleRefused,
    ScaleWorkers,
    Suspect,
    Watching,
)
from shoal.runtime.transport.messages.worker_coordinator import ViewFormed

LEAVE_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalInbox:
    """Collects the signals that ask a job to leave, while it is entered, and wakes the supervisor's loop.

    Only the main thread can receive signals; elsewhere it stays empty. Ignored signals stay
    ignored, as `nohup` intends.
    """

    def __init__(self, *also: signal.Signals) -> None:
        """`also`: more signals that ask to leave, as schedulers send them."""
        self._signals = (*LEAVE_ON, *also)
        self._before: dict[signal.Signals, object] = {}
        self._fd_before = -1
        self._ours, self._theirs = socket.socketpair()
        for sock in (self._ours, self._theirs):
            sock.setblocking(False)

    def fileno(self) -> int:
        return self._ours.fileno()

    def take(self) -> list[signal.Signals]:
        received = b""
        with contextlib.suppress(BlockingIOError):
            received = self._ours.recv(4096)
        return [signal.Signals(number) for number in received if number in self._signals]

    def __enter__(self) -> SignalInbox:
        if threading.current_thread() is threading.main_thread():
            # The interpreter writes the signal's number there from whichever thread the kernel chose; a
            # handler alone would run only when the main thread wakes up by itself.
            self._fd_before = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
            for signum in self._signals:
                if signal.getsignal(signum) is not signal.SIG_IGN:
                    self._before[signum] = signal.signal(signum, lambda signum, frame: None)
        return self

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            for signum, handler in self._before.items():
                signal.signal(signum, handler)  # type: ignore[arg-type]  # what signal() gave back
            signal.set_wakeup_fd(self._fd_before)
        self._ours.close()
        self._theirs.close()


REAP_TIMEOUT_S = 10.0
"""Time from SIGKILL to its confirmation. Longer only if the kernel itself is stuck (a dead disk)."""

PAUSE_POLL_S = 0.05
"""Interval of checks on a process that a fault may have paused and that must be woken."""

MAX_REFUSALS_SHOWN = 20

NUM_LAST_LINES = 8
"""Lines of a dead process's log, shown with its death."""


class Supervisor:
    """Runs one job in the processes of one host."""

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        restart: RestartConfig,
        run: RunDirectory,
        display: Display,
        hosts: Hosts,
        selector: selectors.BaseSelector,
        control: Control,
        elastic: Elastic,
    ) -> None:
        """`spec` is rank 0's; the other ranks differ only in their number.

        Hosts, selector and control socket outlive it, if the job is launched again with other
        workers or hosts.
        """
        self._spec, self._run, self._display = spec, run, display
        self._hosts, self._selector, self._control, self._elastic = hosts, selector, control, elastic
        self.resize: Resize | None = None  # to be launched when this one has ended
        self._homeless: dict[int, int] = {}  # rank -> incarnation that waits for a host
        self._refused: set[str] = set()
        self._placed: dict[int, int | None] = {}  # ranks placed again in this turn, and where
        self._restart = restart
        self._lifecycle = JobLifecycle(num_workers=spec.job.num_workers, restart=restart)
        self.outcome = JobOutcome(self._lifecycle)
        self._workers: dict[int, WorkerHandle] = {}  # by pid, while they live
        self._loop_saves, self._loop_resumes = False, False
        self._died_at: dict[int, float] = {}  # by rank, until its replacement has caught up
        self._suspects: dict[int, tuple[Suspect, bool]] = {}  # by rank: what was logged last
        self._coordinator_died_at: float | None = None  # until the next one answers
        self._furthest = (0, 0, 0)  # call, epoch and step that any worker has reached
        self._most_finished = 0  # exchanges, as of the newest view
        self._incarnations: list[int] = []  # of the newest view
        self._held: list[Pipe] = []  # not read while the display is full
        self._injector = Injector(Faults(spec.job.faults))
        self._activity = ActivityFiles(run.path, num_hosts=hosts.num_hosts)
        self._started_at = time.monotonic()
        self._coordinator: CoordinatorHandle
        self._servers: ServerSupervision
        self._master: socket.socket

    def supervise(self, begun: str = "") -> None:
        """Start everything, watch it, and return when all of it is gone.

        `begun` is shown once the workers are started, where they continue those of another
        supervisor.
        """
        with self._keep_coordinator(), self._keep_servers():
            self._master = self._listen_for_torchrun()
            try:
                # Signals are handled meanwhile: imports take seconds, and hosts may join late.
                self._display.expect(self._explain_start())
                while not self._hosts.local.is_ready and not self._has_ended:
                    soon_s = self._display.tick()
                    left_s = self._hosts.local.seconds_to_start()
                    self._turn(left_s if soon_s is None else min(soon_s, left_s))
                while self._hosts.are_awaited and not begun and not self._has_ended:
                    self._turn(min(self._hosts.join_deadline_s(), 1.0))
                if not self._has_ended:
                    self._note_cluster()
                    self._note_link()
                    self._run.event("coordinator-started", pid=self._coordinator.start())
                    self._started_at = time.monotonic()
                    self._servers.start_all()
                    for rank in self._hosts.start_order:
                        self._start_worker(rank)
                    self._display.expect_script()
                    if begun:
                        self._display.note(begun)
                        self._control.answer(Resized(begun), is_last=True)
                    self._fit_hosts()
                while not self._has_ended:
                    self._turn(self._wait_s())
                    self._inject()
            finally:
                self._end_everything()

    def _explain_start(self) -> str:
        what = "importing torch, once for all workers"
        if self._spec.job.num_servers:
            what += "; the first start on this machine also compiles the loops of the parameter server, for half a minute"
        return f"starting {self._spec.job.name}: {what}"

    @property
    def _has_ended(self) -> bool:
        return self._lifecycle.phase is JobPhase.ENDED

    # ---- starting -------------------------------------------------------------------------------

    def _keep_coordinator(self) -> CoordinatorHandle:
        job = self._spec.job
        config = CoordinationConfig(
            num_workers=job.num_workers,
            liveness=job.liveness,
            can_recover=self._restart.max_restarts > 0,
            servers=ServersConfig(
                num_servers=job.num_servers,
                num_copies=job.num_replicas,
                max_servers=servers.max_servers(job.num_servers),
                hosts=self._hosts.server_hosts,
            ),
        )
        cluster = self._hosts.cluster
        tcp_listener = tls.listen(cluster.config.bind) if cluster is not None else None
        self._coordinator = CoordinatorHandle(
            CoordinatorSpec(
                config=config,
                supervisor=os.getpid(),
                journal=str(self._run.journal_path),
                launch=self._run.launch,
                faults=job.faults,
                credentials=self._hosts.credentials("coordinator", 0),
            ),
            title=f"shoal coordinator [{job.name}]",
            log=self._run.path / "logs" / "coordinator.log",
            warm=self._hosts.local,
            selector=self._selector,
            activity=self._activity,
            tcp_listener=tcp_listener,
        )
        if cluster is not None and tcp_listener is not None:
            job = replace(
                job,
                coordinator=self._hosts.tls_address(tcp_listener.getsockname()[1]),
                rank_hosts=self._hosts.places_of_ranks,
                head_address=cluster.address,
                host_address=cluster.address,
                bind_address=cluster.config.bind,
                interfaces=",".join(cluster.config.interfaces),
                connections=cluster.config.connections,
            )
            self._spec = msgspec.structs.replace(self._spec, job=job)
        return self._coordinator

    def _keep_servers(self) -> ServerSupervision:
        self._servers = ServerSupervision(
            self._spec,
            run=self._run,
            screen=self._display,
            hosts=self._hosts,
            selector=self._selector,
            coordinator=self._coordinator,
            activity=self._activity,
            control=self._control,
            outcome=self.outcome,
            feed=self._feed,
        )
        return self._servers

    def _start_worker(self, rank: int, incarnation: int = 0) -> None:
        host = self._hosts.place_worker(rank, [worker.host for worker in self._workers.values()])
        if self._hosts.num_hosts > 1 and (incarnation or host is None):
            self._placed[rank] = host
        if host is None:
            self._homeless[rank] = incarnation
            self._feed(lifecycle.WorkerUnplaced(rank, incarnation))
            return
        self._homeless.pop(rank, None)
        worker = worker_handle.start(
            msgspec.structs.replace(
                self._spec,
                job=replace(self._spec.job, shares_run_dir=self._hosts.share_run_dir),
                credentials=self._hosts.credentials(f"worker-{rank}", incarnation),
            ),
            rank=rank,
            incarnation=incarnation,
            ways_in={"coordinator": self._coordinator.way_in, **self._servers.ways_in},
            master=self._master,
            run=self._run,
            screen=self._display,
            parent=self._hosts.parent(host),
            host=host,
        )
        self._workers[worker.pid] = worker
        worker.register(self._selector)
        facts = {"incarnation": incarnation, **self._hosts.where(host)}
        kind = "worker-replaced" if incarnation else "worker-started"
        if incarnation:
            facts["after_s"] = self._since_death(rank)
        self._hosts.when_forked(worker.pid, lambda pid: self._run.event(kind, rank=rank, pid=pid, **facts))
        self._feed(lifecycle.WorkerStarted(rank, incarnation))

    def _since_death(self, rank: int) -> float:
        now = time.monotonic()
        return round(now - self._died_at.get(rank, now), 4)

    # ---- watching -------------------------------------------------------------------------------

    def _wait_s(self) -> float | None:
        """Time until the next deadline."""
        waits = [self._display.tick(), self._coordinator.tick()]
        waits.append(self._injector.wait_s(time.monotonic() - self._started_at))
        if self._injector.pauses:
            waits.append(PAUSE_POLL_S)
        if self._lifecycle.deadline is not None:
            waits.append(max(0.0, self._lifecycle.deadline - time.monotonic()))
        return min((wait for wait in waits if wait is not None), default=None)

    def _turn(self, timeout_s: float | None) -> None:
        """Wait for events, at most so long, and handle them."""
        if self._held and not self._display.is_full:
            for pipe in self._held:
                if not pipe.is_closed:
                    self._selector.register(pipe, selectors.EVENT_READ, pipe)
            self._held.clear()
        waits = [wait for wait in (timeout_s, self._hosts.tick()) if wait is not None]
        for key, mask in self._selector.select(0 if self._hosts.has_exits else min(waits, default=None)):
            if self._selector.get_map().get(key.fd) is not key:
                continue  # closed earlier in this turn, with its worker
            match key.data:
                case Pipe() as pipe:
                    if pipe.is_shown and self._display.is_full:
                        # Its writer blocks, as on a pipe without a supervisor between.
                        self._selector.unregister(pipe)
                        self._held.append(pipe)
                    elif not pipe.pump():
                        self._selector.unregister(pipe)  # its writers are gone
                case WorkerHandle() as worker:
                    if not self._receive_from(worker):
                        self._selector.unregister(worker.status)
                case StatusLine() as status:
                    status.attend()
                case CoordinatorHandle() as coordinator:
                    for message in coordinator.hear():
                        self._told_by_coordinator(message)
                case Control() as control:
                    for request in control.hear():
                        self._requested(request)
                case SignalInbox() as inbox:
                    for signum in inbox.take():
                        self._asked(signum)
                case RemoteHost() as host:
                    host.attend(mask)
                case Hosts() as hosts:
                    hosts.attend()
                    for refused in hosts.refused():
                        self._tell_refused(refused)
        for news in self._hosts.news():  # before the deaths of their processes
            self._host_changed(news)
        if self._hosts.headship is not None and (told := self._hosts.headship.news()):
            self._run.event("journal", said=told)
            self._display.note(told)
        for exited in self._hosts.exits():
            self._exited(exited.pid, exited.code)
        if self._placed:
            self._tell_placed()
        self._feed(lifecycle.ClockTick())

    def _host_changed(self, news: HostNews) -> None:
        match news:
            case HostLeaves(number, signum):
                self._let_leave(number, signum)
            case HostJoined(number, incarnation, address, hostname, num_cores, _, link):
                self._run.event(
                    "host-joined",
                    host=number,
                    incarnation=incarnation,
                    address=address,
                    hostname=hostname,
                    cores=num_cores,
                    link_bytes_per_s=round(link),
                )
                missing = len(self._hosts.missing)
                waiting = f"; {missing} more to come" if missing else ""
                self._display.note(f"host {number} is {hostname} ({address}, {num_cores} cores){waiting}")
                self._note_cluster()
                self._servers.place_homeless()
                homeless, self._homeless = self._homeless, {}
                for rank, of_rank in sorted(homeless.items()):
                    self._start_worker(rank, of_rank)
                self._fit_hosts()
            case HostLost(number, name, reason, has_left=True):
                self._run.event("host-left", host=number)
                self._display.note(f"{name} has left; {reason}")
            case HostLost(number, name, reason):
                there = [worker for worker in self._workers.values() if worker.host == number]
                self._run.event(
                    "host-lost", host=number, reason=reason, ranks=sorted(worker.rank for worker in there)
                )
                lost = f"{name} was lost ({reason})"
                self._display.note(lost)
                for worker in there:
                    worker.lost_with = lost
                for server in self._servers.living.values():
                    if server.host == number:
                        server.lost_with = lost

    def _tell_refused(self, reason: str) -> None:
        """Show why a machine was refused; once each, and up to a limit, since anybody can try."""
        if reason not in self._refused and len(self._refused) < MAX_REFUSALS_SHOWN:
            self._refused.add(reason)
            self._run.event("host-refused", reason=reason)
            self._display.note(f"not admitted: {reason}")

    def _tell_placed(self) -> None:
        """Tell where lost ranks restart, or that they wait for a host."""
        placed, self._placed = self._placed, {}
        assert self._hosts.cluster is not None
        if None in placed.values() or any(
            host != self._hosts.rank_hosts[rank] for rank, host in placed.items()
        ):
            where = self._hosts.cluster.join_address
            is_service = bool(self._hosts.cluster.config.roles)
            verb = "worker --join" if is_service else "join"
            join = f" (shoal {verb} {where}, within {self._restart.host_timeout_s:g} s)"
            told = placement.describe(placed, is_service=is_service)
            self._display.note(told + (join if None in placed.values() else ""))
        if None in placed.values():
            self._fit_hosts()

    def _note_cluster(self) -> None:
        """Write the hosts into config.json, now that all are known."""
        if self._hosts.cluster is not None:
            self._run.write_hosts(self._hosts.facts(self._spec.job.num_servers), self._hosts.cluster.config)

    def _note_link(self) -> None:
        """Say if steps were slower with this compression between hosts with such links."""
        job = self._spec.job
        told = outcomes.slow_compression(job.compress, self._hosts.slowest_link)
        if told and not job.num_servers:
            self._display.note(told)

    # ---- other workers and hosts ----------------------------------------------------------------

    def _requested(self, request: Message) -> None:
        """Handle a request of the control socket."""
        try:
            match request:
                case ScaleWorkers(num_workers):
                    self._refuse_resize()
                    resize = self._elastic.with_workers(num_workers)
                    self._refuse_outside_fit()
                    self._elastic.asked = resize.config
                    self._resize(resize)
                case ScaleHosts(num_hosts):
                    self._open_seats(num_hosts)
                case LeaveHost(number):
                    self._refuse_resize()
                    resize = self._elastic.without(number)
                    self._refuse_outside_fit()
                    self._resize(resize)
                case _:
                    self._servers.asked(request, is_running=self._lifecycle.phase is JobPhase.RUNNING)
        except ConfigError as error:
            reason = str(error).replace("Nothing was started", "Nothing was changed").rstrip(".")
            self._control.answer(ScaleRefused(reason), is_last=True)

    def _open_seats(self, num_hosts: int) -> None:
        """Let more hosts join than the job was launched with."""
        if self.resize is not None or self._lifecycle.phase is not JobPhase.RUNNING:
            raise ConfigError(
                "it is being scaled, or about to end. Nothing was changed; try again when that is done"
            )
        before = self._hosts.num_hosts
        self._elastic.open_seats(num_hosts)
        self._note_cluster()
        assert self._hosts.cluster is not None
        self._run.event("hosts-scaled", before=before, now=num_hosts)
        num_free = len(self._hosts.missing)
        told = (
            f"{num_free} more host{'s' if num_free > 1 else ''} can join, with the key of this job; on each: shoal join "
            f"{self._hosts.cluster.join_address}"
        )
        self._display.note(told)
        self._control.answer(Resized(told), is_last=True)

    def _let_leave(self, number: int, signum: int) -> None:
        """Let a host leave whose agent asked to; if it cannot be drained it ends, and counts as lost."""
        signalled = f"its agent was stopped by {signal_name(signum)}"
        try:
            self._refuse_resize()
            resize = self._elastic.without(number)
            self._refuse_outside_fit()
        except ConfigError as error:
            reason = str(error).partition(" Nothing was")[0].rstrip(".")
            self._hosts.remote(number).end(
                128 + signum, f"{signalled}, and it could not be drained: {reason}"
            )
            return
        self._resize(replace(resize, why=f"host {number} leaves: {signalled}"))

    def _refuse_resize(self) -> None:
        if (self.outcome.has_own_loop and not self._loop_resumes) or self._lifecycle.has_own_group:
            raise ConfigError(
                "its script trains by a loop of its own, which has not called shoal.resume and shoal.checkpoint yet: what it has "
                "trained would be lost. Nothing was changed; call both in the loop, train by shoal.Trainer, or end the job and "
                "start it anew"
            )
        if self.resize is not None or self._servers.is_scaling:
            raise ConfigError("it is being scaled already. Nothing was changed; try again when that is done")
        if self._lifecycle.phase is not JobPhase.RUNNING or not self._workers or self._lifecycle.finished:
            raise ConfigError("it is about to start or to end. Nothing was changed")

    def _refuse_outside_fit(self) -> None:
        if not self.outcome.progress:
            raise ConfigError(
                "it is not in a fit of shoal.Trainer, so what it has done could not be saved. Nothing was changed; try again "
                "once it trains"
            )

    def _resize(self, resize: Resize) -> None:
        """Make all workers save and leave; the job is launched again afterwards."""
        before, now = self._spec.job.num_workers, resize.config.workers
        self.resize = resize
        self._run.event("resizing", before=before, workers=now, why=resize.why, leaving=resize.leaving)
        doing = f"the workers {'stop' if self._homeless else 'save and stop'}, then {now} go on"
        self._display.note(f"{resize.why}: {doing}")
        self._control.answer(Resizing(doing), is_last=False)
        self._feed(lifecycle.LeaveRequested(signal.SIGINT, to_resize=True))

    def _fit_hosts(self) -> None:
        """Continue with fewer workers if ranks have no host and --min-workers allows it, or with more once a host joined."""
        if self.resize is not None or self._lifecycle.phase is not JobPhase.RUNNING:
            return
        if self.outcome.has_own_loop and not self._loop_resumes:
            return
        resize = self._elastic.fitting(is_short=bool(self._homeless))
        if resize is not None:
            self._resize(resize)

    def _is_stopped(self, process: WorkerHandle | ServerHandle) -> bool:
        remote = self._hosts.is_stopped(process.pid)
        return system.is_stopped(process.pid) if remote is None else remote

    def _receive_from(self, worker: WorkerHandle) -> bool:
        """Handle one message of a worker; False when there is none left."""
        has_spoken, message = worker.hear()
        if message is not None:
            self._handle_message(worker, message)
        return has_spoken

    def _handle_message(self, worker: WorkerHandle, message: Message) -> None:
        match message:
            case Activity(line):
                self._activity.write(
                    line, process=worker.name, incarnation=worker.incarnation, host=worker.host
                )
            case Progress():
                self.outcome.progress[message.rank] = message
                self._display.update(message)
                reached = (message.call, message.epoch, message.step)
                if reached > self._furthest:
                    self._furthest = reached
                    self._feed(lifecycle.JobAdvanced())
            case Saved():
                if self.outcome.checkpoint is None or message.step > self.outcome.checkpoint.step:
                    self._feed(lifecycle.JobAdvanced())
                self.outcome.checkpoint = message
                if not Path(message.path).is_relative_to(self._run.path / scratch.NAME):
                    self.outcome.lasting = message
                self._run.event("saved", rank=message.rank, path=message.path, step=message.step)
                self._hosts.tell_saved()
                if self._hosts.headship is not None and message is self.outcome.lasting:
                    self._hosts.headship.saved(message.step)
                self._coordinator.tell(message)
            case Happened(rank, kind, facts):
                told = msgspec.json.decode(facts)
                self._run.event(kind, **{**told, "rank": rank})
                if kind == "sharding":
                    self.outcome.sharding = told
                self.outcome.has_own_loop |= kind == OWN_LOOP
                if kind == LOOP_SAVES:
                    self._loop_saves, self._loop_resumes = True, told["resumes"]
                if kind == RESULTS_LET_GO:
                    self._feed(lifecycle.ResultsDropped(rank))
                if kind == OWN_PROCESS_GROUP:
                    self._feed(lifecycle.OwnGroupFormed(rank))
                if kind == "exchanged":
                    self.outcome.exchange = told
                if kind == "tables":
                    self.outcome.tables = told
                if (fact := ledger_entries.of_event(kind, rank, told)) is not None:
                    self._coordinator.note(Noted(rank, ledger_entries.encode(fact)))
            case Noted():
                self._coordinator.note(message)
            case Live(rank):
                self._run.event(
                    "worker-live", rank=rank, incarnation=worker.incarnation, after_s=self._since_death(rank)
                )
                self._feed(lifecycle.WorkerCaughtUp(rank))
            case Failed():
                worker.log.write(message.traceback.encode(errors="replace"))
                kind = "worker-left" if message.error == "Interrupted" else "worker-failed"
                self._run.event(kind, rank=message.rank, error=message.error)
                self._feed(message)
            case Finished():
                self._feed(message)

    def _told_by_coordinator(self, message: Message) -> None:
        match message:
            case Watching():
                if self._coordinator_died_at is not None:
                    after_s = round(time.monotonic() - self._coordinator_died_at, 4)
                    self._coordinator_died_at = None
                    self._run.event("coordinator-serves-again", pid=self._coordinator.pid, after_s=after_s)
                self._feed(lifecycle.CoordinatorServes())
            case ViewFormed(view, donor, finished, call, incarnations):
                self._run.event(
                    "view-formed",
                    view=view,
                    donor=donor,
                    finished=finished,
                    call=call,
                    incarnations=incarnations,
                )
                before, self._incarnations = self._incarnations, incarnations
                if before and all(new > old for new, old in zip(incarnations, before, strict=True)):
                    self._display.note(outcomes.begins_anew(self.outcome.checkpoint))
                if finished > self._most_finished:
                    self._most_finished = finished
                    self._feed(lifecycle.JobAdvanced())
            case Suspect():
                self._suspect(message)
            case _:
                self._servers.told(message)

    def _suspect(self, suspect: Suspect) -> None:
        rank, incarnation = suspect.rank, suspect.incarnation
        of_that_name = [
            each for each in self._workers.values() if (each.rank, each.incarnation) == (rank, incarnation)
        ]
        if not of_that_name:
            return  # dead, or replaced already
        is_to_blame = not suspect.lenient or self._is_stopped(of_that_name[0])
        if self._suspects.get(rank) != (suspect, is_to_blame):  # the coordinator repeats it
            self._suspects[rank] = (suspect, is_to_blame)
            self._run.event(
                "suspect",
                rank=rank,
                incarnation=incarnation,
                why=suspect.why,
                waited_s=round(suspect.waited_s, 3),
                killed=is_to_blame,
            )
        if is_to_blame:
            self._feed(lifecycle.WorkerSuspected(rank, incarnation, suspect.why))

    def _exited(self, pid: int, code: int) -> None:
        if pid == self._coordinator.pid:
            for message in self._coordinator.hear():  # its remaining messages first
                self._told_by_coordinator(message)
            self._coordinator_died_at = time.monotonic()
            self.outcome.coordinator_last_lines = self._coordinator.exited()[-NUM_LAST_LINES:]
            self._run.event("coordinator-exited", code=code)
            self._feed(lifecycle.CoordinatorExited(code, is_final=code == CANNOT_GO_ON))
        elif worker := self._workers.pop(pid, None):
            self._died_at[worker.rank] = time.monotonic()
            while self._receive_from(worker):  # its remaining messages first
                pass
            worker.unregister(self._selector)
            worker.close()
            self.outcome.last_lines[worker.rank] = failure.last_words(worker.log.last_lines(), NUM_LAST_LINES)
            self._run.event("worker-exited", rank=worker.rank, incarnation=worker.incarnation, code=code)
            self._coordinator.tell(Reaped(worker.rank, worker.incarnation, code))
            self._feed(lifecycle.WorkerExited(worker.rank, code, worker.lost_with))
        else:
            self._servers.exited(pid, code)

    def _asked(self, signum: signal.Signals) -> None:
        self._run.event("asked-to-leave", signal=signum.name)
        if self.resize is not None:
            self.resize = None
            self._control.answer(ScaleRefused("it was asked to leave, and does"), is_last=True)
        self._display.leave()
        if self._lifecycle.phase is JobPhase.RUNNING and self._workers:
            doing = "finishing the step and saving"
            if self.outcome.has_own_loop and self._loop_saves:
                doing = "finishing the step; the loop saves at its next shoal.checkpoint"
            elif self.outcome.has_own_loop:
                doing = "finishing the step; nothing is saved, since the loop calls no shoal.checkpoint (shoal.should_stop() is true then)"
            self._display.note(f"{doing}; Ctrl-C again to leave now")
        self._feed(lifecycle.LeaveRequested(signum))

    def _feed(self, event: lifecycle.Event) -> None:
        """Feed an event to the job's lifecycle and carry out its actions."""
        for action in self._lifecycle.handle(event, time.monotonic()):
            match action:
                case lifecycle.AskToLeave(ranks, signum):
                    self._signal(ranks, LEAVE_SIGNALS[signum])
                case lifecycle.KillWorkers(ranks):
                    self._signal(ranks, signal.SIGKILL)
                case lifecycle.ReplaceWorker(died, incarnation):
                    if not died.lost_with:  # else its new place is reported with the host's other ranks
                        self._display.note(outcomes.replacing(died, self._restart.max_restarts))
                    self._start_worker(died.rank, incarnation)
                case lifecycle.KillServers(numbers):
                    self._servers.kill(numbers)
                case lifecycle.ReplaceServer(server_died, incarnation):
                    self._display.note(outcomes.replacing_server(server_died, self._restart.max_restarts))
                    self._servers.start(server_died.number, incarnation)
                    if server_died.number in self._servers.homeless and self._hosts.cluster is not None:
                        self._display.note(
                            f"server {server_died.number} waits for its service (shoal server --join "
                            f"{self._hosts.cluster.join_address}, within {self._restart.host_timeout_s:g} s)"
                        )
                case lifecycle.RollBack(lost):
                    self._go_back(lost)
                case lifecycle.RestartAll(ranks, servers):
                    self._start_anew(ranks, servers)
                case lifecycle.RestartCoordinator():
                    self._run.event("coordinator-restarted", pid=self._coordinator.start())

    def _go_back(self, lost: lifecycle.StateLost) -> None:
        checkpoint, reached = self.outcome.checkpoint, self._furthest[2]
        if reached:  # progress is reported at intervals, the metrics file has every step
            reached = max(reached, self._run.last_step())
        self.outcome.num_went_back += 1
        self._run.event(
            "went-back", servers=lost.servers, to_step=checkpoint.step if checkpoint else 0, from_step=reached
        )
        self._display.note(
            outcomes.going_back(lost, checkpoint, reached, max_restarts=self._restart.max_restarts)
        )

    def _start_anew(self, ranks: dict[int, int], servers: dict[int, int]) -> None:
        job = replace(self._spec.job, resume=True)
        self._spec = msgspec.structs.replace(self._spec, job=job)
        self._master.close()  # a store that served the former group has its keys
        self._master = self._listen_for_torchrun()
        self._incarnations = []  # that all are new was reported when they went
        self._servers.start_anew(servers)
        for rank, incarnation in sorted(ranks.items()):
            self._start_worker(rank, incarnation)

    def _inject(self) -> None:
        """Inject the faults that this process causes."""
        step = max((progress.step for progress in self.outcome.progress.values()), default=0)
        processes: list[WorkerHandle | ServerHandle] = [
            *self._workers.values(),
            *self._servers.living.values(),
        ]
        pids = {process.name: process.pid for process in processes}
        if self._coordinator.pid is not None:
            pids["coordinator"] = self._coordinator.pid
        now = time.monotonic()
        for fault in self._injector.due(since_start_s=now - self._started_at, step=step):
            self._run.event("fault", what=str(fault), hit=fault.process in pids)
            if fault.process in pids:
                stop = fault.act == "pause"
                self._hosts.signal(pids[fault.process], signal.SIGSTOP if stop else signal.SIGKILL)
        for process in processes if self._injector.pauses else ():
            if self._injector.is_to_wake(process.name, process.pid, self._is_stopped(process), now):
                self._hosts.signal(process.pid, signal.SIGCONT)

    def _signal(self, ranks: tuple[int, ...], signum: signal.Signals) -> None:
        for pid, worker in self._workers.items():
            if worker.rank in ranks:
                self._hosts.signal(pid, signum)

    # ---- ending ---------------------------------------------------------------------------------

    def _end_everything(self) -> None:
        """Kill and reap every process of the job, on every path."""
        self._lifecycle.phase = JobPhase.ENDED  # nothing is replaced any more
        self._servers.note_leases()
        for pid in (*self._workers, *self._servers.living):
            self._hosts.signal(pid, signal.SIGKILL)
        # Where the warm parent is gone, so are all its children.
        with contextlib.suppress(ClusterError):
            # The coordinator may have entries to write.
            for signum in (signal.SIGTERM, signal.SIGKILL):
                self._coordinator.signal(signum)
                deadline = time.monotonic() + REAP_TIMEOUT_S
                while (self._workers or self._servers.living or self._coordinator.pid) and (
                    left_s := deadline - time.monotonic()
                ) > 0:
                    self._turn(left_s)
        self._activity.close()
        if self._hosts.headship is not None:
            self._hosts.headship.rest()
        failure_code = (
            getattr(sys.exc_info()[1], "exit_code", ShoalError.exit_code) if sys.exc_info()[1] else None
        )
        for worker in self._workers.values():
            worker.unregister(self._selector)
            worker.close()
        self._master.close()
        if self._lifecycle.is_resizing and failure_code is None:
            return  # the hosts stay
        for name in self._hosts.end(
            self._lifecycle.exit_code if failure_code is None else failure_code, "the job is over"
        ):
            self._display.note(f"{name} has not confirmed that its processes of this job have ended")

    def _listen_for_torchrun(self) -> socket.socket:
        """MASTER_PORT of the workers' environment, bound from the start so that no other process takes
        it before rank 0 serves it.
        """
        cluster = self._hosts.cluster
        return tls.listen(cluster.config.bind if cluster is not None else "127.0.0.1")
