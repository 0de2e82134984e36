"""The ring over connections of our own: its bits are the ring's, and nobody but its ranks is in it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.cluster.hosts.authority import Authority
from shoal.collectives.schemes import parts_of
from shoal.collectives.sparse_rows import RowExchange, Rows
from shoal.collectives.tls_ring import TlsRing
from shoal.config.job import Job
from shoal.errors import PeerLost, WireError
from shoal.runtime.transport import tls

NUM = 3
HOST = "127.0.0.1"


class Gathers:
    """Stands in for torch's group: ranks are threads, and all of them gather once."""

    def __init__(self, rank: int, shared: dict[int, Tensor], all_here: threading.Barrier) -> None:
        self.rank, self.num_workers, self.broken = rank, NUM, False
        self._shared, self._all_here = shared, all_here

    def is_broken(self) -> bool:
        return self.broken

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        self._shared[self.rank] = tensor
        self._all_here.wait(20.0)
        return [self._shared[rank] for rank in range(NUM)]


class Ring:
    """Three ranks of one job, each in a thread."""

    def __init__(self, before: Callable[[str], None] = lambda address: None) -> None:
        authority = Authority("ring")
        shared: dict[int, Tensor] = {}
        all_here = threading.Barrier(NUM)
        self.natives = [Gathers(rank, shared, all_here) for rank in range(NUM)]
        self.pool = ThreadPoolExecutor(NUM)
        self.rings: list[TlsRing] = []

        def open_ring(rank: int) -> TlsRing:
            job = Job(
                name="x", run_dir=Path("x"), rank=rank, num_workers=NUM, host_address=HOST, bind_address=HOST
            )
            if rank == 0:
                group: Any = _Announcing(self.natives[rank], before)
            else:
                group = self.natives[rank]
            return TlsRing(job, group, authority.issue(f"worker-{rank}"))

        self.rings = list(self.pool.map(open_ring, range(NUM)))

    def do(self, act: Callable[[TlsRing], Any]) -> list[Any]:
        return list(self.pool.map(act, self.rings))

    def close(self) -> None:
        for each in self.rings:
            each.close()
        self.pool.shutdown()


class _Announcing:
    """Tells of rank 0's address as soon as all know it."""

    def __init__(self, inner: Gathers, tell: Callable[[str], None]) -> None:
        self._inner, self._tell = inner, tell
        self.rank, self.num_workers, self.is_broken = inner.rank, inner.num_workers, inner.is_broken

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        gathered = self._inner.all_gather(tensor)
        self._tell(tensor.numpy().tobytes().rstrip(b"\0").decode().split()[2])
        return gathered


@pytest.fixture
def ring() -> Iterator[Ring]:
    made = Ring()
    yield made
    made.close()


def test_sums_are_added_up_around_the_ring(ring: Ring) -> None:
    values = [torch.randn(1000, 7, generator=torch.Generator().manual_seed(rank)) for rank in range(NUM)]
    flats = [value.clone().reshape(-1) for value in values]
    expected = []
    for part in range(NUM):
        total = parts_of(flats[part], NUM)[part]
        for step in range(1, NUM):
            total = total + parts_of(flats[(part + step) % NUM], NUM)[part]
        expected.append(total)

    def add_up(each: TlsRing) -> Tensor:
        tensor = values[each.rank].clone()
        each.finish(each.start_all_reduce(tensor), "an all-reduce")
        return tensor

    for summed in ring.do(add_up):
        assert torch.equal(summed.reshape(-1), torch.cat(expected))


def test_broadcasts_gathers_and_state_go_through_it_too(ring: Ring) -> None:
    def talk(each: TlsRing) -> tuple[float, list[float], float]:
        value = torch.full((2, 2), float(each.rank))
        gathered = each.all_gather(value)
        each.broadcast(value)
        state = torch.full((300_000,), 5.0)
        if each.rank == 2:
            each.send_to(0, state)
        elif each.rank == 0:
            state.zero_()
            each.receive_from(2, state)
        return float(value.sum()), [float(part[0, 0]) for part in gathered], float(state.mean())

    assert ring.do(talk) == [(0.0, [0.0, 1.0, 2.0], 5.0)] * NUM


def test_a_rank_that_leaves_is_lost_to_the_others(ring: Ring) -> None:
    ring.rings[1].close()
    for group in ring.natives:
        group.broken = True

    def add_up(each: TlsRing) -> str:
        if each.rank == 1:
            return ""
        with pytest.raises(PeerLost) as lost:
            each.finish(each.start_all_reduce(torch.ones(10)), "the sum")
        return str(lost.value)

    assert all("the sum" in told for told in ring.do(add_up)[::2])


def test_strangers_get_no_seat_and_keep_nobody_from_theirs() -> None:
    sockets: list[socket.socket] = []
    refused: list[threading.Thread] = []
    reasons: list[Exception] = []

    def present_a_foreign_certificate(address: str) -> None:
        foreign = Authority("another").issue("worker-2")
        try:
            foreign.connect(address, expect="worker-0", timeout_s=20.0)
        except (OSError, WireError) as error:
            reasons.append(error)

    def intrude(address: str) -> None:
        where = tls.split_address(address)
        # Half-open, more than may wait.
        sockets.extend(socket.create_connection(where) for _ in range(80))
        sockets[-1].sendall(b"\x16\x03\x01" + bytes(200))
        refused.append(threading.Thread(target=present_a_foreign_certificate, args=(address,)))
        refused[0].start()

    ring = Ring(intrude)
    try:
        assert ring.do(lambda each: len(each.all_gather(torch.ones(1)))) == [NUM] * NUM
    finally:
        ring.close()
        refused[0].join()
        for sock in sockets:
            sock.close()
    assert len(reasons) == 1


def test_rows_of_sparse_gradients_take_its_connections(ring: Ring) -> None:
    def run(each: TlsRing) -> list[Any]:
        keys = torch.arange(each.rank, 4)
        rows = Rows(keys, torch.full((len(keys), 2), 1.0 + each.rank))
        [total] = RowExchange([rows], each).finish()
        return [total.keys.tolist(), total.values[:, 1].tolist()]

    assert ring.do(run) == [[[0, 1, 2, 3], [1.0, 3.0, 6.0, 6.0]]] * NUM
