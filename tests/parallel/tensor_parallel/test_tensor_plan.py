"""Layers cut over tp, and the reasons given for the others."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import ConfigError
from shoal.parallel.tensor_parallel import plan as tensor_plan
from shoal.parallel.tensor_parallel.plan import find_plan


class Attention(nn.Module):
    def __init__(self, dim: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = (
            layer(x).view(batch, length, self.heads, dim // self.heads).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, dim))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.all, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.all(x).unflatten(-1, (3, 2, -1)).unbind(-3)
        return self.out((q * k * v).flatten(-2))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) if x.sum() > 0 else self.first(x)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return hidden + self.second(hidden.relu())


def styles(model: nn.Module, degree: int = 2) -> dict[str, str]:
    return {name: row.style for name, row in find_plan(model, degree).rows.items()}


def reasons(model: nn.Module, degree: int = 2) -> dict[str, str]:
    return {name: row.reason for name, row in find_plan(model, degree).rows.items()}


def test_the_layers_of_an_mlp_are_paired_across_activations() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))
    assert styles(model) == {"0": "colwise", "3": "rowwise"}


def test_a_chain_of_four_makes_two_pairs_and_of_three_one() -> None:
    four = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    assert list(styles(four).values()) == ["colwise", "rowwise", "colwise", "rowwise"]
    three = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    assert list(styles(three).values()) == ["colwise", "rowwise", "replicated"]


def test_the_projections_of_an_attention_are_cut_by_heads() -> None:
    cut = styles(nn.Sequential(Attention(), nn.LayerNorm(16)))
    assert cut == {
        "0.query": "colwise",
        "0.key": "colwise",
        "0.value": "colwise",
        "0.out": "rowwise",
        "1": "replicated",
    }


def test_two_layers_that_meet_are_closed_by_one() -> None:
    assert styles(Gated()) == {"gate": "colwise", "up": "colwise", "down": "rowwise"}


@pytest.mark.parametrize(
    ("model", "layer", "reason"),
    [
        (
            nn.Sequential(Gated(), Attention(heads=4)),
            "1.query",
            "viewed in 4 parts or heads, which cannot be divided by 8",
        ),
        (
            nn.Sequential(Gated(), Packed()),
            "1.all",
            "viewed in 2 parts or heads, which cannot be divided by 8",
        ),
        (nn.Sequential(Gated(), Branching()), "1.first", "cannot be traced"),
        (nn.Sequential(Gated(), Residual()), "1.first", "its output is also used by add"),
        (
            nn.Sequential(Gated(), nn.Sequential(nn.Linear(8, 7), nn.Linear(7, 8))),
            "1.0",
            "7 outputs cannot be divided",
        ),
        (nn.Sequential(Gated(), nn.BatchNorm1d(8)), "1", "a BatchNorm1d is not cut"),
    ],
)
def test_whatever_stays_whole_has_its_reason(model: nn.Module, layer: str, reason: str) -> None:
    assert reason in reasons(model, 8)[layer]


def test_shared_weights_stay_whole() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), Gated())
    model[1].weight = model[0].weight
    assert styles(model)["0"] == styles(model)["1"] == "replicated"


def test_a_large_layer_without_a_partner_is_cut_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_plan, "ALONE_BYTES", 100)
    model = nn.Sequential(nn.Embedding(50, 8), nn.LayerNorm(8), nn.Linear(8, 50))
    assert styles(model) == {"0": "colwise alone", "1": "replicated", "2": "colwise alone"}


def test_a_model_of_which_nothing_can_be_cut_is_refused_by_layer() -> None:
    with pytest.raises(
        ConfigError, match=r"no layer of this model can be cut over 3 ranks .*'0': its 8 outputs"
    ):
        find_plan(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), 3)


def test_the_users_plan_comes_first() -> None:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    plan = find_plan(model, 2, {"1": "colwise", "2": "rowwise", "0": "replicated"})
    assert [row.style for row in plan.rows.values()] == ["colwise", "rowwise", "replicated"]
    assert "tensor_plan: '1'" in plan.table()


@pytest.mark.parametrize(
    ("patterns", "says"),
    [
        ({"0": "diagonal"}, "says 'diagonal'"),
        ({"block.*": "colwise"}, "no layer of the model is called so"),
        ({"1": "colwise"}, "it is a ReLU"),
        ({"1": "sequence"}, "it is a ReLU, and dropout, LayerNorm and RMSNorm"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(patterns: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        find_plan(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), 2, patterns)
    assert "Nothing was trained; " in str(refused.value)


def test_between_pairs_norms_and_dropout_run_on_a_part_of_the_sequence() -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 8), nn.Dropout(0.1))
    rows = find_plan(model, 2, sequence=True).rows
    assert {name: row.style for name, row in rows.items()} == {
        "1": "colwise",
        "3": "rowwise",
        "0": "sequence",
        "4": "sequence",  # and not "2", which works on a part of the features
    }
    by_hand = find_plan(model, 2, {"0": "sequence"})
    assert by_hand.is_sequence
    assert [name for name, row in by_hand.rows.items() if row.style == "sequence"] == ["0"]


def test_a_large_table_is_cut_by_rows_with_the_layer_that_scores_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tensor_plan, "ALONE_BYTES", 100)
    model = nn.Sequential(nn.Embedding(50, 8), nn.LayerNorm(8), nn.Linear(8, 50, bias=False))
    model[2].weight = model[0].weight
    assert styles(model) == {"0": "rowwise", "1": "replicated", "2": "colwise alone"}
    with pytest.raises(ConfigError, match="its weight is shared with another layer"):
        find_plan(model, 2, {"0": "rowwise"})


def test_torchs_own_transformer_layers_are_cut_where_they_can_be() -> None:
    cut = styles(nn.TransformerEncoderLayer(16, 4, 32))
    assert (cut["linear1"], cut["linear2"], cut["self_attn"]) == ("colwise", "rowwise", "heads")
    assert torch.backends.mha.get_fastpath_enabled()  # finding a plan changes nothing


def test_a_deep_forward_is_planned_in_one_pass() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.up(x)
            for _ in range(60):  # as many ways back as 2 to the 60th
                x = x + x
            return self.down(x)

    assert find_plan(Deep(), 2).rows["up"].style == "colwise"
