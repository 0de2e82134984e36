"""Two and three real cores that talk to each other: what one acknowledges, all holders have."""

from __future__ import annotations

from typing import Any

import numpy as np
from serverbench import Bench, messages

from shoal.ps.server.actions import Action, Reply, Request, Send, Tell
from shoal.ps.server.core import ServerCore
from shoal.ps.server.replication import encode
from shoal.runtime.transport.messages.client_server import (
    AppliedSeqsRead,
    AskNote,
    Committed,
    DeclareMode,
    Hello,
    Note,
    Post,
    Posted,
    Pulled,
    PullRows,
    ReadAppliedSeqs,
    Replicate,
    Replicated,
    ViewOver,
)
from shoal.runtime.transport.messages.server_coordinator import ServerView, SlotsFilled
from slot_digests import slot_digests

ASYNC = DeclareMode(1, "async")
BOTH = ServerView(1, [[0, 1]] * 256, {0: 0, 1: 0})


class Pair(Bench):
    """A primary, a bench's own core, and others; what they say to each other waits in `sent`."""

    def __init__(self, mode: DeclareMode, view: ServerView = BOTH, number: int = 2) -> None:
        self.cores = [ServerCore(each) for each in range(number)]
        self.sent: list[Send] = []
        self.told: list[Any] = []
        self.core = self.cores[0]
        for core in self.cores[1:]:
            core.hear(Request(100, 1, Hello("server-0", 0), [], []))
        for each, core in enumerate(self.cores):
            if each in view.incarnations:
                self.note(core.view(view))
        self.ticket, self.view = 0, view.view
        from serverbench import DENSE, SPEC

        from shoal.runtime.transport.messages.client_server import DeclareTable, WriteChunk

        for message in (Hello("worker-0", 0), DeclareTable(SPEC), DENSE, mode):
            self.note(self.ask(1, message))
        self.note(self.ask(1, WriteChunk(view.view, 0, []), [np.ones(4, np.float32)]))
        self.deliver()

    def note(self, actions: list[Action]) -> list[Action]:
        self.sent += [action for action in actions if isinstance(action, Send)]
        self.told += [action.message for action in actions if isinstance(action, Tell)]
        return [action for action in actions if isinstance(action, Reply)]

    def deliver(self) -> list[Action]:
        """All that was sent, and the answers."""
        replies: list[Action] = []
        while self.sent:
            send = self.sent.pop(0)
            frames = [memoryview(bytes(frame)) for frame in send.frames]
            answers = self.note(self.cores[send.server].hear(Request(100, 2, send.message, frames, [])))
            for answer in answers:
                assert isinstance(answer, Reply)
                replies += self.note(self.core.answered(send.server, answer.message))
        return replies

    def fill(self) -> None:
        has_more = True
        while has_more:
            actions, has_more = self.core.work()
            self.note(actions)
        self.deliver()


def test_a_replacement_is_told_of_an_exchange_only_once_the_replica_knows_it_too() -> None:
    pair = Pair(DeclareMode(1, "exact"))
    assert messages(pair.note(pair.ask(1, Post(1, 1, 0, 1), [b"mine", b"note"]))) == []
    assert messages(pair.note(pair.ask(1, AskNote(1, 0)))) == []
    assert messages(pair.deliver()) == [Posted(1), Note(1, [1], [False], 0)]


def test_nothing_is_acknowledged_before_the_replica_has_it() -> None:
    pair = Pair(ASYNC)
    pair.push(0, 1, 1.0, stream=1)
    assert messages(pair.note(pair.end(0, 1, stream=1))) == []
    assert messages(pair.deliver()) == [Committed(1, 1, 1)]
    assert slot_digests(pair.cores[0].state) == slot_digests(pair.cores[1].state)


def test_a_replica_answers_an_exact_pull_once_it_has_followed_to_that_step_and_no_relaxed_one() -> None:
    def ask_replica(pair: Pair, clock: int) -> tuple[list[Any], Any]:
        out = np.zeros((2, 2), np.float32)
        pull = PullRows(pair.view, clock, 0, is_nearby=True)
        frames = [memoryview(np.array([1, 5])).cast("B")]
        return messages(pair.cores[1].hear(Request(1, 9, pull, frames, [memoryview(out).cast("B")]))), out

    pair = Pair(DeclareMode(1, "exact"))
    pair.cores[1].hear(Request(1, 1, Hello("worker-0", 0), [], []))
    assert ask_replica(pair, 0)[0] == [Pulled(0, 0)]
    answers, out = ask_replica(pair, 1)  # ahead of the step, as a worker asks
    pair.push(0, 1, 3.0)
    pair.note(pair.end(0, 1))
    assert (answers, pair.rows(1), out.tolist()) == ([], [[-3.0, -3.0]] * 2, [[0.0, 0.0]] * 2)
    pair.deliver()
    assert out.tolist() == pair.rows(1)
    # In a new view it does not know whether it has all of the slots before their primary has said so.
    pair.view = 2
    for core in pair.cores:
        pair.note(core.view(ServerView(2, [[0, 1]] * 256, {0: 0, 1: 0})))
    answers, out = ask_replica(pair, 1)
    assert (answers, out.tolist()) == ([], [[0.0, 0.0]] * 2)
    pair.deliver()
    assert out.tolist() == pair.rows(1)

    pair = Pair(ASYNC)
    pair.cores[1].hear(Request(1, 1, Hello("worker-0", 0), [], []))
    (refused,) = ask_replica(pair, 0)[0]
    assert "another server" in refused.reason


def test_a_repeat_on_one_connection_counts_once() -> None:
    pair = Pair(ASYNC)
    pair.push(0, 1, 1.0, stream=1)
    pair.note(pair.end(0, 1, stream=1))
    pair.core.lost(1)
    pair.sent.clear()
    pair.note(pair.core.tick())
    pair.sent = pair.sent * 2
    assert messages(pair.deliver())[:1] == [Committed(1, 1, 1)]
    assert slot_digests(pair.cores[0].state) == slot_digests(pair.cores[1].state)


def test_a_replica_refuses_what_comes_after_a_gap_and_of_an_old_view() -> None:
    pair = Pair(ASYNC)
    replica = pair.cores[1]
    (gap,) = messages(replica.hear(Request(100, 3, Replicate(1, (1 << 32) + 99, b""), [], [])))
    assert "never came" in gap.reason  # type: ignore[attr-defined]
    replica.view(ServerView(2, [[0, 1]] * 256, {0: 0, 1: 0}))
    assert messages(replica.hear(Request(100, 3, Replicate(1, 1, b""), [], []))) == [ViewOver(2)]


def test_a_replica_takes_over_with_its_marks() -> None:
    pair = Pair(ASYNC)
    pair.push(0, 1, 1.0, stream=1)
    pair.note(pair.end(0, 1, stream=1))
    pair.deliver()
    pair.core = pair.cores[1]
    pair.core.view(ServerView(2, [[1]] * 256, {1: 0}))
    pair.view = 2
    pair.ask(1, Hello("worker-0", 0))
    pair.push(0, 1, 1.0, stream=1)
    assert messages(pair.end(0, 1, stream=1)) == [Committed(1, 1, 1, is_new=False)]
    assert pair.rows() == [[-1.0, -1.0]] * 2
    assert pair.chunk() == [0.5] * 4


def test_a_new_server_is_filled_slot_by_slot_while_pushes_go_on() -> None:
    alone = ServerView(1, [[0]] * 256, {0: 0})
    pair = Pair(ASYNC, alone)
    pair.push(0, 1, 1.0, stream=1)
    pair.end(0, 1, stream=1)
    joining = ServerView(2, [[0]] * 256, {0: 0, 1: 0}, {slot: [1] for slot in range(256)})
    pair.note(pair.cores[1].view(joining))
    pair.note(pair.core.view(joining))
    pair.view = 2
    for seq in range(2, 130):
        actions, _ = pair.core.work()
        pair.note(actions)
        pair.push(0, seq, 1.0, stream=1)
        pair.note(pair.end(0, seq, stream=1))
        pair.deliver()
    assert pair.told == []
    pair.fill()
    assert pair.told == [SlotsFilled(2, list(range(256)))]
    assert slot_digests(pair.cores[0].state) == slot_digests(pair.cores[1].state)


def test_a_push_waits_for_a_server_that_is_being_filled_where_it_follows_already() -> None:
    pair = Pair(ASYNC, ServerView(1, [[0]] * 256, {0: 0}))
    joining = ServerView(2, [[0]] * 256, {0: 0, 1: 0}, {slot: [1] for slot in range(256)})
    pair.note(pair.cores[1].view(joining))
    pair.note(pair.core.view(joining))
    pair.fill()
    pair.view = 2
    pair.push(0, 1, 1.0, stream=1)
    assert messages(pair.note(pair.end(0, 1, stream=1))) == []
    assert messages(pair.deliver()) == [Committed(1, 1, 1)]


def test_what_was_not_answered_is_said_again_in_the_next_view() -> None:
    pair = Pair(ASYNC)
    pair.push(0, 1, 1.0, stream=1)
    pair.note(pair.end(0, 1, stream=1))
    pair.sent.clear()
    after = ServerView(2, [[0, 1]] * 256, {0: 0, 1: 0})
    pair.note(pair.cores[1].view(after))
    pair.note(pair.core.view(after))
    pair.deliver()
    assert slot_digests(pair.cores[0].state) == slot_digests(pair.cores[1].state)


def test_an_answer_of_an_earlier_view_answers_nothing_in_this_one() -> None:
    pair = Pair(ASYNC)
    after = ServerView(2, [[0, 1]] * 256, {0: 0, 1: 0})
    pair.note(pair.cores[1].view(after))
    pair.note(pair.core.view(after))
    pair.deliver()
    pair.view = 2
    pair.push(0, 1, 1.0, stream=1)
    pair.note(pair.end(0, 1, stream=1))
    assert pair.core.answered(1, Replicated((1 << 32) + 50)) == []


def test_slots_that_are_held_no_more_are_dropped() -> None:
    pair = Pair(ASYNC)
    pair.push(0, 1, 1.0, stream=1)
    pair.note(pair.end(0, 1, stream=1))
    pair.deliver()
    pair.cores[1].view(ServerView(2, [[0]] * 256, {0: 0, 1: 0}))
    assert pair.cores[1].state.contents.tables[0].num_rows == 0
    assert 0 not in pair.cores[1].state.contents.dense


def test_what_a_server_hears_of_from_another_its_own_followers_hear_of_too() -> None:
    # Once real: to the client that declares it here afterwards it is no news, so nobody would have told them.
    pair = Pair(ASYNC)
    declared = next(each for each in [pair.core.state.declarations()])
    middle = ServerCore(1)
    middle.view(ServerView(1, [[1, 2]] * 256, {0: 0, 1: 0, 2: 0}))
    middle.hear(Request(100, 1, Hello("server-0", 0), [], []))
    first = middle.hear(Request(100, 2, Replicate(1, (1 << 32) + 1, encode(declared)), [], []))
    assert [action.server for action in first if isinstance(action, Send)] == [2]


def test_an_update_is_made_with_the_settings_it_says_on_every_holder_and_nobody_remembers_them() -> None:
    # Once real: a server that came while a schedule changed had not heard of it, and took others back with it.
    pair = Pair(ASYNC)
    pair.push(0, 1, 1.0, stream=1)
    pair.note(pair.end(0, 1, stream=1, settings=[{"lr": 0.25}], table_settings={0: {"lr": 0.5}}))
    pair.deliver()
    assert (pair.rows(), pair.chunk()) == ([[-0.5, -0.5]] * 2, [0.75] * 4)
    pair.push(0, 2, 1.0, stream=1)
    pair.note(pair.end(0, 2, stream=1))
    pair.deliver()
    assert (pair.rows(), pair.chunk()) == ([[-1.5, -1.5]] * 2, [0.25] * 4)  # as declared
    assert slot_digests(pair.cores[0].state) == slot_digests(pair.cores[1].state)


def test_settings_that_no_rule_has_are_refused_before_anything_counts() -> None:
    pair = Pair(ASYNC)
    pair.push(0, 1, 1.0, stream=1)
    (refused,) = messages(pair.end(0, 1, stream=1, table_settings={0: {"speed": 1.0}}))
    assert "no setting 'speed'" in refused.reason  # type: ignore[attr-defined]
    assert (pair.rows(), pair.chunk()) == ([[0.0, 0.0]] * 2, [1.0] * 4)


def test_pushes_that_come_while_others_are_shipped_go_together_in_one_message() -> None:
    pair = Pair(ASYNC)
    (before,) = pair.core.replication.need().values()
    for seq in range(1, 6):
        pair.push(0, seq, float(seq), stream=1)
        assert messages(pair.note(pair.end(0, seq, stream=1))) == []
    assert len(pair.sent) == 1  # of the first; the others wait for its answer
    assert messages(pair.deliver()) == [Committed(seq, seq, seq) for seq in range(1, 6)]
    assert pair.core.replication.need() == {1: before + 2}
    assert slot_digests(pair.cores[0].state) == slot_digests(pair.cores[1].state)


def test_pushes_that_were_not_shipped_before_a_view_are_shipped_in_it() -> None:
    pair = Pair(ASYNC)
    for seq in (1, 2):
        pair.push(0, seq, 1.0, stream=1)
        pair.note(pair.end(0, seq, stream=1))
    pair.sent.clear()
    again = ServerView(2, [[0, 1]] * 256, {0: 0, 1: 0})
    pair.note(pair.cores[1].view(again))
    pair.note(pair.core.view(again))
    pair.deliver()
    assert slot_digests(pair.cores[0].state) == slot_digests(pair.cores[1].state)


def test_marks_are_read_only_once_the_replica_has_them_too() -> None:
    pair = Pair(ASYNC)
    pair.push(0, 1, 1.0, stream=1)
    pair.note(pair.end(0, 1, stream=1))
    assert messages(pair.note(pair.ask(1, ReadAppliedSeqs(1)))) == []
    assert AppliedSeqsRead() in messages(pair.deliver())
