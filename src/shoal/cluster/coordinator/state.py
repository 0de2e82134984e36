"""Coordinator state: one conversation with many clients, over membership, views, calls, store and servers.

Pure: no clock, no socket, no disk. It joins `membership.py`, `views.py`,
`calls.py`, `store_table.py` and `server_registry.py`; each client asks one
thing at a time. `process.py` moves the bytes; a simulator can run this by the
thousand.

Promises come back as `Persist` together with the answers that make them: the
caller must write them into the journal before it answers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from shoal.cluster.coordinator import calls, server_registry, store_table, views
from shoal.cluster.coordinator.actions import Answer, DropClient, NotifySupervisor, Tick
from shoal.cluster.coordinator.calls import Calls
from shoal.cluster.coordinator.journal_entries import Granted, JournalState, Persist, StoreChanged
from shoal.cluster.coordinator.membership import ExpireWait, Membership, ReportSuspect
from shoal.cluster.coordinator.server_registry import ServerRegistry, ServersConfig
from shoal.cluster.coordinator.store_table import StoreTable
from shoal.cluster.coordinator.views import FormView, Views
from shoal.config.liveness import LivenessConfig
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.server_coordinator import JoinServer, ServerAlive, SlotsFilled, StepLost
from shoal.runtime.transport.messages.supervisor import (
    Noted,
    Reaped,
    ReapedServer,
    Saved,
    ScaleServers,
    Suspect,
    Watch,
    Watching,
)
from shoal.runtime.transport.messages.worker_coordinator import (
    AskLease,
    AskServers,
    BeginCall,
    CallGranted,
    CallRefused,
    EnterView,
    Join,
    Joined,
    JoinRefused,
    Late,
    LateHeard,
    Leave,
    Regroup,
    ScriptEnded,
    ViewFormed,
    ViewRefused,
    WaitExpired,
)

Action: TypeAlias = Answer | Persist | DropClient


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinationConfig:
    """A job, as configured for its coordinator."""

    num_workers: int
    """How many ranks there are."""

    liveness: LivenessConfig = field(default_factory=LivenessConfig)
    """How long ranks wait for each other, and servers may be silent."""

    can_recover: bool = False
    """Whether a process that keeps the others waiting is killed and replaced. Else the wait ends, and the job."""

    servers: ServersConfig = field(default_factory=ServersConfig)
    """How many servers there are."""


@dataclass(slots=True)
class _Client:
    """One connection. `rank` is -1 until it has joined, and stays so for the supervisor's."""

    is_supervisor: bool
    pid: int = 0  # from the kernel; 0: unknown, or on another host
    rank: int = -1
    incarnation: int = -1
    is_watching: bool = False
    has_asked: bool = False  # has an unanswered request


class Coordination:
    """Complete state of a coordinator. Every method applies one event and returns the actions that follow, in order."""

    def __init__(
        self, config: CoordinationConfig, journaled: JournalState | None = None, *, now: float = 0.0
    ) -> None:
        """`journaled` is the journal's content if an earlier coordinator was killed."""
        journaled = journaled or JournalState()
        self._clients: dict[int, _Client] = {}
        self._by_rank: dict[int, list[int]] = {}  # clients that joined as it
        self._by_pid: dict[int, list[int]] = {}
        self._watchers: list[int] = []
        self._callers: dict[int, int] = {}  # rank -> the client on which it makes its calls
        self._enterers: dict[int, int] = {}  # rank -> the client on which it entered a view
        self._suspects: dict[int, Suspect] = {}
        self._can_recover = config.can_recover
        liveness = config.liveness
        grace_s = liveness.coordinator_grace_s if journaled.joins else 0.0
        self._membership = Membership(num_workers=config.num_workers, not_before=now + grace_s)
        for join in journaled.joins.values():
            self._membership.admit(join, now)
        for death in journaled.deaths.values():
            self._membership.reaped(death.rank, death.incarnation, death.code, now)
        self._views = Views(
            self._membership,
            timeout_s=liveness.step_timeout_s,
            can_recover=config.can_recover,
            formed=_formed(journaled.view) if journaled.view else None,
        )
        self._calls = Calls(
            num_workers=config.num_workers,
            # A rank still in an exchange first has step_timeout_s to detect that no peer joins it.
            timeout_s=liveness.join_timeout_s + (liveness.step_timeout_s if config.can_recover else 0.0),
            membership=self._membership if config.can_recover else None,
            record=journaled.calls,
        )
        self._num_remembered, self._num_noted = len(journaled.calls), journaled.num_noted
        self._store = StoreTable(journaled.store, journaled.answers)
        self._servers = ServerRegistry(
            config.servers,
            liveness,
            now=now,
            grace_s=grace_s,
        )
        self._servers.replay(journaled.server_facts)
        for join in journaled.joins.values():
            if not self._membership.is_fenced(join.rank, join.incarnation):
                self._servers.rank_joined(join.rank, join.incarnation)
        if journaled.view is not None:
            self._membership.form(journaled.view.view, journaled.view.incarnations)
            self._store.handle(store_table.ViewClosed(journaled.view.view - 1))

    @property
    def deadline(self) -> float | None:
        parts = (self._calls, self._store, self._views, self._servers)
        deadlines = [part.deadline for part in parts]
        return min((each for each in deadlines if each is not None), default=None)

    def connected(self, client: int, *, is_supervisor: bool = False, pid: int = 0) -> None:
        """A client has connected. The kernel tells its process, and whether that is the supervisor."""
        self._clients[client] = _Client(is_supervisor, pid)
        if pid:
            self._by_pid.setdefault(pid, []).append(client)

    def has_introduced_itself(self, client: int) -> bool:
        me = self._clients.get(client)
        return me is None or me.rank >= 0 or me.is_watching or self._servers.is_server(client)

    def hear(self, client: int, message: Message, now: float) -> list[Action]:
        me = self._clients.get(client)
        if me is None:
            return []  # it was dropped, and its earlier messages no longer count
        if me.has_asked:
            return [DropClient(client, "it asks before it was answered")]
        if isinstance(message, Watch | Reaped | Saved | Noted | ReapedServer | ScaleServers):
            return self._hear_supervisor(client, me, message, now)
        if self._servers.is_server(client):
            if isinstance(message, SlotsFilled | StepLost | ServerAlive):
                return self._about_servers(self._servers.hear_server(client, message, now))
            return [DropClient(client, f"a server says {type(message).__name__}, which is not for it to say")]
        if isinstance(message, JoinServer):
            if me.rank >= 0 or me.is_watching:
                return [DropClient(client, f"rank {me.rank} joins a second time, as server {message.number}")]
            problem = self._impostor(client, me, message.pid, f"server {message.number}")
            if problem is not None:
                return [Answer(client, JoinRefused(problem)), DropClient(client, problem)]
            return self._about_servers(self._servers.join_server(client, message, now))
        me.has_asked = True
        match message:
            case Join():
                return self._join(client, me, message, now)
            case _ if me.rank < 0:
                return [DropClient(client, f"it says {type(message).__name__} before it has joined")]
            case BeginCall() | ScriptEnded() if client < self._callers.get(me.rank, 0):
                return [self._overtaken(client)]
            case EnterView() if client < self._enterers.get(me.rank, 0):
                return [self._overtaken(client)]
            case BeginCall(rank, number, kind, detail) if rank == me.rank:
                self._callers[rank] = client
                self._membership.spoke(rank, now)
                return self._about_calls(self._calls.handle(calls.CallBegan(rank, number, kind, detail, now)))
            case ScriptEnded(rank, num_calls) if rank == me.rank:
                self._callers[rank] = client
                self._membership.spoke(rank, now)
                return self._about_calls(self._calls.handle(calls.ScriptEndReached(rank, num_calls, now)))
            case EnterView() if (message.rank, message.incarnation) == (me.rank, me.incarnation):
                self._enterers[me.rank] = client
                self._membership.spoke(me.rank, now)
                return self._about_views(self._views.handle(_entered(message, now)))
            case AskServers():
                return self._about_servers(self._servers.ask_servers(client, message, now))
            case AskLease() if (message.rank, message.incarnation) == (me.rank, me.incarnation):
                return self._about_servers(self._servers.ask_lease(client, message, now))
            case Late():
                return [*self._look_at(me.rank, message, now), self._answer(client, LateHeard())]
            case _ if isinstance(message, store_table.Request):
                return self._about_store(self._store.handle(store_table.StoreAsked(client, message, now)))
        return [DropClient(client, f"rank {me.rank} says {message}, which is not for it to say")]

    def gone(self, client: int) -> list[Action]:
        me = self._clients.pop(client, None)
        if me is None:
            return []
        for index, key in ((self._by_rank, me.rank), (self._by_pid, me.pid)):
            if client in (clients := index.get(key, [])):
                clients.remove(client)
                if not clients:
                    del index[key]
        if me.is_watching:
            self._watchers.remove(client)
        self._store.handle(store_table.StoreClientGone(client))
        served = self._about_servers(self._servers.gone(client))
        if self._callers.get(me.rank) == client:
            del self._callers[me.rank]
            self._calls.handle(calls.CallerGone(me.rank))
        if self._enterers.get(me.rank) == client:
            del self._enterers[me.rank]
            return [
                *served,
                *self._about_views(self._views.handle(views.EntererGone(me.rank, me.incarnation))),
            ]
        return served

    def tick(self, now: float) -> list[Action]:
        return [
            *self._about_calls(self._calls.handle(Tick(now))),
            *self._about_views(self._views.handle(Tick(now))),
            *self._about_store(self._store.handle(Tick(now))),
            *self._about_servers(self._servers.tick(now)),
        ]

    # ---- clients --------------------------------------------------------------------------------

    def _join(self, client: int, me: _Client, join: Join, now: float) -> list[Action]:
        if me.rank >= 0 or me.is_watching:
            return [DropClient(client, f"it joins a second time, as rank {join.rank}")]
        problem = self._impostor(client, me, join.pid, f"rank {join.rank}")
        if problem is not None:
            return [self._answer(client, JoinRefused(problem)), DropClient(client, problem)]
        known = self._membership.members.get(join.rank)
        if (
            known is not None
            and join.incarnation > known.incarnation
            and self._calls.phase is calls.CallPhase.ENDED
        ):
            # A replacement for a process that was released before it was killed: nothing is left to do. It
            # is not admitted, so that it gets the same answer when it asks again.
            return [self._answer(client, Leave())]
        reason = self._membership.admit(join, now)
        if reason is not None:
            return [self._answer(client, JoinRefused(reason)), DropClient(client, reason)]
        me.rank, me.incarnation = join.rank, join.incarnation
        self._by_rank.setdefault(join.rank, []).append(client)
        if known is not None and known.incarnation == join.incarnation:
            return [self._answer(client, Joined(self._membership.view))]
        self._calls.handle(calls.RankConnected(join.rank))
        return [
            Persist(join),
            *self._drop_fenced(join.rank),
            self._answer(client, Joined(self._membership.view)),
            *self._about_servers(self._servers.rank_joined(join.rank, join.incarnation)),
        ]

    def _impostor(self, client: int, me: _Client, pid: int, role: str) -> str | None:
        """Reason why a process is not who it claims to be: the kernel reports another pid, or it has another role."""
        if not me.pid or me.is_supervisor:
            return None
        if pid != me.pid:
            return f"it says it is process {pid}, and is process {me.pid}"
        for other in self._by_pid[pid]:
            if other != client:
                each = self._clients[other]
                number = self._servers.number_of(other)
                known = (
                    f"rank {each.rank}"
                    if each.rank >= 0
                    else f"server {number}"
                    if number is not None
                    else role
                )
                if known != role:
                    return f"process {pid} is {known}, and cannot be {role} too"
        return None

    def _hear_supervisor(self, client: int, me: _Client, message: Message, now: float) -> list[Action]:
        if not me.is_supervisor or me.rank >= 0 or not (me.is_watching or isinstance(message, Watch)):
            return [DropClient(client, f"it says {type(message).__name__} and is not this job's supervisor")]
        match message:
            case Reaped(rank, incarnation, code):
                if not self._membership.reaped(rank, incarnation, code, now):
                    return []
                freed = self._about_servers(self._servers.rank_dead(rank, incarnation, now))
                return [Persist(message), *self._drop_fenced(rank), *freed]
            case Saved():
                return [Persist(message)]
            case Noted(serial=serial):
                is_new, self._num_noted = serial > self._num_noted, max(serial, self._num_noted)
                return [Persist(message)] if is_new else []
            case ReapedServer() | ScaleServers():
                return self._about_servers(self._servers.hear_supervisor(client, message, now))
        news = () if me.is_watching else self._servers.news_for_watcher()
        if not me.is_watching:
            self._watchers.append(client)
        me.is_watching = True
        said = (Watching(self._membership.view, self._num_noted), *self._suspects.values(), *news)
        return [Answer(client, each) for each in said]

    def _drop_fenced(self, rank: int) -> list[Action]:
        fenced = [
            client
            for client in self._by_rank.get(rank, ())
            if self._membership.is_fenced(rank, self._clients[client].incarnation)
        ]
        for settled in [other for other, each in self._suspects.items() if self._is_settled(each)]:
            del self._suspects[settled]
        return [action for client in fenced for action in (DropClient(client), *self.gone(client))]

    def _is_settled(self, suspect: Suspect) -> bool:
        return self._membership.is_fenced(suspect.rank, suspect.incarnation)

    # ---- actions of the parts -------------------------------------------------------------------

    def _about_calls(self, decided: list[calls.Action]) -> list[Action]:
        granted = self._calls.granted_since(self._num_remembered)
        actions: list[Action] = [
            Persist(Granted(number, call)) for number, call in enumerate(granted, self._num_remembered + 1)
        ]
        self._num_remembered += len(granted)
        for each in decided:
            match each:
                case calls.GrantCall(rank, number):
                    actions.append(self._to_caller(rank, CallGranted(number)))
                case calls.ReleaseRank(rank):
                    actions.append(self._to_caller(rank, Leave()))
                case calls.RefuseCall(rank, number, differing):
                    actions.append(self._to_caller(rank, CallRefused(number, differing)))
                case ExpireWait(rank, operation, waited_s, missing):
                    actions.append(self._to_caller(rank, WaitExpired(operation, waited_s, list(missing))))
                case calls.SendToView(rank, view):
                    actions.append(self._to_caller(rank, Regroup(view)))
                case ReportSuspect():
                    actions += self._suspect(each)
        return actions

    def _about_views(self, decided: list[views.Action]) -> list[Action]:
        actions: list[Action] = []
        for each in decided:
            match each:
                case FormView():
                    actions += self._form(each)
                case views.RefuseEntry(rank, reason):
                    actions.append(self._to_enterer(rank, ViewRefused(reason)))
                case ExpireWait(rank, operation, waited_s, missing):
                    actions.append(self._to_enterer(rank, WaitExpired(operation, waited_s, list(missing))))
                case ReportSuspect():
                    actions += self._suspect(each)
        if self._views.is_gathering:
            # A rank has left this view, so it is over for all: waiting ranks are sent to the next one.
            view = self._membership.view
            actions += self._about_calls(self._calls.handle(calls.CallsSuspended(view)))
            actions += self._about_store(self._store.handle(store_table.ViewClosed(view)))
        else:
            self._calls.handle(calls.CallsResumed())
        return actions

    def _about_store(self, answers: list[Answer]) -> list[Action]:
        values, answered = self._store.take_changes()
        changes = [Persist(StoreChanged(values, answered))] if values or answered else []
        return [*changes, *(self._answer(each.client, each.message) for each in answers)]

    def _about_servers(self, decided: list[server_registry.Action]) -> list[Action]:
        actions: list[Action] = []
        for each in decided:
            match each:
                case NotifySupervisor(message):
                    actions += self._to_watchers(message)
                case Answer(client, message):
                    actions.append(self._answer(client, message))
                case _:
                    actions.append(each)
        return actions

    def _form(self, formed: FormView) -> list[Action]:
        message = ViewFormed(
            formed.view, formed.donor, formed.finished, formed.call, list(formed.incarnations)
        )
        actions: list[Action] = []
        if formed.view > self._membership.view:
            self._membership.form(formed.view, message.incarnations)
            actions = [Persist(message), *self._to_watchers(message)]
        return actions + [self._to_enterer(rank, message) for rank in formed.ranks]

    def _look_at(self, rank: int, message: Late, now: float) -> list[Action]:
        """A worker waits at a server for ranks that may be at work: only a stopped process is suspected."""
        actions: list[Action] = []
        for other in message.ranks if self._can_recover else []:
            if other == rank or other >= self._membership.num_workers:
                continue
            since = now - message.waited_s
            late = self._membership.late(
                other, since=since, timeout_s=message.waited_s, now=now, may_be_busy=True
            )
            if late is not None:
                why = f"rank {rank} waited {message.waited_s:.1f} s for rank {other} in {message.operation}"
                actions += self._suspect(ReportSuspect(late, why, message.waited_s))
        return actions

    def _suspect(self, found: ReportSuspect) -> list[Action]:
        late = found.late
        message = Suspect(late.rank, late.incarnation, found.why, found.waited_s, late.lenient)
        self._suspects[late.rank] = message
        return self._to_watchers(message)

    # ---- ranks concerned -----------------------------------------------------------------------

    def _answer(self, client: int, message: Message) -> Answer:
        if client in self._clients:
            self._clients[client].has_asked = False
        return Answer(client, message)

    def _overtaken(self, client: int) -> DropClient:
        # The rank reconnected and repeated its request, and the old one arrives only now. Taking it for the
        # newest would leave the rank without an answer on its new connection.
        return DropClient(client)

    def _to_caller(self, rank: int, message: Message) -> Answer:
        return self._answer(self._callers.get(rank, 0), message)

    def _to_enterer(self, rank: int, message: Message) -> Answer:
        return self._answer(self._enterers.get(rank, 0), message)

    def _to_watchers(self, message: Message) -> list[Action]:
        return [Answer(client, message) for client in self._watchers]


def _entered(message: EnterView, now: float) -> views.ViewEntered:
    return views.ViewEntered(
        message.rank,
        message.incarnation,
        message.view_left,
        message.finished,
        message.call,
        now,
        message.waited_s,
        message.waited_in,
    )


def _formed(view: ViewFormed) -> FormView:
    return FormView(view.view, view.donor, view.finished, view.call, tuple(view.incarnations), ranks=())
