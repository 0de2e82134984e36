"""Every scheme gives every rank the same sum: exact where numbers are, the same bits where they are not."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.collectives.schemes import allgather, chain, halving, hierarchical, mapreduce, ring, tree
from shoal.collectives.schemes import broadcast as everyone
from shoal.collectives.schemes.hierarchical import Hierarchical, InPieces

SCHEMES = {
    "ring": ring,
    "tree": tree,
    "halving": halving,
    "broadcast": everyone,
    "allgather": allgather,
    "chain": chain,
    "mapreduce": mapreduce,
}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32]


class Lines:
    """P2P between threads of this process."""

    def __init__(self, queues: dict[tuple[int, int], Any], rank: int, num_ranks: int) -> None:
        self._queues, self.rank, self.num_ranks = queues, rank, num_ranks

    def swap(self, to: int, outgoing: Tensor, source: int, incoming: Tensor) -> None:
        self.wait(self.receive(source, incoming), self.send(to, outgoing))

    def send(self, to: int, tensor: Tensor) -> Any:
        self._queues[self.rank, to].put(tensor.clone())

    def receive(self, source: int, tensor: Tensor) -> Any:
        return source, tensor

    def wait(self, *works: Any) -> None:
        for work in works:
            if work is not None:
                source, tensor = work
                tensor.copy_(self._queues[source, self.rank].get(timeout=20.0))


class Part(Lines):
    """The p2p between some of the ranks."""

    def __init__(self, p2p: Lines, ranks: list[int]) -> None:
        queues = {
            (a, b): p2p._queues[ranks[a], ranks[b]] for a in range(len(ranks)) for b in range(len(ranks))
        }
        super().__init__(queues, ranks.index(p2p.rank), len(ranks))


def on_all(num_ranks: int, run: Callable[[Lines], Any]) -> list[Any]:
    queues = {(a, b): queue.SimpleQueue() for a in range(num_ranks) for b in range(num_ranks)}
    results: list[Any] = [None] * num_ranks

    def work(rank: int) -> None:
        results[rank] = run(Lines(queues, rank, num_ranks))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(each.empty() for each in queues.values())
    return results


def summed(scheme: str, parts: list[Tensor]) -> list[Tensor]:
    def run(p2p: Lines) -> Tensor:
        flat = parts[p2p.rank].clone()
        SCHEMES[scheme].all_reduce(p2p, flat)
        return flat

    return on_all(len(parts), run)


@settings(max_examples=60, deadline=None)
@given(
    scheme=st.sampled_from(sorted(SCHEMES)),
    num_ranks=st.integers(1, 9),
    length=st.integers(0, 70),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_whole_numbers_give_the_exact_sum(
    scheme: str, num_ranks: int, length: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randint(-12, 13, (length,), generator=generator).to(dtype) for _ in range(num_ranks)]
    expected = torch.stack(parts).sum(0).to(dtype)
    for result in summed(scheme, parts):
        assert torch.equal(result, expected)


@settings(max_examples=40, deadline=None)
@given(scheme=st.sampled_from(sorted(SCHEMES)), num_ranks=st.integers(2, 7), length=st.integers(1, 60))
def test_all_ranks_get_the_same_bits_and_get_them_again(scheme: str, num_ranks: int, length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    parts = [torch.randn(length, generator=generator) * 10.0**rank for rank in range(num_ranks)]
    first, again = summed(scheme, parts), summed(scheme, parts)
    assert all(torch.equal(result, first[0]) for result in [*first, *again])


def test_a_sum_of_hosts_has_one_order_and_the_same_bits_on_hosts_of_one_and_of_two_ranks() -> None:
    parts = [torch.randn(50, generator=torch.Generator().manual_seed(rank)) * 10.0**rank for rank in range(3)]
    for part in parts:
        part[:3] = -0.0

    def run(p2p: Lines) -> Tensor:
        flat, rank = parts[p2p.rank].clone(), p2p.rank
        home = Part(p2p, [0, 1] if rank < 2 else [2])
        between = Part(p2p, [0, 2]) if rank != 1 else None
        Hierarchical(partial(chain.all_reduce, home), between).all_reduce(flat)
        return flat.view(torch.int32)

    expected = ((parts[0] + parts[1]) + parts[2]).view(torch.int32)
    assert all(torch.equal(result, expected) for result in on_all(3, run))


@pytest.mark.parametrize("scheme", ["broadcast", "allgather", "chain", "mapreduce"])
def test_these_add_in_rank_order(scheme: str) -> None:
    parts = [
        torch.randn(100, generator=torch.Generator().manual_seed(rank)) * 10.0**rank for rank in range(4)
    ]
    expected = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    assert torch.equal(summed(scheme, parts)[2], expected)


def test_a_chain_relays_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "CHUNK_BYTES", 16)
    parts = [torch.arange(50.0) * (rank + 1) for rank in range(3)]
    for result in summed("chain", parts):
        assert torch.equal(result, torch.arange(50.0) * 6)


class InOneProcess:
    """Stands in for `Shm` between threads: sums in rank order, through queues."""

    def __init__(self, home: Lines) -> None:
        self._home, self.rank, self.num_workers = home, home.rank, home.num_ranks

    def start_all_reduce(self, tensor: Tensor) -> None:
        chain.all_reduce(self._home, tensor)

    def start_reduce_scatter(self, whole: Tensor, begin: int, end: int) -> None:
        total = whole.clone()
        chain.all_reduce(self._home, total)
        whole[begin:end] = total[begin:end]

    def finish(self, work: None, operation: str) -> None:
        pass

    def start_gather_in_place(self, whole: Tensor) -> None:
        if len(whole):
            ring.all_gather(self._home, list(whole.view(self.num_workers, -1)), own=self.rank)


@settings(max_examples=60, deadline=None)
@given(
    num_ranks=st.lists(st.integers(1, 3), min_size=2, max_size=4),
    length=st.integers(0, 200),
    slice_bytes=st.integers(1, 80),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_pieces_and_lanes_leave_the_bits_of_a_sum_in_one_piece(
    num_ranks: list[int], length: int, slice_bytes: int, dtype: torch.dtype
) -> None:
    hosts, count = [], 0
    for num in num_ranks:
        hosts.append(list(range(count, count + num)))
        count += num
    parts = [
        (torch.randn(length, generator=torch.Generator().manual_seed(rank)) * 10.0**rank).to(dtype)
        for rank in range(count)
    ]
    for part in parts:
        part[::7] = -0.0
    num_lanes = num_ranks[0] if len(set(num_ranks)) == 1 else 1

    def in_one(p2p: Lines) -> Tensor:
        flat, mine = parts[p2p.rank].clone(), next(ranks for ranks in hosts if p2p.rank in ranks)
        speakers = [ranks[0] for ranks in hosts]
        between = Part(p2p, speakers) if p2p.rank in speakers else None
        Hierarchical(partial(chain.all_reduce, Part(p2p, mine)), between).all_reduce(flat)
        return flat

    def in_pieces(p2p: Lines) -> Tensor:
        flat, mine = parts[p2p.rank].clone(), next(ranks for ranks in hosts if p2p.rank in ranks)
        at = mine.index(p2p.rank)
        lane = Part(p2p, [ranks[at] for ranks in hosts]) if at < num_lanes else None
        home: Any = InOneProcess(Part(p2p, mine))
        InPieces(home, lane, num_hosts=len(hosts), num_lanes=num_lanes).all_reduce(flat)
        return flat

    expected = on_all(count, in_one)
    with mock.patch.object(hierarchical, "SLICE_BYTES", slice_bytes):
        got = on_all(count, in_pieces)
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got, expected, strict=True)
    )
