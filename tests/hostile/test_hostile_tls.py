"""Hostile peers at the endpoints between hosts: frames of a member gone bad, half-open floods, replayed handshakes."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import select
import selectors
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzzing import num_frames, packets

from shoal.cluster.coordinator.process import Coordinator
from shoal.cluster.coordinator.state import CoordinationConfig
from shoal.cluster.hosts import joining, remote_host
from shoal.cluster.hosts.authority import Authority
from shoal.cluster.hosts.files import FileService
from shoal.cluster.hosts.joining import Door, JobFacts
from shoal.cluster.hosts.remote_host import RemoteHost
from shoal.collectives import tls_ring
from shoal.collectives.tls_ring import TlsP2P
from shoal.config.job import Job
from shoal.config.liveness import LivenessConfig
from shoal.errors import ConfigError, PeerLost, WireError
from shoal.runtime.transport import tls, unix
from shoal.runtime.transport.framing import encode, read_message, send_message
from shoal.runtime.transport.messages import MESSAGES, client_server, hosts
from shoal.runtime.transport.messages.client_server import Hello, Welcome
from shoal.runtime.transport.messages.hosts import (
    AgentListens,
    AgentStart,
    ChildOutput,
    ChildStatus,
    Heartbeat,
)
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.worker_coordinator import AskServers, Join, Joined, StoreNumKeys
from shoal.runtime.transport.shared_client import Link
from shoal.runtime.transport.shared_server import Listener, Request
from waiting import wait_until

NUM_FRAMES = num_frames(400)
ANSWER_S = 0.002
HOST = "127.0.0.1"
KEY = "a-key-of-more-than-twenty-characters"
OF_SERVERS = tuple(kind for kind in MESSAGES if kind.__module__ == client_server.__name__)
OF_HOSTS = tuple(kind for kind in MESSAGES if kind.__module__ == hosts.__name__)


class Endpoint:
    """One process's end, in a thread: where it is, and a proper conversation with it."""

    address: str
    kinds: tuple[Any, ...] = MESSAGES
    has_table = False
    first = b""
    """Said by a member before what is hostile."""

    authority: Authority
    problems: Sequence[BaseException] = ()
    """That ended its thread."""

    def connect(self) -> socket.socket:
        """As a member of the job that has gone bad."""
        raise NotImplementedError

    def converse(self) -> None:
        """Raises where it does not serve a proper member any more."""
        raise NotImplementedError

    @property
    def where(self) -> tuple[str, int]:
        return tls.split_address(self.address)


class _Threaded(Endpoint):
    member = ""
    role = ""

    def __init__(self) -> None:
        self.authority = Authority("job")
        self.listener = tls.listen(HOST)
        self.address = f"tls://{HOST}:{self.listener.getsockname()[1]}"
        self.wake, self.waker = socket.socketpair()
        self.problems: list[BaseException] = []
        self.bad_member = self.authority.issue(self.member)
        self.thread = threading.Thread(target=self._guarded)

    def _guarded(self) -> None:
        try:
            self.serve()
        except BaseException as error:
            self.problems.append(error)

    def serve(self) -> None:
        raise NotImplementedError

    def connect(self) -> socket.socket:
        return self.bad_member.connect(self.address, expect=self.role, timeout_s=10.0)

    def close(self) -> None:
        self.waker.send(b"\0")
        self.thread.join()
        self.wake.close()
        self.waker.close()
        assert self.problems == []


class ServerEndpoint(_Threaded):
    """Connections of a parameter server; what a request means is fuzzed in test_fuzzed_frames.py."""

    member, role, kinds, has_table = "worker-1", "server-0", OF_SERVERS, True

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.heard: list[str] = []
        self.unix = unix.listen(folder / "server")
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.wake, selectors.EVENT_READ)
        self.ps = Listener(
            self.unix,
            self.selector,
            hear=self.hear,
            gone=lambda peer: None,
            memory_problem=lambda nbytes: "too much" if nbytes > 32 << 20 else None,
            remote=(self.listener, self.authority.issue("server-0")),
        )
        self.thread.start()

    def hear(self, request: Request) -> None:
        self.heard.append(type(request.message).__name__)
        self.ps.reply(request.peer, request.ticket, Welcome("server-0", 0, 1))

    def serve(self) -> None:
        while True:
            for key, mask in self.selector.select():
                if key.fileobj is self.wake:
                    self.ps.close()
                    self.selector.close()
                    return
                self.ps.attend(key, mask)

    def converse(self) -> None:
        tls.use(self.authority.issue("worker-2"))
        try:
            Link.connect(self.address, Hello("worker-2", 0), 10.0, peer="server-0").close()
        finally:
            tls.use(None)


class CoordinatorEndpoint(_Threaded):
    member, role = "worker-1", "coordinator"
    first = b"".join(encode(Join(1, 0, 7, 3)))

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.coordinator = Coordinator(
            unix.listen(folder / "coordinator"),
            CoordinationConfig(num_workers=3, can_recover=True),
            remote=(self.listener, self.authority.issue("coordinator")),
        )
        self.thread.start()

    def serve(self) -> None:
        self.coordinator.serve(until_readable=self.wake)
        self.coordinator.close()
        self.listener.close()

    def converse(self) -> None:
        with self.authority.issue("worker-2").connect(
            self.address, expect="coordinator", timeout_s=10.0
        ) as sock:
            send_message(sock, Join(2, 0, os.getpid(), 3))
            assert isinstance(read_message(sock, timeout_s=10.0)[0], Joined)
            send_message(sock, StoreNumKeys())
            read_message(sock, timeout_s=10.0)


class JoinPort(Endpoint):
    """Where hosts join: whoever has no certificate may speak there too."""

    kinds = OF_HOSTS

    def __init__(self, folder: Path) -> None:
        script, run_dir = folder / "train.py", folder / "run"
        script.write_text("print('hello')\n")
        run_dir.mkdir()
        self.authority = Authority("job")
        listener = tls.listen(HOST)
        self.address = f"shoal://{HOST}:{listener.getsockname()[1]}"
        facts = JobFacts(
            "job",
            str(script),
            joining.file_hash(str(script)),
            str(run_dir),
            joining.make_mark(run_dir),
            is_shipped=False,
        )
        files = FileService(run_dir, folder)
        self.door = Door(listener, self.authority, KEY, facts, [1], files, {})
        self.strangers = 0
        self.bad_member = self.authority.issue("host-1")

    def connect(self) -> socket.socket:
        self.strangers += 1
        where = self.address.replace("shoal", "tls")
        if self.strangers % 2:
            return self.bad_member.connect(where, expect="head", timeout_s=10.0)
        return _without_certificate(self.where)

    def converse(self) -> None:
        # An address has few handshakes at a time, and those of the hostile connections end in threads.
        admitted: list[joining.Admission] = []

        def is_admitted() -> bool:
            with contextlib.suppress(ConfigError):
                admitted.append(joining.join(self.address, KEY, timeout_s=5.0))
            return bool(admitted)

        assert wait_until(is_admitted, 20.0)
        self.door.release(admitted[0].number, admitted[0].credentials.incarnation)

    def close(self) -> None:
        for each in self.door.joined():
            each.stream.close()
        self.door.close()


class AgentLine(_Threaded):
    """The head's end of a host agent: a host that has joined and gone bad."""

    member, role, kinds = "host-1", "head", OF_HOSTS
    first = b"".join(encode(AgentListens("10.0.0.2", {0: 4242})))

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.heads = self.authority.issue("head")
        self.hosts: list[RemoteHost] = []
        self.pipes: list[tuple[int, int]] = []
        self.thread.start()

    def serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self.wake, selectors.EVENT_READ)
            selector.register(self.listener, selectors.EVENT_READ)
            while True:
                for key, mask in selector.select(0.2):
                    if key.fileobj is self.wake:
                        self._lose()
                        self.listener.close()
                        return
                    if key.fileobj is self.listener:
                        self._take_in(selector)
                    else:
                        key.data.attend(mask)
                for host in self.hosts:
                    host.tick()
                    host.exits()

    def _take_in(self, selector: selectors.BaseSelector) -> None:
        self._lose()
        stream = self.heads.accept(self.listener)
        stream.settimeout(10.0)
        with contextlib.suppress(OSError, WireError):
            stream.do_handshake()
            options: dict[str, Any] = {"liveness": LivenessConfig(), "selector": selector}
            host = RemoteHost(1, 0, stream, address="10.0.0.2", servers=[0], **options)  # type: ignore[arg-type]
            self.hosts.append(host)
            self.pipes.append(os.pipe())
            fds = {"stdout": self.pipes[-1][1], "status": self.pipes[-1][1]}
            host.fork("worker", title="worker", spec=b"", fds=fds)

    def _lose(self) -> None:
        """One agent at a time; nobody reads what its children print."""
        while self.hosts:
            self.hosts.pop().lose("another one came")
            for fd in self.pipes.pop():
                os.close(fd)

    def converse(self) -> None:
        with self.connect() as sock:
            sock.sendall(self.first)
            assert isinstance(read_message(sock, timeout_s=10.0)[0], AgentStart)
            sock.sendall(b"".join(encode(Heartbeat())))
            assert wait_until(lambda: bool(self.hosts) and self.hosts[0].is_ready, 10.0)


class _TwoRanks:
    """Stands in for gloo's group of two ranks, each in a thread."""

    num_workers = 2

    def __init__(self, rank: int, shared: dict[int, torch.Tensor], all_here: threading.Barrier) -> None:
        self.rank, self.broken, self._shared, self._all_here = rank, False, shared, all_here

    def is_broken(self) -> bool:
        return self.broken

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._shared[self.rank] = tensor
        self._all_here.wait(60.0)
        return [self._shared[0], self._shared[1]]


class RingEndpoint(_Threaded):
    """Rank 0 of `--exchange ring --tls`, which waits for rank 1: what that asks for is the state of a donor."""

    member, role = "worker-2", "worker-0"
    first = struct.pack("<QQQ", 1, 1, 0)  # as rank 1 says it

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.listener.close()
        self.heard: list[str] = []
        shared: dict[int, torch.Tensor] = {}
        groups: list[Any] = [
            _TwoRanks(rank, shared, barrier) for barrier in [threading.Barrier(2)] for rank in (0, 1)
        ]
        with ThreadPoolExecutor(2) as pool:
            self.group, self.ranks = groups[0], list(pool.map(self._open, groups))
        self.address = self.ranks[0]._seats[0].address
        self.thread.start()

    def _open(self, group: Any) -> TlsP2P:
        job = Job(name="x", run_dir=Path("x"), rank=group.rank, host_address=HOST, bind_address=HOST)
        return TlsP2P(job, group, self.authority.issue(f"worker-{group.rank}"))

    def serve(self) -> None:
        while not self.group.broken:
            with contextlib.suppress(PeerLost):
                self.ranks[0]._accept(1, 3600.0).close()
                self.heard.append("rank 1")

    def converse(self) -> None:
        before, seats = len(self.heard), self.ranks[1]._seats
        seats[0] = seats[0]._replace(address=self.address)
        with self.ranks[1]._connect(0, 10.0):
            assert wait_until(lambda: len(self.heard) > before, 10.0)

    def close(self) -> None:
        self.group.broken = True
        super().close()
        for each in self.ranks:
            each.close()


def _without_certificate(where: tuple[str, int]) -> socket.socket:
    context = joining.ssl.SSLContext(joining.ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, joining.ssl.CERT_NONE
    return context.wrap_socket(socket.create_connection(where, 10.0))


@pytest.fixture(params=[ServerEndpoint, CoordinatorEndpoint, JoinPort, RingEndpoint])
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    made = request.param(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize(
    "endpoint", [ServerEndpoint, CoordinatorEndpoint, JoinPort, AgentLine, RingEndpoint], indirect=True
)
def test_an_endpoint_between_hosts_outlives_hostile_frames(endpoint: Endpoint) -> None:
    rng, sock = random.Random(7), None
    for packet in packets(NUM_FRAMES, seed=7, kinds=endpoint.kinds, table=endpoint.has_table):
        assert not endpoint.problems
        with contextlib.suppress(OSError, WireError):
            if sock is None:
                sock = endpoint.connect()
                sock.setblocking(False)
                if rng.random() < 0.7:
                    sock.send(endpoint.first)
            sock.send(packet)
            # What it has hung up on, or answered, is known at once; else it waits for the rest of a frame.
            answered = select.select([sock], [], [], ANSWER_S)[0]
            if (not answered or sock.recv(1 << 16)) and rng.random() < 0.9:
                continue
        if sock is not None:
            sock.close()
            sock = None
    if sock is not None:
        sock.close()
    endpoint.converse()


def test_who_asks_the_coordinator_to_wait_for_decades_does_not_end_it(tmp_path: Path) -> None:
    endpoint = CoordinatorEndpoint(tmp_path)
    try:
        with endpoint.connect() as sock:
            send_message(sock, Join(1, 0, os.getpid(), 3))
            read_message(sock, timeout_s=10.0)
            send_message(sock, AskServers(0, 1e9))
            endpoint.converse()
    finally:
        endpoint.close()


@pytest.mark.parametrize(
    "said",
    [
        AgentListens("10.0.0.2", {}),
        AgentListens("10.0.0.2", {0: 4242, 1: 4243}),
        AgentListens("10.0.0.2", {0: 1 << 16}),
        AgentListens("10.0.0.2/../../", {0: 4242}),
        AgentStart(1.0, 3.0, [0]),
        ChildOutput(1, "stdout", bytes(600 << 10)),
        ChildStatus(1, bytes(3 << 20)),
    ],
    ids=lambda said: type(said).__name__,
)
def test_a_host_that_says_what_no_agent_says_is_lost_and_takes_nothing_with_it(
    said: Message, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_host, "_serials", itertools.repeat(1))  # as if it knew its children's
    endpoint = AgentLine(tmp_path)
    try:
        with endpoint.connect() as sock:
            read_message(sock, timeout_s=10.0)
            for _ in range(8):  # more output than it may send before any is taken
                with contextlib.suppress(OSError):
                    sock.sendall(b"".join(encode(said)))
            assert wait_until(lambda: any("broke" in host.lost for host in endpoint.hosts), 10.0)
        endpoint.converse()
    finally:
        endpoint.close()


def test_half_open_connections_keep_nobody_out(endpoint: Endpoint) -> None:
    with contextlib.ExitStack() as stack:
        for number in range(300):
            with contextlib.suppress(OSError):
                sock = stack.enter_context(socket.create_connection(endpoint.where, 5.0))
                if number % 3 == 0:  # a handshake that stops in its middle
                    sock.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40))
        if not isinstance(endpoint, JoinPort):
            endpoint.converse()
    # The join port bounds them by address, and serves an address again when its own are gone.
    endpoint.converse()


def test_strangers_that_speak_while_they_are_dropped_do_not_end_the_ring(tmp_path: Path) -> None:
    endpoint, strangers = RingEndpoint(tmp_path), list[socket.socket]()

    def is_broken() -> bool:
        """Called between two looks at the sockets: one more stranger comes, and all say the next byte of a handshake."""
        if len(strangers) < 2 * tls_ring.MAX_STRANGERS:
            strangers.append(socket.create_connection(endpoint.where, 5.0))
            strangers[-1].send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
            # Not in every turn: what is sent now is read in this one, where the socket was ready already.
            for stranger in strangers if len(strangers) % 3 == 0 else ():
                with contextlib.suppress(OSError):
                    stranger.send(b"\0")
        return endpoint.group.broken

    try:
        endpoint.group.is_broken = is_broken
        assert wait_until(
            lambda: len(strangers) == 2 * tls_ring.MAX_STRANGERS or bool(endpoint.problems), 30.0
        )
        assert not endpoint.problems
        endpoint.converse()
    finally:
        for stranger in strangers:
            stranger.close()
        endpoint.close()


def test_what_was_recorded_of_a_member_says_nothing_a_second_time(endpoint: Endpoint) -> None:
    recorded = _record(endpoint)
    assert len(recorded) > 500
    heard = getattr(endpoint, "heard", [])
    before = list(heard)
    with socket.create_connection(endpoint.where, 5.0) as sock, contextlib.suppress(OSError):
        sock.sendall(recorded)
        sock.settimeout(2.0)
        answered = b""
        while part := sock.recv(1 << 16):
            answered += part
    assert heard == before
    assert getattr(getattr(endpoint, "door", None), "seats", {}) == {}
    endpoint.converse()


def _record(endpoint: Endpoint) -> bytes:
    """The bytes of a proper member's conversation, taken down on the way."""
    real, recorded = endpoint.address, bytearray()
    with socket.create_server((HOST, 0)) as between:
        endpoint.address = f"{real.partition('://')[0]}://{HOST}:{between.getsockname()[1]}"
        passing = threading.Thread(target=_pass_on, args=(between, tls.split_address(real), recorded))
        passing.start()
        try:
            endpoint.converse()
        finally:
            endpoint.address = real
            passing.join()
    return bytes(recorded)


def _pass_on(between: socket.socket, to: tuple[str, int], recorded: bytearray) -> None:
    client, _ = between.accept()
    with client, socket.create_connection(to) as server, selectors.DefaultSelector() as selector:
        selector.register(client, selectors.EVENT_READ, server)
        selector.register(server, selectors.EVENT_READ, client)
        while True:
            for key, _ in selector.select():
                data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                if not data:
                    return
                if key.fileobj is client:
                    recorded += data
                with contextlib.suppress(OSError):
                    key.data.sendall(data)
