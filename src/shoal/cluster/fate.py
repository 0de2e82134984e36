"""How a job ends: from what its workers say and how they die, to one cause.

Pure: no clock, no process, no socket. `supervisor.py` feeds events in with
the time at which they came and carries out the actions that come back.

    RUNNING ──asked to leave──▶ LEAVING ──all gone──▶ ENDED
       │                           │
       ├──a worker failed or died──┴──▶ ENDING ──all gone──▶ ENDED
       └──all finished, all gone──────▶ ENDED

A failure has consequences that look like failures: the exchange of every
other rank breaks. So an error of kind "peer" is only believed when `blame_s`
has passed without a better one, and once the cause is known whatever follows
is not reported.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from shoal.wire.messages import Failed, Finished

LEAVE_SIGNALS = {
    signal.SIGINT: signal.SIGUSR1,  # not SIGINT: a script's own idea of Ctrl-C is for when it runs alone
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
}
"""What the supervisor was sent -> what it sends its workers."""


class Phase(StrEnum):
    """How far the job is from its end."""

    RUNNING = "running"
    LEAVING = "leaving"  # asked to: finishing the step and saving
    ENDING = "ending"  # the cause is known; whoever is left has a moment to flush, then is killed
    ENDED = "ended"


EDGES = {
    Phase.RUNNING: {Phase.LEAVING, Phase.ENDING, Phase.ENDED},
    Phase.LEAVING: {Phase.ENDING, Phase.ENDED},
    Phase.ENDING: {Phase.ENDED},
    Phase.ENDED: set(),
}


# ---- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """A worker was forked."""

    rank: int


@dataclass(frozen=True, slots=True)
class Exited:
    """A worker is gone; all it said has been handled before."""

    rank: int
    code: int  # minus the signal that killed it


@dataclass(frozen=True, slots=True)
class CoordinatorExited:
    """The coordinator is gone."""

    code: int


@dataclass(frozen=True, slots=True)
class Asked:
    """The user or the system wants the job to leave."""

    signum: signal.Signals


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event: TypeAlias = Started | Failed | Finished | Exited | CoordinatorExited | Asked | Tick


# ---- actions -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskToLeave:
    """Tell these ranks to finish their step, save and leave."""

    ranks: tuple[int, ...]
    signum: signal.Signals


@dataclass(frozen=True, slots=True)
class Kill:
    """End these ranks now."""

    ranks: tuple[int, ...]


Action: TypeAlias = AskToLeave | Kill


# ---- causes --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Died:
    """A worker ended without a word, or badly after its last one."""

    rank: int
    code: int
    finished: bool = False


@dataclass(frozen=True, slots=True)
class CoordinatorDied:
    """Nobody is left to agree through."""

    code: int


@dataclass(frozen=True, slots=True)
class Left:
    """The job left because it was asked to; `late` names the ranks that had to be killed."""

    signum: signal.Signals
    late: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Stuck:
    """Scripts ended, but their processes did not."""

    ranks: tuple[int, ...]


Cause: TypeAlias = Failed | Died | CoordinatorDied | Left | Stuck


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long each wait of an ending job may take."""

    grace_s: float = 60.0
    """From being asked to leave to being killed."""

    blame_s: float = 1.0
    """How long a broken exchange waits for a better explanation."""

    settle_s: float = 0.5
    """From the cause to the kill: time for the others to write out what they printed."""

    exit_s: float = 30.0
    """From the last script's end to the end of its process."""

    reap_s: float = 10.0
    """From the kill to the news of it. Longer only where the kernel itself is stuck, in a dead disk say."""


class Fate:
    """The end of one job, or that there is none yet."""

    def __init__(self, *, num_workers: int, patience: Patience) -> None:
        self.phase = Phase.RUNNING
        self.cause: Cause | None = None
        self.finished: dict[int, Finished] = {}
        self.failures: list[Failed] = []
        self._num_workers, self._patience = num_workers, patience
        self._alive: set[int] = set()
        self._suspicion: tuple[Failed, float] | None = None  # a broken exchange, and until when it may wait
        self._kill_at: float | None = None
        self._give_up_at: float | None = None

    @property
    def deadline(self) -> float | None:
        """When a Tick has something to do, if nothing else happens before."""
        times = [self._kill_at, self._give_up_at, self._suspicion[1] if self._suspicion else None]
        return min((at for at in times if at is not None), default=None)

    @property
    def exit_code(self) -> int:
        """What the job's process ends with, once it has."""
        match self.cause:
            case None:
                return 0
            case Failed():
                # A script that leaves with sys.exit does so on every rank; which came first is chance, rank 0 is not.
                alike = [f for f in self.failures if (f.kind, f.error) == (self.cause.kind, self.cause.error)]
                return min(alike, key=lambda f: f.rank != 0).exit_code
            case Left(signum):
                return 128 + signum
            case _:
                return 3

    def handle(self, event: Event, now: float) -> list[Action]:
        """Apply one event; return what must now be done, in order."""
        if self.phase is Phase.ENDED:
            return []
        match event:
            case Started(rank):
                self._alive.add(rank)
                return []
            case Failed():
                return self._failed(event, now)
            case Finished():
                self.finished[event.rank] = event
                if len(self.finished) == self._num_workers and self._kill_at is None:
                    self._kill_at = now + self._patience.exit_s
                return []
            case Exited(rank, code):
                return self._exited(rank, code, now)
            case CoordinatorExited(code):
                return self._end(CoordinatorDied(code), now) if self.cause is None and self._alive else []
            case Asked(signum):
                return self._asked(signum, now)
            case Tick():
                return self._tick(now)

    def _failed(self, failed: Failed, now: float) -> list[Action]:
        self.failures.append(failed)
        if self.phase is Phase.ENDING:
            return []
        if failed.error == "Interrupted":
            if self.phase is Phase.LEAVING:
                return []
            # Somebody asked the worker and not us: the others follow it.
            return self._leave(
                signal.SIGTERM if failed.exit_code == 128 + signal.SIGTERM else signal.SIGINT, now
            )
        if failed.kind == "peer":
            # Those who leave first break the exchange of those who leave last.
            if self.phase is Phase.RUNNING and self._suspicion is None:
                self._suspicion = (failed, now + self._patience.blame_s)
            return []
        return self._end(failed, now)

    def _exited(self, rank: int, code: int, now: float) -> list[Action]:
        self._alive.discard(rank)
        actions: list[Action] = []
        if self.phase is not Phase.ENDING and not self._explains(rank, code):
            actions = self._end(Died(rank, code, finished=rank in self.finished), now)
        if not self._alive:
            if self._suspicion and self.cause is None:
                self.cause = self._suspicion[0]  # nobody is left who could explain it
            self.phase, self._kill_at, self._give_up_at, self._suspicion = Phase.ENDED, None, None, None
        return actions

    def _explains(self, rank: int, code: int) -> bool:
        """Whether this end was announced, or wanted."""
        if any(failed.rank == rank for failed in self.failures):
            return True
        if self.phase is Phase.LEAVING and -code in LEAVE_SIGNALS.values():
            return True  # asked before its handler was in place
        return code == 0 and rank in self.finished

    def _asked(self, signum: signal.Signals, now: float) -> list[Action]:
        if not self._alive:
            self.cause, self.phase = self.cause or Left(signum), Phase.ENDED
            return []
        if self.phase is Phase.RUNNING:
            return self._leave(signum, now)
        return self._kill_all(now)  # asked again, or while it ends anyway: now

    def _leave(self, signum: signal.Signals, now: float) -> list[Action]:
        self.cause, self.phase = Left(signum), Phase.LEAVING
        self._kill_at = now + self._patience.grace_s
        return [AskToLeave(tuple(sorted(self._alive)), signum)]

    def _end(self, cause: Cause, now: float) -> list[Action]:
        self.cause, self.phase, self._suspicion = cause, Phase.ENDING, None
        self._kill_at = now + self._patience.settle_s
        return []

    def _tick(self, now: float) -> list[Action]:
        if self._suspicion and now >= self._suspicion[1]:
            return self._end(self._suspicion[0], now)
        if self._kill_at is not None and now >= self._kill_at and self._alive:
            late = tuple(sorted(self._alive))
            if isinstance(self.cause, Left):
                self.cause = Left(self.cause.signum, late)
            elif self.cause is None:
                self.cause = Stuck(late)
            return self._kill_all(now)
        if self._give_up_at is not None and now >= self._give_up_at:
            self.phase, self._give_up_at = Phase.ENDED, None
        return []

    def _kill_all(self, now: float) -> list[Action]:
        self._kill_at, self._suspicion, self.phase = None, None, Phase.ENDING
        self._give_up_at = now + self._patience.reap_s
        return [Kill(tuple(sorted(self._alive)))]
