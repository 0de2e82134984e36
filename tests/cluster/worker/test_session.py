from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest

from shoal.cluster.worker import session
from shoal.cluster.worker.coordinator_client import CoordinatorClient
from shoal.runtime.transport import framing as codec
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.supervisor import Finished, Progress, Saved


@pytest.fixture(autouse=True)
def _fresh_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_session", session._Session())


@pytest.fixture
def supervisor() -> Iterator[socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    with ours, theirs:
        session.attach(rank=1, status=theirs)
        yield ours


def told(supervisor: socket.socket) -> list[Message]:
    messages = []
    while True:
        try:
            messages.append(codec.decode(supervisor.recv(1 << 20))[0])
        except BlockingIOError:
            return messages


def report(step: int, *, phase: str = "fit", epoch: int = 1, num_steps: int | None = 100) -> None:
    session.report(
        phase=phase,
        epoch=epoch,
        num_epochs=2,
        step=step,
        num_steps=num_steps,
        loss=0.5,
        metrics={"accuracy": 0.5},
        samples=step,
        samples_per_s=1.0,
        eta_s=None,
    )


def test_in_a_plain_process_calls_are_counted_and_nothing_is_said() -> None:
    assert [session.begin_call("fit", ""), session.begin_call("evaluate", "")] == [1, 2]
    report(1)
    session.saved("x", 1)
    session.finished()
    assert session.stop_requested() is None


def test_in_a_plain_process_progress_goes_to_whoever_listens() -> None:
    heard: list[Progress] = []
    session.listen(heard.append)
    report(1)
    session.listen(None)
    report(100)
    assert [progress.step for progress in heard] == [1]


def test_every_call_waits_for_the_other_ranks(supervisor: socket.socket) -> None:
    agreed: list[tuple[int, str, str]] = []
    client = SimpleNamespace(begin_call=lambda number, kind, detail: agreed.append((number, kind, detail)))
    session.agree_through(cast(CoordinatorClient, client))
    session.begin_call("fit", "epochs=2")
    assert session.begin_call("save", "") == 2
    assert agreed == [(1, "fit", "epochs=2"), (2, "save", "")]


def test_progress_is_thinned_but_never_where_something_begins_or_ends(supervisor: socket.socket) -> None:
    for step in range(1, 101):
        report(step)
    report(3, epoch=2)
    report(4, phase="validate", epoch=2)
    heard = [(m.phase, m.epoch, m.step) for m in told(supervisor) if isinstance(m, Progress)]
    assert heard == [("fit", 1, 1), ("fit", 1, 100), ("fit", 2, 3), ("validate", 2, 4)]


def test_progress_nobody_reads_is_dropped_and_blocks_nobody(supervisor: socket.socket) -> None:
    began = time.monotonic()
    for epoch in range(5000):
        report(1, epoch=epoch)
    assert time.monotonic() - began < session.SEND_TIMEOUT_S
    assert 0 < len(told(supervisor)) < 5000


def test_what_must_arrive_is_sent_after_dropped_progress(supervisor: socket.socket) -> None:
    report(1)
    session.saved("checkpoints/step-7", 7)
    session.summary(metrics={"loss": 0.5}, samples=10, seconds=1.0, steps=5)
    session.summary(metrics={"val_loss": 0.7}, samples=20, seconds=2.0, steps=6)
    session.finished()
    assert told(supervisor)[1:] == [
        Saved(1, "checkpoints/step-7", 7),
        Finished(1, 30, 3.0, 11, {"loss": 0.5, "val_loss": 0.7}),
    ]


def test_a_supervisor_that_is_gone_is_no_error(supervisor: socket.socket) -> None:
    supervisor.close()
    report(1)
    session.saved("x", 1)


def test_who_was_asked_to_leave_waits_for_nobody(supervisor: socket.socket) -> None:
    session.begin_call("fit", "")
    assert session.is_inside_call()
    session.request_stop("SIGTERM")
    with pytest.raises(KeyboardInterrupt):
        session._through_regroups(lambda: pytest.fail("waited"))
    assert not session.is_inside_call()


def test_a_wish_to_stop_is_heard() -> None:
    session.request_stop("SIGINT")
    assert session.stop_requested() == "SIGINT"


def test_a_note_of_a_replacement_is_printed_once_its_output_is_shown(
    capfd: pytest.CaptureFixture[str],
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        session.attach(rank=1, status=theirs, live_output=(os.dup(1), os.dup(2)))
        session.say_when_live("note: of the past")
        assert capfd.readouterr().err == ""
        session.live()
        assert capfd.readouterr().err == "note: of the past\n"
        session.say_when_live("note: of today")
        assert capfd.readouterr().err == "note: of today\n"
