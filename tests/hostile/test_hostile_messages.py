"""Messages that are well formed and hostile: refused by their bounds, by who says them, or by what they would take."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from test_fuzzed_frames import Hostile, new_core

from shoal.cluster.coordinator import store_table
from shoal.cluster.coordinator.process import Coordinator
from shoal.cluster.coordinator.state import CoordinationConfig
from shoal.errors import WireError
from shoal.ps.server.actions import Reply, Request
from shoal.runtime.transport import unix
from shoal.runtime.transport.framing import Decoder, decode, encode, read_message
from shoal.runtime.transport.messages import MESSAGES
from shoal.runtime.transport.messages.client_server import (
    ChunkSpec,
    Declared,
    DeclareDense,
    DensePart,
    Hello,
    Post,
    PsRefused,
    Replicate,
    Rest,
)
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.server_coordinator import JoinServer
from shoal.runtime.transport.messages.worker_coordinator import (
    Join,
    Joined,
    JoinRefused,
    StoreDone,
    StoreGet,
    StoreRefused,
    StoreSet,
)

info = msgspec.inspect


def unbounded(kind: Any, path: str) -> Iterator[str]:
    match kind:
        case info.IntType(ge=low, le=high) if low is None or high is None:
            yield path
        case info.ListType(item_type=item):
            yield from unbounded(item, path)
        case info.DictType(key_type=key, value_type=value):
            if not path.endswith(("groups", "settings")):  # plain values for torch, which are tried there
                yield from unbounded(key, path)
                yield from unbounded(value, path)
        case info.TupleType(item_types=items) | info.UnionType(types=items):
            for each in items:
                yield from unbounded(each, path)
        case info.StructType(fields=fields):
            for field in fields:
                yield from unbounded(field.type, f"{path}.{field.name}")


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_every_number_in_a_message_has_bounds(kind: type[Message]) -> None:
    assert list(unbounded(info.type_info(kind), kind.__name__)) == []


@pytest.mark.parametrize(
    "message",
    [
        JoinServer(0, 2**63, 1),
        JoinServer(2**16, 0, 1),
        Join(0, 2**31, 1, 3),
        Hello("worker-²", 0),
        Hello("worker-1\n", 0),
        Hello("worker-007", 0),
        Hello("somebody", 0),
        DeclareDense([ChunkSpec(0, 999, "float32", [])], "SGD", []),
    ],
    ids=repr,
)
def test_what_is_out_of_bounds_is_no_message(message: Message) -> None:
    with pytest.raises(WireError):
        decode(b"".join(encode(message)))


# ---- coordinator ----------------------------------------------------------------------------------


def test_nobody_jumps_far_ahead_of_the_incarnation_that_is_expected() -> None:
    hostile = Hostile()
    (refused,) = hostile.say(JoinServer(0, 2**31 - 1, 1))
    assert isinstance(refused, JoinRefused)
    hostile.connect()
    (refused,) = hostile.say(Join(0, 2**31 - 1, 1, 3))
    assert isinstance(refused, JoinRefused)
    assert hostile.serves()


def test_a_question_for_one_value_many_times_is_refused() -> None:
    hostile = Hostile()
    hostile.connect(rank=0)
    assert hostile.say(StoreSet({"key": bytes(1 << 20)})) == [StoreDone()]
    (refused,) = hostile.say(StoreGet(["key"] * 3000, 1.0))
    assert isinstance(refused, StoreRefused)
    assert "too large" in refused.reason


def test_the_store_holds_no_more_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_table, "MAX_BYTES", 1 << 20)
    hostile = Hostile()
    hostile.connect(rank=0)
    for _ in range(4):
        assert hostile.say(StoreSet({"same": bytes(400_000)})) == [StoreDone()]
    assert isinstance(hostile.say(StoreSet({"other": bytes(800_000)}))[0], StoreRefused)


def test_a_process_has_one_role_and_its_own_number() -> None:
    hostile = Hostile()
    coordination = hostile.coordination

    def say(client: int, pid: int, message: Message) -> Message:
        coordination.connected(client, pid=pid)
        return coordination.hear(client, message, 1.0)[0].message  # type: ignore[union-attr]

    assert isinstance(coordination_answer := say(100, 500, Join(0, 0, 499, 3)), JoinRefused), (
        coordination_answer
    )
    coordination.connected(101, pid=500)
    coordination.hear(101, Join(0, 0, 500, 3), 1.0)
    assert "is rank 0, and cannot be rank 1 too" in say(102, 500, Join(1, 0, 500, 3)).reason  # type: ignore[attr-defined]
    assert "is rank 0, and cannot be server 1 too" in say(103, 500, JoinServer(1, 0, 500)).reason  # type: ignore[attr-defined]


CONNECTS = """
import socket, sys
sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[1])
sock.sendall(bytes.fromhex(sys.argv[2]))
print(len(sock.recv(1)))
"""


def test_a_process_that_the_supervisor_did_not_start_is_refused() -> None:
    directory = unix.runtime_dir()
    path = directory / "c"
    stop, stopped = socket.socketpair()
    supervisor = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    coordinator = Coordinator(unix.listen(path), CoordinationConfig(num_workers=1), supervisor=supervisor.pid)
    thread = threading.Thread(target=lambda: coordinator.serve(until_readable=stopped))
    thread.start()
    try:
        join = b"".join(encode(Join(0, 0, os.getpid(), 1)))
        told = subprocess.run(
            [sys.executable, "-c", CONNECTS, str(path), join.hex()], capture_output=True, text=True
        )
        assert told.stdout == "0\n" or "ConnectionResetError" in told.stderr or "BrokenPipe" in told.stderr
        assert coordinator.num_refused == 1
        assert "is none of this job's" in coordinator.last_refusal
    finally:
        stop.send(b"x")
        thread.join()
        coordinator.close()
        for sock in (stop, stopped):
            sock.close()
        supervisor.communicate(b"\n")
        path.unlink()
        directory.rmdir()


def test_half_open_connections_do_not_keep_others_out() -> None:
    directory = unix.runtime_dir()
    path = directory / "c"
    stop, stopped = socket.socketpair()
    coordinator = Coordinator(unix.listen(path), CoordinationConfig(num_workers=1))
    thread = threading.Thread(target=lambda: coordinator.serve(until_readable=stopped))
    thread.start()
    flood = []
    try:
        while len(flood) < 301:
            with contextlib.suppress(BlockingIOError):  # more than wait to be accepted
                flood.append(unix.connect(path, timeout_s=5.0))
                flood[-1].sendall(b"SHOL\x01" if len(flood) < 301 else b"")
        with flood.pop() as sock:
            sock.sendall(b"".join(encode(Join(0, 0, os.getpid(), 1))))
            assert read_message(sock, timeout_s=5.0)[0] == Joined(0)
    finally:
        stop.send(b"x")
        thread.join()
        coordinator.close()
        for sock in (*flood, stop, stopped):
            sock.close()
        path.unlink()
        directory.rmdir()


def test_a_replayed_capture_changes_nothing_twice() -> None:
    hostile = Hostile()
    capture = b"".join(part for each in (Join(0, 0, 7, 3), StoreSet({"key": b"1"})) for part in encode(each))
    assert hostile.feed(capture) == [Joined(0), StoreDone()]
    members = dict(hostile.coordination._membership.members)
    for _ in range(100):
        hostile.connect()
        assert hostile.feed(capture) == [Joined(0), StoreDone()]
    assert hostile.coordination._membership.members == members
    assert Decoder().feed(capture)


# ---- server ---------------------------------------------------------------------------------------


def refusal(core: Any, peer: int, message: Message) -> str:
    (reply,) = core.hear(Request(peer, 1, message, [], []))
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, PsRefused), reply.message
    return reply.message.reason


def dense(shape: list[int], optimizer: str = "SGD", **settings: Any) -> DeclareDense:
    part = DensePart("weight", shape, 0, 0)
    return DeclareDense([ChunkSpec(0, 0, "float32", [part])], optimizer, [settings])


@pytest.mark.parametrize("shape", [[1 << 30], [1 << 40], [1 << 62, 1 << 62]], ids=str)
def test_a_model_larger_than_the_memory_is_refused(shape: list[int]) -> None:
    assert refusal(new_core(), 1, dense(shape)) == "too much"


@pytest.mark.parametrize("settings", [{"lr": "x"}, {"params": [1.0]}, {"momentum": [1.0]}], ids=str)
def test_settings_that_no_step_can_be_made_with_are_refused(settings: dict[str, Any]) -> None:
    core = new_core()
    assert "declared" in refusal(core, 1, dense([4], **settings))
    (reply,) = core.hear(Request(1, 1, dense([4], lr=0.1), [], []))
    assert isinstance(reply, Reply)
    assert reply.message == Declared(True)


def test_a_worker_speaks_for_its_own_rank_and_not_as_a_server() -> None:
    core = new_core()
    assert "speaks for rank 1" in refusal(core, 1, Rest(1, 1))
    assert "speaks for rank 2" in refusal(core, 1, Post(1, 1, 2, 0))
    assert "not for it to say" in refusal(core, 1, Replicate(1, 1, b""))
    core.hear(Request(2, 1, Hello("server-1", 0), [], []))
    assert "not for it to say" in refusal(core, 2, Rest(1, 0))
