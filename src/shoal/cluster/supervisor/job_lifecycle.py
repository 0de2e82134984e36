"""Job lifecycle: a state machine over worker, server and coordinator deaths, failures and requests to leave.

Pure: no clock, no process, no socket. `supervisor.py` feeds events in with the
time at which they came and carries out the actions that come back. Failed and
Finished, which workers report themselves, are wire messages.

    RUNNING ──asked to leave──▶ LEAVING ──all gone──▶ ENDED
     │ ▲ │                         │
     │ │ ├──a worker failed, ──────┴──▶ ENDING ──all gone──▶ ENDED
     │ │ │  or died once too often
     │ │ └──all finished, all gone──────▶ ENDED
     └─┴──a worker died: it is replaced

A worker that dies without a report is replaced by the next incarnation of its
rank, and so is a server. Where servers were the last to hold something, all
processes are killed and restarted from the newest checkpoint. A user's exception
is not retried: it would come again. Deaths are counted per rank and reset when
the job makes progress, so that only a crash loop ends it.

A failure has consequences that look like failures: the exchange of every other
rank breaks. So an error of kind "peer" is only believed when `blame_s` has
passed without a better one, and once the cause is known the errors that follow
are not reported.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeAlias

from shoal.runtime.transport.messages.supervisor import Failed, Finished

LEAVE_SIGNALS = {
    signal.SIGINT: signal.SIGUSR1,  # not SIGINT: the script may have its own Ctrl-C handler for running alone
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
}
"""Signal to the supervisor -> signal to its workers."""


# ---- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    """A worker was forked; a later incarnation has to catch up with the others first."""

    rank: int
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class WorkerCaughtUp:
    """A replacement has the state of the others and runs with them."""

    rank: int


@dataclass(frozen=True, slots=True)
class JobAdvanced:
    """The job made progress beyond where it ever was."""


@dataclass(frozen=True, slots=True)
class WorkerSuspected:
    """A process keeps the others waiting, without an excuse."""

    rank: int
    incarnation: int
    why: str


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """A worker process exited; all its messages were handled before."""

    rank: int
    code: int  # minus the signal that killed it
    lost_with: str = ""  # the host that was lost, and why: its process may even live on, fenced


@dataclass(frozen=True, slots=True)
class WorkerUnplaced:
    """No host has capacity for this incarnation of a rank: it is started when one joins."""

    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class ServerStarted:
    """A server was forked."""

    number: int
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class ServerUnplaced:
    """A server waits for its service."""

    number: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class ServerExited:
    """A server exited; `is_wanted` unless it was told to leave."""

    number: int
    code: int
    is_wanted: bool = True
    lost_with: str = ""
    """The host that was lost with it, and why."""


@dataclass(frozen=True, slots=True)
class ServerSuspected:
    """A server is silent, without an excuse."""

    number: int
    incarnation: int
    why: str


@dataclass(frozen=True, slots=True)
class StateLost:
    """Parts of the weights were lost with their only holders. Event, and cause if it ends the job."""

    servers: tuple[int, ...]
    num_times: int = 1  # without progress of the job
    rank: int | None = None  # it died in one step with the server that had its part
    holds_parts: bool = False  # or it alone held parts of the weights, as every worker does
    has_dropped_results: bool = (
        False  # or the others no longer keep the results that a replacement would need
    )
    has_own_group: bool = False  # or the process group is the script's own, and it died
    died: WorkerDeath | None = None  # how that worker ended


@dataclass(frozen=True, slots=True)
class ResultsDropped:
    """A worker dropped results that a replacement of another would need: they had become too large."""

    rank: int


@dataclass(frozen=True, slots=True)
class OwnGroupFormed:
    """The script forms a process group of its own, which does not survive the death of a worker."""

    rank: int


@dataclass(frozen=True, slots=True)
class CoordinatorServes:
    """The coordinator has answered."""


@dataclass(frozen=True, slots=True)
class CoordinatorExited:
    """The coordinator exited; `is_final` where it reported that a restart would not help."""

    code: int
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class LeaveRequested:
    """A signal asks the job to leave; `to_resize`: it is launched again at once, with other workers or hosts."""

    signum: signal.Signals
    to_resize: bool = False


@dataclass(frozen=True, slots=True)
class ClockTick:
    """Time has passed."""


Event: TypeAlias = (
    WorkerStarted
    | WorkerCaughtUp
    | JobAdvanced
    | WorkerSuspected
    | Failed
    | Finished
    | WorkerExited
    | WorkerUnplaced
    | ServerStarted
    | ServerUnplaced
    | ServerExited
    | ServerSuspected
    | StateLost
    | ResultsDropped
    | OwnGroupFormed
    | CoordinatorServes
    | CoordinatorExited
    | LeaveRequested
    | ClockTick
)


# ---- actions -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskToLeave:
    """Ask these ranks to finish their step, save and leave."""

    ranks: tuple[int, ...]
    signum: signal.Signals


@dataclass(frozen=True, slots=True)
class KillWorkers:
    """Kill these ranks now."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReplaceWorker:
    """Start this incarnation of a rank whose worker died."""

    died: WorkerDeath
    incarnation: int


@dataclass(frozen=True, slots=True)
class KillServers:
    """Kill these servers now."""

    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReplaceServer:
    """Start this incarnation of a server that died."""

    died: ServerDeath
    incarnation: int


@dataclass(frozen=True, slots=True)
class RollBack:
    """Tell the user that the job goes back to its newest checkpoint. Live processes are killed."""

    lost: StateLost


@dataclass(frozen=True, slots=True)
class RestartAll:
    """All processes are gone: start these incarnations, by rank and by number, from the newest checkpoint."""

    ranks: dict[int, int]
    servers: dict[int, int]


@dataclass(frozen=True, slots=True)
class RestartCoordinator:
    """Restart the coordinator; it goes on from its journal."""


Action: TypeAlias = (
    AskToLeave
    | KillWorkers
    | ReplaceWorker
    | KillServers
    | ReplaceServer
    | RollBack
    | RestartAll
    | RestartCoordinator
)


# ---- causes --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerDeath:
    """A worker exited without a report, or badly after its last one."""

    rank: int
    code: int
    finished: bool = False
    why: str = ""  # why we killed it, if we did
    num_times: int = 1  # in a row, without progress of the job
    lost_with: str = ""  # the host that was lost, and why


@dataclass(frozen=True, slots=True)
class HostMissing:
    """No host joined for ranks and servers without one."""

    ranks: tuple[int, ...]
    waited_s: float
    lost_with: str  # the host that was lost, and why
    servers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerDeath:
    """A server died too often."""

    number: int
    code: int
    why: str = ""  # why we killed it, if we did
    num_times: int = 1  # in a row, without progress of the job
    lost_with: str = ""  # the host that was lost, and why


@dataclass(frozen=True, slots=True)
class CoordinatorDeath:
    """The coordinator cannot be restarted, or died again and again."""

    code: int


@dataclass(frozen=True, slots=True)
class LeftOnRequest:
    """The job left because it was asked to; `late` names the ranks that had to be killed."""

    signum: signal.Signals
    late: tuple[int, ...] = ()
    to_resize: bool = False


@dataclass(frozen=True, slots=True)
class StuckAtExit:
    """Scripts ended, but their processes did not."""

    ranks: tuple[int, ...]


Cause: TypeAlias = (
    Failed
    | WorkerDeath
    | HostMissing
    | ServerDeath
    | StateLost
    | CoordinatorDeath
    | LeftOnRequest
    | StuckAtExit
)


class JobPhase(StrEnum):
    """Progress of a job towards its end."""

    RUNNING = "running"
    LEAVING = "leaving"  # asked to: finishing the step and saving
    ENDING = "ending"  # the cause is known; remaining processes have a moment to flush, then are killed
    ENDED = "ended"


EDGES = {
    JobPhase.RUNNING: {JobPhase.LEAVING, JobPhase.ENDING, JobPhase.ENDED},
    JobPhase.LEAVING: {JobPhase.ENDING, JobPhase.ENDED},
    JobPhase.ENDING: {JobPhase.ENDED},
    JobPhase.ENDED: set(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartConfig:
    """Number of restarts, and the length of each wait of an ending job."""

    max_restarts: int = 0
    """Replacements of a rank without progress of the job; the next death ends it. 0: none."""

    max_host_losses: int = 10
    """Replacements of a rank because of lost hosts, without progress of the job: not the rank's fault."""

    host_timeout_s: float = 600.0
    """How long ranks wait for a host with capacity before the job ends."""

    all_hold_parts: bool = False
    """Each worker holds state that no other has: when one dies, all restart from the newest snapshot."""

    max_coordinator_restarts: int = 3
    """Consecutive deaths of a coordinator before it had served for `steady_s`."""

    steady_s: float = 0.1
    """A coordinator that served this long did not die of its start or its first requests."""

    grace_s: float = 60.0
    """Time from the request to leave to the kill."""

    blame_s: float = 1.0
    """Time that a broken exchange waits for a better explanation."""

    settle_s: float = 0.5
    """Delay from the cause to the kill: time for the other processes to flush their output."""

    exit_s: float = 30.0
    """From the last script's end to the end of its process."""

    reap_s: float = 10.0
    """Time from the kill to its confirmation. Longer only if the kernel itself is stuck, for example in a dead disk."""


class JobLifecycle:
    """Decides whether a job continues, and keeps the one cause for which it ended."""

    def __init__(self, *, num_workers: int, restart: RestartConfig) -> None:
        self.phase = JobPhase.RUNNING
        self.cause: Cause | None = None
        self.finished: dict[int, Finished] = {}
        self.failures: list[Failed] = []
        self.num_restarts = 0
        self._num_workers, self._restart = num_workers, restart
        self._alive: dict[int, int] = {}  # rank -> incarnation
        self._incarnations: dict[int, int] = {}  # the same, including dead ones
        self._behind: set[int] = set()  # replacements that have not caught up
        self._num_deaths: dict[int, int] = {}  # by rank, since the job last progressed
        self._unrecovered: WorkerDeath | None = None  # newest death since then
        self._num_host_losses: dict[int, int] = {}  # the same, of deaths with a host
        self._unplaced: set[int] = set()  # ranks that wait for a host
        self._unplaced_servers: dict[int, int] = {}  # number -> incarnation that waits for a service
        self._unplaced_since = 0.0
        self._lost_with = ""  # the newest loss of a host
        self._why_killed: dict[int, str] = {}
        self._servers: dict[int, int] = {}  # number -> incarnation, of those that live
        self._num_server_deaths: dict[int, int] = {}  # as for ranks
        self._num_server_host_losses: dict[int, int] = {}
        self._why_servers_killed: dict[int, str] = {}
        self._num_losses = 0  # full restarts since the job last progressed
        self._starting_anew: RestartAll | None = None  # pending until all processes are gone
        self._has_dropped_results = False  # since they were started
        self._has_own_group = False  # under torchrun's interface
        self._coordinator_served_at: float | None = None
        self._num_coordinator_deaths = 0
        self._suspicion: tuple[Failed, float] | None = None  # broken exchange, and deadline
        self._kill_at: float | None = None
        self._give_up_at: float | None = None

    @property
    def deadline(self) -> float | None:
        """Time of the next ClockTick that has an effect."""
        if self.phase is JobPhase.ENDED:
            return None
        times = [
            self._kill_at,
            self._give_up_at,
            self._suspicion[1] if self._suspicion else None,
            self._place_by,
        ]
        return min((at for at in times if at is not None), default=None)

    @property
    def _place_by(self) -> float | None:
        """Deadline at which ranks and servers without a host end the job."""
        is_ending = self.phase not in (JobPhase.RUNNING, JobPhase.LEAVING)
        if is_ending or not (self._unplaced or self._unplaced_servers):
            return None
        return self._unplaced_since + self._restart.host_timeout_s

    @property
    def exit_code(self) -> int:
        """Exit code of the job's process, once it has ended."""
        match self.cause:
            case None:
                return 0
            case Failed():
                # A script that leaves with sys.exit does so on every rank; which rank is first is chance,
                # so rank 0 decides.
                alike = [f for f in self.failures if (f.kind, f.error) == (self.cause.kind, self.cause.error)]
                return min(alike, key=lambda f: f.rank != 0).exit_code
            case LeftOnRequest(signum):
                return 128 + signum
            case _:
                return 3

    def handle(self, event: Event, now: float) -> list[Action]:
        """Apply one event; return what must now be done, in order."""
        if self.phase is JobPhase.ENDED:
            return []
        match event:
            case WorkerStarted(rank, incarnation):
                self._alive[rank] = self._incarnations[rank] = incarnation
                self._unplaced.discard(rank)
                if incarnation:
                    self._behind.add(rank)
                return []
            case WorkerCaughtUp(rank):
                self._behind.discard(rank)
                return (
                    [AskToLeave((rank,), self.cause.signum)] if isinstance(self.cause, LeftOnRequest) else []
                )
            case JobAdvanced():
                self._num_deaths.clear()
                self._num_host_losses.clear()
                self._num_server_deaths.clear()
                self._num_server_host_losses.clear()
                self._num_losses = 0
                self._unrecovered = None
                return []
            case WorkerSuspected(rank, incarnation, why):
                return self._suspected(rank, incarnation, why)
            case ServerStarted(number, incarnation):
                self._servers[number] = incarnation
                self._unplaced_servers.pop(number, None)
                return []
            case ServerUnplaced(number, incarnation):
                self._wait_for_host(now)
                self._unplaced_servers[number] = incarnation
                return []
            case ServerExited():
                return self._server_exited(event, now)
            case ServerSuspected(number, incarnation, why):
                if self._servers.get(number) != incarnation or self.phase is JobPhase.ENDING:
                    return []
                self._why_servers_killed[number] = why
                return [KillServers((number,))]
            case StateLost():
                return self._state_lost(event, now)
            case ResultsDropped():
                return self._results_dropped()
            case OwnGroupFormed():
                self._has_own_group = True
                return []
            case Failed() | Finished() if self._starting_anew:
                return []  # from one that is being killed
            case Failed():
                return self._failed(event, now)
            case Finished():
                self.finished[event.rank] = event
                if len(self.finished) == self._num_workers and self._kill_at is None:
                    self._kill_at = now + self._restart.exit_s
                return []
            case WorkerExited(rank, code, lost_with):
                return self._exited(rank, code, lost_with, now)
            case WorkerUnplaced(rank, incarnation):
                return self._not_placed(rank, incarnation, now)
            case CoordinatorServes():
                self._coordinator_served_at = self._coordinator_served_at or now
                return []
            case CoordinatorExited(code, is_final):
                return self._coordinator_exited(code, is_final, now)
            case LeaveRequested(signum, to_resize):
                return self._asked(LeftOnRequest(signum, to_resize=to_resize), now)
            case ClockTick():
                return self._tick(now)

    def _failed(self, failed: Failed, now: float) -> list[Action]:
        self.failures.append(failed)
        if self.phase is JobPhase.ENDING:
            return []
        if failed.error == "Interrupted":
            if self.phase is JobPhase.LEAVING:
                return []
            # The worker was asked directly, not the supervisor: the others follow it.
            is_terminated = failed.exit_code == 128 + signal.SIGTERM
            return self._leave(LeftOnRequest(signal.SIGTERM if is_terminated else signal.SIGINT), now)
        if failed.kind == "peer":
            # Ranks that leave first break the exchange of those that leave last.
            if self.phase is JobPhase.RUNNING and self._suspicion is None:
                self._suspicion = (failed, now + self._restart.blame_s)
            return []
        return self._end(failed, now)

    def _suspected(self, rank: int, incarnation: int, why: str) -> list[Action]:
        if self.phase not in (JobPhase.RUNNING, JobPhase.LEAVING) or self._alive.get(rank) != incarnation:
            return []  # about one that is gone, or leaves anyway
        self._why_killed[rank] = why
        return [KillWorkers((rank,))]

    def _not_placed(self, rank: int, incarnation: int, now: float) -> list[Action]:
        self._wait_for_host(now)
        self._unplaced.add(rank)
        self._incarnations[rank] = incarnation - 1  # the newest that was started
        # No rank can finish a step while one has no host.
        return self._kill_all(now) if self.phase is JobPhase.LEAVING else []

    def _wait_for_host(self, now: float) -> None:
        if not self._unplaced and not self._unplaced_servers:
            self._unplaced_since = now

    def _exited(self, rank: int, code: int, lost_with: str, now: float) -> list[Action]:
        incarnation = self._alive.pop(rank, 0)
        self._behind.discard(rank)
        if self._starting_anew and self.phase is JobPhase.RUNNING:
            return self._start_anew()
        actions: list[Action] = []
        if self.phase is not JobPhase.ENDING and not self._explains(rank, code):
            actions = self._died(rank, incarnation, code, lost_with, now)
            if any(isinstance(action, (ReplaceWorker, RollBack)) for action in actions):
                return actions
        if not self._alive:
            if self.is_resizing and len(self.finished) == self._num_workers:
                self.cause = None  # the script was at its end
            if self._suspicion and self.cause is None:
                # No process is left that could explain it better.
                self.cause = self._unrecovered or self._suspicion[0]
            self.phase, self._kill_at, self._give_up_at, self._suspicion = JobPhase.ENDED, None, None, None
        return actions

    def _died(self, rank: int, incarnation: int, code: int, lost_with: str, now: float) -> list[Action]:
        self._lost_with = lost_with or self._lost_with
        counts = self._num_host_losses if lost_with else self._num_deaths
        num_times = counts[rank] = counts.get(rank, 0) + 1
        most = self._most_deaths(lost_with)
        why = self._why_killed.pop(rank, "")
        died = WorkerDeath(rank, code, rank in self.finished, why, num_times, lost_with)
        # Once a rank has left, a replacement has no donor and no peers. With a script's own group, or a
        # loop whose model is partitioned over the ranks, ranks that lose a peer exit too, and all of them
        # are restarted.
        leave_with_it = self._has_own_group or self._restart.all_hold_parts
        lost_peer = [f for f in self.failures if f.kind == "peer" and leave_with_it]
        have_others_left = bool(self.finished or len(self.failures) > len(lost_peer))
        if self.is_resizing and have_others_left and self._restart.max_restarts:
            return self._kill_all(now)  # all are launched again, from the saved state
        if num_times > most or not self._restart.max_restarts or have_others_left:
            return self._end(died, now)
        takes_all_back = self._restart.all_hold_parts or self._has_dropped_results or self._has_own_group
        if self.phase is JobPhase.LEAVING and (not self._alive or takes_all_back):
            return self._kill_all(now) if self.is_resizing else self._end(died, now)
        self._unrecovered = died
        if takes_all_back:
            own, parts = self._has_own_group, self._restart.all_hold_parts and not self._has_own_group
            lost = StateLost(
                (),
                num_times,
                rank,
                holds_parts=parts,
                has_dropped_results=not parts and not own,
                has_own_group=own,
                died=died,
            )
            return self._begin_anew(lost)
        self.num_restarts += 1
        return [ReplaceWorker(died, incarnation + 1)]

    def _most_deaths(self, lost_with: str) -> int:
        """Limit for replacing a process; the loss of a host is not its fault."""
        most = self._restart.max_restarts
        return max(most, self._restart.max_host_losses) if lost_with and most else most

    def _explains(self, rank: int, code: int) -> bool:
        """True for an exit that was announced, requested, or too late to matter."""
        if any(failed.rank == rank for failed in self.failures):
            return True
        if self.phase is JobPhase.LEAVING and -code in LEAVE_SIGNALS.values():
            return True  # asked before its handler was in place
        if code == -signal.SIGKILL and self.finished and self._restart.max_restarts:
            return not self._has_own_group  # no rank leaves before all reach the script's end, so it had
        return code == 0 and rank in self.finished

    def _server_exited(self, exited: ServerExited, now: float) -> list[Action]:
        number, lost_with = exited.number, exited.lost_with
        incarnation = self._servers.pop(number, 0)
        why = self._why_servers_killed.pop(number, "")
        if self._starting_anew and self.phase is JobPhase.RUNNING:
            return self._start_anew()
        # No rank leaves before all have reached the script's end, and from there on servers are not needed.
        if not exited.is_wanted or self.finished or self.phase not in (JobPhase.RUNNING, JobPhase.LEAVING):
            return []
        counts = self._num_server_host_losses if lost_with else self._num_server_deaths
        num_times = counts[number] = counts.get(number, 0) + 1
        self._lost_with = lost_with or self._lost_with
        died = ServerDeath(number, exited.code, why, num_times, lost_with)
        if num_times > self._most_deaths(lost_with):
            return self._end(died, now)
        self.num_restarts += 1
        return [ReplaceServer(died, incarnation + 1)]

    def _state_lost(self, lost: StateLost, now: float) -> list[Action]:
        if self.phase not in (JobPhase.RUNNING, JobPhase.LEAVING) or self._starting_anew or self.finished:
            return []
        self._num_losses += 1
        lost = StateLost(lost.servers, self._num_losses, lost.rank)
        if self.phase is JobPhase.LEAVING or self._num_losses > 1 or not self._restart.max_restarts:
            return self._end(lost, now)
        return self._begin_anew(lost)

    def _results_dropped(self) -> list[Action]:
        if self._has_dropped_results or self._starting_anew:
            return []
        self._has_dropped_results = True
        if not self._behind or self.phase is not JobPhase.RUNNING:
            return []
        # One was replaced a moment before this was known, and its results may be lost everywhere.
        return self._begin_anew(StateLost((), rank=min(self._behind), has_dropped_results=True))

    def _begin_anew(self, lost: StateLost) -> list[Action]:
        # Surviving processes hold state newer than any checkpoint. All must be gone before the first
        # restarts: a late one would be lost again, from the new group.
        self._starting_anew = RestartAll(
            {rank: incarnation + 1 for rank, incarnation in self._incarnations.items()},
            {number: incarnation + 1 for number, incarnation in self._servers.items()}
            | self._unplaced_servers,
        )
        self._suspicion = None
        self.failures.clear()
        kill: list[Action] = [
            KillWorkers(tuple(sorted(self._alive))),
            KillServers(tuple(sorted(self._servers))),
        ]
        return [RollBack(lost), *kill, *self._start_anew()]

    def _start_anew(self) -> list[Action]:
        if self._alive or self._servers:
            return []
        anew, self._starting_anew = self._starting_anew, None
        assert anew is not None
        self._has_dropped_results = self._has_own_group = False
        self.num_restarts += 1
        return [anew]

    def _coordinator_exited(self, code: int, is_final: bool, now: float) -> list[Action]:
        served_at, self._coordinator_served_at = self._coordinator_served_at, None
        if self.phase not in (JobPhase.RUNNING, JobPhase.LEAVING) or not (self._alive or self._starting_anew):
            return []
        if served_at is not None and now - served_at >= self._restart.steady_s:
            self._num_coordinator_deaths = 0
        self._num_coordinator_deaths += 1
        if is_final or self._num_coordinator_deaths > self._restart.max_coordinator_restarts:
            return self._end(CoordinatorDeath(code), now)
        return [RestartCoordinator()]

    @property
    def has_own_group(self) -> bool:
        """The script forms a process group of its own."""
        return self._has_own_group

    @property
    def is_resizing(self) -> bool:
        """The job ends, or has ended, to be launched again with other workers or hosts."""
        return isinstance(self.cause, LeftOnRequest) and self.cause.to_resize

    def _asked(self, asked: LeftOnRequest, now: float) -> list[Action]:
        if not self._alive:
            self.cause, self.phase = self.cause or asked, JobPhase.ENDED
            return []
        if self._starting_anew or self._unplaced:  # no rank could finish a step
            self.cause = asked
            return self._kill_all(now)
        if self.phase is JobPhase.RUNNING:
            return self._leave(asked, now)
        if self.is_resizing:
            self.cause = asked  # they leave already; now for good
            return []
        return self._kill_all(now)  # asked again, or already ending: now

    def _leave(self, asked: LeftOnRequest, now: float) -> list[Action]:
        self.cause, self.phase = asked, JobPhase.LEAVING
        self._kill_at = now + self._restart.grace_s
        # One request is enough for all to leave at one step. A replacement that has not caught up could
        # only break off while the others wait for it; it is asked once it has.
        ranks = self._alive.keys() - self._behind or self._alive.keys()
        return [AskToLeave(tuple(sorted(ranks)), asked.signum)]

    def _end(self, cause: Cause, now: float) -> list[Action]:
        self.cause, self.phase, self._suspicion = cause, JobPhase.ENDING, None
        self._kill_at = now + self._restart.settle_s
        return []

    def _tick(self, now: float) -> list[Action]:
        if self._suspicion and now >= self._suspicion[1]:
            return self._end(self._unrecovered or self._suspicion[0], now)
        if self._place_by is not None and now >= self._place_by:
            ranks = tuple(sorted(self._unplaced))
            servers = tuple(sorted(self._unplaced_servers))
            self._end(HostMissing(ranks, now - self._unplaced_since, self._lost_with, servers), now)
            return [] if self._alive else self._kill_all(now)
        if self._kill_at is not None and now >= self._kill_at and self._alive:
            late = tuple(sorted(self._alive))
            if isinstance(self.cause, LeftOnRequest):
                self.cause = replace(self.cause, late=late)
            elif self.cause is None:
                self.cause = StuckAtExit(late)
            return self._kill_all(now)
        if self._give_up_at is not None and now >= self._give_up_at:
            self.phase, self._give_up_at = JobPhase.ENDED, None
        return []

    def _kill_all(self, now: float) -> list[Action]:
        self._kill_at, self._suspicion, self.phase = None, None, JobPhase.ENDING
        self._give_up_at = now + self._restart.reap_s
        if not self._alive:
            self.phase, self._give_up_at = JobPhase.ENDED, None
        return [KillWorkers(tuple(sorted(self._alive)))]
