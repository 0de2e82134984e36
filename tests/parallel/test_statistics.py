"""BatchNorm's running statistics as one vector, and back."""

from __future__ import annotations

import torch
from torch import nn

from shoal.parallel.statistics import RunningStatistics


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
