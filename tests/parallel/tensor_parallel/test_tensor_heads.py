"""Attentions cut by heads, however they are written, and the reasons given for the others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import ConfigError
from shoal.parallel.tensor_parallel.plan import find_plan

WIDTH, HEADS = 24, 12
Projected = tuple[Tensor, Tensor, Tensor]


def chunked(qkv: Tensor) -> Projected:
    q, k, v = (_heads(each) for each in qkv.chunk(3, dim=-1))
    return q, k, v


def split(qkv: Tensor) -> Projected:
    q, k, v = torch.split(qkv, WIDTH, dim=2)
    return _heads(q), _heads(k), _heads(v)


def viewed(qkv: Tensor) -> Projected:
    batch, length, width = qkv.shape
    q, k, v = qkv.view(batch, length, 3, HEADS, width // 3 // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def by_head(qkv: Tensor) -> Projected:
    q, k, v = qkv.unflatten(-1, (HEADS, -1)).chunk(3, dim=-1)
    return q, k, v


def unevenly(qkv: Tensor) -> Projected:
    q, k, v = qkv.split([WIDTH, WIDTH // 2, WIDTH + WIDTH // 2], dim=-1)
    return _heads(q), k, v


def _heads(x: Tensor) -> Tensor:
    batch, length, width = x.shape
    return x.view(batch, length, HEADS, width // HEADS).transpose(1, 2)


class Masked(nn.Module):
    """q, k and v in one layer, a mask, and weights where they are asked for."""

    def __init__(self, project: Callable[[Tensor], Projected]) -> None:
        super().__init__()
        self.project = project
        self.qkv, self.out, self.softmax = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Softmax(-1),
        )

    def forward(self, x: Tensor, mask: Tensor | None = None, need_weights: bool = True) -> object:
        batch, length, _ = x.shape
        q, k, v = self.project(self.qkv(x))
        scores = q @ k.transpose(-2, -1)
        if mask is not None:
            scores = scores.masked_fill(mask[:, None, None, :], -torch.inf)
        weights = self.softmax(scores)
        out = self.out((weights @ v).transpose(1, 2).reshape(batch, length, WIDTH))
        return (out, weights) if need_weights else out


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


@pytest.mark.parametrize(("project", "num_blocks"), [(chunked, 3), (split, 3), (viewed, 3), (by_head, None)])
def test_an_attention_with_a_mask_is_cut_by_heads(
    project: Callable[[Tensor], Projected], num_blocks: int | None
) -> None:
    plan = find_plan(Masked(project), 4)
    assert {name: row.style for name, row in plan.rows.items()} == {"qkv": "colwise", "out": "rowwise"}
    assert plan.packed.get("qkv.weight") == plan.packed.get("qkv.bias") == num_blocks
    assert plan.inputs_inside == {"": ("mask",)}
    assert ("in 3 blocks" in plan.table()) == (num_blocks == 3)


def test_a_gate_and_what_it_lets_through_are_two_blocks() -> None:
    assert find_plan(Gate(), 2).packed == {"up.weight": 2, "up.bias": 2}


@pytest.mark.parametrize(
    ("project", "degree", "reason"),
    [
        (unevenly, 2, "split into parts, which lie across the ranks"),
        (viewed, 8, "viewed in 12 parts or heads, which cannot be divided by 8"),
        (chunked, 5, "its 3 blocks of 24 outputs cannot be divided by 5"),
    ],
)
def test_what_is_not_by_heads_stays_whole(
    project: Callable[[Tensor], Projected], degree: int, reason: str
) -> None:
    other = nn.Sequential(nn.Linear(8, 40), nn.Linear(40, 8))
    assert reason in find_plan(nn.ModuleList([other, Masked(project)]), degree).rows["1.qkv"].reason


HEAD = 4
Views = Callable[[Tensor, Tensor], Tensor]
"""Of what a module is given and a projection of it."""

VIEWS: dict[str, Views] = {
    "heads, rest": lambda x, q: q.view(x.shape[0], x.shape[1], q.shape[-1] // HEAD, -1),
    "rest, head": lambda x, q: q.view(x.shape[0], x.shape[1], -1, HEAD),
    "a list": lambda x, q: torch.reshape(q, [x.size(0), x.size(1), -1, HEAD]),
    "a size of the input": lambda x, q: q.view(x.size(0), x.size(1), -1, x.size(2) // (x.size(2) // HEAD)),
    "batch, rest": lambda x, q: q.view(x.shape[0], -1, q.size(-1) // HEAD, HEAD),
    "unflatten": lambda x, q: q.unflatten(-1, (-1, HEAD)),
    "unflatten by name": lambda x, q: torch.unflatten(q, dim=-1, sizes=(-1, HEAD)),
    "a shape and more": lambda x, q: q.view(x.size()[:-1] + (-1, HEAD)),  # noqa: RUF005  # as people write it
    "a starred shape": lambda x, q: q.view(*x.shape[:-1], -1, HEAD),
    "a tuple with a shape": lambda x, q: q.reshape((*q.shape[:-1], -1, HEAD)),
}


class Viewed(nn.Module):
    def __init__(self, view: Views, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.view, self.group, width = view, heads // kv_heads, heads * HEAD
        self.q, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = nn.Linear(width, kv_heads * HEAD), nn.Linear(width, kv_heads * HEAD)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.view(x, layer(x)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        k, v = k.repeat_interleave(self.group, 1), v.repeat_interleave(self.group, 1)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_heads_are_counted_however_a_view_is_written(view: Views) -> None:
    mlp = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8))
    for heads, kv_heads, degree in ((6, 6, 3), (6, 2, 2)):
        rows = find_plan(Viewed(view, heads, kv_heads), degree).rows
        assert [rows[name].style for name in "qkv"] == ["colwise"] * 3, rows["q"]
    for heads, kv_heads, degree in ((3, 3, 2), (6, 6, 4), (6, 3, 2)):
        row = find_plan(nn.ModuleList([mlp, Viewed(view, heads, kv_heads)]), degree).rows["1.q"]
        says = f"viewed in {kv_heads} parts or heads, which cannot be divided by {degree}"
        assert (row.style, says in row.reason) == ("replicated", True), row


def rest_first(qkv: Tensor) -> Projected:
    q, k, v = qkv.view(*qkv.shape[:-1], -1, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def rest_second(qkv: Tensor) -> Projected:
    q, k, v = qkv.unflatten(-1, (3, -1, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
    return q, k, v


def unbound(qkv: Tensor) -> Projected:
    q, k, v = qkv.unflatten(-1, (3, -1)).unbind(2)
    return _heads(q), _heads(k), _heads(v)


@pytest.mark.parametrize("project", [rest_first, rest_second, unbound])
def test_blocks_are_counted_however_a_view_is_written(project: Callable[[Tensor], Projected]) -> None:
    assert find_plan(Masked(project), 3).packed["qkv.weight"] == 3


class Own(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x)[0]


@pytest.mark.parametrize(
    ("attention", "reason"),
    [
        (nn.MultiheadAttention(8, 4, add_bias_kv=True), "add_bias_kv=True adds a key"),
        (nn.MultiheadAttention(8, 4, add_zero_attn=True), "add_zero_attn=True adds a key"),
        (nn.MultiheadAttention(9, 3), "its 3 heads cannot be divided by 2"),
        (Own(8, 4), "a Own is not torch's own"),
    ],
)
def test_torchs_attention_stays_whole_with_a_reason(attention: nn.Module, reason: str) -> None:
    rows = find_plan(nn.ModuleList([Gate(), attention]), 2).rows
    assert rows["1"].style == rows["1.out_proj"].style == "replicated"
    assert reason in rows["1"].reason


def test_the_users_plan_says_what_becomes_of_torchs_attention() -> None:
    model = nn.ModuleList([Gate(), nn.MultiheadAttention(8, 4)])
    assert find_plan(model, 2).rows["1"].reason == "2 of its 4 heads on each rank"
    assert find_plan(model, 2).packed["1.in_proj_weight"] == 3
    assert find_plan(model, 2, {"1": "heads"}).rows["1.out_proj"].style == "heads"
    whole = find_plan(model, 2, {"1.*": "replicated"})
    assert whole.rows["1"].style == "replicated"
    assert "1.in_proj_weight" not in whole.packed
    for layer, style, says in (
        ("1.out_proj", "rowwise", "cut by heads with all its projections, or not at all"),
        ("0.up", "heads", "it is a Linear, and an nn.MultiheadAttention can be cut by heads"),
    ):
        with pytest.raises(ConfigError, match=says):
            find_plan(model, 2, {layer: style})


class Adapted(nn.Linear):
    """A layer that adds a narrow one to itself."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(inside, outside)
        self.down, self.up = nn.Parameter(torch.zeros(6, inside)), nn.Parameter(torch.zeros(outside, 6))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.down.T @ self.up.T


def test_blocks_of_a_layer_that_is_more_than_a_weight_stay_whole() -> None:
    model = Masked(chunked)
    model.qkv = Adapted(WIDTH, 3 * WIDTH)
    row = find_plan(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), model), 2, None
    ).rows["3.qkv"]
    assert (row.style, "more than a weight" in row.reason) == ("replicated", True), row


class AddedUp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).cumsum(-1)) * self.scale


def test_sums_along_a_row_are_not_cut_and_a_single_number_does_not_matter() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), AddedUp())
    plan = find_plan(model, 2)
    assert [plan.rows[f"3.{name}"].style for name in ("first", "second")] == ["replicated", "replicated"]
    plan.packing_of(model)


def test_a_weight_made_of_other_parameters_stays_whole() -> None:
    normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
    plan = find_plan(
        nn.Sequential(
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
            normed,
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
        ),
        2,
        None,
    )
    assert plan.rows["3"].style == "replicated"
