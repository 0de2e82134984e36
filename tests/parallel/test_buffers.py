"""Buffers that a forward changes are found without reading them, and agreed on."""

from __future__ import annotations

import torch
from torch import nn

from shoal.parallel.buffers import ChangingBuffers, RunningStatistics


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


def model() -> nn.Sequential:
    return nn.Sequential(
        nn.BatchNorm1d(3), nn.Linear(3, 2), nn.BatchNorm1d(2, track_running_stats=False), nn.BatchNorm1d(2)
    )


def state(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in net.named_buffers()}


def run(net: nn.Module, seed: int = 0) -> None:
    net(torch.randn(8, 3, generator=torch.Generator().manual_seed(seed)) * 5 + 2)


def test_what_is_written_back_is_what_was_read() -> None:
    net = model()
    run(net)
    statistics, before = RunningStatistics(net), state(net)
    flat = statistics.flat()
    assert flat.dtype == torch.float64
    assert flat.numel() == 2 * 3 + 2 * 2
    run(net, seed=1)
    assert not torch.equal(net[0].running_mean, before["0.running_mean"])
    statistics.write(flat)
    after = state(net)
    assert all(torch.equal(after[name], before[name]) for name in before if "running" in name)


def test_taken_back_a_forward_never_was() -> None:
    net = model()
    run(net)
    statistics, before = RunningStatistics(net), state(net)
    kept = statistics.keep()
    net(torch.full((8, 3), torch.nan))
    assert net[0].running_mean.isnan().all()
    statistics.take_back(kept)
    after = state(net)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_frozen_layer_keeps_its_own() -> None:
    net = model()
    net[0].eval()
    statistics = RunningStatistics(net)
    statistics.write(torch.full((10,), 7.0, dtype=torch.float64))
    assert torch.equal(net[0].running_mean, torch.zeros(3))
    assert torch.equal(net[3].running_mean, torch.full((2,), 7.0))


def test_a_model_without_has_none() -> None:
    assert not RunningStatistics(nn.Linear(2, 2))
    assert not RunningStatistics(nn.BatchNorm1d(2, track_running_stats=False))
    assert RunningStatistics(model())
