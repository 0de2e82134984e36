"""Hostile frames for every endpoint: it goes on serving, and its memory stays within a bound."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import selectors
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from fuzzing import altered, message_at_limits, num_frames, packets

from shoal.cluster.coordinator.actions import Answer, DropClient
from shoal.cluster.coordinator.server_registry import ServersConfig
from shoal.cluster.coordinator.state import Coordination, CoordinationConfig
from shoal.cluster.hosts.authority import Authority
from shoal.cluster.supervisor.sockets import Control, ask
from shoal.cluster.supervisor.worker_handle import WorkerHandle
from shoal.data.remote import block_server
from shoal.data.remote.peers import LIMITS, BlockConnection, PeerHosts
from shoal.errors import WireError
from shoal.ps.server.actions import DropPeer, Reply, Request
from shoal.ps.server.core import ServerCore
from shoal.runtime.forkserver.messages import Close, Fork, Signal, receive_command, send_packet
from shoal.runtime.transport.envelope import REQUESTS, open_table
from shoal.runtime.transport.framing import Decoder, encode
from shoal.runtime.transport.messages import MESSAGES, blocks, client_server
from shoal.runtime.transport.messages.client_server import (
    DeclareMode,
    DeclareTable,
    Hello,
    TableSpec,
    Welcome,
)
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.server_coordinator import ServerView
from shoal.runtime.transport.messages.supervisor import Live, ScaleBegun, ScaleServers
from shoal.runtime.transport.messages.worker_coordinator import (
    Join,
    Joined,
    StoreGet,
    StoreSet,
    StoreValues,
)
from shoal.runtime.transport.tls import Identity

NUM_FRAMES = num_frames(20_000)
MOST_BYTES = 200 << 20


@pytest.fixture(autouse=True)
def _stays_within_its_memory() -> Iterator[None]:
    before = resident_bytes()
    yield
    assert resident_bytes() - before < MOST_BYTES


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


# ---- coordinator ----------------------------------------------------------------------------------


class Hostile:
    """A coordinator's state behind its real decoder, and clients that are dropped as it says."""

    def __init__(self) -> None:
        servers = ServersConfig(num_servers=2, num_copies=2, max_servers=4)
        self.coordination = Coordination(CoordinationConfig(num_workers=3, can_recover=True, servers=servers))
        self._numbers = itertools.count(1)
        self._num_heard = 0
        self.connect()

    def connect(self, *, rank: int | None = None) -> list[Message]:
        self.client, self.decoder = next(self._numbers), Decoder()
        self.coordination.connected(self.client)
        if rank is None:
            return []
        incarnation = self.coordination._membership.newest(rank)
        known = self.coordination._membership.members.get(rank)
        pid = known.pid if known is not None and known.incarnation == incarnation else 7
        return self.say(Join(rank, incarnation, pid, 3))

    def say(self, message: Message) -> list[Message]:
        return self.feed(b"".join(encode(message)))

    def feed(self, data: bytes) -> list[Message]:
        """Answers to this client. One that breaks a rule is dropped."""
        answers = []
        try:
            for message, _ in self.decoder.feed(data):
                self._num_heard += 1
                for action in self.coordination.hear(self.client, message, float(self._num_heard)):
                    match action:
                        case Answer(client, answer) if client == self.client:
                            answers.append(answer)
                        case DropClient(client) if client == self.client:
                            raise WireError("dropped")
                self.coordination.tick(float(self._num_heard))
        except WireError:
            self.coordination.gone(self.client)
            self.client = 0
        return answers

    def serves(self) -> bool:
        if not isinstance(self.connect(rank=1)[0], Joined):
            return False
        self.say(StoreSet({"view-999999999/key": b"value"}))
        return self.say(StoreGet(["view-999999999/key"], 1.0)) == [StoreValues([b"value"])]


def test_a_coordinator_outlives_hostile_frames() -> None:
    hostile, rng = Hostile(), random.Random(1)
    for packet in packets(NUM_FRAMES, seed=1):
        if not hostile.client or hostile.decoder.num_pending_bytes:
            if hostile.client:
                hostile.coordination.gone(hostile.client)
            hostile.connect(rank=rng.choice([None, 0, 1, 2]))
        hostile.feed(packet)
    assert hostile.serves()


# ---- server ---------------------------------------------------------------------------------------


TABLE = TableSpec(number=0, name="t", dim=2, dtype="float32", rule="sgd", settings={"lr": 0.1})


def new_core() -> ServerCore:
    core = ServerCore(0)
    core.state.contents.memory_problem = lambda nbytes: "too much" if nbytes > MOST_BYTES // 4 else None
    core.view(ServerView(1, [[0]] * 256, {0: 0}))
    core.hear(Request(1, 1, Hello("worker-0", 0), [], []))
    core.hear(Request(1, 2, DeclareMode(3, "exact"), [], []))
    core.hear(Request(1, 3, DeclareTable(TABLE), [], []))
    return core


def test_a_server_outlives_hostile_frames() -> None:
    kinds = tuple(kind for kind in MESSAGES if kind.__module__ == client_server.__name__)
    core, rng = new_core(), random.Random(2)
    peer, decoder, num_dropped = 1, Decoder(REQUESTS), 0
    for packet in packets(NUM_FRAMES, seed=2, kinds=kinds, table=True):
        actions: list[object] = []
        try:
            for received in decoder.feed(packet):
                envelope, inline = open_table(received)
                frames = [memoryview(each) for each in inline]
                message = received[0]
                if hasattr(message, "view") and rng.random() < 0.8:
                    message = msgspec.structs.replace(message, view=core.view_number)
                actions += core.hear(Request(peer, envelope.ticket, message, frames, []))
        except WireError:
            actions.append(DropPeer(peer, "no message"))
        if decoder.num_pending_bytes or any(
            isinstance(each, DropPeer) and each.peer == peer for each in actions
        ):
            core.gone(peer)
            peer, decoder, num_dropped = peer + 1, Decoder(REQUESTS), num_dropped + 1
            name = rng.choice(["worker-0", "worker-1", "worker-2", "kv-0-0", "server-1"])
            core.hear(Request(peer, 0, Hello(name, max(core.clients.newest(name), 0)), [], []))
    assert num_dropped > NUM_FRAMES // 100
    welcome = core.hear(Request(peer + 1, 5, Hello("kv-9-9", 0), [], []))
    assert any(isinstance(each, Reply) and isinstance(each.message, Welcome) for each in welcome)
    assert np.array_equal(core.state.contents.table(0).spec, TABLE)


# ---- supervisor -----------------------------------------------------------------------------------


def test_the_status_socket_of_a_worker_outlives_hostile_frames() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        worker = WorkerHandle(rank=0, incarnation=0, pid=0, host=0, status=ours, pipes=[], log=None)  # type: ignore[arg-type]
        for packet in packets(NUM_FRAMES, seed=3):
            theirs.send(packet)
            assert worker.hear()[0]
        theirs.send(b"".join(encode(Live(0))))
        assert worker.hear() == (True, Live(0))


def test_the_control_socket_outlives_hostile_frames(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    with selectors.DefaultSelector() as selector, Control(tmp_path, selector) as control:
        address = f"\0shoal-{os.getuid()}-{(tmp_path / 'lock').stat().st_dev:x}-{(tmp_path / 'lock').stat().st_ino:x}"
        sock, num_heard = socket.socket(socket.AF_UNIX), 0
        sock.connect(address)
        for packet in packets(NUM_FRAMES, seed=4):
            with contextlib.suppress(OSError):
                sock.send(packet)
            num_heard += len(control.hear())
            if not control._asking or next(iter(control._asking.values())).num_pending_bytes:
                sock.close()
                control.hear()
                sock = socket.socket(socket.AF_UNIX)
                sock.connect(address)
        sock.close()
        control.hear()
        assert num_heard
        got: list[Message] = []
        asker = threading.Thread(target=lambda: got.extend(ask(tmp_path, ScaleServers(3), timeout_s=5.0)))
        asker.start()
        asked: list[Message] = []
        for _ in range(50):
            selector.select(0.2)
            asked += control.hear()
            if asked:
                break
        control.answer(ScaleBegun(3), is_last=True)
        asker.join()
        assert (asked, got) == ([ScaleServers(3)], [ScaleBegun(3)])


# ---- block server ---------------------------------------------------------------------------------


def test_a_block_server_outlives_hostile_frames_and_serves_no_file_but_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FETCH_TIMEOUT_S", "_COMING_TIMEOUT_S"):
        monkeypatch.setattr(block_server, name, 0.0)
    monkeypatch.setattr(block_server.BlockServer, "_begin_spreading", lambda *unused: None)  # sends elsewhere
    secret, own = tmp_path / "passwd", tmp_path / "own"
    secret.write_bytes(b"secret")
    own.write_bytes(b"own")
    book: dict[str, str] = {}
    hosts = PeerHosts(
        tmp_path / "hosts",
        rank=0,
        homes=(0, 1, 2),
        bind="127.0.0.1",
        credentials=Authority("job").issue("worker-0"),
        book=SimpleNamespace(publish=book.__setitem__, lookup=book.get),
    )
    server = block_server.BlockServer(hosts)
    kinds = tuple(kind for kind in MESSAGES if kind.__module__ == blocks.__name__)
    callers = [Identity("worker-1", 0), Identity("worker-2", 3)]
    rng, decoder, num_answered = random.Random(6), Decoder(LIMITS), 0
    try:
        server.answer(Identity("worker-0", 0), blocks.ShareFiles("w", [(str(own), 3, "1")]), b"")
        for packet in packets(num_frames(4000), seed=6, kinds=kinds):
            try:
                for message, frames in decoder.feed(packet):
                    if isinstance(message, blocks.AskBlock) and rng.random() < 0.5:
                        message = msgspec.structs.replace(message, url=str(secret))
                    answer, frame = server.answer(rng.choice(callers), message, frames[0] if frames else b"")
                    encode(answer, () if frame is None else (frame,), limits=LIMITS)
                    assert frame is None or bytes(frame) != b"secret"
                    num_answered += 1
            except WireError:
                decoder = Decoder(LIMITS)
            if decoder.num_pending_bytes:
                decoder = Decoder(LIMITS)
        assert num_answered > num_frames(4000) // 10
        line = BlockConnection(hosts.server_of(0), hosts.credentials)  # type: ignore[arg-type]  # it is there
        assert line.ask(blocks.AskBlock(str(own), "1", 0)) == (blocks.BlockIs(), b"own")
        line.close()
    finally:
        server.close()


def test_commands_of_a_fork_server_are_commands_or_refused_and_no_descriptor_is_left() -> None:
    rng, num_commands = random.Random(6), 0
    corpus = [
        msgspec.json.encode(command)
        for command in (
            Fork("worker", "title", ["stdout"]),
            Signal(2**31, 9),
            Signal(1, 64),
            Close(0.0),
        )
    ]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    before = len(os.listdir("/proc/self/fd"))
    with ours, theirs:
        for _ in range(NUM_FRAMES):
            packet = rng.choice(corpus)
            packet = packet if rng.random() < 0.2 else altered(packet, rng)
            packet = rng.randbytes(rng.randrange(1, 200)) if rng.random() < 0.1 else packet
            send_packet(theirs, packet, [0] * rng.choice([0, 0, 1, 3]))
            with contextlib.suppress(WireError):
                received = receive_command(ours)
                assert received is not None
                num_commands += 1
                command, fds = received
                assert not isinstance(command, Signal) or 1 <= command.signum <= 64
                for fd in fds:
                    os.close(fd)
        assert num_commands > NUM_FRAMES // 10
        assert len(os.listdir("/proc/self/fd")) == before


def test_every_message_has_values_at_its_limits_that_come_back() -> None:
    rng = random.Random(5)
    for kind in MESSAGES:
        for _ in range(20):
            message = message_at_limits(kind, rng)
            ((back, _),) = Decoder().feed(b"".join(encode(message)))
            assert type(back) is kind
