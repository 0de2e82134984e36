"""What happens to a job, what is done about it, and what it ends of: the words that `fate.py` thinks in.

Pure data. What workers say of themselves (Failed, Finished) are messages and
live in `shoal.runtime.transport.messages.supervisor`.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import TypeAlias

from shoal.runtime.transport.messages.supervisor import Failed, Finished

LEAVE_SIGNALS = {
    signal.SIGINT: signal.SIGUSR1,  # not SIGINT: a script's own idea of Ctrl-C is for when it runs alone
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
}
"""What the supervisor was sent -> what it sends its workers."""


# ---- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """A worker was forked; a later incarnation has to catch up before it is one of the others."""

    rank: int
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """A replacement has the state of the others and runs with them."""

    rank: int


@dataclass(frozen=True, slots=True)
class Advanced:
    """The job got ahead of where it ever was."""


@dataclass(frozen=True, slots=True)
class Suspected:
    """A process keeps the others waiting, and nothing excuses it."""

    rank: int
    incarnation: int
    why: str


@dataclass(frozen=True, slots=True)
class Exited:
    """A worker is gone; all it said has been handled before."""

    rank: int
    code: int  # minus the signal that killed it


@dataclass(frozen=True, slots=True)
class ServerStarted:
    """A server was forked."""

    number: int
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class ServerExited:
    """A server is gone; `is_wanted` where nobody sent it away."""

    number: int
    code: int
    is_wanted: bool = True


@dataclass(frozen=True, slots=True)
class ServerSuspected:
    """A server says nothing, and nothing excuses it."""

    number: int
    incarnation: int
    why: str


@dataclass(frozen=True, slots=True)
class StateLost:
    """Servers died that alone held parts of the weights. Event, and cause where it ends the job."""

    servers: tuple[int, ...]
    num_times: int = 1  # without the job getting ahead
    rank: int | None = (
        None  # instead of servers: it died in a step together with a server that had its part in it
    )
    holds_parts: bool = False  # or it alone held parts of the weights, as every worker does
    has_let_go: bool = False  # or the others no longer keep what a replacement would need
    died: Died | None = None  # how that worker ended


@dataclass(frozen=True, slots=True)
class LetGo:
    """A worker keeps no longer what a replacement of another would need: it became too much."""

    rank: int


@dataclass(frozen=True, slots=True)
class CoordinatorServes:
    """The coordinator has answered."""


@dataclass(frozen=True, slots=True)
class CoordinatorExited:
    """The coordinator is gone; `is_final` where it said that it would be no better the next time."""

    code: int
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    """The user or the system wants the job to leave."""

    signum: signal.Signals


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event: TypeAlias = (
    Started
    | CaughtUp
    | Advanced
    | Suspected
    | Failed
    | Finished
    | Exited
    | ServerStarted
    | ServerExited
    | ServerSuspected
    | StateLost
    | LetGo
    | CoordinatorServes
    | CoordinatorExited
    | Asked
    | Tick
)


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


@dataclass(frozen=True, slots=True)
class Replace:
    """Start this incarnation of the rank of one that died, in its place."""

    died: Died
    incarnation: int


@dataclass(frozen=True, slots=True)
class KillServers:
    """End these servers now."""

    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReplaceServer:
    """Start this incarnation of a server that died, in its place."""

    died: ServerDied
    incarnation: int


@dataclass(frozen=True, slots=True)
class GoBack:
    """Tell the user that the job goes back to its newest checkpoint. Who lives is killed."""

    lost: StateLost


@dataclass(frozen=True, slots=True)
class StartAnew:
    """All are gone: start these incarnations, by rank and by number, to go on from the newest checkpoint."""

    ranks: dict[int, int]
    servers: dict[int, int]


@dataclass(frozen=True, slots=True)
class RestartCoordinator:
    """Start the coordinator again; it goes on from its journal."""


Action: TypeAlias = (
    AskToLeave | Kill | Replace | KillServers | ReplaceServer | GoBack | StartAnew | RestartCoordinator
)


# ---- causes --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Died:
    """A worker ended without a word, or badly after its last one."""

    rank: int
    code: int
    finished: bool = False
    why: str = ""  # why we killed it, where we did
    num_times: int = 1  # in a row, without the job getting ahead


@dataclass(frozen=True, slots=True)
class ServerDied:
    """A server died, and once too often."""

    number: int
    code: int
    why: str = ""  # why we killed it, where we did
    num_times: int = 1  # in a row, without the job getting ahead


@dataclass(frozen=True, slots=True)
class CoordinatorDied:
    """Nobody is left to agree through: it cannot go on, or died again and again."""

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


Cause: TypeAlias = Failed | Died | ServerDied | StateLost | CoordinatorDied | Left | Stuck
