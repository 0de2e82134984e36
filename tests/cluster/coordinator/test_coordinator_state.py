"""The coordinator's conversation as a whole, message by message; its parts have tests of their own."""

from __future__ import annotations

import pytest

from shoal.cluster.coordinator.actions import Answer, DropClient
from shoal.cluster.coordinator.journal_entries import Entry, Granted, JournalState, Persist, StoreChanged
from shoal.cluster.coordinator.state import Action, Coordination, CoordinationConfig
from shoal.config.liveness import LivenessConfig
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.supervisor import Reaped, Saved, Suspect, Watch, Watching
from shoal.runtime.transport.messages.worker_coordinator import (
    BeginCall,
    CallGranted,
    EnterView,
    Join,
    Joined,
    Late,
    LateHeard,
    Leave,
    Regroup,
    ScriptEnded,
    StoreAdd,
    StoreCount,
    StoreRefused,
    StoreSet,
    StoreWait,
    ViewFormed,
    ViewRefused,
    WaitExpired,
)

LIVENESS = LivenessConfig(join_timeout_s=10.0, step_timeout_s=5.0)
CONFIG = CoordinationConfig(num_workers=2, liveness=LIVENESS, can_recover=True)
SUPERVISOR = 100


class Conversation:
    """Clients by name: rank r, incarnation i speaks as client 1 + r + 10 * i, the supervisor as 100."""

    def __init__(
        self, config: CoordinationConfig = CONFIG, memory: JournalState | None = None, now: float = 0.0
    ) -> None:
        self.coordination, self.now, self.written = Coordination(config, memory, now=now), now, JournalState()
        self.coordination.connected(SUPERVISOR, is_supervisor=True)

    def take(self, actions: list[Action]) -> dict[int, Message]:
        """Write down what must be, and give what is answered; None stands for a closed connection."""
        answers: dict[int, Message] = {}
        has_answered = False
        for action in actions:
            match action:
                case Persist(entry):
                    self.written.apply(entry)
                    assert not has_answered or not isinstance(entry, Granted | ViewFormed | Join)
                case Answer(client, message):
                    answers[client], has_answered = message, True
                case DropClient(client):
                    self.coordination.gone(client)
        return answers

    def say(self, client: int, message: Message) -> dict[int, Message]:
        return self.take(self.coordination.hear(client, message, self.now))

    def watch(self) -> dict[int, Message]:
        return self.say(SUPERVISOR, Watch())

    def join(self, rank: int, incarnation: int = 0) -> int:
        client = 1 + rank + 10 * incarnation
        self.coordination.connected(client)
        assert self.say(client, Join(rank, incarnation, client, 2)) == {
            client: Joined(self.coordination._views.view)
        }
        return client

    def tick(self, now: float) -> dict[int, Message]:
        self.now = now
        return self.take(self.coordination.tick(now))


def call(rank: int, number: int = 1) -> BeginCall:
    return BeginCall(rank, number, "fit", "")


def enter(rank: int, view_left: int = 0, finished: int = -1, incarnation: int = 0) -> EnterView:
    return EnterView(rank, incarnation, view_left, finished, 1)


@pytest.fixture
def talk() -> Conversation:
    """Two ranks in call 1 and view 1."""
    talk = Conversation()
    talk.watch()
    for rank in range(2):
        talk.join(rank)
    talk.say(1, call(0))
    talk.say(2, call(1))
    talk.say(1, enter(0))
    talk.say(2, enter(1))
    return talk


def test_what_is_promised_is_written_first(talk: Conversation) -> None:
    assert talk.written.calls == [("fit", "")]
    assert talk.written.view == ViewFormed(1, -1, -1, 0, [0, 0])
    assert set(talk.written.joins) == {0, 1}


def test_who_waits_at_a_call_is_fetched_when_somebody_enters_a_view(talk: Conversation) -> None:
    assert talk.say(1, call(0, 2)) == {}
    assert talk.say(2, enter(1, 1, 4)) == {1: Regroup(1)}
    formed = ViewFormed(2, 0, 5, 1, [0, 0])
    assert talk.say(1, enter(0, 1, 5)) == {1: formed, 2: formed, SUPERVISOR: formed}
    assert talk.say(1, call(0, 2)) == {}
    assert talk.say(2, call(1, 2)) == {1: CallGranted(2), 2: CallGranted(2)}


def test_who_comes_to_a_call_while_somebody_waits_for_a_view_is_sent_there(talk: Conversation) -> None:
    talk.say(2, enter(1, 1, 4))
    assert talk.say(1, ScriptEnded(0, 1)) == {1: Regroup(1)}


def test_a_call_that_was_granted_is_granted_again_while_somebody_waits_for_a_view(talk: Conversation) -> None:
    talk.say(SUPERVISOR, Reaped(1, 0, -9))
    talk.say(1, enter(0, 1, 5))
    client = talk.join(1, 1)
    assert talk.say(client, call(1, 1)) == {client: CallGranted(1)}
    assert set(talk.say(client, enter(1, incarnation=1))) == {1, client, SUPERVISOR}


def test_who_waits_for_keys_of_a_view_hears_at_once_that_it_is_over(talk: Conversation) -> None:
    talk.say(2, StoreSet({"view-1/a": b"", "view-2/a": b"", "mine": b""}))
    assert talk.say(1, StoreWait(["view-1/b"], 100.0)) == {}
    answers = talk.say(2, enter(1, 1, 5))
    assert answers == {1: StoreRefused("view 1 is over: a rank has left it")}
    assert set(talk.written.store) == {"view-2/a", "mine"}
    assert isinstance(talk.say(1, StoreSet({"view-1/a": b""}))[1], StoreRefused)
    assert not isinstance(talk.say(1, StoreSet({"view-2/b": b"", "view-x/b": b""}))[1], StoreRefused)


def test_the_dead_are_dropped_and_may_not_speak_any_more(talk: Conversation) -> None:
    talk.say(1, enter(0, 1, 5))
    talk.say(SUPERVISOR, Reaped(1, 0, -9))
    assert talk.written.deaths == {1: Reaped(1, 0, -9)}
    assert talk.say(2, enter(1, 1, 5)) == {}
    assert talk.coordination._views.is_gathering


def test_an_old_incarnation_that_connects_again_is_refused_its_view(talk: Conversation) -> None:
    talk.coordination.connected(50)
    talk.say(50, Join(1, 0, 2, 2))
    talk.coordination._membership.reaped(
        1, 0, -9, 0.0
    )  # and the news of it has not dropped the connection yet
    assert isinstance(talk.say(50, enter(1, 1, 5))[50], ViewRefused)


def test_whom_a_worker_waits_for_at_a_server_is_looked_at_and_blamed_only_if_stopped(
    talk: Conversation,
) -> None:
    talk.now = 20.0
    late = Late([0, 1, 9], 5.0, "a step")  # itself and who does not exist are of no account
    answers = talk.say(1, late)
    assert answers[1] == LateHeard()
    suspect = answers[SUPERVISOR]
    assert isinstance(suspect, Suspect)
    assert (suspect.rank, suspect.incarnation, suspect.lenient) == (1, 0, True)
    assert suspect.why == "rank 0 waited 5.0 s for rank 1 in a step"
    assert talk.say(1, late) == {1: LateHeard()}  # once is enough, for a while
    talk.now = 26.0
    assert SUPERVISOR in talk.say(1, late)


def test_who_keeps_the_others_waiting_is_told_to_whoever_watches_until_it_is_replaced(
    talk: Conversation,
) -> None:
    talk.say(1, enter(0, 1, 5))
    [(client, suspect)] = talk.tick(6.0).items()
    assert client == SUPERVISOR
    assert isinstance(suspect, Suspect)
    assert (suspect.rank, suspect.incarnation, suspect.lenient, suspect.waited_s) == (1, 0, False, 6.0)
    said = talk.coordination.hear(SUPERVISOR, Watch(), 6.1)
    assert said == [Answer(SUPERVISOR, Watching(1)), Answer(SUPERVISOR, suspect)]
    talk.say(SUPERVISOR, Reaped(1, 0, -9))
    assert talk.watch() == {SUPERVISOR: Watching(1)}


def test_without_recovery_a_wait_for_a_view_ends() -> None:
    talk = Conversation(CoordinationConfig(num_workers=2, liveness=LIVENESS))
    talk.join(0)
    talk.say(1, enter(0))
    assert talk.tick(5.0) == {1: WaitExpired("view 1", 5.0, ["rank 1 (never joined)"])}


@pytest.mark.parametrize("message", [Watch(), Reaped(0, 0, -9), Saved(0, "x", 1)])
def test_only_the_supervisor_may_say_what_is_its_to_say(message: Message) -> None:
    talk = Conversation()
    client = talk.join(0)
    assert [type(action) for action in talk.coordination.hear(client, message, 0.0)] == [DropClient]


def test_a_replacement_that_comes_when_all_have_ended_is_let_go_at_once(talk: Conversation) -> None:
    talk.say(1, ScriptEnded(0, 1))
    assert talk.say(2, ScriptEnded(1, 1)) == {1: Leave(), 2: Leave()}
    for client in (30, 31):  # the answer may be lost, and it asks again
        talk.coordination.connected(client)
        assert talk.say(client, Join(1, 1, 77, 2)) == {client: Leave()}


# ---- another coordinator --------------------------------------------------------------------------


def test_the_next_coordinator_keeps_every_promise_of_the_last(talk: Conversation) -> None:
    talk.say(2, StoreAdd("n", 3, client=9, serial=1))
    talk.say(SUPERVISOR, Reaped(1, 0, -9))
    after = Conversation(memory=talk.written, now=50.0)
    after.watch()
    assert after.join(0) == 1
    after.coordination.connected(60)
    assert [type(action) for action in after.coordination.hear(60, Join(1, 0, 2, 2), 50.0)][-1] is DropClient
    client = after.join(1, 1)
    assert after.say(client, call(1, 1)) == {client: CallGranted(1)}
    assert after.say(1, StoreAdd("n", 3, client=9, serial=1)) == {1: StoreCount(3)}  # not done twice
    assert after.say(1, enter(0)) == {1: ViewFormed(1, -1, -1, 0, [0, 0])}  # its news was lost
    assert after.say(1, enter(0, 1, 5)) == {}
    assert after.say(client, enter(1, incarnation=1))[1] == ViewFormed(2, 0, 5, 1, [0, 1])


def test_the_next_coordinator_suspects_nobody_before_it_has_been_up_for_a_while(talk: Conversation) -> None:
    after = Conversation(memory=talk.written, now=50.0)
    after.join(0)
    after.say(1, enter(0, 1, 5))
    assert after.coordination.deadline == 50.0 + LIVENESS.coordinator_grace_s + LIVENESS.step_timeout_s


def test_a_promise_that_was_written_twice_was_made_once() -> None:
    memory = JournalState()
    entries: list[Entry] = [Granted(1, ("fit", "")), StoreChanged({"a": b"1"}, {}), Granted(1, ("fit", ""))]
    for entry in entries:
        memory.apply(entry)
    assert memory.calls == [("fit", "")]
