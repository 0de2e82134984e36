"""Blocks by the names of their layers: found, refused for a reason, or taken back by the trial step."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shoal.parallel.tensor_parallel.blocks import Block, candidates, try_blocks
from shoal.parallel.tensor_parallel.plan import find_plan


class Mlp(nn.Module):
    def __init__(self, wide: int = 8) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, wide), nn.Linear(wide, 4)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.fc2(torch.relu(self.fc1(x))) * scale


class Planned(nn.Module):
    """With a plan as transformers' models have one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(3))
        self.experts = Mlp()
        self.tp_plan = {
            "layers.*.fc1": "colwise",
            "layers.*.fc2": "rowwise",
            "experts.fc1": "packed_colwise",
            "experts.fc2": "rowwise",
            "head": "colwise_gather_output",
        }

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return self.experts(x)


def test_a_models_own_plan_comes_before_common_names() -> None:
    found = list(candidates(Planned(), 2))
    assert [(block.root, block.source, why is None) for block, why in found] == [
        ("layers.0", "tp_plan", True),
        ("layers.1", "tp_plan", True),
        ("layers.2", "tp_plan", True),
        ("experts", "tp_plan", False),
    ]
    assert "packed_colwise" in str(found[3][1])
    [(block, why)] = candidates(Mlp(6), 4)
    assert block == Block("", {"fc1": "colwise", "fc2": "rowwise"}, "common names")
    assert why == "the 6 outputs of 'fc1' cannot be divided by 4"


def test_one_block_of_each_kind_is_tried_and_a_difference_takes_all_of_them_back() -> None:
    tried: list[Mapping[str, str]] = []

    def unchanged(part: nn.Module, styles: Mapping[str, str]) -> None:
        tried.append(styles)

    def wrong(part: nn.Module, styles: Mapping[str, str]) -> None:
        part.get_submodule("fc2").weight.data *= 1.01

    model, x = Planned(), torch.randn(5, 4)
    before, seed = [each.clone() for each in model.parameters()], torch.get_rng_state()
    trial = try_blocks(model, x, 2, unchanged)
    assert [block.root for block in trial.blocks] == ["layers.0", "layers.1", "layers.2"]
    assert tried == [{"fc1": "colwise", "fc2": "rowwise"}]
    assert torch.equal(seed, torch.get_rng_state())
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    trial = try_blocks(model, x, 2, wrong)
    assert trial.blocks == ()
    assert any("a trial step differs by" in note for note in trial.notes())


def test_a_users_plan_of_one_layer_keeps_its_block() -> None:
    model = Planned()
    blocks = [block for block, why in candidates(model, 2) if why is None]
    plan = find_plan(model, 2, {"layers.0.*": "replicated"}, blocks=blocks)
    assert plan.rows["layers.0.fc1"].style == "replicated"
    assert plan.rows["layers.1.fc1"].style == "colwise"
    assert set(plan.local) == {"layers.1.fc1", "layers.1.fc2", "layers.2.fc1", "layers.2.fc2"}


def test_a_block_with_a_hook_inside_is_not_cut() -> None:
    model = Mlp()
    model.register_forward_hook(lambda *_: None)  # on the block itself: it sees whole tensors
    assert [why for _, why in candidates(model, 2)] == [None]
    model.fc1.register_forward_hook(lambda *_: None)
    assert ["'fc1' has a hook" in str(why) for _, why in candidates(model, 2)] == [True]


def test_a_trial_in_half_precision_sees_what_is_wrong() -> None:
    def wrong(part: nn.Module, styles: Mapping[str, str]) -> None:
        part.get_submodule("fc2").weight.data *= 1.1

    model, x = Planned().bfloat16(), torch.randn(5, 4, dtype=torch.bfloat16)
    assert len(try_blocks(model, x, 2, lambda *_: None).blocks) == 3
    assert try_blocks(model, x, 2, wrong).blocks == ()
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}


def test_a_model_that_cannot_run_on_a_few_samples_is_left_to_tracing() -> None:
    class Whole(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = Mlp()
            self.register_buffer("num", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.num = self.num + 1
            return self.mlp(x.view(5, 4))

    model = Whole()
    trial = try_blocks(model, torch.randn(5, 4), 2, lambda *_: None)
    assert trial.blocks == ()
    assert any("was not called" in note for note in trial.notes())
    assert float(model.num) == 0.0
