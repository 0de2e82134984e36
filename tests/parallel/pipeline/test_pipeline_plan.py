"""Cuts of a model into stages: as equal as possible, never where none is possible, always with a reason."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.errors import ConfigError, ShapeDecides, StageCannotRun, TrainingError
from shoal.parallel.loss import loss_rule
from shoal.parallel.pipeline.partition import (
    Partition,
    SegmentModule,
    find_partition,
    partition_by_blocks,
    segments_of,
)
from shoal.parallel.pipeline.plan import PipelineCut, balance, costs_by_size, find_cut, measure
from shoal.parallel.pipeline.stage import refuse_different_results
from shoal.parallel.pipeline.trace import check, expect
from shoal.parallel.protocol import TrainJob


def dearest(costs: list[float], begins: list[int]) -> float:
    return max(sum(costs[begin:end]) for begin, end in zip(begins, [*begins[1:], len(costs)], strict=True))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.data())
def test_the_dearest_stage_is_as_cheap_as_in_any_cut(whole: list[int], data: st.DataObject) -> None:
    costs = [float(cost) for cost in whole]
    num_stages = data.draw(st.integers(1, len(costs)))
    begins = balance(costs, num_stages)
    assert begins[0] == 0
    assert len(begins) == num_stages
    assert sorted(set(begins)) == begins
    others = itertools.combinations(range(1, len(costs)), num_stages - 1)
    assert dearest(costs, begins) == min(dearest(costs, [0, *other]) for other in others)


def linears(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))


X = torch.randn(5, 4)


def cut_of(
    model: nn.Module, num_stages: int, user_cut: list[str] | None = None, inputs: object = X
) -> tuple[Partition, PipelineCut]:
    partition = find_partition(model, inputs, num_stages, user_cut or ())
    cut = find_cut(partition, num_stages, costs_by_size(partition), user_cut)
    job = TrainJob(model=model, loss=loss_rule(nn.MSELoss()), build_optimizer=None)
    refuse_different_results(job, partition, cut, inputs)
    return partition, cut


def names(cut: PipelineCut) -> list[list[str]]:
    ends = [*cut.begins[1:], len(cut.layers)]
    return [
        [layer.name for layer in cut.layers[begin:end]] for begin, end in zip(cut.begins, ends, strict=True)
    ]


def test_sequences_in_sequences_are_laid_open_and_every_layer_is_in_one_stage() -> None:
    model = nn.Sequential(linears(4, 4, 4), nn.Tanh(), nn.Sequential(linears(4, 4)), nn.Linear(4, 1))
    _, cut = cut_of(model, 3)
    assert [name for stage in names(cut) for name in stage] == ["0.0", "0.1", "1", "2.0.0", "3"]
    assert "stage" in cut.table()
    assert "100%" not in cut.table()


def test_the_users_cut_is_taken_by_the_names_of_layers() -> None:
    _, cut = cut_of(nn.Sequential(linears(4, 4, 4), linears(4, 4, 4)), 3, ["0.1", "1"])
    assert names(cut) == [["0.0"], ["0.1"], ["1.0", "1.1"]]


class Block(nn.Module):
    """Residual, with a mask, an operation in place, and a decision by a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.act = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU(inplace=True)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        num, width = x.shape
        assert width <= 8
        noise = torch.randn(num, width) if self.training else 0.0
        y = self.second(self.act(self.first(x))) + noise
        return x + F.dropout(y, 0.1, self.training) * self.scale * mask


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = [Block() for _ in range(3)]
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(4, 4)
        self.head.weight = blocks[0].first.weight

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
        kept = (mask > 0).to(x.dtype)
        with torch.no_grad():
            shift = x.mean(0, keepdim=True)
        for block in self.blocks:
            x = block(x, kept)
        return {"out": self.head(x - shift), "norm": x.norm(dim=1)}


def test_a_forward_of_the_users_own_is_followed_through_all_it_does() -> None:
    inputs = (X, torch.rand(5, 4) - 0.5)
    for num_stages in (2, 4):
        partition, _ = cut_of(Net(), num_stages, inputs=inputs)
        assert partition.draws
        assert not partition.draws_in_evaluation
        assert partition.is_batch_dependent  # by the shift
    # What follows from the inputs alone is not sent.
    partition, cut = cut_of(Net(), 2, ["blocks.1.second"], inputs)
    begins = [cut.layers[begin].begin for begin in cut.begins]
    first, second = segments_of(partition.train, begins, training=True)
    assert first.gives == ("add_1", "randn_1", "blocks_1_act")
    assert first.gives == second.takes
    assert second.inputs == (0, 1)
    assert not second.trains_beside


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.RNNCell(1, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.size(0), 4)
        for number in range(x.size(1)):
            state = self.cell(x[:, number : number + 1], state)
        return self.out(state)  # type: ignore[no-any-return]


def test_a_decision_by_a_shape_is_checked_with_the_line_that_takes_it() -> None:
    expect(5, 5, "")
    with pytest.raises(
        ShapeDecides, match=r"decides by the shape of a batch \(line 3 of net.py\): .* was 5 .* is 7"
    ):
        expect(7, 5, " (line 3 of net.py)")
    found = [
        node.args[2] for node in find_partition(Net(), (X, X), 2).train.graph.nodes if node.target is expect
    ]
    assert found
    assert all("of test_pipeline_plan.py" in str(line) for line in found)


def test_a_loop_over_a_shape_is_laid_out_and_its_cell_shared() -> None:
    _, cut = cut_of(Loop(), 2)
    assert names(cut)[0] == ["cell"] * len(names(cut)[0])


class ByData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.sum() > 0:
            x = x * 2
        return self.second(x)  # type: ignore[no-any-return]


class Checks(ByData):
    def forward(self, x: Tensor) -> Tensor:
        if x is not None and x.max() > 100:
            raise ValueError("too large")
        x = self.first(x)
        assert x.isfinite().all(), "no number"
        return self.second(x)  # type: ignore[no-any-return]


def test_a_check_that_only_raises_does_not_close_a_forward_and_is_made_on_every_batch() -> None:
    partition, cut = cut_of(Checks(), 2)
    assert names(cut) == [["first"], ["second"]]
    checks = [node.args[1] for node in partition.train.graph.nodes if node.target is check]
    assert checks == [False, True]
    begins = [cut.layers[begin].begin for begin in cut.begins]
    first, _ = segments_of(partition.train, begins, training=True)
    with pytest.raises(TrainingError, match=r"failed \(line \d+ of test_pipeline_plan.py\)"):
        first.run(None, X * 1e4)


class BySamples(ByData):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.second(self.first(x[n])) for n in range(len(x))])


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.last = inner, nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x))  # type: ignore[no-any-return]


def test_a_module_whose_forward_cannot_be_followed_stays_whole() -> None:
    partition, cut = cut_of(Around(ByData()), 2)
    assert names(cut) == [["inner"], ["last"]]
    assert "a value computed from the data decides what is done next" in partition.closed["inner"]


def frozen() -> nn.Sequential:
    model = linears(4, 4, 4)
    model[0].requires_grad_(False)
    return model


def hooked() -> nn.Module:
    model = Around(nn.Linear(4, 2))
    model.register_forward_hook(lambda module, inputs, output: None)
    return model


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.lin(self.norm(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "num_stages", "user_cut", "said"),
    [
        (ByData(), 2, None, "a value computed from the data decides what is done next (line"),
        (BySamples(), 2, None, "depends on the number of samples"),
        (Around(ByData()), 3, None, "'inner' stays whole, because a value computed from the data"),
        (Around(ByData()), 2, ["inner.second"], "is called so ('inner' stays whole, because"),
        (hooked(), 2, None, "it has hooks of its own"),
        (linears(4, 4, 4), 3, None, "of its 2 layers in a row, a stage can begin at 2"),
        (frozen(), 2, None, "nothing before '1' that it depends on is trained"),
        (frozen(), 2, ["1"], "a stage cannot begin at '1', as pipeline_cut says: nothing before"),
        (Shared(), 2, None, "'norm' and 'norm' share the buffer 'norm.running_mean'"),
        (linears(4, 4, 4), 2, ["7"], "no layer in a row is called so"),
        (linears(4, 4, 4, 4), 3, ["2", "1"], "does not come after the beginning of the stage before it"),
        (linears(4, 4, 4, 4), 3, ["2"], "makes 2 stages, and there are 3"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_layer_and_reason(
    model: nn.Module, num_stages: int, user_cut: list[str] | None, said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        cut_of(model, num_stages, user_cut)
    assert said in str(refused.value)
    assert "Nothing was trained" in str(refused.value)


class Backwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * -ctx.by, None


class Adversarial(nn.Module):
    """Goes back through a function of its own, which forward calls between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(Backwards.apply(self.second(self.first(x).tanh()), 0.5))


def test_a_backward_of_the_users_own_is_kept() -> None:
    model = Adversarial()
    partition, cut = cut_of(model, 2)
    values: tuple[Any, ...] = ()
    for segment in segments_of(
        partition.train, [cut.layers[begin].begin for begin in cut.begins], training=True
    ):
        values = segment.run(SegmentModule(model, segment.targets, {}), *(X for _ in segment.inputs), *values)
    found = torch.autograd.grad(values.sum(), list(model.parameters()))  # type: ignore[attr-defined]  # the last one's
    for mine, its in zip(found, torch.autograd.grad(model(X).sum(), list(model.parameters())), strict=True):
        assert torch.equal(mine, its)


def test_stages_with_another_gradient_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward_alone(x: Tensor, by: float) -> Tensor:
        return x.view_as(x)

    monkeypatch.setattr("shoal.parallel.pipeline.trace._applying", lambda function: forward_alone)
    with pytest.raises(ConfigError, match="has another gradient of '"):
        cut_of(Adversarial(), 2)


backwards = Backwards.apply  # kept before anything is traced


class ByAnotherName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(backwards(self.first(x), 0.5))


def test_a_module_that_applies_a_function_by_another_name_stays_whole() -> None:
    _, cut = cut_of(nn.Sequential(nn.Linear(4, 4), ByAnotherName(), nn.Linear(4, 2)), 3)
    assert names(cut) == [["0"], ["1"], ["2"]]


class Ranks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.argsort().to(x)


class Ranked(nn.Module):
    """Beside its output gives one that has no derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        output = self.second(self.first(x))
        return output, Ranks.apply(output)


class Rooted(Ranked):
    """Has gradients that are no numbers."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # one output
        return (self.second(self.first(x)) * 0).sqrt()


@pytest.mark.parametrize("kind", [Ranked, Rooted])
def test_gradients_that_cannot_be_compared_are_no_difference(kind: type[nn.Module]) -> None:
    assert names(cut_of(kind(), 2)[1]) == [["first"], ["second"]]


class Balanced(nn.Module):
    """Leaves a part of the loss in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.aux = nn.Linear(4, 4), nn.LayerNorm(4), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(self.norm(x))
        self.aux = out.square().mean()
        return out


class Collects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Balanced() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x + sum(block.aux for block in self.blocks)


def test_a_value_left_in_an_attribute_of_another_stage_is_refused() -> None:
    model = Collects()
    with pytest.raises(ConfigError, match="left in an attribute"):
        cut_of(model, 2)
    partition = partition_by_blocks(model, X)
    assert partition is not None
    cut = find_cut(partition, 2, costs_by_size(partition))
    job = TrainJob(model=model, loss=loss_rule(nn.MSELoss()), build_optimizer=None)
    with pytest.raises(StageCannotRun, match="is used again"):
        refuse_different_results(job, partition, cut, X)


def test_what_tp_leaves_in_parts_stays_in_one_stage() -> None:
    partition = find_partition(linears(4, 4, 4, 4), X, 2)
    cut = find_cut(partition, 2, costs_by_size(partition), None, {"0": "colwise", "1": "rowwise"})
    assert names(cut) == [["0", "1"], ["2"]]
    with pytest.raises(ConfigError, match="tp leaves the result of '0' in parts"):
        find_cut(partition, 2, costs_by_size(partition), ["1"], {"0": "colwise", "1": "rowwise"})


class Counter(nn.Module):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


def test_measuring_finds_the_dear_layer_and_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Counter(), nn.Linear(4, 3000), nn.Linear(3000, 3000))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    inputs = torch.randn(64, 4)
    costs = measure(find_partition(model, inputs, 2), inputs)
    assert len(costs) == 4
    assert max(costs) == costs[3]
    assert min(costs) > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


class Elsewhere(ByData):
    """While it is traced, somebody else makes a tensor."""

    made: list[object]

    def forward(self, x: Tensor) -> Tensor:
        other = threading.Thread(target=lambda: self.made.append(torch.zeros(2)))
        other.start()
        other.join()
        return self.second(self.first(x) + torch.zeros(x.shape[1]))  # type: ignore[no-any-return]


def test_tensors_of_other_threads_are_not_part_of_a_forward() -> None:
    model = Elsewhere()
    model.made = []
    cut_of(model, 2)
    assert all(isinstance(tensor, Tensor) for tensor in model.made)
