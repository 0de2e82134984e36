"""Batches of other shapes than the first: stages do what forward does for them, or say which layer is elsewhere."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.data.slice import Slice
from shoal.errors import ShapeDecides, ShapeLeadsElsewhere
from shoal.parallel.pipeline.partition import find_partition
from shoal.parallel.pipeline.plan import costs_by_size, find_cut
from shoal.parallel.pipeline.runner import RetracedRoles
from shoal.parallel.pipeline.stage import ModelStage, stages_of


class ByLength(nn.Module):
    """Decides by the length, loops over it, makes tensors as long, and leaves layers out."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.cell, self.pool = nn.Linear(4, 4), nn.Linear(4, 4), nn.AvgPool1d(2, 1)
        self.norm, self.long, self.head = nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.shift = torch.arange(4.0)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        x = self.table(x) + torch.arange(length)[:, None] * self.shift
        if length > 4:
            x = self.pool(x.transpose(1, 2)).transpose(1, 2)
        state = torch.zeros(len(x), 4)
        for at in range(x.shape[1]):
            state = torch.tanh(self.cell(x[:, at]) + state)
        state = self.norm(state)
        if length > 3:
            state = self.long(state)
        if len(x) == 1:
            state = state * 2
        return self.head(F.dropout(state, 0.3, self.training))  # type: ignore[no-any-return]


def ways_of(model: nn.Module, x: Tensor, user_cut: list[str]) -> tuple[RetracedRoles, list[ModelStage]]:
    partition = find_partition(model, x, len(user_cut) + 1, user_cut)
    cut = find_cut(partition, len(user_cut) + 1, costs_by_size(partition), user_cut)
    job: Any = SimpleNamespace(device=torch.device("cpu"), autocast=None)
    stages = stages_of(job, partition, cut, gives_copies=False)
    retraced = RetracedRoles(partition, cut, stages, dict(enumerate(stages)))
    partition.forget()
    return retraced, stages


def run(retraced: RetracedRoles, stages: list[ModelStage], x: Tensor, *, training: bool) -> Tensor:
    torch.manual_seed(0)
    values: Any = ()
    for role, stage in zip(
        retraced.roles(Slice((x, x), len(x), len(x)), training=training), stages, strict=True
    ):
        values = role.segment.run(stage.held, *[x for _ in role.segment.inputs], *values)
    return values  # type: ignore[no-any-return]


@pytest.mark.parametrize("cut", [["norm"], ["cell", "long"]])
def test_stages_do_what_forward_does_for_every_length(cut: list[str]) -> None:
    torch.manual_seed(0)
    model = ByLength()
    retraced, stages = ways_of(model, torch.randn(6, 5, 4), cut)
    for shape in ((6, 5, 4), (3, 5, 4), (3, 7, 4), (2, 4, 4), (1, 6, 4)):
        x = torch.randn(*shape)
        for training in (True, False):
            model.train(training)
            model.norm.eval()
            torch.manual_seed(0)
            wanted = model(x)
            assert torch.equal(run(retraced, stages, x, training=training), wanted)
    assert len(retraced._found) == 10
    assert retraced.roles(Slice((x, x), 1, 1), training=False) is retraced.roles(
        Slice((x, x), 1, 1), training=False
    )


def test_a_layer_that_the_first_batch_did_not_need_is_in_the_stage_of_the_one_before_it() -> None:
    model = ByLength()
    retraced, stages = ways_of(model, torch.randn(6, 3, 4), ["norm"])
    assert [("long" in stage.targets) for stage in stages] == [False, True]
    x = torch.randn(6, 5, 4)
    model.eval()
    assert torch.equal(run(retraced, stages, x, training=False), model(x))


class Crossed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.spare, self.lock = nn.Linear(4, 4), None
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] == 7:
            return self.first(x)  # type: ignore[no-any-return]
        if x.shape[1] == 4:
            return self.spare(self.second(self.first(x)))  # type: ignore[no-any-return]
        layers = [self.first, self.second, self.third]
        for layer in layers if x.shape[1] < 5 else reversed(layers):
            x = layer(x)
        return x


def test_layers_of_another_stage_are_refused_by_name() -> None:
    retraced, stages = ways_of(Crossed(), torch.randn(6, 3, 4), ["second"])
    with pytest.raises(ShapeLeadsElsewhere, match="it needs 'spare' in stage 1, and that is in stage 0"):
        run(retraced, stages, torch.randn(6, 4, 4), training=True)
    with pytest.raises(ShapeLeadsElsewhere, match="it needs 'third' in stage 0, and that is in stage 1"):
        run(retraced, stages, torch.randn(6, 5, 4), training=True)
    with pytest.raises(ShapeLeadsElsewhere, match="no layer is left for stage 1"):
        run(retraced, stages, torch.randn(6, 7, 4), training=True)


def test_a_model_that_cannot_be_copied_says_which_shape_decides() -> None:
    model = Crossed()
    model.lock = threading.Lock()  # type: ignore[assignment]
    retraced, stages = ways_of(model, torch.randn(6, 3, 4), ["second"])
    run(retraced, stages, torch.randn(6, 3, 4), training=True)
    with pytest.raises(ShapeDecides, match=r"was False when .* is True for this batch"):
        run(retraced, stages, torch.randn(6, 7, 4), training=True)
