"""Journal entries: one for each promise of the coordinator, and the state they add up to.

Pure. The state machines return `Persist(entry)` with the answers that make the
promise; `journal.py` writes the entry before the answers are sent. After a
death the next coordinator replays them from a `JournalState`. Steps and clocks
are not in it: they never pass through the coordinator.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from shoal.cluster.coordinator.leases import LeaseSnapshot
from shoal.cluster.ledger.entries import LedgerFact
from shoal.runtime.transport.messages.message import Count, Message
from shoal.runtime.transport.messages.server_coordinator import JoinServer
from shoal.runtime.transport.messages.supervisor import Noted, Reaped, ReapedServer, Saved, ScaleServers
from shoal.runtime.transport.messages.worker_coordinator import AskLease, Join, ViewFormed


class _Entry(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    pass


class Granted(_Entry, frozen=True, tag="granted"):
    """All ranks make this call; or, without one, all have reached the end of the script."""

    number: Count
    call: tuple[str, str] | None  # kind and detail


@dataclass(frozen=True, slots=True)
class StoreChanged:
    """Changes of the store, and answers to be repeated when their request is repeated."""

    values: dict[str, bytes | None]  # None: deleted
    answers: dict[int, tuple[int, Message]]  # by client: its newest serial, and the answer to it


class ServerFilled(_Entry, frozen=True, tag="server-filled"):
    """A server has these slots and follows their updates."""

    number: Count
    incarnation: Count
    view: Count
    slots: list[Count]


class ServerLostStep(_Entry, frozen=True, tag="server-lost-step"):
    """This server can never apply a step that counts elsewhere: a rank's part of it is lost."""

    number: Count
    incarnation: Count
    view: Count
    rank: Count


class LeaseAsked(_Entry, frozen=True, tag="lease-asked"):
    """A worker has asked for leases; `at` is the host's clock, which survives a restart of the coordinator."""

    at: float
    ask: AskLease


class LeaseTicked(_Entry, frozen=True, tag="lease-ticked"):
    """Time has passed, and a lease was handed out because of it."""

    at: float


class LeaseReturned(_Entry, frozen=True, tag="lease-returned"):
    """Leases of this rank's incarnations below this one went back."""

    rank: Count
    incarnation: Count
    at: float


class LeaseGaveUp(_Entry, frozen=True, tag="lease-gave-up"):
    """A worker no longer waits for a lease."""

    rank: Count
    incarnation: Count


class LeasesStand(_Entry, frozen=True, tag="leases-stand"):
    """Snapshot of all leases, replacing the lease entries before it; `asked` tells how the epochs are cut."""

    asked: AskLease
    snapshot: LeaseSnapshot


ServerFact: TypeAlias = (
    JoinServer
    | ReapedServer
    | ServerFilled
    | ServerLostStep
    | ScaleServers
    | LeaseAsked
    | LeaseTicked
    | LeaseReturned
    | LeaseGaveUp
    | LeasesStand
)
"""Changes of servers and leases; replayed in order, they restore their state."""

Fact: TypeAlias = Join | Reaped | ViewFormed | Granted | Saved | ServerFact | Noted | LedgerFact
"""Entries that stay: the history of a job."""

Entry: TypeAlias = Fact | StoreChanged


@dataclass(frozen=True, slots=True)
class Persist:
    """Action of a state machine: write this entry into the journal before anything is answered."""

    entry: Entry


_ABOUT_LEASES = (LeaseAsked, LeaseTicked, LeaseReturned, LeaseGaveUp, LeasesStand)


@dataclass(slots=True)
class JournalState:
    """The sum of all entries."""

    joins: dict[int, Join] = field(default_factory=dict)
    """Newest join of each rank."""

    deaths: dict[int, Reaped] = field(default_factory=dict)
    """Newest death of each rank."""

    view: ViewFormed | None = None
    calls: list[tuple[str, str] | None] = field(default_factory=list)
    """Granted calls, in order; None at the end of the script."""

    checkpoint: Saved | None = None
    server_facts: list[ServerFact] = field(default_factory=list)
    """Server and lease events that are still needed, in order."""

    num_noted: int = 0
    """Number of ledger notes received, by the supervisor's count."""

    store: dict[str, bytes] = field(default_factory=dict)
    answers: dict[int, tuple[int, Message]] = field(default_factory=dict)

    def apply(self, entry: Entry) -> None:
        match entry:
            case Join():
                self.joins[entry.rank] = entry
            case Reaped():
                self.deaths[entry.rank] = entry
            case JoinServer() | ReapedServer() | ServerFilled() | ServerLostStep() | ScaleServers():
                self.server_facts.append(entry)
            case LeaseAsked() | LeaseTicked() | LeaseReturned() | LeaseGaveUp():
                self.server_facts.append(entry)
            case Noted():
                self.num_noted = max(self.num_noted, entry.serial)
            case LeasesStand():
                self.server_facts = [
                    each for each in self.server_facts if not isinstance(each, _ABOUT_LEASES)
                ]
                self.server_facts.append(entry)
            case ViewFormed():
                self.view = entry
            case Granted(number, call):
                del self.calls[number - 1 :]
                self.calls.append(call)
            case Saved():
                self.checkpoint = entry
            case StoreChanged(values, answers):
                for key, value in values.items():
                    if value is None:
                        self.store.pop(key, None)
                    else:
                        self.store[key] = value
                self.answers.update(answers)
