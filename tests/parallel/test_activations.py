"""Which blocks run again within backward, what that saves, and that nothing is counted or drawn twice."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from shoal.errors import ConfigError
from shoal.parallel.activations import blocks, run_again


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 8))


def kept_numbers(model: nn.Module, x: Tensor) -> int:
    """How many numbers autograd keeps for backward, parameters aside."""
    own = {parameter.data_ptr() for parameter in model.parameters()}
    kept = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel() if tensor.data_ptr() not in own else 0
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    return kept


def test_blocks_keep_their_inputs_only_and_nothing_else_changes() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*[block() for _ in range(4)], nn.Linear(8, 2))
    model = copy.deepcopy(plain)
    assert run_again(model, True) == ["0", "1", "2", "3"]
    run_again(model, True)  # once more is no more
    x = torch.randn(16, 8)
    for each in (plain, model):
        torch.manual_seed(1)
        each(x).square().sum().backward()
    assert model.state_dict().keys() == plain.state_dict().keys()
    for (name, one), other in zip(plain.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(one, other), name  # BatchNorm counted every batch once
    for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name  # type: ignore[arg-type]
    assert kept_numbers(model, x) < kept_numbers(plain, x) / 4


def test_a_block_that_looks_up_rows_does_not_run_twice() -> None:
    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.inside = nn.Embedding(4, 8), nn.Sequential(block())

    assert blocks(nn.Sequential(Looking(), block())) == ["0.inside.0", "1"]


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (True, "none of its members holds layers of its own"),
        (["encoder.*"], "names 'encoder.*', and no layer of the model is called so"),
    ],
)
def test_what_cannot_run_again_is_refused(wanted: bool | list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        run_again(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), wanted)


def test_patterns_choose_layers_and_the_outer_of_two_nested() -> None:
    model = nn.Sequential(block(), block())
    assert run_again(model, ["1", "1.0", "0.4"]) == ["1", "0.4"]
