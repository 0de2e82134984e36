"""Server registry: connections, heartbeats and views of the servers, and lease requests.

Pure, a part of `state.py`, which passes on messages that concern servers. It
decides which client is sent what; `server_group.py` places slots, `leases.py`
hands out samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from shoal.cluster.coordinator import server_group
from shoal.cluster.coordinator.actions import Answer, DropClient, NotifySupervisor
from shoal.cluster.coordinator.journal_entries import (
    LeaseAsked,
    LeaseGaveUp,
    LeaseReturned,
    LeasesStand,
    LeaseTicked,
    Persist,
    ServerFact,
    ServerFilled,
    ServerLostStep,
)
from shoal.cluster.coordinator.lease_service import LeaseService
from shoal.cluster.coordinator.server_group import ServerGroup
from shoal.config.liveness import LivenessConfig
from shoal.errors import ConfigError
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.server_coordinator import (
    JoinedServer,
    JoinServer,
    PingServer,
    RankDead,
    RankJoined,
    SlotsFilled,
    StepLost,
)
from shoal.runtime.transport.messages.supervisor import (
    ReapedServer,
    ScaleBegun,
    ScaleRefused,
    ScaleServers,
    ServersScaled,
    SlotsLost,
    SuspectServer,
)
from shoal.runtime.transport.messages.worker_coordinator import (
    AskLease,
    AskServers,
    JoinRefused,
    LeaseRefused,
    WaitExpired,
)

Action: TypeAlias = Answer | Persist | DropClient | NotifySupervisor


@dataclass(frozen=True, slots=True, kw_only=True)
class ServersConfig:
    """Servers of a job, as configured for the coordinator."""

    num_servers: int = 0
    """Servers at launch; 0 where the job has none."""

    num_copies: int = 1
    """Of every slot, the primary's among them."""

    max_servers: int = 0
    """Most servers that the group can be scaled to."""

    hosts: tuple[int, ...] = ()
    """Home of each server by number; empty on one host."""


@dataclass(slots=True)
class _ServerConnection:
    """A server's connection."""

    number: int
    incarnation: int


@dataclass(slots=True)
class _ViewWaiter:
    """A worker that waits for a view of the servers."""

    after_view: int
    asked_at: float
    expires_at: float


@dataclass(slots=True)
class _Heartbeats:
    """Last sign of life of each server. One that should have joined and has not counts as silent."""

    heard_at: dict[int, float] = field(default_factory=dict)
    sent_at: float = 0.0


class ServerRegistry:
    """Servers of one job. Every method applies one event and returns the actions that follow, in order."""

    def __init__(
        self, config: ServersConfig, liveness: LivenessConfig, *, now: float, grace_s: float
    ) -> None:
        """No server is suspected for `grace_s` from `now`."""
        self._group = ServerGroup(
            num_servers=config.num_servers,
            num_copies=config.num_copies,
            max_servers=max(config.max_servers, config.num_servers),
            hosts=config.hosts,
        )
        self.leases = LeaseService()
        self._has_servers = config.num_servers > 0
        self._lines: dict[int, _ServerConnection] = {}  # by client
        self._waiting: dict[int, _ViewWaiter] = {}  # by client
        self._ranks: dict[int, int] = {}  # rank -> incarnation, of those that are in
        self._liveness = liveness
        self._heartbeats = _Heartbeats(sent_at=now)
        self._not_before, self._began = now + grace_s, now
        self._loss: SlotsLost | None = None  # newest loss, until the group is complete again
        self._lost_view = -1

    # ---- remembering ----------------------------------------------------------------------------

    def replay(self, facts: list[ServerFact]) -> None:
        """Apply the journal entries of a coordinator that died."""
        for fact in facts:
            match fact:
                case JoinServer() | ReapedServer() | ServerFilled() | ServerLostStep() | ScaleServers():
                    self._about(self._group.handle(fact))
                case LeaseReturned(rank, incarnation, at):
                    self.leases.replaced(rank, incarnation, at)
                case LeaseAsked(at, ask):
                    self.leases.ask(0, ask, at)
                case LeaseTicked(at):
                    self.leases.hand_out(at)
                case LeaseGaveUp(rank, incarnation):
                    self.leases.gave_up(rank, incarnation)
                case LeasesStand():
                    self.leases.restore(fact)

    # ---- clients --------------------------------------------------------------------------------

    def is_server(self, client: int) -> bool:
        return client in self._lines

    def number_of(self, client: int) -> int | None:
        """The server at the other end of a connection; None where it is none."""
        return self._lines[client].number if client in self._lines else None

    def join_server(self, client: int, join: JoinServer, now: float) -> list[Action]:
        if not self._has_servers:
            reason = "this job has no servers"
            return [Answer(client, JoinRefused(reason)), DropClient(client, reason)]
        is_known = self._group.members.get(join.number) == join.incarnation
        decided = self._group.handle(join)
        for each in decided:
            if isinstance(each, server_group.RefuseChange):
                return [Answer(client, JoinRefused(each.reason)), DropClient(client, each.reason)]
        older = [
            other
            for other, line in self._lines.items()
            if line.number == join.number and line.incarnation <= join.incarnation
        ]
        for other in older:
            del self._lines[other]
        view_before = self._group.newest
        self._lines[client] = _ServerConnection(join.number, join.incarnation)
        self._heartbeats.heard_at[join.number] = now
        told = self._about(decided)
        greeting: list[Action] = [Answer(client, JoinedServer(self._group.view))]
        greeting += [Answer(client, RankJoined(*each)) for each in sorted(self._ranks.items())]
        if view_before is not None and not any(
            isinstance(each, server_group.AnnounceView) for each in decided
        ):
            greeting.append(Answer(client, view_before))
        return [
            *([] if is_known and not decided else [Persist(join)]),
            *(DropClient(other) for other in older),
            *greeting,
            *told,
        ]

    def hear_server(self, client: int, message: Message, now: float) -> list[Action]:
        line = self._lines[client]
        self._heartbeats.heard_at[line.number] = now
        if isinstance(message, StepLost):
            lost = ServerLostStep(line.number, line.incarnation, message.view, message.rank)
            decided = self._group.handle(lost)
            return [Persist(lost), *self._about(decided)] if decided else []
        if not isinstance(message, SlotsFilled):
            return []
        filled = ServerFilled(line.number, line.incarnation, message.view, message.slots)
        return [Persist(filled), *self._about(self._group.handle(filled))]

    def ask_servers(self, client: int, ask: AskServers, now: float) -> list[Action]:
        newest = self._group.newest
        if newest is not None and newest.view > ask.after_view:
            return [Answer(client, newest)]
        self._waiting[client] = _ViewWaiter(ask.after_view, now, now + ask.timeout_s)
        return []

    def ask_lease(self, client: int, ask: AskLease, now: float) -> list[Action]:
        if ask.view <= self._lost_view:
            # It will be killed in a moment, and its knowledge of the epoch is newer than the checkpoint's.
            reason = f"the servers of view {ask.view} are lost, and the job begins anew"
            return [Answer(client, LeaseRefused(reason))]
        try:
            return [*self.leases.ask(client, ask, now)]
        except (ConfigError, OverflowError) as error:
            return [Answer(client, LeaseRefused(str(error)))]

    def hear_supervisor(self, client: int, message: ReapedServer | ScaleServers, now: float) -> list[Action]:
        if isinstance(message, ReapedServer):
            if self._group.is_fenced(message.number, message.incarnation):
                return []
            self._heartbeats.heard_at[message.number] = now
            fenced = [
                other
                for other, line in self._lines.items()
                if line.number == message.number and line.incarnation <= message.incarnation
            ]
            for other in fenced:
                del self._lines[other]
            return [
                Persist(message),
                *(DropClient(other) for other in fenced),
                *self._about(self._group.handle(message)),
            ]
        before = self._group.num_servers
        decided = self._group.handle(message)
        for each in decided:
            if isinstance(each, server_group.RefuseChange):
                return [Answer(client, ScaleRefused(each.reason))]
        for number in range(before, message.num_servers):
            self._heartbeats.heard_at[number] = now
        return [
            Persist(message),
            Answer(client, ScaleBegun(message.num_servers)),
            *self._about(decided),
        ]

    def news_for_watcher(self) -> list[Message]:
        """Messages for a supervisor that begins to watch."""
        if not self._has_servers:
            return []
        news: list[Message] = [ScaleBegun(self._group.num_servers), *self.leases.drained]
        if self._loss is not None:
            news.append(self._loss)
        if self._group.newest is not None:
            news.append(self._group.newest)
            if self._group.is_settled:
                news.append(ServersScaled(self._group.view, self._group.num_servers))
        return news

    def rank_joined(self, rank: int, incarnation: int) -> list[Action]:
        self._ranks[rank] = incarnation
        return [Answer(client, RankJoined(rank, incarnation)) for client in self._lines]

    def rank_dead(self, rank: int, incarnation: int, now: float) -> list[Action]:
        if self._ranks.get(rank, incarnation) <= incarnation:
            self._ranks.pop(rank, None)
        told: list[Action] = [Answer(client, RankDead(rank, incarnation)) for client in self._lines]
        return [*told, *self.leases.replaced(rank, incarnation + 1, now)]

    def gone(self, client: int) -> list[Action]:
        """A connection is closed. Its server may live: only the supervisor reports deaths."""
        self._lines.pop(client, None)
        self._waiting.pop(client, None)
        return [*self.leases.gone(client)]

    # ---- time -----------------------------------------------------------------------------------

    @property
    def deadline(self) -> float | None:
        times = [each.expires_at for each in self._waiting.values()]
        if self._has_servers:
            times.append(self._heartbeats.sent_at + self._liveness.server_heartbeat_s)
        if self.leases.deadline is not None:
            times.append(self.leases.deadline)
        return min(times, default=None)

    def tick(self, now: float) -> list[Action]:
        actions: list[Action] = [*self.leases.tick(now)]
        for client, waiting in list(self._waiting.items()):
            if now >= waiting.expires_at:
                del self._waiting[client]
                actions.append(Answer(client, self._expired(waiting, now)))
        if self._has_servers and now >= self._heartbeats.sent_at + self._liveness.server_heartbeat_s:
            self._heartbeats.sent_at = now
            actions += [Answer(client, PingServer(line.number)) for client, line in self._lines.items()]
            actions += self._suspects(now)
        return actions

    def _expired(self, waiting: _ViewWaiter, now: float) -> WaitExpired:
        missing = [f"server {number} (has not joined)" for number in self._group.missing]
        missing = missing or [f"a view of the servers after view {waiting.after_view}"]
        return WaitExpired("the servers", now - waiting.asked_at, missing)

    def _suspects(self, now: float) -> list[Action]:
        actions: list[Action] = []
        numbers = {*range(self._group.num_servers), *self._group.members}
        for number in sorted(numbers):
            is_in = number in self._group.members
            tolerated_s = self._liveness.step_timeout_s if is_in else self._liveness.join_timeout_s
            silent_s = now - max(self._heartbeats.heard_at.get(number, self._began), self._not_before)
            if silent_s >= tolerated_s:
                self._heartbeats.heard_at[number] = now  # reported again after the same interval
                why = f"it said nothing for {silent_s:.1f} s" if is_in else "it never joined"
                actions.append(
                    NotifySupervisor(SuspectServer(number, self._group.expected(number), why, silent_s))
                )
        return actions

    # ---- actions of the group -------------------------------------------------------------------

    def _about(self, decided: list[server_group.Action]) -> list[Action]:
        actions: list[Action] = []
        for each in decided:
            match each:
                case server_group.AnnounceView(view):
                    self._loss = None
                    told = [
                        client for client, waiting in self._waiting.items() if view.view > waiting.after_view
                    ]
                    for client in told:
                        del self._waiting[client]
                    actions += [Answer(client, view) for client in (*self._lines, *told)]
                    actions.append(NotifySupervisor(view))
                case server_group.LoseSlots(number, view_lost, slots, servers, rank):
                    self._loss = SlotsLost(number, view_lost, len(slots), list(servers), rank)
                    self._lost_view = view_lost
                    self.leases.clear()
                    actions.append(NotifySupervisor(self._loss))
                case server_group.Settle(settled, num_servers):
                    actions.append(NotifySupervisor(ServersScaled(settled, num_servers)))
        return actions
