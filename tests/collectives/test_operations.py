"""A product cut over ranks is torch's product, whatever the shapes."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep import with_ranks

from shoal.collectives.operations import matmul_by_blocks, matmul_by_inner, matmul_mesh

SIZES = st.integers(0, 9)


@settings(max_examples=60, deadline=None)
@given(
    num_ranks=st.integers(1, 4),
    m=SIZES,
    k=SIZES,
    n=SIZES,
    dtype=st.sampled_from([torch.int64, torch.float64]),
)
def test_both_cuts_give_torchs_product(num_ranks: int, m: int, k: int, n: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(m + 10 * k + 100 * n)
    a = torch.randint(-9, 9, (m, k), generator=g).to(dtype)
    b = torch.randint(-9, 9, (k, n), generator=g).to(dtype)
    mesh = matmul_mesh(num_ranks, m, n)

    def run(ranks: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return matmul_by_blocks(ranks, a, b, mesh), matmul_by_inner(ranks, a, b, "matmul")

    for blocks, inner in with_ranks(num_ranks, run):
        assert torch.equal(blocks, a @ b)  # whole numbers: no order of sums rounds
        assert torch.equal(inner, a @ b)


def test_the_mesh_follows_the_shape() -> None:
    assert matmul_mesh(4, 100, 100) == (2, 2)
    assert matmul_mesh(4, 1000, 10) == (4, 1)
    assert matmul_mesh(3, 10, 1000) == (1, 3)
