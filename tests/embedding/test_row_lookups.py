"""Embeddings over rows of a source: equal to torch's modules, forward and backward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.embedding.lookup import (
    BagLookup,
    Lookup,
    bag_elsewhere,
    embedding_bag_forward,
    embedding_forward,
    merged,
    uniques_of,
)
from shoal.errors import TrainingError

NUM_ROWS, DIM = 9, 4


class WeightRows:
    """Rows of a weight; what is pushed adds up to its gradient."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.detach()
        self.grad = torch.zeros_like(self.weight)
        self.pushed: list[list[int]] = []

    def uniques(self, ids: Tensor) -> Any:
        return uniques_of(ids)

    def pull(self, keys: np.ndarray) -> Tensor:
        return self.weight[torch.from_numpy(keys)]

    def push(self, keys: np.ndarray, gradients: np.ndarray) -> None:
        self.pushed.append(keys.tolist())
        self.grad[torch.from_numpy(keys)] += torch.from_numpy(gradients)


IDS = st.lists(st.integers(0, NUM_ROWS - 1), min_size=1, max_size=24)


@settings(max_examples=40, deadline=None)
@given(ids=IDS, padding=st.none() | st.integers(0, NUM_ROWS - 1), columns=st.sampled_from([1, 2]))
def test_an_embedding_is_torchs(ids: list[int], padding: int | None, columns: int) -> None:
    module = nn.Embedding(NUM_ROWS, DIM, padding_idx=padding, dtype=torch.float64)
    source = WeightRows(module.weight)
    batch = torch.tensor(ids * columns).view(-1, columns)
    expected, found = module(batch), embedding_forward(source, batch, padding_idx=padding)
    assert torch.equal(found, expected)
    scale = torch.randn_like(expected)
    (expected * scale).sum().backward()
    (found * scale).sum().backward()
    assert module.weight.grad is not None
    torch.testing.assert_close(source.grad, module.weight.grad, rtol=1e-12, atol=1e-12)
    # As with sparse=True: the padding's row is not heard of, and no key comes twice.
    heard = sorted(set(ids) - {padding})
    assert source.pushed == ([heard] if heard else [])


@settings(max_examples=80, deadline=None)
@given(
    ids=IDS,
    mode=st.sampled_from(["sum", "mean", "weights"]),
    cuts=st.lists(st.integers(0, 24), max_size=6),
    include_last=st.booleans(),
    padding=st.none() | st.integers(0, NUM_ROWS - 1),
)
def test_a_bag_is_torchs(
    ids: list[int], mode: str, cuts: list[int], include_last: bool, padding: int | None
) -> None:
    kind = "sum" if mode == "weights" else mode
    module = nn.EmbeddingBag(
        NUM_ROWS, DIM, mode=kind, padding_idx=padding, include_last_offset=include_last, dtype=torch.float64
    )
    source = WeightRows(module.weight)
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts)]
    offsets = torch.tensor([*bounds, len(ids)] if include_last else bounds)
    weights = [torch.randn(len(ids), dtype=torch.float64) for _ in range(1)] if mode == "weights" else []
    theirs, ours = ([weight.clone().requires_grad_() for weight in weights] for _ in range(2))
    batch = torch.tensor(ids)
    expected = module(batch, offsets, *theirs)
    found = embedding_bag_forward(
        source, batch, offsets, mode=kind, per_sample_weights=ours[0] if ours else None,
        include_last_offset=include_last, padding_idx=padding,
    )  # fmt: skip
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    scale = torch.randn_like(expected)
    (expected * scale).sum().backward()
    (found * scale).sum().backward()
    assert module.weight.grad is not None
    torch.testing.assert_close(source.grad, module.weight.grad, rtol=1e-12, atol=1e-12)
    for one, other in zip(theirs, ours, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-12, atol=1e-12)


def test_bags_of_two_dims_need_no_offsets() -> None:
    module = nn.EmbeddingBag(NUM_ROWS, DIM, mode="mean")
    batch = torch.randint(0, NUM_ROWS, (6, 5))
    found = embedding_bag_forward(WeightRows(module.weight), batch, mode="mean")
    torch.testing.assert_close(found, module(batch))


def test_gradients_of_lookups_are_the_ones_of_the_function() -> None:
    rows = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    inverse = torch.tensor([0, 4, 4, 1, 0, 2, 1, 4], dtype=torch.int32)
    assert torch.autograd.gradcheck(lambda rows: Lookup.apply(rows, inverse), (rows,))


@pytest.mark.parametrize("padding", [-1, 4])
def test_gradients_of_bags_are_the_ones_of_the_function(padding: int) -> None:
    rows = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(8, dtype=torch.float64, requires_grad=True)
    inverse = torch.tensor([0, 4, 4, 1, 0, 2, 1, 4], dtype=torch.int32)
    bounds = torch.tensor([0, 3, 3, 7, 8])
    assert torch.autograd.gradcheck(
        lambda rows, weights: BagLookup.apply(rows, weights, inverse, bounds, padding, False), (rows, weights)
    )
    assert torch.autograd.gradcheck(
        lambda rows: BagLookup.apply(rows, None, inverse, bounds, padding, True), (rows,)
    )


@pytest.mark.parametrize("padding", [-1, 4])
@pytest.mark.parametrize("mode", ["sum", "mean", "weights"])
def test_bags_on_another_device_are_the_same_function(padding: int, mode: str) -> None:
    inverse = torch.tensor([0, 4, 4, 1, 0, 2, 1, 4], dtype=torch.int32)
    bounds = torch.tensor([0, 3, 3, 7, 8])
    rows = torch.randn(5, 3, dtype=torch.float64)
    weights = torch.randn(8, dtype=torch.float64)
    grads = []
    for function in (BagLookup.apply, bag_elsewhere):
        wanting = [tensor.clone().requires_grad_() for tensor in (rows, weights)]
        out = function(
            wanting[0], wanting[1] if mode == "weights" else None, inverse, bounds, padding, mode == "mean"
        )
        (out * torch.arange(12).view(4, 3)).sum().backward()
        grads.append([out, *(tensor.grad for tensor in wanting if tensor.grad is not None)])
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-12, atol=1e-12)


def test_two_uses_in_one_model_push_twice_and_merge_in_order() -> None:
    source = WeightRows(torch.randn(NUM_ROWS, DIM))
    first = embedding_forward(source, torch.tensor([1, 3]))
    second = embedding_forward(source, torch.tensor([3, 0, 3]))
    (first.sum() + 2 * second.sum()).backward()
    assert sorted(source.pushed) == [[0, 3], [1, 3]]
    keys, rows = merged([(np.array([1, 3]), np.ones((2, 1))), (np.array([0, 3]), np.full((2, 1), 2.0))])
    assert keys.tolist() == [0, 1, 3]
    assert rows[:, 0].tolist() == [2, 1, 3]


def test_nothing_is_pushed_without_a_gradient() -> None:
    source = WeightRows(torch.randn(NUM_ROWS, DIM))
    with torch.no_grad():
        assert not embedding_forward(source, torch.tensor([1, 3])).requires_grad
    embedding_forward(source, torch.tensor([1, 3])).sum()
    assert embedding_forward(source, torch.empty(0, 2, dtype=torch.int64)).shape == (0, 2, DIM)
    assert source.pushed == []


def test_bags_that_cannot_be_are_refused() -> None:
    source, ids = WeightRows(torch.randn(NUM_ROWS, DIM)), torch.tensor([1, 2, 3])
    for offsets in ([1, 2], [0, 2, 1], [0, 4], []):
        with pytest.raises(TrainingError, match="offsets of an EmbeddingBag begin with 0"):
            embedding_bag_forward(
                source, ids, torch.tensor(offsets, dtype=torch.int64), include_last_offset=True
            )
    with pytest.raises(TrainingError, match="mode='max' cannot have its rows elsewhere"):
        embedding_bag_forward(source, ids, torch.tensor([0]), mode="max")
    with pytest.raises(TrainingError, match="'mean' with per_sample_weights"):
        embedding_bag_forward(source, ids, torch.tensor([0]), mode="mean", per_sample_weights=torch.ones(3))
    with pytest.raises(TrainingError, match="ids of 1 dims and no offsets"):
        embedding_bag_forward(source, ids)
    with pytest.raises(TrainingError, match="2 entries for 3 ids"):
        embedding_bag_forward(source, ids, torch.tensor([0]), mode="sum", per_sample_weights=torch.ones(2))
