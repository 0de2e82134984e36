"""Bugs that the simulator found in the pure parts, in as few steps as possible."""

from __future__ import annotations

from shoal.cluster.coordinator.actions import Answer
from shoal.cluster.coordinator.journal_entries import JournalState, Persist
from shoal.cluster.coordinator.state import Action, Coordination, CoordinationConfig
from shoal.config.liveness import LivenessConfig
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.supervisor import Reaped, Watch
from shoal.runtime.transport.messages.worker_coordinator import (
    BeginCall,
    CallGranted,
    EnterView,
    Join,
    Joined,
    Leave,
    ScriptEnded,
    ViewFormed,
)

CONFIG = CoordinationConfig(
    num_workers=2, liveness=LivenessConfig(join_timeout_s=30.0, step_timeout_s=10.0), can_recover=True
)


class Desk:
    """A Coordination and what it has answered; client 0 is the supervisor."""

    def __init__(self, memory: JournalState | None = None) -> None:
        self.core = Coordination(CONFIG, memory)
        self.memory = memory or JournalState()
        self.core.connected(1000, is_supervisor=True)
        self.say(1000, Watch())

    def join(self, client: int, rank: int, incarnation: int = 0) -> list[tuple[int, Message]]:
        self.core.connected(client)
        return self.say(client, Join(rank, incarnation, 100 + 10 * rank + incarnation, 2))

    def say(self, client: int, message: Message) -> list[tuple[int, Message]]:
        """What is answered to whom, the supervisor left out."""
        actions: list[Action] = self.core.hear(client, message, 0.0)
        for action in actions:
            if isinstance(action, Persist):
                self.memory.apply(action.entry)
        return [
            (each.client, each.message) for each in actions if isinstance(each, Answer) and each.client < 1000
        ]


def view_one() -> Desk:
    desk = Desk()
    desk.join(1, 0)
    desk.join(2, 1)
    desk.say(1, EnterView(0, 0, 0, -1, 0))
    assert [client for client, _ in desk.say(2, EnterView(1, 0, 0, -1, 0))] == [1, 2]
    return desk


def test_a_replacement_whose_donor_died_before_it_gave_anything_is_no_survivor() -> None:
    desk = view_one()
    desk.say(1000, Reaped(1, 0, -9))
    desk.join(3, 1, incarnation=1)
    desk.say(1, EnterView(0, 0, 1, 57, 1))
    desk.say(3, EnterView(1, 1, 0, -1, 1))  # view 2; rank 0 is the donor, and breaks off
    desk.say(3, EnterView(1, 1, 2, -1, 1))
    formed = ViewFormed(3, donor=0, finished=57, call=1, incarnations=[0, 1])
    assert desk.say(1, EnterView(0, 0, 2, 57, 1)) == [(1, formed), (3, formed)]


def test_a_question_that_was_overtaken_by_its_repeat_does_not_take_the_answer() -> None:
    desk = Desk()
    desk.join(1, 0)
    desk.join(2, 0)  # the same process, on a new line
    desk.join(3, 1)
    call = BeginCall(0, 1, "fit", "")
    assert desk.say(2, call) == []
    assert desk.say(1, call) == []  # sent first, arrives last
    desk.core.gone(1)
    assert desk.say(3, BeginCall(1, 1, "fit", "")) == [(2, CallGranted(1)), (3, CallGranted(1))]


def test_a_replacement_that_comes_after_the_end_hears_so_each_time_it_asks() -> None:
    desk = Desk()
    desk.join(1, 0)
    desk.join(2, 1)
    desk.say(1, ScriptEnded(0, 0))
    assert desk.say(2, ScriptEnded(1, 0)) == [(1, Leave()), (2, Leave())]
    desk.say(1000, Reaped(1, 0, -9))
    assert desk.join(3, 1, incarnation=1) == [(3, Leave())]
    assert desk.join(4, 1, incarnation=1) == [(4, Leave())]


def test_granting_an_old_call_again_does_not_forget_those_after_it() -> None:
    desk = view_one()
    for number in (1, 2):
        desk.say(1, BeginCall(0, number, "fit", ""))
        desk.say(2, BeginCall(1, number, "fit", ""))
    desk.say(1000, Reaped(1, 0, -9))
    assert desk.join(3, 1, incarnation=1) == [(3, Joined(1))]
    assert desk.say(3, BeginCall(1, 1, "fit", "")) == [(3, CallGranted(1))]
    again = Desk(desk.memory)  # the coordinator is killed and comes back
    again.join(1, 0)
    assert again.say(1, BeginCall(0, 2, "fit", "")) == [(1, CallGranted(2))]
