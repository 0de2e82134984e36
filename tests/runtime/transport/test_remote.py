"""Links to a server on another host: the same messages as on one host, and a peer without certificate is refused."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import HELLO, PULL, PUSH, Server, serving

from shoal.cluster.hosts import authority
from shoal.cluster.hosts.authority import Authority
from shoal.errors import LinkLost
from shoal.runtime.transport import tls
from shoal.runtime.transport.envelope import REPLIES, REPLY_BYTES, Envelope, open_table, seal
from shoal.runtime.transport.framing import read_message
from shoal.runtime.transport.messages.client_server import (
    Committed,
    Hello,
    PsRefused,
    Pulled,
    Stripe,
    Striped,
    Welcome,
)
from shoal.runtime.transport.shared_client import Link
from shoal.runtime.transport.shared_server import ListenerConfig, Request

JOB = {True: Authority("job", plaintext=True), False: Authority("job")}
FEW = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=20)
CONFIG = ListenerConfig(hello_timeout_s=3.0, num_strangers=8, segment_bytes=1 << 30)


@pytest.fixture(params=["tls", "plain", "tls over 3 connections"])
def job(request: pytest.FixtureRequest) -> Iterator[Authority]:
    """Authority of a job of which this process is worker 0."""
    made = JOB[request.param == "plain"]
    tls.use(made.issue("worker-0"), tls.Connections(3 if "over" in request.param else 1))
    yield made
    tls.use(None)


@pytest.fixture
def tls_job() -> Iterator[Authority]:
    tls.use(JOB[False].issue("worker-0"))
    yield JOB[False]
    tls.use(None)


@pytest.fixture
def server(job: Authority, tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path, CONFIG, job.issue("server-0")) as running:
        yield running


def connect(server: Server, hello: Hello = HELLO) -> Link:
    return Link.connect(server.address, hello, 5.0, peer="server-0")


def refusal(server: Server, number: int = 1) -> str:
    """Why a connection was closed, once so many were."""
    deadline = time.monotonic() + 5.0
    while server.listener.num_refused < number:
        assert time.monotonic() < deadline, "nobody was refused"
    return server.listener.last_refusal


@given(
    sizes=st.lists(st.sampled_from([0, 1, 64, 4097, 32_768, 70_000, 3_000_000]), max_size=5), data=st.data()
)
@FEW
def test_frames_of_every_size_arrive_whole_and_come_back(
    server: Server, sizes: list[int], data: st.DataObject
) -> None:
    with connect(server) as link:
        contents = [np.random.default_rng(size).bytes(size) for size in sizes]
        frames = []
        for content in contents:
            if data.draw(st.booleans()):
                frames.append(content)
            else:
                frames.append(link.alloc(len(content)))
                frames[-1].view[:] = content
        assert isinstance(link.wait(link.send(PUSH, frames), 60.0)[0], Committed)
        if sizes:
            into = [link.alloc(size) for size in sizes]
            assert isinstance(link.wait(link.send(PULL, into=into), 60.0)[0], Pulled)
            assert [bytes(buffer.view) for buffer in into] == contents
        assert [bytes(frame) for frame in link.wait(link.send(PULL), 60.0)[1]] == contents


def test_a_pull_and_pushes_move_while_nobody_waits(server: Server) -> None:
    with connect(server) as link:
        pushed, into = link.alloc(40 << 20), link.alloc(40 << 20)
        pushed.view[:] = os.urandom(40 << 20)
        answers: list[Request] = []
        arrived = threading.Event()
        usual = server.answer

        def answer(request: Request) -> None:
            usual(request)
            answers.append(request)
            if len(answers) == 3:
                arrived.set()

        server.answer = answer
        first = link.send(PUSH, [pushed])
        pull = link.send(PULL, into=[into])
        last = link.send(PUSH, [b"small"])
        assert arrived.wait(60.0)  # this thread did nothing for it
        deadline = time.monotonic() + 20.0
        while link.take(pull) is None:
            assert time.monotonic() < deadline
        assert into.view == pushed.view
        for ticket in (first, last):
            assert isinstance(link.wait(ticket, 60.0)[0], Committed)


def test_requests_behind_a_large_answer_are_heard_once_it_is_sent(server: Server) -> None:
    with connect(server) as link:
        pushed = os.urandom(24 << 20)
        link.wait(link.send(PUSH, [pushed]), 60.0)
        pulls = [link.send(PULL) for _ in range(3)]  # into no buffer: the server pauses until it is read
        last = link.send(PUSH, [b"small"])
        for pull in pulls:
            assert bytes(link.wait(pull, 60.0)[1][0]) == pushed
        assert isinstance(link.wait(last, 60.0)[0], Committed)


def test_a_small_answer_passes_a_large_one_that_has_not_begun(server: Server) -> None:
    sizes = {1: 60 << 20, 2: 60 << 20, 3: 1000}
    server.answer = waiting = Waiting(server, len(sizes))  # type: ignore[assignment]
    with tls.mine().connect(server.address, expect="server-0", timeout_s=20.0) as stream:
        stream.sendall(b"".join(seal(Envelope(0, [], [], []), HELLO, [])))
        read_message(stream, limits=REPLIES, timeout_s=60.0)
        for ticket, size in sizes.items():
            stream.sendall(b"".join(seal(Envelope(ticket, [], [], [(0, 0, size)]), PULL, [])))
        assert waiting.is_answered.wait(60.0)  # far more than sockets hold
        tickets = []
        for _ in sizes:
            received = read_message(stream, limits=REPLIES, timeout_s=20.0)
            envelope, frames = open_table(received, is_remote=True, is_answer=True)
            assert [len(frame) for frame in frames] == [sizes[envelope.ticket]]
            tickets.append(envelope.ticket)
        assert tickets == [1, 3, 2]


class Waiting:
    """Answers so many pulls in one turn, in the order in which they came."""

    def __init__(self, server: Server, num_pulls: int) -> None:
        self._server, self._num_pulls, self._usual = server, num_pulls, server.answer
        self._pulls: list[Request] = []
        self.is_answered = threading.Event()

    def __call__(self, request: Request) -> None:
        if isinstance(request.message, Hello):
            self._usual(request)
            return
        self._pulls.append(request)
        if len(self._pulls) == self._num_pulls:
            for each in self._pulls:
                self._server.listener.reply(each.peer, each.ticket, Pulled(updates=1, slowest=1))
            self.is_answered.set()


def test_threads_share_a_link(server: Server) -> None:
    with connect(server) as link:
        failed: list[object] = []

        def work(seed: int) -> None:
            for size in (100, 700_000, 5_000_000):
                pushed = link.alloc(size)
                pushed.view[:] = np.random.default_rng(seed).bytes(size)
                message, _ = link.wait(link.send(PUSH, [pushed]), 60.0)
                link.free(pushed)
                if not isinstance(message, Committed):
                    failed.append(message)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed


def test_memory_does_not_grow_with_the_number_of_messages(server: Server) -> None:
    with connect(server) as link:

        def round_trip() -> None:
            pushed, into = link.alloc(8 << 20), link.alloc(8 << 20)
            link.wait(link.send(PUSH, [pushed]), 60.0)
            link.wait(link.send(PULL, into=[into]), 60.0)
            link.free(pushed)
            link.free(into)

        for _ in range(3):
            round_trip()
        before = resident_bytes()
        for _ in range(20):
            round_trip()
        assert resident_bytes() - before < 30 << 20  # 320 MiB went over the wire


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_server_that_dies_in_the_middle_of_a_transfer_is_a_lost_link(server: Server) -> None:
    link = connect(server)
    heard = threading.Event()

    def die(request: Request) -> None:
        heard.set()
        server.listener.close_peer(request.peer)

    server.answer = die
    pushed = link.alloc(64 << 20)
    pull = link.send(PULL, into=[pushed])
    with pytest.raises(LinkLost):
        link.wait(pull, 60.0)
    assert heard.is_set()
    with pytest.raises(LinkLost):
        link.send(PUSH, [pushed])
    link.close()


def test_a_client_that_dies_in_the_middle_of_a_push_costs_only_itself(server: Server) -> None:
    link, other = connect(server), connect(server)
    pushed = link.alloc(64 << 20)
    link.send(PUSH, [pushed], is_blocking=False)
    link.close()
    assert isinstance(other.wait(other.send(PUSH), 60.0)[0], Committed)
    other.close()


def test_a_lost_connection_of_several_is_a_lost_link(tls_job: Authority, tmp_path: Path) -> None:
    tls.use(tls_job.issue("worker-0"), tls.Connections(3))
    with serving(tmp_path, CONFIG, tls_job.issue("server-0")) as server, connect(server) as link:
        assert isinstance(link.wait(link.send(PUSH, [bytes(3 << 20)]), 60.0)[0], Committed)
        further = established(server)[-1]
        with socket.socket(fileno=os.dup(further)) as sock:
            sock.shutdown(socket.SHUT_RDWR)
        with pytest.raises(LinkLost):
            link.wait(link.send(PUSH, [bytes(8 << 20)]), 60.0)
        deadline = time.monotonic() + 5.0
        while not server.gone:
            assert time.monotonic() < deadline, "the server still has the link"


def test_connections_are_spread_over_the_interfaces_of_both_ends(tls_job: Authority, tmp_path: Path) -> None:
    further = tls.listen("127.0.0.2")
    tls.use(tls_job.issue("worker-0"), tls.Connections(4, ("127.0.0.1", "127.0.0.3")))
    with serving(tmp_path, CONFIG, tls_job.issue("server-0"), also=[further]) as server:
        address = tls.join_address(tls.TLS, *further.getsockname())
        with connect(server) as link:
            assert len(established(server)) == 2
            for fd in established(server, address):
                with socket.socket(fileno=os.dup(fd)) as sock:
                    assert sock.getsockname()[0] == "127.0.0.3"
            assert len(established(server, address)) == 2
            pushed, into = link.alloc(3 << 20), link.alloc(3 << 20)
            pushed.view[:] = os.urandom(3 << 20)
            link.wait(link.send(PUSH, [pushed]), 60.0)
            link.wait(link.send(PULL, into=[into]), 60.0)
            assert into.view == pushed.view


def established(server: Server, at: str = "") -> list[int]:
    """Descriptors of this process that are connected to the server, in the order in which they were opened."""
    address = tls.split_address(at or server.address)
    found = []
    for fd in sorted(int(name) for name in os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
            if sock.getpeername() == address:
                found.append(fd)
    return found


# ---- strangers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hello",
    [Hello("worker-2", 0), Hello("worker-0", 1), Hello("server-0", 0), Hello("kv-1-0", 0), Hello("kv-0-", 0)],
    ids=str,
)
def test_a_hello_that_differs_from_the_certificate_is_refused(server: Server, hello: Hello) -> None:
    with pytest.raises(LinkLost):
        connect(server, hello)
    assert f"calls itself {hello.name}" in refusal(server)


def test_a_worker_may_have_further_clients(server: Server) -> None:
    connect(server, Hello("kv-0-3", 0)).close()


def test_a_first_sentence_that_is_not_hello_is_refused(server: Server) -> None:
    with Link(server.address, peer="server-0") as link, pytest.raises(LinkLost):
        link.wait(link.send(PULL), 60.0)
    assert "not Hello" in refusal(server)


def test_a_certificate_of_another_job_is_refused(tls_job: Authority, tmp_path: Path) -> None:
    with serving(tmp_path, CONFIG, tls_job.issue("server-0")) as server:
        tls.use(Authority("other").issue("worker-0"))
        with pytest.raises(LinkLost, match="no certificate of this job"):
            connect(server)
        # One that does not look at the server's own gets no further.
        stranger = Authority("other").issue("worker-0")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        (tmp_path / "pem").write_bytes(stranger.certificate + stranger.key)
        context.load_cert_chain(tmp_path / "pem")
        with (
            socket.create_connection(tls.split_address(server.address)) as sock,
            context.wrap_socket(sock) as stream,
        ):
            with contextlib.suppress(OSError):  # an alert, or a reset
                stream.sendall(b"".join(seal(Envelope(1, [], [], []), HELLO, [])))
                assert stream.recv(1) == b""
        assert "CERTIFICATE" in refusal(server, 2).upper()


def test_an_expired_certificate_is_refused(
    tls_job: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path, CONFIG, tls_job.issue("server-0")) as server:
        monkeypatch.setattr(authority, "VALID_FOR", -datetime.timedelta(hours=1))
        tls.use(tls_job.issue("worker-0"))
        with pytest.raises(LinkLost):
            connect(server)
        assert "CERTIFICATE" in refusal(server).upper()


def test_a_server_of_another_number_is_refused_by_the_client(job: Authority, tmp_path: Path) -> None:
    if job is JOB[True]:
        pytest.skip("without encryption only the one who connects proves who it is")
    with serving(tmp_path, CONFIG, job.issue("server-1")) as server:
        with pytest.raises(LinkLost, match="server-0 was expected"):
            connect(server)


def test_silent_connections_are_closed_and_do_not_keep_others_out(server: Server) -> None:
    host, port = tls.split_address(server.address)
    silent = [socket.create_connection((host, port)) for _ in range(3 * CONFIG.num_strangers)]
    for each in silent[::2]:
        each.sendall(b"\x16\x03\x01")  # half of a handshake, or of a token
    with connect(server) as link:
        assert isinstance(link.wait(link.send(PUSH), 60.0)[0], Committed)
        deadline = time.monotonic() + 10.0
        while server.listener.num_peers > 1:
            assert time.monotonic() < deadline
    for each in silent:
        each.close()


@given(garbage=st.binary(min_size=1, max_size=300))
@FEW
def test_bytes_that_make_no_sense_cost_only_their_sender(server: Server, garbage: bytes) -> None:
    stream = tls.mine().connect(server.address, expect="server-0", timeout_s=60.0)
    before = server.listener.num_refused
    with stream:
        stream.sendall(garbage)
        stream.shutdown(socket.SHUT_WR)
    deadline = time.monotonic() + 5.0
    while server.listener.num_refused == before:
        assert time.monotonic() < deadline
    with connect(server) as link:
        assert isinstance(link.wait(link.send(PUSH), 60.0)[0], Committed)


@pytest.mark.parametrize(
    ("envelope", "problem"),
    [
        (Envelope(1, [], [(1, 0, 5)], []), "shared memory of another host"),
        (Envelope(1, [(1, 4096)], [], []), "shared memory of another host"),
        (Envelope(1, [], [], [(1, 0, 5)]), "shared memory of another host"),
        (Envelope(1, [], [], [(0, 0, REPLY_BYTES), (0, 0, 1)]), "buffers for an answer"),
        (Envelope(1, [], [], [(0, 0, 1 << 63)] * 4), "buffers for an answer"),
    ],
)
def test_an_envelope_that_asks_for_what_cannot_be_is_refused(
    server: Server, envelope: Envelope, problem: str
) -> None:
    with tls.mine().connect(server.address, expect="server-0", timeout_s=60.0) as stream:
        stream.sendall(b"".join(seal(Envelope(7, [], [], []), HELLO, [])))
        assert isinstance(read_message(stream, limits=REPLIES, timeout_s=60.0)[0], Welcome)
        stream.sendall(b"".join(seal(envelope, PULL, [])))
        assert problem in refusal(server)


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (Stripe(77, 1, 2), "belongs to no connection"),  # of another worker
        (Stripe(78, 1, 2), "belongs to no connection"),
        (Stripe(77, 0, 2), "before Hello"),
    ],
)
def test_a_connection_that_is_none_of_its_own_link_is_refused(
    tls_job: Authority, tmp_path: Path, said: Stripe, problem: str
) -> None:
    with serving(tmp_path, CONFIG, tls_job.issue("server-0")) as server, connect(server) as link:
        assert isinstance(link.wait(link.send(Stripe(77, 0, 2)), 60.0)[0], Striped)
        with tls_job.issue("worker-1").connect(server.address, expect="server-0", timeout_s=60.0) as stream:
            stream.sendall(b"".join(seal(Envelope(1, [], [], []), said, [])))
            assert problem in refusal(server)
        assert isinstance(link.wait(link.send(PUSH, [bytes(3 << 20)]), 60.0)[0], Committed)


def test_a_frame_over_connections_that_do_not_exist_is_refused(server: Server) -> None:
    with tls.mine().connect(server.address, expect="server-0", timeout_s=60.0) as stream:
        stream.sendall(b"".join(seal(Envelope(7, [], [], []), HELLO, [])))
        assert isinstance(read_message(stream, limits=REPLIES, timeout_s=60.0)[0], Welcome)
        stream.sendall(b"".join(seal(Envelope(8, [], [(0, 5, 2 << 20)], []), PUSH, [bytes(2 << 20)])[:2]))
        assert "over 5 connections, where there are 1" in refusal(server)


def test_memory_is_asked_for_before_it_is_taken(job: Authority, tmp_path: Path) -> None:
    def problem(nbytes: int) -> str | None:
        return f"no room for {nbytes}" if nbytes > 1 << 20 else None

    with serving(tmp_path, CONFIG, job.issue("server-0"), memory_problem=problem) as server:
        with connect(server) as link:
            large = link.alloc(20 << 20)
            message, _ = link.wait(link.send(PUSH, [b"first", large, b"last"]), 60.0)
            assert message == PsRefused(f"no room for {20 << 20}")
            message, _ = link.wait(link.send(PULL, into=[large]), 60.0)
            assert message == PsRefused(f"no room for {20 << 20}")
            assert isinstance(link.wait(link.send(PUSH, [b"small"]), 60.0)[0], Committed)
            assert server.listener.bytes_mapped == 0
