"""Rows of sparse gradients: duplicates in the order of the batch, ranks in rank order, with and without compiled loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep import with_ranks
from torch import Tensor

from shoal.collectives import sparse_rows
from shoal.collectives.shm import Shm
from shoal.collectives.sparse_rows import Rows, TableExchange, rows_of

NUM_ROWS = 20
SHAPES = (
    (3, torch.float32),
    (4, torch.float64),
    (2, torch.bfloat16),
    (3, torch.float32),
)  # the first and the last go as one


@pytest.fixture(autouse=True, params=["compiled", "torch"])
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_rows, "_is_compiled", lambda: request.param == "compiled")


def gradient(rank: int, number: int, num_ids: int) -> Tensor:
    dim, dtype = SHAPES[number]
    generator = torch.Generator().manual_seed(100 * rank + number)
    ids = torch.randint(0, NUM_ROWS, (1, num_ids), generator=generator)
    values = torch.randn(num_ids, dim, dtype=torch.float64, generator=generator).to(dtype)
    return torch.sparse_coo_tensor(ids, values, (NUM_ROWS, dim), check_invariants=False)


def added_by_hand(of_ranks: list[Tensor]) -> tuple[list[int], Tensor]:
    """Ids that anybody has, and the table: every rank's rows summed in their order, then the ranks in theirs."""
    total, seen = torch.zeros(of_ranks[0].shape, dtype=of_ranks[0].dtype), set()
    for one in of_ranks:
        own = torch.zeros_like(total)
        for key, row in zip(one._indices()[0].tolist(), one._values(), strict=True):
            own[key] += row
            seen.add(key)
        total += own
    return sorted(seen), total


class ByAllToAll:
    """Ranks of several hosts: an all-to-all, out of an all-gather."""

    scatters_rows = True

    def __init__(self, group: Any) -> None:
        self._group, self.rank, self.num_workers = group, group.rank, group.num_workers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def swap_parts(self, parts: Tensor) -> Tensor:
        return torch.stack([each[self.rank] for each in self._group.all_gather(parts)])


def in_memory(group: Any) -> Any:
    return Shm(group, num_cores=1)


@pytest.mark.parametrize("reducer", [in_memory, ByAllToAll])
@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.lists(st.integers(0, 60), min_size=4, max_size=4), min_size=1, max_size=4))
def test_all_ranks_hold_the_sum_in_rank_order(reducer: Callable[[Any], Any], sizes: list[list[int]]) -> None:
    def run(group: Any) -> list[Rows]:
        tables = [rows_of(gradient(group.rank, n, size)) for n, size in enumerate(sizes[group.rank])]
        return TableExchange(tables, reducer(group)).finish()

    for result in with_ranks(len(sizes), run):
        for number, rows in enumerate(result):
            keys, total = added_by_hand(
                [gradient(rank, number, each[number]) for rank, each in enumerate(sizes)]
            )
            assert rows.keys.tolist() == keys
            if total.dtype is torch.bfloat16:  # torch keeps more digits between two additions
                torch.testing.assert_close(rows.values, total[keys], atol=0.1, rtol=0.1)
            else:
                assert torch.equal(rows.values, total[keys])


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.lists(st.integers(0, 60), min_size=4, max_size=4), min_size=4, max_size=6),
    seed=st.integers(0, 5),
)
def test_ranks_that_share_memory_divide_the_adding(sizes: list[list[int]], seed: int) -> None:
    def run(group: Any) -> list[list[Rows]]:
        shm, found = in_memory(group), []
        for step in range(3):  # the first gathers, and finds out how much memory is needed
            tables = [
                rows_of(gradient(group.rank + 10 * (step + seed), n, size))
                for n, size in enumerate(sizes[group.rank])
            ]
            found.append(TableExchange(tables, shm).finish())
        assert shm.shared_parts.num_bytes or not any(map(any, sizes))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse_rows, "_SHARED_FROM", 0)
        results = with_ranks(len(sizes), run)
    for result in results:
        for step, tables in enumerate(result):
            for number, rows in enumerate(tables):
                keys, total = added_by_hand(
                    [
                        gradient(rank + 10 * (step + seed), number, each[number])
                        for rank, each in enumerate(sizes)
                    ]
                )
                assert rows.keys.tolist() == keys
                if total.dtype is torch.bfloat16:
                    torch.testing.assert_close(rows.values, total[keys], atol=0.1, rtol=0.1)
                else:
                    assert torch.equal(rows.values, total[keys])


def test_one_rank_never_adds_up_much_more_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each table's rows are mostly those of another rank; a range of too many would not fit the memory of sums."""
    monkeypatch.setattr(sparse_rows, "_SHARED_FROM", 0)

    def run(group: Any) -> list[list[int]]:
        shm = in_memory(group)
        for _ in range(2):
            tables = [
                Rows(keys := torch.arange(3000 if n == group.rank else 1), torch.ones(len(keys), 16))
                for n in range(group.num_workers)
            ]
            rows = TableExchange(tables, shm).finish()
        assert shm.shared_parts.num_bytes
        return [each.keys.tolist() for each in rows]

    assert all(keys == [list(range(3000))] * 9 for keys in with_ranks(9, run))


def test_many_small_tables_divide_their_sum_as_one_of_their_rows_would() -> None:
    def tables(rank: int) -> list[Rows]:
        """26 tables of 200 rows, of which every second is each rank's."""
        return [Rows(torch.arange(200) * 2 + n % 2 * rank, torch.full((200, 2), 1.0 + n)) for n in range(26)]

    def run(group: Any) -> list[Rows]:
        shm = in_memory(group)
        TableExchange(tables(group.rank), shm).finish()
        assert shm.shared_parts.num_bytes  # the next one is divided
        return TableExchange(tables(group.rank), shm).finish()

    for result in with_ranks(4, run):
        for n, rows in enumerate(result):
            total = torch.zeros(403, 2)
            for rank in range(4):
                total[torch.arange(200) * 2 + n % 2 * rank] += 1.0 + n
            assert rows.keys.tolist() == total[:, 0].nonzero()[:, 0].tolist()
            assert torch.equal(rows.values, total[rows.keys])


def test_rows_come_back_as_autograd_has_them() -> None:
    rows = rows_of(gradient(0, 0, 30))
    found = rows.gradient(NUM_ROWS)
    assert found.is_coalesced()
    torch.testing.assert_close(found.to_dense(), gradient(0, 0, 30).to_dense())
