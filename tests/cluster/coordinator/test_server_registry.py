"""Messages of the coordinator to servers, workers and the supervisor about servers and leases."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.cluster.coordinator.actions import Answer, DropClient
from shoal.cluster.coordinator.journal_entries import JournalState, LeaseAsked, LeasesStand, Persist
from shoal.cluster.coordinator.server_registry import ServersConfig
from shoal.cluster.coordinator.state import Action, Coordination, CoordinationConfig
from shoal.cluster.ledger.entries import EpochLeased, RangesTrained, TrainingBegan
from shoal.config.liveness import LivenessConfig
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.server_coordinator import (
    JoinedServer,
    JoinServer,
    PingServer,
    RankDead,
    RankJoined,
    ServerAlive,
    ServerView,
    SlotsFilled,
    StepLost,
)
from shoal.runtime.transport.messages.supervisor import (
    Reaped,
    ReapedServer,
    ScaleBegun,
    ScaleRefused,
    ScaleServers,
    ServersScaled,
    SlotsLost,
    SuspectServer,
    Watch,
    Watching,
    WorkerDrained,
    WorkerReadmitted,
)
from shoal.runtime.transport.messages.worker_coordinator import (
    AskLease,
    AskServers,
    Join,
    JoinRefused,
    LeaseRefused,
    Leases,
    NoMoreLeases,
    WaitExpired,
)

SUPERVISOR = 100


def config(num_servers: int = 2, num_copies: int = 2) -> CoordinationConfig:
    return CoordinationConfig(
        num_workers=2,
        liveness=LivenessConfig(join_timeout_s=10.0, step_timeout_s=4.0),
        can_recover=True,
        servers=ServersConfig(num_servers=num_servers, num_copies=num_copies, max_servers=4),
    )


class Conversation:
    """Rank r of incarnation i is client 1 + r + 10 i, server n of incarnation i client 51 + n + 10 i."""

    def __init__(
        self, told: CoordinationConfig | None = None, memory: JournalState | None = None, now: float = 0.0
    ) -> None:
        self.told = told or config()
        self.coordination, self.now = Coordination(self.told, memory, now=now), now
        self.memory = memory or JournalState()
        self.dropped: list[int] = []
        self.coordination.connected(SUPERVISOR, is_supervisor=True)
        self.news = self.say(SUPERVISOR, Watch()).get(SUPERVISOR, [])

    def take(self, actions: list[Action]) -> dict[int, list[Message]]:
        said: dict[int, list[Message]] = {}
        for action in actions:
            match action:
                case Persist(entry):
                    self.memory.apply(entry)
                case Answer(client, message):
                    said.setdefault(client, []).append(message)
                case DropClient(client):
                    self.dropped.append(client)
                    self.take(self.coordination.gone(client))
        return said

    def say(self, client: int, message: Message) -> dict[int, list[Message]]:
        return self.take(self.coordination.hear(client, message, self.now))

    def server(self, number: int, incarnation: int = 0) -> dict[int, list[Message]]:
        client = 51 + number + 10 * incarnation
        self.coordination.connected(client)
        return self.say(client, JoinServer(number, incarnation, client))

    def rank(self, rank: int, incarnation: int = 0) -> dict[int, list[Message]]:
        client = 1 + rank + 10 * incarnation
        self.coordination.connected(client)
        return self.say(client, Join(rank, incarnation, client, 2))

    def tick(self, now: float) -> dict[int, list[Message]]:
        self.now = now
        return self.take(self.coordination.tick(now))

    def again(self, now: float = 0.0) -> Conversation:
        """The next coordinator, after this one was killed."""
        return Conversation(self.told, self.memory, now)


@pytest.fixture
def talk() -> Conversation:
    return Conversation()


def first_view(talk: Conversation) -> ServerView:
    talk.server(0)
    view = talk.server(1)[52][-1]
    assert isinstance(view, ServerView)
    return view


def question(rank: int, *finished: int, **options: Any) -> AskLease:
    told: dict[str, Any] = {
        "call": 1,
        "rank": rank,
        "incarnation": 0,
        "view": 1,
        "finished": list(finished),
        "num_samples": 40,
        "samples_per_lease": 10,
        "num_epochs": 1,
        "num_ahead": 1,
        "timeout_s": 3.0,
    }
    return AskLease(**told | options)


def asks(
    talk: Conversation, rank: int, *finished: int, incarnation: int = 0, **options: Any
) -> list[Message]:
    client = 1 + rank + 10 * incarnation
    asked = question(rank, *finished, incarnation=incarnation, **options)
    return talk.say(client, asked).get(client, [])


def test_the_view_is_told_to_servers_to_who_waits_and_to_the_supervisor(talk: Conversation) -> None:
    talk.rank(0)
    assert talk.say(1, AskServers(0, 5.0)) == {}
    assert talk.server(0) == {51: [JoinedServer(0), RankJoined(0, 0)]}
    said = talk.server(1)
    view = said[1][0]
    assert isinstance(view, ServerView)
    assert said == {
        1: [view],
        51: [view],
        52: [JoinedServer(1), RankJoined(0, 0), view],
        SUPERVISOR: [view, ServersScaled(1, 2)],
    }
    assert talk.say(1, AskServers(0, 5.0)) == {1: [view]}


def test_a_wait_for_servers_ends_and_names_who_is_missing(talk: Conversation) -> None:
    talk.rank(0)
    talk.server(1)
    talk.say(1, AskServers(0, 5.0))
    assert talk.tick(4.9).get(1) is None
    (expired,) = talk.tick(5.0)[1]
    assert expired == WaitExpired("the servers", 5.0, ["server 0 (has not joined)"])


def test_servers_hear_of_ranks_that_come_and_die(talk: Conversation) -> None:
    first_view(talk)
    assert talk.rank(1)[51] == [RankJoined(1, 0)]
    said = talk.say(SUPERVISOR, Reaped(1, 0, -9))
    assert said == {51: [RankDead(1, 0)], 52: [RankDead(1, 0)]}
    assert talk.rank(1, 1)[52] == [RankJoined(1, 1)]


def test_a_dead_server_is_dropped_and_its_successor_filled(talk: Conversation) -> None:
    first_view(talk)
    talk.rank(0)
    talk.say(1, AskServers(1, 5.0))
    said = talk.say(SUPERVISOR, ReapedServer(0, 0, -9))
    assert talk.dropped == [51]
    assert [type(each) for each in said[1]] == [ServerView]
    joining = talk.server(0, 1)[61][-1]
    assert isinstance(joining, ServerView)
    assert len(joining.joining) == 256
    assert talk.server(0, 0) == {
        51: [JoinRefused("server 0 was replaced: incarnation 1 is expected, this is 0")]
    }
    said = talk.say(61, SlotsFilled(joining.view, list(range(256))))
    assert [type(each) for each in said[SUPERVISOR]] == [ServerView, ServersScaled]


def test_a_server_that_answers_no_ping_is_suspected_and_one_that_does_is_not(talk: Conversation) -> None:
    first_view(talk)
    for second in range(1, 4):
        assert talk.tick(float(second))[51] == [PingServer(0)]
        talk.say(51, ServerAlive(0))
    assert talk.tick(4.0)[SUPERVISOR] == [SuspectServer(1, 0, "it said nothing for 4.0 s", 4.0)]


def test_lost_slots_are_told_and_who_knows_only_the_lost_view_gets_no_lease() -> None:
    talk = Conversation(config(1, 1))
    talk.server(0)
    talk.rank(0)
    assert [type(each) for each in asks(talk, 0)] == [Leases]
    said = talk.say(SUPERVISOR, ReapedServer(0, 0, -9))
    assert said[SUPERVISOR] == [SlotsLost(1, 1, 256, [0])]
    (refused,) = asks(talk, 0, 0)
    assert isinstance(refused, LeaseRefused)
    again = talk.again()
    assert again.news[:3] == [Watching(0), ScaleBegun(1), SlotsLost(1, 1, 256, [0])]
    again.server(0, 1)
    again.rank(0)
    assert isinstance(asks(again, 0, view=1)[0], LeaseRefused)
    assert asks(again, 0, view=2) == [Leases([(0, 0, 0, 10)], 0)]  # from the beginning: nothing is done


def test_a_lost_step_fences_every_server_and_is_told_once(talk: Conversation) -> None:
    first_view(talk)
    assert (
        talk.say(51, StepLost(0, 1)) == {}
    )  # of a view that is over: the next one knows better, or says it again
    lost = SlotsLost(1, 1, 256, [0, 1], rank=1)
    assert talk.say(51, StepLost(1, 1)) == {SUPERVISOR: [lost]}
    assert talk.say(52, StepLost(1, 1)) == {}
    again = talk.again()
    assert lost in again.news
    assert isinstance(again.server(0, 0)[51][0], JoinRefused)
    again.server(0, 1)
    assert isinstance(again.server(1, 1)[62][-1], ServerView)


def test_leases_of_a_dead_worker_go_back_and_the_last_ends_the_call(talk: Conversation) -> None:
    talk.rank(0)
    talk.rank(1)
    assert asks(talk, 0) == [Leases([(0, 0, 0, 10)], 0)]
    assert asks(talk, 1) == [Leases([(1, 0, 10, 20)], 0)]
    talk.say(SUPERVISOR, Reaped(1, 0, -9))
    for done, given in ((0, 1), (1, 2), (2, 3)):
        assert asks(talk, 0, done) == [Leases([(given, 0, 10 * given, 10 * given + 10)], done + 1)]
    assert asks(talk, 0, 3) == [NoMoreLeases(4)]


def test_a_wait_for_a_lease_ends_and_names_who_holds_what_is_left(talk: Conversation) -> None:
    talk.rank(0)
    talk.rank(1)
    asks(talk, 1)
    for done in ((), (1,), (2,)):
        asks(talk, 0, *done)
    assert asks(talk, 0, 3) == []
    (expired,) = talk.tick(3.0)[1]
    assert expired == WaitExpired("rank 0's next lease", 3.0, ["rank 1 (holds lease 0)"])


def test_the_next_coordinator_knows_servers_views_and_leases(talk: Conversation) -> None:
    first_view(talk)
    talk.rank(0)
    talk.rank(1)
    asks(talk, 0)
    asks(talk, 1)
    asks(talk, 1, 1)
    talk.say(SUPERVISOR, ReapedServer(0, 0, -9))
    joining = talk.server(0, 1)[61][-1]
    assert isinstance(joining, ServerView)
    talk.say(61, SlotsFilled(joining.view, list(range(100))))
    again = talk.again(now=50.0)
    assert again.news[-1] == joining
    *greeting, anew = again.server(0, 1)[61]
    assert greeting == [JoinedServer(joining.view + 1), RankJoined(0, 0), RankJoined(1, 0)]
    assert isinstance(anew, ServerView)
    assert (anew.view, anew.joining) == (joining.view + 1, joining.joining)
    assert again.again().news[-1] == anew
    again.rank(0)
    again.rank(1)
    assert asks(again, 0) == [Leases([(0, 0, 0, 10)], 0)]
    assert asks(again, 1, 1) == [Leases([(2, 0, 20, 30)], 0)]
    said = again.say(61, SlotsFilled(anew.view, list(range(256))))
    assert [type(each) for each in said[SUPERVISOR]] == [ServerView, ServersScaled]


def test_the_next_coordinator_knows_what_was_handed_out_twice(talk: Conversation) -> None:
    talk.rank(0)
    talk.rank(1)
    options = {"num_samples": 20, "backup": True, "timeout_s": 60.0}
    assert asks(talk, 0, **options) == [Leases([(0, 0, 0, 10)], 0)]
    assert asks(talk, 1, **options) == [Leases([(1, 0, 10, 20)], 0, True)]
    talk.now = 1.0
    assert asks(talk, 0, 0, busy_s=[1.0], **options) == []
    assert 1 not in talk.tick(1.9)
    assert talk.tick(2.0)[1] == [Leases([(1, 0, 10, 20)], 1, True)]  # rank 1 is a second late
    again = talk.again(now=3.0)
    again.rank(0)
    again.rank(1)
    assert asks(again, 0, 1, busy_s=[1.0], **options) == [NoMoreLeases(2)]
    assert asks(again, 1, 1, busy_s=[9.0], **options) == [NoMoreLeases(2)]


def test_a_worker_that_only_looks_whether_it_still_has_its_leases_leaves_no_trace(talk: Conversation) -> None:
    talk.rank(0)
    asks(talk, 0)
    before = len(talk.memory.server_facts)
    assert asks(talk, 0) == [Leases([(0, 0, 0, 10)], 0)]
    assert len(talk.memory.server_facts) == before


def test_a_drained_worker_is_told_of_with_its_figures_and_again_to_the_next_who_watches() -> None:
    talk = Conversation(config(1, 1))
    talk.server(0)
    talk.rank(0)
    talk.rank(1)
    options = {"num_samples": 400, "num_epochs": 1, "drain_slower_than": 3.0, "timeout_s": 60.0}
    asks(talk, 0, **options)
    asks(talk, 1, **options)
    asks(talk, 0, 0, busy_s=[1.0], **options)
    asks(talk, 1, 1, busy_s=[5.0], **options)
    said = talk.say(2, question(1, 3, busy_s=[5.0], **options))
    assert said[SUPERVISOR][0] == WorkerDrained(1, 0, 2.0, 10.0, 3.0)
    assert 2 not in said
    again = talk.again(now=1.0)
    assert WorkerDrained(1, 0, 2.0, 10.0, 3.0) in again.news
    again.rank(1)
    assert asks(again, 1, 3, busy_s=[5.0], **options) == []
    assert again.tick(10.0)[2] == [Leases([(4, 0, 40, 50)], 2)]  # a probe
    said = again.say(2, question(1, 4, busy_s=[1.0], **options))
    assert said[SUPERVISOR][0] == WorkerReadmitted(1, 10.0, 10.0)


def test_what_was_trained_is_in_the_journal(talk: Conversation) -> None:
    talk.rank(0)
    written = [
        action.entry
        for number in range(5)
        for action in talk.coordination.hear(1, question(0, *range(number)[-1:], from_epoch=7), 0.0)
        if isinstance(action, Persist)
    ]
    began = TrainingBegan(
        call=1,
        trainer=0,
        data="",
        epoch=7,
        start=0,
        num_samples=40,
        num_workers=0,
        sharding="dynamic",
        is_leased=True,
    )
    trained = [
        RangesTrained(call=1, rank=0, epoch=7, ranges=[(10 * number, 10 * number + 10)])
        for number in range(4)
    ]
    ended = EpochLeased(call=1, epoch=7, num_samples_twice=0)
    assert [each for each in written if not isinstance(each, LeaseAsked | LeasesStand)] == [
        began,
        *trained,
        ended,
    ]


def test_another_number_of_servers_is_begun_refused_and_remembered(talk: Conversation) -> None:
    assert isinstance(
        talk.say(SUPERVISOR, ScaleServers(3))[SUPERVISOR][0], ScaleRefused
    )  # not all have joined
    first_view(talk)
    assert isinstance(talk.say(SUPERVISOR, ScaleServers(9))[SUPERVISOR][0], ScaleRefused)
    assert talk.say(SUPERVISOR, ScaleServers(3)) == {SUPERVISOR: [ScaleBegun(3)]}
    assert talk.again().news[1] == ScaleBegun(3)


@pytest.mark.parametrize("message", [ReapedServer(0, 0, -9), ScaleServers(3)])
def test_only_the_supervisor_may_say_that_a_server_is_dead(talk: Conversation, message: Message) -> None:
    first_view(talk)
    talk.rank(0)
    assert talk.say(1, message) == {}
    assert talk.dropped == [1]


def test_a_job_without_servers_takes_none() -> None:
    talk = Conversation(config(0))
    assert talk.server(0) == {51: [JoinRefused("this job has no servers")]}
    assert talk.dropped == [51]
    assert talk.coordination.deadline is None


def test_a_server_may_not_speak_as_a_worker(talk: Conversation) -> None:
    first_view(talk)
    talk.say(51, AskServers(0, 1.0))
    assert talk.dropped == [51]
