"""An attention by heads is torch's own: masks, hints, weights, layouts and what dropout draws."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoal.parallel.tensor_parallel import cut as tensor_cut
from shoal.parallel.tensor_parallel.attention import AttentionByHeads
from shoal.parallel.tensor_parallel.plan import find_plan

SIZE, LENGTH, WIDTH, HEADS = 2, 5, 12, 4


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """One rank, which has all heads: what several add to it is tested with processes."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def causal(kind: torch.dtype) -> Tensor:
    later = torch.ones(LENGTH, LENGTH).triu(1).bool()
    return (
        later if kind is torch.bool else torch.zeros(LENGTH, LENGTH).double().masked_fill(later, -torch.inf)
    )


def padding() -> Tensor:
    return torch.arange(LENGTH) >= torch.tensor([[5], [3]])


def of_heads() -> Tensor:
    return torch.randn(SIZE * HEADS, LENGTH, LENGTH, dtype=torch.float64)


@pytest.mark.parametrize(
    ("built", "called"),
    [
        ({}, {}),
        ({"bias": False}, {"average_attn_weights": False}),
        ({"batch_first": True}, {"attn_mask": causal(torch.bool), "need_weights": False}),
        (
            {"batch_first": True},
            {"attn_mask": causal(torch.float64), "need_weights": False, "is_causal": True},
        ),
        ({}, {"attn_mask": causal(torch.bool), "key_padding_mask": padding(), "is_causal": True}),
        ({"kdim": 6, "vdim": 8}, {"attn_mask": of_heads(), "need_weights": False}),
        ({"kdim": 6, "vdim": 8, "bias": False}, {"key_padding_mask": padding(), "need_weights": False}),
        ({"dropout": 0.4}, {"attn_mask": of_heads(), "average_attn_weights": False}),
        (
            {"dropout": 0.4, "batch_first": True},
            {"key_padding_mask": padding() | padding()[:1], "need_weights": False},
        ),
        ({"dropout": 1.0}, {}),
    ],
)
def test_it_computes_what_torch_does(mesh: DeviceMesh, built: dict[str, Any], called: dict[str, Any]) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.MultiheadAttention(WIDTH, HEADS, **built)).double()
    cut = copy.deepcopy(whole)
    tensor_cut.apply(find_plan(cut, 1), cut, mesh)
    assert isinstance(cut[0], AttentionByHeads)
    shape = (SIZE, LENGTH) if built.get("batch_first") else (LENGTH, SIZE)
    query, key, value = (
        torch.randn(*shape, built.get(name, WIDTH), dtype=torch.float64) for name in ("", "kdim", "vdim")
    )
    if "kdim" not in built:
        key = value = query
    (expected, weights), drawn = run(whole[0], query, key, value, called)
    with tensor_cut.running():
        (given, its_weights), its_drawn = run(cut[0], query, key, value, called)
    torch.testing.assert_close(given, expected, check_stride=True)  # what a dropout draws goes by strides
    assert (weights is None) == (its_weights is None)
    if weights is not None:
        torch.testing.assert_close(its_weights, weights)
    assert its_drawn == drawn


def run(attention: nn.Module, *given: Any) -> tuple[Any, float]:
    *tensors, options = given
    torch.manual_seed(1)
    return attention(*tensors, **options), float(torch.rand(1))


def test_one_sequence_alone_and_masks_of_the_wrong_shape(mesh: DeviceMesh) -> None:
    whole = nn.Sequential(nn.MultiheadAttention(WIDTH, HEADS))
    cut = copy.deepcopy(whole)
    tensor_cut.apply(find_plan(cut, 1), cut, mesh)
    x = torch.randn(LENGTH, WIDTH)
    with tensor_cut.running():
        for expected, given in zip(whole[0](x, x, x), cut[0](x, x, x), strict=True):
            torch.testing.assert_close(given, expected)
        batch = torch.randn(LENGTH, SIZE, WIDTH)
        for mask in (torch.zeros(3, 3), torch.zeros(3, LENGTH, LENGTH)):
            with pytest.raises(RuntimeError, match=f"The shape of the {mask.dim()}D attn_mask is"):
                cut[0](batch, batch, batch, attn_mask=mask)
        with pytest.raises(RuntimeError, match="Need attn_mask if specifying the is_causal hint"):
            cut[0](batch, batch, batch, is_causal=True)
