"""Rows of several blocks in the order of ranks, and back."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.parallel.tensor_parallel.packing import Packing, by_block, by_rank

SIZES = st.integers(1, 4)


@given(num_blocks=SIZES, degree=SIZES, num_rows=SIZES)
def test_each_rank_has_its_part_of_every_block(num_blocks: int, degree: int, num_rows: int) -> None:
    rows = torch.arange(num_blocks * degree * num_rows * 2).view(-1, 2)
    lying = by_rank(rows, num_blocks, degree)
    for rank, part in enumerate(lying.chunk(degree)):
        own = [block.chunk(degree)[rank] for block in rows.chunk(num_blocks)]
        assert torch.equal(part, torch.cat(own))
    assert torch.equal(by_block(lying, num_blocks, degree), rows)


def test_the_state_of_a_packed_parameter_is_translated_by_name() -> None:
    packing = Packing(2, {"a.weight": 3}, {"a.weight": 6})
    rows = torch.tensor([0, 1, 2, 3, 4, 5])
    for name in ("model/a.weight", "optimizer/a.weight/exp_avg"):
        cut = packing.to_rank_layout(name, rows)
        assert cut.tolist() == [0, 2, 4, 1, 3, 5]
        assert torch.equal(packing.to_user_layout(name, cut), rows)
    step = torch.tensor(3.0)
    assert packing.to_user_layout("optimizer/a.weight/step", step) is step
    assert packing.to_user_layout("model/b.weight", rows) is rows


@given(num_blocks=SIZES, degree=SIZES, num_rows=SIZES, num_shards=SIZES)
def test_shards_of_packed_rows_are_saved_where_the_user_has_them(
    num_blocks: int, degree: int, num_rows: int, num_shards: int
) -> None:
    rows = torch.arange(num_blocks * degree * num_rows * 2).view(-1, 2)
    packing = Packing(degree, {"w": num_blocks}, {"w": len(rows)})
    saved = torch.full_like(rows, -1)
    lying, begin = packing.to_rank_layout("model/w", rows), 0
    for part in lying.tensor_split(num_shards):
        for piece in packing.parts_in_user_layout("model/w", part, (begin, 0), tuple(rows.shape)):
            saved[piece.offset[0] : piece.offset[0] + len(piece.tensor)] = piece.tensor
        begin += len(part)
    assert torch.equal(saved, rows)
