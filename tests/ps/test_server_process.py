"""A server as a process: serves its clients, follows the coordinator, speaks to other servers, and ends in order."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from server_group_of_processes import group

from shoal.errors import LinkLost
from shoal.ps.layout import slot_of
from shoal.runtime.transport.arena import Buffer
from shoal.runtime.transport.framing import send_message
from shoal.runtime.transport.messages.client_server import (
    Committed,
    Declared,
    DeclareMode,
    DeclareTable,
    Post,
    Posted,
    PsRefused,
    Pulled,
    PullRows,
    PushRows,
    Rest,
    StepEnd,
    TableSpec,
)
from shoal.runtime.transport.messages.server_coordinator import (
    JoinedServer,
    JoinServer,
    PingServer,
    RankJoined,
    ServerAlive,
    ServerView,
    SlotsFilled,
)
from shoal.runtime.transport.messages.worker_coordinator import JoinRefused, Leave
from shoal.runtime.transport.shared_client import Link

PUSH = PushRows(view=1, stream=0, seq=1, table=0)
PULL = PullRows(view=1, clock=0, table=0)
POST = Post(view=1, exchange=1, rank=0, anchored_at=0)
VIEW = ServerView(view=3, holders=[[0]], incarnations={0: 0, 1: 0})


def test_a_server_serves_follows_the_coordinator_outlives_it_and_leaves_when_told(tmp_path: Path) -> None:
    with group(tmp_path) as (coordinator, [server]):
        link = server.link()  # before it runs: its socket is there
        joined = coordinator.accept()
        assert joined == JoinServer(number=0, incarnation=0, pid=server.process.pid)
        coordinator.say(JoinedServer(view=3), RankJoined(0, 0), VIEW, PingServer(9))
        assert coordinator.hear() == SlotsFilled(3, [7])
        assert coordinator.hear() == ServerAlive(9)

        pushed, into = link.alloc(1 << 20), link.alloc(1 << 20)
        pushed.view[:] = os.urandom(1 << 20)
        assert isinstance(link.wait(link.send(PUSH, [pushed]), 60.0)[0], Committed)
        assert isinstance(link.wait(link.send(PULL, into=[into]), 60.0)[0], Pulled)
        assert into.view == pushed.view

        coordinator.lines[-1].close()  # it was killed; another one comes at the same address
        assert coordinator.accept() == joined
        assert isinstance(link.wait(link.send(PUSH, [b"while it was away"]), 60.0)[0], Committed)
        assert link.welcome is not None
        assert link.welcome.view == 0
        assert server.link().welcome.view == 3  # type: ignore[union-attr]
        coordinator.say(Leave())
        assert server.end() == (0, "")
        with pytest.raises(LinkLost):
            link.wait(link.send(PUSH), 60.0)


def test_what_the_core_sends_reaches_the_other_server_and_its_answer_comes_back(tmp_path: Path) -> None:
    with group(tmp_path, 2) as (coordinator, [first, second]):
        link = first.link()
        second.link().close()  # both run
        large, empty, small = os.urandom(3 << 20), b"", b"small"
        tickets = [link.send(POST, [large, empty, small]) for _ in range(5)]
        for ticket in tickets:
            assert isinstance(link.wait(ticket, 60.0)[0], Posted)
        reader = second.link()
        into = [reader.alloc(len(large)), reader.alloc(1), reader.alloc(len(small))]
        link.wait(link.send(POST, [large, b"1", small]), 60.0)
        reader.wait(reader.send(PULL, into=into), 60.0)
        assert [bytes(buffer.view) for buffer in into] == [large, b"1", small]

        # The other one is killed and replaced: what is sent from the next view on reaches its successor.
        reader.close()
        second.process.kill()
        assert second.end()[0] == -signal.SIGKILL
        second.start([first, second])
        second.link().close()
        for _ in range(3):
            coordinator.accept()
        for line in coordinator.lines:
            with contextlib.suppress(BrokenPipeError):  # of the one that was killed
                send_message(line, VIEW)
        deadline = time.monotonic() + 10.0
        while first.link().welcome.view != 3:  # type: ignore[union-attr]
            assert time.monotonic() < deadline
        answer, frames = link.wait(link.send(POST, [large]), 60.0)
        assert isinstance(answer, Posted)
        assert bytes(frames[0]) == b"lost 1"
        for server in (first, second):
            server.process.send_signal(signal.SIGTERM)
            assert server.end() == (0, "")


def test_a_server_short_of_memory_refuses_what_would_grow_and_goes_on_with_the_rest(tmp_path: Path) -> None:
    with group(tmp_path, server_memory_bytes=1 << 30) as (_, [server]):
        link = server.link()
        other = server.link()
        frame = link.alloc(100_000)
        assert isinstance(link.wait(link.send(PUSH, [frame]), 60.0)[0], Committed)
        assert isinstance(link.wait(link.send(Rest(1, 1024)), 60.0)[0], Declared)
        refused, _ = link.wait(link.send(PUSH, [frame]), 60.0)
        assert isinstance(refused, PsRefused)
        assert "server-0 holds 1," in refused.reason
        assert "raise server_memory_bytes" in refused.reason
        # A segment that is new to it is refused in the same words, and so is what lies in it.
        for _ in range(2):
            refused, _ = other.wait(other.send(POST, [other.alloc(100_000)]), 60.0)
            assert isinstance(refused, PsRefused)
        assert isinstance(link.wait(link.send(Rest(1, 0)), 60.0)[0], Declared)


def test_a_server_that_nobody_wants_says_so_and_ends(tmp_path: Path) -> None:
    with group(tmp_path) as (coordinator, [server]):
        coordinator.accept()
        coordinator.say(JoinRefused("there is a newer one"))
        code, said = server.end()
        assert code == 3
        assert "does not want server-0: there is a newer one" in said


def test_a_client_that_the_core_drops_is_counted_and_told_at_the_end(tmp_path: Path) -> None:
    with group(tmp_path) as (_, [server]):
        bad, good = server.link(), server.link()
        ticket = bad.send(PushRows(view=1, stream=13, seq=1, table=0))
        with pytest.raises(LinkLost):
            bad.wait(ticket, 60.0)
        assert isinstance(good.wait(good.send(PUSH), 60.0)[0], Committed)
        server.process.send_signal(signal.SIGTERM)
        code, said = server.end()
        assert code == 0
        assert "closed 1 connections" in said
        assert f"process {os.getpid()}: thirteen" in said


def test_what_was_acknowledged_is_on_the_replica_when_its_primary_is_killed(tmp_path: Path) -> None:
    keys = np.arange(1000, dtype=np.int64)
    table = TableSpec(
        number=0, name="t", dim=4, dtype="float32", rule="sgd", settings={"lr": 1.0}, num_rows=1000
    )
    with group(tmp_path, 2, is_real=True) as (coordinator, servers):
        for _ in servers:
            coordinator.accept()
        both = ServerView(
            view=1, holders=[[slot % 2, 1 - slot % 2] for slot in range(256)], incarnations={0: 0, 1: 0}
        )
        for line in coordinator.lines:
            send_message(line, both)
        links = [server.link() for server in servers]
        for link in links:
            link.wait(link.send(DeclareTable(table)), 60.0)
            link.wait(link.send(DeclareMode(num_workers=1, kind="async")), 60.0)
        for seq in (1, 2, 3):
            for number, link in enumerate(links):
                mine = keys[slot_of(0, keys) % 2 == number]
                frames = [put(link, mine), put(link, np.ones((len(mine), 4), np.float32))]
                link.send(PushRows(view=1, stream=1, seq=seq, table=0), frames, wants_reply=False)
                end = StepEnd(view=1, stream=1, seq=seq, rank=0, num_pushes=1, exchange=0, anchored_at=0)
                assert isinstance(link.wait(link.send(end, [bytes(32), b""]), 60.0)[0], Committed)
                assert not link.unasked
        servers[1].process.kill()
        for line in coordinator.lines:
            with contextlib.suppress(BrokenPipeError):
                send_message(line, ServerView(view=2, holders=[[0]] * 256, incarnations={0: 0}))
        into = links[0].alloc(16 * len(keys))
        asked = links[0].send(PullRows(view=2, clock=0, table=0), [put(links[0], keys)], [into])
        assert isinstance(links[0].wait(asked, 60.0)[0], Pulled)
        assert (np.frombuffer(into.view, np.float32) == -3.0).all()


def put(link: Link, array: np.ndarray) -> Buffer:
    buffer = link.alloc(array.nbytes)
    buffer.view[:] = array.tobytes()
    return buffer
