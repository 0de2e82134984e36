"""Rows of sparse gradients: duplicates in the order of the batch, ranks in rank order, with and without compiled loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep import with_ranks
from torch import Tensor

from shoal.collectives import sparse_rows
from shoal.collectives.shm import Shm
from shoal.collectives.sparse_rows import RowExchange, Rows, rows_of

NUM_ROWS = 20
SHAPES = ((3, torch.float32), (4, torch.float64), (2, torch.bfloat16))


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


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.lists(st.integers(0, 60), min_size=3, max_size=3), min_size=1, max_size=4))
def test_all_ranks_hold_the_sum_in_rank_order(sizes: list[list[int]]) -> None:
    def run(group: Any) -> list[Rows]:
        tables = [rows_of(gradient(group.rank, n, size)) for n, size in enumerate(sizes[group.rank])]
        return RowExchange(tables, Shm(group, num_cores=1)).finish()

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


def test_rows_come_back_as_autograd_has_them() -> None:
    rows = rows_of(gradient(0, 0, 30))
    found = rows.gradient(NUM_ROWS)
    assert found.is_coalesced()
    torch.testing.assert_close(found.to_dense(), gradient(0, 0, 30).to_dense())
