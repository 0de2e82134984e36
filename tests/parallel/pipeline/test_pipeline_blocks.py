from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shoal.errors import StageCannotRun
from shoal.parallel.pipeline import plan
from shoal.parallel.pipeline.blocks import AbsentTensor, block_forwards, block_segments
from shoal.parallel.pipeline.partition import SegmentModule, partition_by_blocks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer, self.drop = nn.LayerNorm(4), nn.Linear(4, 4), nn.Dropout(0.2)

    def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Tensor]:
        return {"out": x + self.drop(self.layer(self.norm(x)).relu()) * scale}


class Rows(nn.Module):
    """Blocks in a row, and around them what no trace follows."""

    def __init__(self, around: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks = nn.Linear(3, 4), nn.ModuleList(Block() for _ in range(4))
        self.shift = nn.Parameter(torch.randn(4))
        self.register_buffer("steps", torch.arange(1.0, 5.0))
        self.last, self.around = nn.Linear(4, 2), around

    def forward(self, x: Tensor) -> Tensor:
        start = self.first(x) + self.shift
        scale = self.steps * (1.0 if float(x[0, 0]) > 0 else 2.0)
        if self.around == "decides by layers" and float(start.sum()) > 1e9:
            scale = scale * 0
        if self.around == "draws":
            scale = scale + torch.rand(4)
        kept = torch.zeros(len(x), 4)
        if self.around == "writes":
            kept[:, :] = start
        hidden = start
        for number, block in enumerate(self.blocks):
            if self.around == "leaves out" and number == 2 and len(x) == 2:
                continue
            hidden = block(hidden, scale=scale)["out"]
        if self.around == "goes around":
            hidden = hidden + start
        return self.last(hidden + kept) * float(x.sum())


def run_in_stages(
    model: nn.Module, inputs: Tensor, num_stages: int
) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
    """The output by stages, each a graph of its own, and what each stage took."""
    partition = partition_by_blocks(model, inputs)
    assert partition is not None
    cut = plan.find_cut(partition, num_stages, plan.costs_by_size(partition))
    begins = [cut.layers[begin].begin for begin in cut.begins]
    values: tuple[Tensor, ...] = ()
    stages = []
    for segment in block_segments(partition.train, begins):  # type: ignore[arg-type]  # one of blocks
        taken = tuple(value.detach().requires_grad_() for value in values)
        values = segment.run(SegmentModule(model, segment.targets, {}), inputs, *taken)
        stages.append((taken, values))
    output = stages[-1][1]
    assert isinstance(output, Tensor)
    gradients: list[Tensor] = [torch.ones_like(output)]
    given: tuple[Tensor, ...] = (output,)
    for number in range(len(stages) - 1, -1, -1):
        torch.autograd.backward(given, gradients)
        taken = stages[number][0]
        gradients = [value.grad for value in taken if value.grad is not None]
        given = stages[number - 1][1] if number else ()
    return output, [taken for taken, _ in stages]


@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_stages_give_the_models_output_and_gradients(num_stages: int) -> None:
    model, inputs = Rows(), torch.randn(5, 3)
    torch.manual_seed(1)
    whole = model(inputs)
    whole.sum().backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    torch.manual_seed(1)
    output, taken = run_in_stages(model, inputs, num_stages)
    assert torch.equal(output, whole)
    assert [len(values) for values in taken] == [0] + [1] * (num_stages - 1)
    for name, parameter in model.named_parameters():
        assert wanted[name] is not None
        torch.testing.assert_close(parameter.grad, wanted[name])


@pytest.mark.parametrize(
    ("around", "why"),
    [("goes around", "is used again"), ("draws", "draws random numbers outside of its blocks")],
)
def test_what_a_block_is_not_given_raises_and_never_computes(around: str, why: str) -> None:
    with pytest.raises(StageCannotRun, match=why):
        run_in_stages(Rows(around), torch.randn(5, 3), 2)


@pytest.mark.parametrize("around", ["decides by layers", "writes"])
def test_a_forward_that_decides_by_layers_has_no_row_of_blocks(around: str) -> None:
    assert partition_by_blocks(Rows(around), torch.randn(5, 3)) is None


def test_a_block_left_out_for_another_batch_raises() -> None:
    model = Rows("leaves out")
    found = block_forwards(model, torch.randn(3, 3))
    assert found is not None
    first, _ = block_segments(found[0], [0, found[0].begins[3]])
    with pytest.raises(StageCannotRun, match=r"forward ended without calling 'blocks\.2'"):
        first.run(SegmentModule(model, first.targets, {}), torch.randn(2, 3))


def test_the_model_is_as_before_after_a_stage_has_run() -> None:
    model, inputs = Rows(), torch.randn(5, 3)
    before = {name: id(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    run_in_stages(model, inputs, 2)
    assert before == {
        name: id(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }
    assert all(block._compiled_call_impl is None for block in model.blocks)
    assert model(inputs).shape == (5, 2)


def test_nothing_of_the_graph_it_was_recorded_with_is_kept() -> None:
    found = block_forwards(Rows(), torch.rand(3, 3))
    assert found is not None
    for forward in found:
        examples = [example for unit in forward.units for _, example in unit.takes]
        assert [(each.requires_grad, each.grad_fn) for each in examples] == [(True, None)] * len(examples)
        for segment in block_segments(forward, forward.begins):
            assert forward.units not in [cell.cell_contents for cell in segment.run.__closure__]


def test_absent_tensors_know_their_shape_and_have_no_data() -> None:
    absent = AbsentTensor.like(torch.zeros(2, 3))
    assert (absent @ torch.zeros(3, 4)).shape == (2, 4)
    assert isinstance(torch.cat([torch.zeros(1, 3), absent]), AbsentTensor)
    with pytest.raises(StageCannotRun):
        bool(absent.sum() > 0)
    with pytest.raises(StageCannotRun):
        absent.nonzero()
    with pytest.raises(StageCannotRun, match="is written into another"):
        torch.zeros(2, 3).add_(absent)
    absent.value = torch.ones(2, 3)
    assert float(absent.sum()) == 6
