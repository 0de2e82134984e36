"""Servers on other hosts: real processes over TLS and plain TCP give the bits that they give over Unix sockets."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from server_group_of_processes import Coordinator, Server, group

from shoal.cluster.hosts.authority import Authority
from shoal.embedding.shared_rows import can_share_rows
from shoal.errors import LinkLost
from shoal.ps.client.bulk_transfer import read_chunk, read_table, write_chunk, write_rows
from shoal.ps.client.server_group import Group
from shoal.ps.client.step import Decision, DensePull, PushStep, RowsPull
from shoal.runtime.transport import tls
from shoal.runtime.transport.framing import send_message
from shoal.runtime.transport.messages.client_server import (
    ChunkSpec,
    DeclareDense,
    DeclareMode,
    DeclareTable,
    DensePart,
    Hello,
    Post,
    Posted,
    TableSpec,
)
from shoal.runtime.transport.messages.server_coordinator import RankJoined, ServerView
from shoal.runtime.transport.shared_client import Link

NUM_ROWS, DIM, CHUNK = 20_000, 64, 300_000
TABLE = TableSpec(
    number=0, name="t", dim=DIM, dtype="float32", rule="adagrad", settings={"lr": 0.1, "eps": 1e-10}, num_rows=NUM_ROWS
)  # fmt: skip
CHUNKS = [ChunkSpec(n, n, "float32", [DensePart(f"w{n}", [CHUNK], 0, 0)]) for n in range(2)]
BOTH = ServerView(
    view=1, holders=[[slot % 2, 1 - slot % 2] for slot in range(256)], incarnations={0: 0, 1: 0}
)
ONLY = ServerView(view=1, holders=[[0]] * 256, incarnations={0: 0})
ALONE = ServerView(view=2, holders=[[0]] * 256, incarnations={0: 0})

TABLE_DECLARED, DENSE_DECLARED = DeclareTable(TABLE), DeclareDense(CHUNKS, "Adam", [{"lr": 0.1}])

AUTHORITIES = {"unix": None, "tls": Authority("job"), "plain": Authority("job", plaintext=True)}


@pytest.fixture(params=["tls", "plain"])
def authority(request: pytest.FixtureRequest) -> Iterator[Authority]:
    made = AUTHORITIES[request.param]
    assert made is not None
    tls.use(made.issue("worker-0"), tls.Connections(3 if request.param == "plain" else 1))
    yield made
    tls.use(None)


def train(
    folder: Path, authority: Authority | None, *, num_near: int = 0, in_place: bool = False
) -> list[bytes]:
    """Rows and chunks after steps in two phases on two servers, of which one is then killed: all that was pulled.

    Of an authority's, `num_near` are on the client's host. Pulls go to replicas there or, `in_place`, rows of primaries
    there are read where they lie.
    """
    folder.mkdir()
    with group(folder, 2, is_real=True, authority=authority) as (coordinator, servers):
        for _ in servers:
            coordinator.accept()
        views = [seen_from(servers, BOTH)]
        tell(coordinator, RankJoined(0, 0), views[0])
        client = Group(
            name="worker-0",
            incarnation=0,
            ways_in=[str(server.path) for server in (servers if authority is None else servers[:num_near])],
            own_host="127.0.0.1",
            ask_view=lambda after, timeout_s: views[-1],
            timeout_s=60.0,
        )
        client.reads_replicas = num_near > 0 and not in_place
        client.reads_in_place = in_place
        with contextlib.closing(client):
            client.declare(TABLE_DECLARED)
            assert client.readers == ((0,) if client.reads_replicas else (0, 1))
            client.declare(DENSE_DECLARED)
            client.declare(DeclareMode(1, "exact", two_phase=True, wants_norm=True))
            keys = np.arange(NUM_ROWS, dtype=np.int64)
            ones = np.ones((NUM_ROWS, DIM), np.float32)
            write_rows(client, TABLE, keys, ones, None, 0)
            for chunk in CHUNKS:
                write_chunk(client, chunk, torch.linspace(-1, 1, CHUNK), {})
            found = [b"".join(step(client, number)) for number in (1, 2, 3)]
            assert [client.has_committed(server, 3) for server in (0, 1)] == [True, True]
            is_read = [client._rows.get((server, 0)) is not None for server in (0, 1)]
            assert is_read == [in_place and not tls.is_remote(client._addresses[server]) for server in (0, 1)]
            # Over a network the keys of a push are those of its pull, which the servers have.
            # A push names the keys of the pull before it, where both went to one server of another host.
            if num_near and in_place:
                assert 0 < client.key_bytes_saved < 3 * 9_000 * 8  # of one server of the two
            else:
                is_known = authority is not None and not num_near
                assert client.key_bytes_saved == (3 * 9_000 * 8 if is_known else 0)
            servers[1].process.kill()
            views.append(seen_from(servers, ALONE))
            tell(coordinator, views[1])
            found += [b"".join(step(client, 4))]
            found += [part.tobytes() for part in read_table(client, TABLE)[:3]]
            elements, state = read_chunk(client, CHUNKS[1])
            found += [elements.numpy().tobytes(), *(state[each].numpy().tobytes() for each in sorted(state))]
        return found


def step(client: Group, number: int) -> Sequence[bytes]:
    random = np.random.default_rng(number)
    keys = np.sort(random.choice(NUM_ROWS, 9_000, replace=False)).astype(np.int64)
    pulls = (
        RowsPull(0, keys, DIM, np.dtype(np.float32), clock=number - 1, in_place=TABLE),
        DensePull([(each.number, each.slot, 4 * CHUNK) for each in CHUNKS], clock=number - 1, in_place=True),
    )
    for pull in pulls:
        client.start(pull)
    for pull in pulls:
        client.finish(pull)
    rows, dense = pulls
    found = [rows.rows.tobytes(), *(bytes(dense.arrived[each.number]) for each in CHUNKS)]
    push = PushStep(
        client, stream=0, seq=number, decide=lambda vector, norm: Decision(1 / norm, True, norm), wants_norm=True
    )  # fmt: skip
    push.push_rows(0, keys, random.standard_normal((len(keys), DIM)).astype(np.float32))
    for each in CHUNKS:
        memory = push.chunk_memory(each.number, each.slot, 4 * CHUNK)
        memory[:] = random.standard_normal(CHUNK).astype(np.float32).tobytes()
        push.push_dense(each.number, [])
    push.end(np.ones(5), b"", rank=0, exchange=number)
    client.finish(push)
    found.append(push.vector.tobytes())
    for each in (*pulls, push):
        each.release()
    return found


def seen_from(servers: list[Server], view: ServerView) -> ServerView:
    """The view with the addresses of those that are on other hosts."""
    addresses = {each.number: each.address for each in servers if each.number in view.incarnations}
    return msgspec.structs.replace(
        view, addresses={number: at for number, at in addresses.items() if tls.is_remote(at)}
    )


def tell(coordinator: Coordinator, *messages: object) -> None:
    for line in coordinator.lines:
        for message in messages:
            with contextlib.suppress(OSError):  # of one that was killed
                send_message(line, message)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    return train(tmp_path_factory.mktemp("near") / "group", None)


def test_rows_chunks_and_replicas_have_the_bits_of_unix_sockets(
    tmp_path: Path, authority: Authority, near: list[bytes]
) -> None:
    assert train(tmp_path / "far", authority) == near


@pytest.mark.skipif(not can_share_rows(), reason="stores may be seen in another order here")
def test_rows_read_in_place_have_the_bits_of_those_that_servers_gather(
    tmp_path: Path, near: list[bytes]
) -> None:
    assert train(tmp_path / "in-place", None, in_place=True) == near


@pytest.mark.skipif(not can_share_rows(), reason="stores may be seen in another order here")
def test_a_replacement_reads_in_place_only_after_a_step_of_its_own(tmp_path: Path) -> None:
    # Before, a step that its predecessor had ended may count while it reads.
    with group(tmp_path, 1, is_real=True) as (coordinator, [server]):
        coordinator.accept()
        tell(coordinator, RankJoined(0, 0), ONLY)
        for incarnation in (0, 1):
            client = Group(
                name="worker-0",
                incarnation=incarnation,
                ways_in=[str(server.path)],
                ask_view=lambda after, timeout_s: ONLY,
                timeout_s=60.0,
            )
            client.reads_in_place = True
            with contextlib.closing(client):
                for declared in (
                    TABLE_DECLARED,
                    DENSE_DECLARED,
                    DeclareMode(1, "exact", two_phase=True, wants_norm=True),
                ):
                    client.declare(declared)
                step(client, 1 + 2 * incarnation)
                assert not client._rows
                step(client, 2 + 2 * incarnation)
                assert list(client._rows) == [(0, 0)]


@pytest.mark.skipif(not can_share_rows(), reason="stores may be seen in another order here")
def test_of_servers_on_two_hosts_those_of_the_own_host_are_read_in_place(
    tmp_path: Path, authority: Authority, near: list[bytes]
) -> None:
    assert train(tmp_path / "mixed", authority, num_near=1, in_place=True) == near


def test_pulls_from_a_replica_on_the_workers_host_have_the_bits_of_the_primaries(
    tmp_path: Path, authority: Authority, near: list[bytes]
) -> None:
    assert train(tmp_path / "nearby", authority, num_near=1) == near


def test_two_servers_that_reach_for_each_other_at_once_do_not_wait_for_each_other(
    tmp_path: Path, authority: Authority
) -> None:
    with group(tmp_path, 2, authority=authority) as (coordinator, servers):
        for _ in servers:
            coordinator.accept()
        tell(coordinator, seen_from(servers, BOTH))
        links = [server.link() for server in servers]
        # The core of these servers sends on what is posted, over a connection that is made for it.
        post = Post(view=1, exchange=1, rank=0, anchored_at=0)
        tickets = [link.send(post, [bytes(3 << 20), b"small"]) for link in links]
        for link, ticket in zip(links, tickets, strict=True):
            assert isinstance(link.wait(ticket, 60.0)[0], Posted)


def test_a_server_that_is_killed_in_the_middle_of_a_push_is_a_lost_link(
    tmp_path: Path, authority: Authority
) -> None:
    with group(tmp_path, authority=authority) as (_, [server]):
        link = server.link()
        server.process.send_signal(signal.SIGSTOP)  # what is sent stays in the sockets
        ticket = link.send(Post(view=1, exchange=1, rank=0, anchored_at=0), [bytes(64 << 20)])
        server.process.kill()
        with pytest.raises(LinkLost):
            link.wait(ticket, 60.0)


def test_a_server_refuses_another_worker_than_its_certificate_names(
    tmp_path: Path, authority: Authority
) -> None:
    with group(tmp_path, authority=authority) as (_, [server]):
        assert_refused(server, Hello("worker-2", 0))
        tls.use(authority.issue("worker-1"))
        assert_refused(server, Hello("worker-2", 0))
        Link.connect(server.address, Hello("worker-1", 0), 20.0, peer="server-0").close()
        server.process.send_signal(signal.SIGTERM)
        code, said = server.end()
        assert code == 0
        assert "closed 2 connections" in said
        assert "it calls itself worker-2" in said


def assert_refused(server: Server, hello: Hello) -> None:
    with pytest.raises(LinkLost):
        Link.connect(server.address, hello, 20.0, peer="server-0")
