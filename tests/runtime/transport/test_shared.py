"""A link to a server: what is sent arrives, answers find their waiters, and a lost server is noticed at once."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import HELLO, PULL, PUSH, serving

from shoal.errors import LinkLost, PsError, WaitTimedOut
from shoal.runtime.transport.messages.client_server import Committed, Hello, PsRefused, Pulled
from shoal.runtime.transport.shared_client import Link
from shoal.runtime.transport.shared_server import Request

TMP = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)


@given(sizes=st.lists(st.sampled_from([0, 1, 64, 4096, 4097, 70_000, 300_000]), max_size=6), data=st.data())
@TMP
def test_frames_of_every_size_arrive_whole_and_come_back(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], data: st.DataObject
) -> None:
    inline = [data.draw(st.booleans()) for _ in sizes]
    with serving(tmp_path_factory.mktemp("s")) as server:
        link = Link.connect(server.path, HELLO)
        contents = [np.random.default_rng(size).bytes(size) for size in sizes]
        frames = []
        for content, is_inline in zip(contents, inline, strict=True):
            if is_inline:
                frames.append(content)
            else:
                frames.append(link.alloc(len(content)))
                frames[-1].view[:] = content
        message, _ = link.wait(link.send(PUSH, frames), 60.0)
        assert isinstance(message, Committed)
        # Into shared memory where there is some to write, and by the socket.
        if sizes:
            into = [link.alloc(size) for size in sizes]
            assert isinstance(link.wait(link.send(PULL, into=into), 60.0)[0], Pulled)
            assert [bytes(buffer.view) for buffer in into] == contents
        assert [bytes(frame) for frame in link.wait(link.send(PULL), 60.0)[1]] == contents
        link.close()


def test_answers_may_overtake_each_other_and_find_their_waiters(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        waiting: list[Request] = []

        def answer_in_reverse(request: Request) -> None:
            waiting.append(request)
            if len(waiting) == 20:
                for each in reversed(waiting):
                    server.listener.reply(
                        each.peer, each.ticket, Committed(each.ticket, 0, 0), [bytes(each.frames[0])]
                    )

        link = Link(server.path)
        server.answer = answer_in_reverse
        tickets = [link.send(PUSH, [b"%d" % number]) for number in range(20)]
        found: dict[int, bytes] = {}

        def wait_for(number: int) -> None:
            found[number] = bytes(link.wait(tickets[number], 60.0)[1][0])

        threads = [threading.Thread(target=wait_for, args=(number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == {number: b"%d" % number for number in range(20)}
        link.close()


def test_more_than_the_socket_holds_goes_both_ways_at_once(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        server.answer = lambda r: server.listener.reply(r.peer, r.ticket, Committed(1, 0, 0), r.frames)
        link = Link(server.path)
        content = os.urandom(3_000_000)
        tickets = [link.send(PUSH, [content]) for _ in range(8)]
        for ticket in tickets:
            assert bytes(link.wait(ticket, 60.0)[1][0]) == content
        link.close()


def test_what_was_held_back_leaves_though_the_socket_is_full(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        begin = threading.Event()

        def answer(request: Request) -> None:
            begin.wait(60.0)  # the socket fills meanwhile
            server.listener.reply(request.peer, request.ticket, Committed(request.ticket, 0, 0))

        link = Link(server.path)
        server.answer = answer
        tickets = [link.send(PUSH, [bytes(4096)], is_held=True, is_blocking=False) for _ in range(1000)]
        assert link.has_unsent
        timer = threading.Timer(0.05, begin.set)  # once somebody waits
        timer.start()
        for ticket in tickets:
            assert isinstance(link.wait(ticket, 60.0)[0], Committed)
        timer.join()
        link.close()


def test_threads_that_send_and_wait_at_once_get_their_own_answers(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        server.answer = lambda r: server.listener.reply(r.peer, r.ticket, Committed(1, 0, 0), r.frames)
        link, problems = Link(server.path), []

        def talk(number: int) -> None:
            for turn in range(50):
                content = bytes([number]) * (turn * 7001)
                if bytes(link.wait(link.send(PUSH, [content]), 60.0)[1][0]) != content:
                    problems.append((number, turn))

        threads = [threading.Thread(target=talk, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not problems
        link.close()


def test_a_server_that_is_gone_is_noticed_at_once_by_every_waiter(tmp_path: Path) -> None:
    lost: list[LinkLost] = []
    with serving(tmp_path) as server:
        link = Link.connect(server.path, HELLO)
        link.on_lost = lost.append
        server.answer = lambda request: server.listener.close_peer(request.peer)
        array = np.frombuffer(link.alloc(80_000).view, np.float64)
        ticket = link.send(PUSH)
        began = time.monotonic()
        with pytest.raises(LinkLost, match="is lost: "):
            link.wait(ticket, 60.0)
        assert time.monotonic() - began < 30.0
        for use in (
            lambda: link.send(PUSH),
            lambda: link.wait(ticket, 1.0),
            lambda: link.take(ticket),
            link.poll,
        ):
            with pytest.raises(LinkLost):
                use()
        assert len(lost) == 1
        assert link.arena.bytes_reserved == 0
        array[:] = 1.0  # still its holder's
    with pytest.raises(LinkLost, match="nobody answers"):
        Link(tmp_path / "nothing")


def test_a_wait_without_an_answer_ends_and_names_whom_it_waited_for(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        link = Link.connect(server.path, HELLO, peer="server-0")
        held: list[Request] = []
        server.answer = held.append
        ticket = link.send(PUSH)
        with pytest.raises(WaitTimedOut, match="server-0"):
            link.wait(ticket, 0.05)
        while not held:
            time.sleep(0.001)
        server.listener.reply(held[0].peer, held[0].ticket, Committed(1, 0, 0))
        server.listener.flush()
        assert isinstance(link.wait(ticket, 60.0)[0], Committed)
        with pytest.raises(ValueError, match="not waited for"):
            link.wait(ticket, 60.0)
        link.close()


def test_a_server_that_refuses_the_hello_says_why(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        server.answer = lambda r: server.listener.reply(
            r.peer, r.ticket, PsRefused("worker-0 is in already.")
        )
        with pytest.raises(PsError, match="worker-0 is in already"):
            Link.connect(server.path, Hello(name="worker-0", incarnation=0))


def test_an_answer_that_nobody_wanted_is_kept_apart(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        link = Link.connect(server.path, HELLO)
        ticket = link.send(PUSH, wants_reply=False)
        link.wait(link.send(PUSH), 60.0)
        assert [reply.ticket for reply in link.unasked] == [ticket]
        link.close()


def test_a_loop_that_polls_gets_all_answers_and_never_waits(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        server.answer = lambda r: server.listener.reply(r.peer, r.ticket, Committed(1, 0, 0), r.frames)
        link = Link(server.path)
        content = os.urandom(2_000_000)
        tickets = [link.send(PUSH, [content], is_blocking=False) for _ in range(3)]
        found = []
        deadline = time.monotonic() + 10.0
        while len(found) < 3 and time.monotonic() < deadline:
            found += link.poll()
        assert [reply.ticket for reply in found] == tickets
        assert all(bytes(reply.frames[0]) == content for reply in found)
        assert not link.has_unsent
        link.close()


def test_a_link_leaves_no_descriptor_behind(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            link = Link.connect(server.path, HELLO)
            link.wait(link.send(PUSH, [link.alloc(100_000)]), 60.0)
            link.close()
        deadline = time.monotonic() + 5.0
        while server.listener.num_peers and time.monotonic() < deadline:
            time.sleep(0.001)
        assert len(os.listdir("/proc/self/fd")) == before + 1  # what was pushed last is still held
        server.last.clear()
        assert len(os.listdir("/proc/self/fd")) == before
        assert server.listener.bytes_mapped == 0
        assert server.listener.num_refused == 0
