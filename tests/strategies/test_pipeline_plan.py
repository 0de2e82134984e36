"""Where a model is cut into stages: as equal as can be, never where it cannot be, and always with a reason."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shoal.core.errors import ConfigError
from shoal.strategies.pipeline_cut import num_micro_batches, padded
from shoal.strategies.pipeline_plan import Layer, balance, costs_by_size, find_cut, layers_of, measure


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


def names(cut: object, number: int) -> list[str]:
    return [layer.name for layer in cut.stage(number)]  # type: ignore[attr-defined]


def cut_of(model: nn.Module, num_stages: int, user_cut: list[str] | None = None) -> object:
    layers = layers_of(model, num_stages)
    return find_cut(layers, num_stages, costs_by_size(layers), user_cut)


def test_sequences_in_sequences_are_laid_open_and_every_layer_is_in_one_stage() -> None:
    model = nn.Sequential(linears(4, 4, 4), nn.Tanh(), nn.Sequential(linears(4, 4)), nn.Linear(4, 1))
    cut = cut_of(model, 3)
    assert [name for number in range(3) for name in names(cut, number)] == [
        "0.0", "0.1", "1", "2.0.0", "3",
    ]  # fmt: skip
    assert "stage" in cut.table()
    assert "100%" not in cut.table()


def test_the_users_cut_is_taken_by_the_names_of_layers() -> None:
    cut = cut_of(nn.Sequential(linears(4, 4, 4), linears(4, 4, 4)), 3, ["0.1", "1"])
    assert [names(cut, number) for number in range(3)] == [["0.0"], ["0.1"], ["1.0", "1.1"]]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = linears(4, 4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x) + x  # type: ignore[no-any-return]


def tied() -> nn.Sequential:
    model = linears(4, 4, 4, 4)
    model[2].weight = model[0].weight
    return model


def frozen() -> nn.Sequential:
    model = linears(4, 4, 4)
    model[0].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("model", "num_stages", "user_cut", "said"),
    [
        (Net(), 2, None, "a Net cannot be cut into 2 stages"),
        (linears(4, 4, 4), 3, None, "of its 2 layers in a row, a stage can begin at 2"),
        (tied(), 2, None, "'0' and '2' share a weight"),
        (tied(), 2, ["1"], "a stage cannot begin at '1', as pipeline_cut says: '0' and '2' share a weight"),
        (frozen(), 2, None, "'0' and those before it train nothing"),
        (
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
            2,
            None,
            "the layer '1' (BatchNorm1d) normalises",
        ),
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


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x


def test_measuring_finds_the_dear_layer_and_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Counter(), nn.Linear(4, 3000), nn.Linear(3000, 3000))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    costs = measure([Layer(name, module) for name, module in model.named_children()], torch.randn(64, 4))
    assert len(costs) == 4
    assert max(costs) == costs[3]
    assert min(costs) > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@given(st.integers(0, 500), st.integers(2, 9), st.booleans())
def test_micro_batches_are_as_many_as_a_schedule_needs_and_hold_every_sample(
    num_samples: int, num_ranks: int, rounds_only: bool
) -> None:
    number = num_micro_batches(num_samples, num_ranks, rounds_only=rounds_only)
    assert num_ranks <= number <= 2 * num_ranks
    assert not rounds_only or number % num_ranks == 0
    size = -(-max(num_samples, 1) // number)
    assert number * size >= num_samples


@given(st.integers(1, 7), st.integers(0, 20))
def test_padding_repeats_samples_behind_those_there_are(num_samples: int, more: int) -> None:
    inputs = torch.arange(num_samples)
    longer = padded(inputs, num_samples, num_samples + more)
    assert longer.tolist() == [number % num_samples for number in range(num_samples + more)]
