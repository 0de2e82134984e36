"""Buffers that a forward changes are found without reading them, and agreed on."""

from __future__ import annotations

import torch
from torch import nn

from shoal.parallel.buffers import ChangingBuffers


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("centre", torch.zeros(2))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.arange(100_000.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.centre = self.centre * 0.5 + x.mean(0) * 0.5  # another tensor in its stead
        self.seen.add_(1)  # the same one, written in place
        return self.norm(x - self.centre)


def test_only_what_a_forward_changed_is_flagged_and_batchnorm_is_left_to_its_own() -> None:
    model = Centred()
    buffers = ChangingBuffers(model)
    buffers.look()
    assert buffers.flags() == [0.0, 0.0, 0.0]
    model(torch.randn(4, 2))
    assert buffers.flags() == [1.0, 1.0, 0.0]


def test_floats_are_averaged_by_samples_and_counters_are_rank_0s() -> None:
    ranks = [Centred(), Centred(), Centred()]
    buffers = [ChangingBuffers(model) for model in ranks]
    for rank, model in enumerate(ranks):
        model.centre.fill_(float(rank))
        model.seen.fill_(10 + rank)
    shares = [0.5, 0.25, 0.25]
    agreed = sum(
        b.contribution([0, 1], share=s, rank=r) for r, (b, s) in enumerate(zip(buffers, shares, strict=True))
    )
    for each, model in zip(buffers, ranks, strict=True):
        each.write([0, 1], agreed)  # type: ignore[arg-type]
        assert model.centre.tolist() == [0.75, 0.75]
        assert int(model.seen) == 10


def test_a_large_buffer_that_never_changed_needs_no_copy() -> None:
    model = Centred()
    buffers = ChangingBuffers(model)
    assert buffers.constants() == {id(model.table)}
    buffers.write([2], buffers.contribution([2], share=1.0, rank=0))
    assert buffers.constants() == set()
