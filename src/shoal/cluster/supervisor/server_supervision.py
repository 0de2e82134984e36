"""The supervisor's part that concerns servers: it starts them, tells of their deaths, scales them when asked to.

Decides nothing about the job's course: that is `fate.py`'s, through `feed`;
and nothing about slots: that is the coordinator's.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import time
from collections.abc import Callable
from types import TracebackType

from shoal.cluster.launch.run_directory import RunDirectory
from shoal.cluster.supervisor import job_events as fate_events
from shoal.cluster.supervisor import server_handles as server_keeper
from shoal.cluster.supervisor import user_messages as notes
from shoal.cluster.supervisor.control import Control
from shoal.cluster.supervisor.coordinator_handle import CoordinatorKeeper
from shoal.cluster.supervisor.outcome import Outcome
from shoal.cluster.supervisor.output import Screen
from shoal.cluster.supervisor.server_handles import Server, ServerKeeper
from shoal.cluster.supervisor.warm_parent import WarmParent
from shoal.cluster.worker.process import WorkerSpec
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
"""Between two lines of events.jsonl that tell how leases stand."""


class ServerSupervision:
    """The servers of one job, under one supervisor. Use it as a context manager."""

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        run: RunDirectory,
        screen: Screen,
        warm: WarmParent,
        selector: selectors.BaseSelector,
        coordinator: CoordinatorKeeper,
        outcome: Outcome,
        feed: Callable[[fate_events.Event], None],
    ) -> None:
        self._run, self._warm, self._coordinator, self._selector = run, warm, coordinator, selector
        self._outcome, self._feed = outcome, feed
        self._num_servers = outcome.num_servers = spec.job.num_servers
        self._keeper = ServerKeeper(
            server_keeper.spec_for(spec), run=run, screen=screen, warm=warm, selector=selector
        )
        self._control: Control | None = None
        self._anew: dict[int, int] = {}  # by number: the incarnations with which the job last began anew
        self._in_view: tuple[int, dict[int, int]] = (0, {})  # the newest view, and who is in it
        self._is_scaling = False
        self._leases_noted_at = 0.0
        self._drained: dict[int, int] = {}  # rank: its incarnation

    @property
    def living(self) -> dict[int, Server]:
        """Those that live, by pid."""
        return self._keeper.living

    @property
    def ways_in(self) -> dict[str, int]:
        """Descriptors that lead to the servers, by name."""
        return self._keeper.ways_in

    def start_all(self) -> None:
        """Start the servers the job was launched with, and listen to who wants others."""
        for number in range(self._num_servers):
            self.start(number)
        if self._num_servers:
            self._control = Control(self._run.path, self._selector)

    def start(self, number: int, incarnation: int = 0) -> None:
        """Start a server."""
        server = self._keeper.start(number, incarnation, coordinator=self._coordinator.way_in)
        kind = "server-replaced" if incarnation else "server-started"
        self._run.event(kind, server=number, pid=server.pid, incarnation=incarnation)
        self._feed(fate_events.ServerStarted(number, incarnation))

    def start_anew(self, incarnations: dict[int, int]) -> None:
        """Start the servers that are still wanted of those that were ended together."""
        self._anew = dict(incarnations)
        for number, incarnation in sorted(incarnations.items()):
            if number < self._num_servers:
                self.start(number, incarnation)

    def _was_ended_with(self, view: int) -> bool:
        """Whether all servers of this view were ended when the job last began anew.

        One that was on its way then may have joined in time to be lost once more.
        """
        known, incarnations = self._in_view
        return (
            bool(self._anew)
            and known <= view
            and all(incarnation < self._anew.get(number, 0) for number, incarnation in incarnations.items())
        )

    def kill(self, numbers: tuple[int, ...]) -> None:
        """End these servers."""
        for server in self.living.values():
            if server.number in numbers:
                self._warm.signal(server.pid, signal.SIGKILL)

    def exited(self, pid: int, code: int) -> bool:
        """A process is gone; whether it was a server."""
        server = self._keeper.exited(pid)
        if server is None:
            return False
        number = server.number
        self._outcome.server_last_lines[number] = server.log.last_lines()[-NUM_LAST_LINES:]
        self._run.event("server-exited", server=number, incarnation=server.incarnation, code=code)
        self._coordinator.tell(ReapedServer(number, server.incarnation, code))
        self._feed(fate_events.ServerExited(number, code, is_wanted=number < self._num_servers))
        return True

    def told(self, message: Message) -> None:
        """The coordinator says something about servers."""
        match message:
            case ServerView(view):
                self._run.event("server-view", view=view, servers=notes.slots_by_server(message))
                self._in_view = (view, dict(message.incarnations))
            case SuspectServer(number, incarnation, why):
                self._run.event("suspect", server=number, incarnation=incarnation, why=why, killed=True)
                self._feed(fate_events.ServerSuspected(number, incarnation, why))
            case SlotsLost(_, view) if self._was_ended_with(view):
                pass  # of servers that were started before everybody was ended: it is dealt with
            case SlotsLost(_, view, num_slots, servers, None):
                self._run.event("slots-lost", view=view, slots=num_slots, servers=servers)
                self._feed(fate_events.StateLost(tuple(servers)))
            case SlotsLost(_, view, rank=rank):
                self._run.event("step-lost", view=view, rank=rank)
                self._feed(fate_events.StateLost((), rank=rank))
            case ScaleBegun(num_servers):
                self._scale(num_servers)
                self._answer(message, is_last=False)
            case ScaleRefused():
                self._answer(message, is_last=True)
            case ServersScaled(_, num_servers):
                # What is beyond holds nothing any more.
                self.kill(tuple(each.number for each in self.living.values() if each.number >= num_servers))
                if self._is_scaling:
                    self._is_scaling = False
                    self._answer(message, is_last=True)
            case WorkerDrained(rank, incarnation, samples_per_s, others, slower_than):
                if self._drained.get(rank) != incarnation:  # else said again, by one that was started again
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

    def asked(self, control: Control, *, is_running: bool) -> None:
        """Somebody outside has a wish."""
        for message in control.hear():
            if not is_running or not isinstance(message, ScaleServers):
                control.answer(ScaleRefused("the job is about to end"), is_last=True)
            elif self._is_scaling:
                control.answer(ScaleRefused("slots are still moving; try again in a moment"), is_last=True)
            elif not self._coordinator.ask_to_scale(message.num_servers):
                control.answer(ScaleRefused("its coordinator is being started again"), is_last=True)

    def note_leases(self, *, every_s: float = 0.0) -> None:
        """Write down how leases stand."""
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
        """Let go of everything. The servers must be gone."""
        if self._control is not None:
            self._control.close()
        self._keeper.close()

    def __enter__(self) -> ServerSupervision:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _scale(self, num_servers: int) -> None:
        before, self._num_servers = self._num_servers, num_servers
        if num_servers == before:
            return  # said again, by a coordinator that was started again
        self._is_scaling = True
        self._outcome.num_servers = num_servers
        self._run.event("servers-scaled", before=before, now=num_servers)
        for number in range(before, num_servers):
            if self._keeper.of(number) is None:
                self.start(number, self._keeper.next_incarnation(number))

    def _answer(self, message: Message, *, is_last: bool) -> None:
        if self._control is not None:
            with contextlib.suppress(OSError):
                self._control.answer(message, is_last=is_last)
