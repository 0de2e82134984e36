"""BatchNorm over ranks, each a thread here, against torch's own over the whole batch."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.collectives.sync_batchnorm import RanksOfBatch, SyncedBatchNorm, synchronise
from shoal.errors import ConfigError


class Table:
    """Where threads add up: each lays down its part and reads all of them, in rank order."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks, timeout=30.0)
        self._parts: list[Tensor] = [torch.empty(0)] * num_ranks

    def adder(self, rank: int) -> Callable[[Tensor], None]:
        def add_up(tensor: Tensor) -> None:
            self._parts[rank] = tensor.clone()
            self._barrier.wait()
            tensor.copy_(sum(self._parts[1:], self._parts[0]))
            self._barrier.wait()

        return add_up


def layer_and_batch(dims: int) -> tuple[nn.Module, tuple[int, ...]]:
    if dims == 2:
        return nn.BatchNorm1d(3, momentum=None), (3,)
    return nn.BatchNorm2d(3, affine=dims == 4), (3, 2, 2) if dims == 4 else (3, 1, 2)


@settings(max_examples=12, deadline=None)
@given(
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(lambda counts: sum(counts) > 1),
    dims=st.sampled_from([2, 4, 5]),
    offset=st.sampled_from([0.0, 1e4]),
)
def test_it_is_the_whole_batchs_wherever_the_samples_are(counts: list[int], dims: int, offset: float) -> None:
    torch.manual_seed(0)
    whole, shape = layer_and_batch(dims)
    whole = whole.double()
    x = torch.randn(sum(counts), *shape, dtype=torch.float64) + offset
    x.requires_grad_()
    weights = torch.randn(sum(counts), *shape, dtype=torch.float64)
    table = Table(len(counts))
    found: list[tuple[Tensor, Tensor, nn.Module]] = [None] * len(counts)  # type: ignore[list-item]

    def run(rank: int) -> None:
        ranks = RanksOfBatch(rank=rank, num_ranks=len(counts), add_up=table.adder(rank))
        mine = copy.deepcopy(whole)
        synchronise(mine, ranks)
        ranks.is_borrowed = counts[rank] == 0
        begin = sum(counts[:rank])
        at = slice(begin, begin + counts[rank]) if counts[rank] else slice(0, 1)
        part = x.detach()[at].clone().requires_grad_()
        out = mine(part)
        (out * weights[at] * bool(counts[rank])).sum().backward()
        assert part.grad is not None
        found[rank] = out.detach(), part.grad, mine

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(counts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = whole(x)
    (expected * weights).sum().backward()
    assert x.grad is not None
    own = [(out, grad) for count, (out, grad, _) in zip(counts, found, strict=True) if count]
    tolerance = {"rtol": 1e-9, "atol": 1e-9 * max(1.0, offset / 10)}
    torch.testing.assert_close(torch.cat([out for out, _ in own]), expected.detach(), **tolerance)
    torch.testing.assert_close(torch.cat([grad for _, grad in own]), x.grad, **tolerance)
    for (name, parameter), *ranks in zip(
        whole.named_parameters(), *(layer.named_parameters() for *_, layer in found), strict=True
    ):
        gradients = [each.grad for other, each in ranks if other == name]
        torch.testing.assert_close(sum(gradients), parameter.grad, **tolerance)
    for *_, layer in found:
        assert layer.state_dict().keys() == whole.state_dict().keys()
        for key, value in whole.state_dict().items():
            torch.testing.assert_close(layer.state_dict()[key], value, **tolerance)
    for count, (_, grad, _) in zip(counts, found, strict=True):
        assert count or not grad.any()  # a borrowed sample has no say


def alone() -> RanksOfBatch:
    return RanksOfBatch(rank=0, num_ranks=1, add_up=lambda tensor: None)


def test_half_precision_is_summed_in_more() -> None:
    layer = nn.BatchNorm1d(2)
    synchronise(layer, alone())
    x = torch.randn(64, 2) * 0.1 + 100
    out = layer(x.bfloat16())
    assert out.dtype is torch.bfloat16
    assert out.float().mean(0).abs().max() < 0.1


def test_evaluation_and_frozen_layers_are_torchs_own() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    expected = copy.deepcopy(model).eval()(torch.ones(2, 3))
    assert synchronise(model, alone()) == ["0", "1"]
    assert isinstance(model[0], SyncedBatchNorm)
    assert isinstance(model[0], nn.BatchNorm1d)
    assert torch.equal(model.eval()(torch.ones(2, 3)), expected)


def test_one_value_over_all_workers_cannot_be_normalised() -> None:
    layer = nn.BatchNorm1d(3)
    synchronise(layer, alone())
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(torch.ones(1, 3))


def test_a_batchnorm_with_a_forward_of_its_own_is_refused_by_name() -> None:
    class Renormalising(nn.BatchNorm1d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 2

    with pytest.raises(ConfigError, match="the layer '1' is a Renormalising"):
        synchronise(nn.Sequential(nn.Linear(2, 2), Renormalising(2)), alone())
