from __future__ import annotations

import os
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from shoal.cluster.worker.coordinator_client import CoordinatorClient
from shoal.config.liveness import LivenessConfig
from shoal.errors import CallsDiffer, ClusterError, CoordinatorLost, WaitTimedOut, WireError
from shoal.runtime.transport import unix
from shoal.runtime.transport.framing import encode, read_message, send_message
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.supervisor import Suspect, Watch, Watching
from shoal.runtime.transport.messages.worker_coordinator import (
    BeginCall,
    CallGranted,
    Join,
    Joined,
    JoinRefused,
    Leave,
    ScriptEnded,
    StoreAdd,
    StoreCheck,
    StoreCount,
    StoreGet,
    StoreNumKeys,
    StoreSet,
    StoreWait,
    ViewFormed,
)

Start = Callable[..., Any]


def raw(path: str) -> socket.socket:
    return unix.connect(path, timeout_s=10.0)


def join(sock: socket.socket, rank: int = 0, **changes: int) -> Message:
    send_message(
        sock, Join(**{"rank": rank, "incarnation": 0, "pid": os.getpid(), "num_workers": 2, **changes})
    )
    return read_message(sock)[0]


def is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def both(pool: ThreadPoolExecutor, first: Callable[[], Any], second: Callable[[], Any]) -> list[Any]:
    """What two ranks at once get: a result, or the error."""
    futures = [pool.submit(first), pool.submit(second)]
    return [future.exception() or future.result() for future in futures]


# ---- joining --------------------------------------------------------------------------------------


def test_a_worker_that_joins_learns_the_view(start: Start) -> None:
    with start().client(rank=1) as client:
        assert client.view == 0  # none was formed yet


def test_one_process_may_hold_several_connections(start: Start) -> None:
    running = start()
    with running.client(rank=0) as first, running.client(rank=0) as second:
        assert first.request(StoreSet({"a": b"1"}), 5.0) == second.request(StoreSet({"b": b"1"}), 5.0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_workers": 3}, "a job of 3 workers, this one has 2"),
        ({"rank": 2}, "no rank 2 among 2 workers"),
        ({"pid": 1}, "already here as process"),
    ],
)
def test_a_process_that_does_not_belong_is_told_why_and_counted(
    start: Start, changes: dict[str, int], reason: str
) -> None:
    running = start()
    with raw(running.path) as member, raw(running.path) as sock:
        join(member)
        answer = join(sock, **changes)
        assert isinstance(answer, JoinRefused)
        assert reason in answer.reason
        assert is_closed(sock)
        send_message(member, StoreNumKeys())
        assert read_message(member)[0] == StoreCount(0)
        assert running.coordinator.num_refused == 1


def test_a_newer_incarnation_closes_the_connections_of_the_older_and_keeps_it_out(start: Start) -> None:
    running = start()
    with raw(running.path) as old, running.client(rank=1) as other:
        join(old)
        with running.client(rank=0, incarnation=1):
            assert is_closed(old)
            with pytest.raises(ClusterError, match="incarnation 1 is in, this is 0"), running.client(rank=0):
                pass
            assert other.request(StoreNumKeys(), 5.0) == StoreCount(0)


def test_whoever_connects_and_never_joins_is_closed_at_the_deadline(start: Start) -> None:
    running = start(join_timeout_s=0.05)
    with raw(running.path) as sock:
        assert is_closed(sock)
    assert "never joined" in running.coordinator.last_refusal


# ---- calls ----------------------------------------------------------------------------------------


def test_calls_and_the_end_of_the_script_hold_every_rank_until_all_are_there(start: Start) -> None:
    running = start()
    with running.client(rank=0) as zero, raw(running.path) as one, ThreadPoolExecutor() as pool:
        join(one, rank=1)
        for number, kind in enumerate(["fit", "evaluate"], start=1):
            waiting = pool.submit(zero.begin_call, number, kind, "data")
            send_message(one, StoreCheck(["nothing"]))  # rank 1 is about other things
            read_message(one)
            assert not waiting.done()
            send_message(one, BeginCall(1, number, kind, "data"))
            assert read_message(one)[0] == CallGranted(number)
            waiting.result(10.0)
        leaving = pool.submit(zero.end_script, 2)
        send_message(one, ScriptEnded(1, 2))
        assert read_message(one)[0] == Leave()
        leaving.result(10.0)


def test_ranks_that_differ_get_an_error_that_lists_them(start: Start) -> None:
    running = start()
    with running.client(rank=0) as zero, running.client(rank=1) as one, ThreadPoolExecutor() as pool:
        errors = both(pool, lambda: zero.begin_call(1, "fit", "epochs=2"), lambda: one.end_script(0))
    calls = {0: "called fit(epochs=2)", 1: "ended its script after 0 calls"}
    for error in errors:
        assert isinstance(error, CallsDiffer)
        assert (error.number, error.calls) == (1, calls)


def test_a_rank_that_never_comes_is_named_with_the_setting_to_change(start: Start) -> None:
    with start(join_timeout_s=0.05).client(rank=0, join_timeout_s=0.05) as client:
        with pytest.raises(WaitTimedOut, match=r"call 1 \(fit\) waited .* rank 1 \(never joined\)") as caught:
            client.begin_call(1, "fit", "")
        assert "join_timeout_s (now 0.05 s)" in str(caught.value)
        assert caught.value.waited_s >= 0.05


def test_a_rank_that_vanishes_while_it_waits_is_waited_for_again(start: Start) -> None:
    running = start()
    with running.client(rank=0) as zero, ThreadPoolExecutor() as pool:
        with raw(running.path) as one:
            join(one, rank=1)
            send_message(one, BeginCall(1, 1, "fit", ""))
        with running.client(rank=1, incarnation=1) as one_again:
            assert both(
                pool, lambda: zero.begin_call(1, "fit", ""), lambda: one_again.begin_call(1, "fit", "")
            ) == [None, None]


def test_a_waiting_client_that_vanishes_leaves_nothing_behind(start: Start) -> None:
    running = start()
    with raw(running.path) as sock, running.client(rank=1) as other:
        join(sock)
        send_message(sock, StoreWait(["never"], 1000.0))
        sock.close()
        while len(running.coordinator._connections) > 1:
            other.request(StoreNumKeys(), 5.0)
        assert running.coordinator._coordination.deadline is None


# ---- strangers ------------------------------------------------------------------------------------

HUGE = struct.pack("<4sHHII", b"SHOL", 1, 0, 2**32 - 1, 0)
FRAMES = struct.pack("<4sHHIIQ", b"SHOL", 1, 1, 10, 0, 2**63)


def joined(*messages: Message) -> bytes:
    return b"".join(b"".join(encode(message)) for message in messages)


HELLO = Join(rank=0, incarnation=0, pid=os.getpid(), num_workers=2)

STRANGERS = {
    "another protocol": b"GET / HTTP/1.1\r\n\r\n",
    "noise": random.Random(7).randbytes(5000),
    "a huge header": HUGE,
    "a frame of 2**63 bytes": FRAMES,
    "a damaged message": joined(HELLO)[:-1] + b"\xff",
    "an answer": joined(HELLO, Joined(1)),
    "a question before joining": joined(StoreNumKeys()),
    "joining twice": joined(HELLO, HELLO),
    "speaking for another rank": joined(HELLO, BeginCall(1, 1, "fit", "")),
    "ending for another rank": joined(HELLO, ScriptEnded(1, 0)),
    "two questions at once": joined(HELLO, StoreWait(["never"], 100.0), StoreNumKeys()),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_what_a_stranger_says_closes_its_own_connection_and_no_other(start: Start, name: str) -> None:
    running = start()
    with running.client(rank=1) as member, raw(running.path) as waiting, raw(running.path) as stranger:
        join(waiting, rank=1)
        send_message(waiting, StoreGet(["key"], 100.0))
        stranger.sendall(STRANGERS[name])
        while True:
            try:
                if not stranger.recv(4096):
                    break
            except ConnectionResetError:
                break
        assert running.coordinator.num_refused == 1
        member.request(StoreSet({"key": b"value"}), 5.0)
        assert read_message(waiting)[0].values == [b"value"]  # type: ignore[attr-defined]


def test_a_torn_message_and_a_closed_connection_are_nobodys_concern(start: Start) -> None:
    running = start()
    with running.client(rank=1) as member:
        for cut in range(1, len(joined(HELLO)), 7):
            with raw(running.path) as sock:
                sock.sendall(joined(HELLO)[:cut])
        while len(running.coordinator._connections) > 1:
            member.request(StoreNumKeys(), 5.0)
        assert member.request(StoreNumKeys(), 5.0) == StoreCount(0)


def test_a_client_that_never_reads_its_answers_is_dropped(start: Start) -> None:
    running = start()
    with raw(running.path) as greedy, running.client(rank=1) as member:
        join(greedy)
        member.request(StoreSet({"long": bytes(3 << 20)}), 5.0)
        asks = joined(StoreGet(["long"], 1.0)) * 100_000
        with pytest.raises(ConnectionError):
            greedy.sendall(asks)
        assert member.request(StoreNumKeys(), 5.0) == StoreCount(1)


# ---- the client -----------------------------------------------------------------------------------


def test_threads_that_share_a_client_get_their_own_answers(start: Start) -> None:
    with start().client(rank=0) as client, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: client.request(StoreAdd("n", 1), 10.0), range(200)))
    assert sorted(answer.value for answer in answers) == list(range(1, 201))  # type: ignore[attr-defined]


def test_nobody_at_the_path_is_one_error(start: Start) -> None:
    running = start()
    running.path += "-nobody"
    with pytest.raises(CoordinatorLost, match="rank 0's join lost the coordinator"), running.client(rank=0):
        pass


def test_an_answer_that_comes_late_is_not_taken_for_the_next_one(start: Start) -> None:
    with start().client(rank=0) as client:
        with pytest.raises(WaitTimedOut, match="the coordinator"):
            client.request(StoreWait(["late"], 1000.0), timeout_s=0.05)
        client.request(StoreSet({"late": b""}), 5.0)
        assert client.request(StoreNumKeys(), 5.0) == StoreCount(1)


def test_what_is_too_large_to_say_is_refused_and_the_conversation_goes_on(start: Start) -> None:
    with start().client(rank=0) as client:
        with pytest.raises(WireError, match="header of"):
            client.request(StoreSet({"key": bytes(5 << 20)}), 5.0)
        assert client.request(StoreNumKeys(), 5.0) == StoreCount(0)


@pytest.fixture
def mute() -> Iterator[tuple[str, threading.Event, threading.Event]]:
    """A coordinator that lets one client in, hears one question, and never answers: (path, heard, hang up)."""
    directory = unix.runtime_dir()
    path, heard, hang_up = str(directory / "c"), threading.Event(), threading.Event()

    def serve() -> None:
        sock, _ = unix.accept(listener)
        with sock:
            read_message(sock)
            send_message(sock, Joined(1))
            read_message(sock)
            heard.set()
            hang_up.wait(60.0)

    with unix.listen(path) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield path, heard, hang_up
        hang_up.set()
        thread.join()
    os.unlink(path)
    directory.rmdir()


def test_a_coordinator_that_goes_away_in_the_middle_of_a_wait_and_stays_away_is_lost(mute: Any) -> None:
    path, heard, hang_up = mute
    with (
        ThreadPoolExecutor() as pool,
        closing(
            CoordinatorClient(path, 0, num_workers=2, liveness=LivenessConfig(reconnect_timeout_s=0.1))
        ) as client,
    ):
        waiting = pool.submit(client.begin_call, 1, "fit", "")
        heard.wait(60.0)
        hang_up.set()
        assert isinstance(waiting.exception(60.0), CoordinatorLost)


def test_closing_wakes_a_thread_that_waits_for_an_answer(mute: Any) -> None:
    path, heard, _ = mute
    with ThreadPoolExecutor() as pool, closing(CoordinatorClient(path, 0, num_workers=2)) as client:
        waiting = pool.submit(client.begin_call, 1, "fit", "")
        heard.wait(60.0)
        client.close()
        assert isinstance(waiting.exception(60.0), CoordinatorLost)


@pytest.fixture
def dying() -> Iterator[tuple[str, list[Message]]]:
    """A coordinator that is killed three times: before it answers a join, before it answers a question, and after
    it sent half of an answer. The fourth time it answers. Gives its path, and what it hears."""
    directory = unix.runtime_dir()
    path, heard = str(directory / "c"), list[Message]()

    def serve() -> None:
        for life in range(4):
            sock, _ = unix.accept(listener)
            with sock:
                heard.append(read_message(sock)[0])
                if life > 0:
                    send_message(sock, Joined(life))
                    heard.append(read_message(sock)[0])
                if life == 2:
                    sock.sendall(b"".join(encode(CallGranted(1)))[:-3])
                if life == 3:
                    send_message(sock, CallGranted(1))

    with unix.listen(path) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield path, heard
        thread.join()
    os.unlink(path)
    directory.rmdir()


def test_a_client_whose_coordinator_dies_joins_again_and_repeats_its_question(
    dying: tuple[str, list[Message]],
) -> None:
    path, heard = dying
    with closing(CoordinatorClient(path, 0, num_workers=2)) as client:
        client.begin_call(1, "fit", "")
        assert client.view == 3
    join, question = Join(0, 0, os.getpid(), 2), BeginCall(0, 1, "fit", "")
    assert heard == [join, join, question, join, question, join, question]


def test_a_coordinator_tells_whoever_watches_and_only_this_jobs_supervisor_may(start: Start) -> None:
    running = start(can_recover=True, step_timeout_s=0.05)
    with raw(running.path) as supervisor, running.client(rank=0) as zero, ThreadPoolExecutor() as pool:
        send_message(supervisor, Watch())
        assert read_message(supervisor)[0] == Watching(0)
        entering = pool.submit(zero.enter_view, view_left=0, finished=-1, call=0)
        suspect = read_message(supervisor)[0]
        assert isinstance(suspect, Suspect)
        assert suspect.rank == 1
        with running.client(rank=1) as one:
            assert one.enter_view(view_left=0, finished=-1, call=0) == entering.result(10.0)
        told = read_message(supervisor)[0]
        while isinstance(told, Suspect):
            told = read_message(supervisor)[0]
        assert told == ViewFormed(1, -1, -1, 0, [0, 0])
        running.coordinator._supervisor = 0
        with raw(running.path) as stranger:
            send_message(stranger, Watch())
            assert is_closed(stranger)
