from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn, optim

from shoal.errors import CheckpointMismatch, ConfigError
from shoal.parallel.state import load_optimizer, optimizer_pieces, optimizer_settings

Build = Callable[[Iterable[Any]], optim.Optimizer]

OPTIMIZERS: dict[str, Build] = {
    "sgd": lambda params: optim.SGD(params, lr=0.1),
    "sgd momentum": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda params: optim.Adam(params, lr=0.01),
    "adam amsgrad": lambda params: optim.Adam(params, lr=0.01, betas=(0.8, 0.99), amsgrad=True),
    "adam foreach": lambda params: optim.Adam(params, lr=0.01, foreach=True),
    "adam fused": lambda params: optim.Adam(params, lr=0.01, fused=True),
    "adam tensor lr": lambda params: optim.Adam(params, lr=torch.tensor(0.01), foreach=False),
    "adamw": lambda params: optim.AdamW(params, lr=0.01, weight_decay=0.1, maximize=True),
    "adagrad": lambda params: optim.Adagrad(params, lr=0.1, lr_decay=0.01),
    "rmsprop": lambda params: optim.RMSprop(params, lr=0.01, centered=True, momentum=0.5),
    "adadelta": lambda params: optim.Adadelta(params),
    "adamax": lambda params: optim.Adamax(params, lr=0.01),
    "nadam": lambda params: optim.NAdam(params, lr=0.01),
    "radam": lambda params: optim.RAdam(params, lr=0.01),
    "rprop": lambda params: optim.Rprop(params, lr=0.01),
    "asgd": lambda params: optim.ASGD(params, lr=0.01, t0=2),
    "adafactor": lambda params: optim.Adafactor(params, lr=0.01),
}


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def train(model: nn.Module, optimizer: optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(6, 4, generator=generator)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def saved(model: nn.Module, optimizer: optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What a checkpoint keeps: copies of the tensors, and JSON."""
    pieces = {piece.name: piece.tensor.clone() for piece in optimizer_pieces(model, optimizer)}
    return pieces, json.loads(json.dumps(optimizer_settings(model, optimizer), allow_nan=False))


@pytest.mark.parametrize("name", OPTIMIZERS)
@settings(max_examples=5, deadline=None)
@given(before=st.integers(0, 4), after=st.integers(1, 4))
def test_a_resumed_optimizer_goes_on_to_the_bit(name: str, before: int, after: int) -> None:
    build = OPTIMIZERS[name]
    straight = net()
    optimizer = build(straight.parameters())
    train(straight, optimizer, range(before))
    weights = {key: tensor.clone() for key, tensor in straight.state_dict().items()}
    pieces, described = saved(straight, optimizer)
    train(straight, optimizer, range(before, before + after))

    resumed = net()
    resumed.load_state_dict(weights)
    again = build(resumed.parameters())
    load_optimizer(resumed, again, pieces, described)
    train(resumed, again, range(before, before + after))

    for key, tensor in straight.state_dict().items():
        assert torch.equal(resumed.state_dict()[key], tensor), key
    assert json.dumps(optimizer_settings(resumed, again)) == json.dumps(
        optimizer_settings(straight, optimizer)
    )


def test_sparse_adam_keeps_its_counter_which_is_no_tensor() -> None:
    def run(model: nn.Embedding, optimizer: optim.Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            model(torch.tensor([step, 1])).sum().backward()
            optimizer.step()

    torch.manual_seed(0)
    model = nn.Embedding(9, 2, sparse=True)
    optimizer = optim.SparseAdam(list(model.parameters()))
    run(model, optimizer, range(3))
    pieces, described = saved(model, optimizer)
    assert described["numbers"] == {"weight": {"step": 3}}
    fresh = nn.Embedding(9, 2, sparse=True)
    fresh.load_state_dict(model.state_dict())
    again = optim.SparseAdam(list(fresh.parameters()))
    load_optimizer(fresh, again, pieces, described)
    run(model, optimizer, range(3, 6))
    run(fresh, again, range(3, 6))
    assert torch.equal(fresh.weight, model.weight)


def test_groups_keep_their_own_hyper_parameters() -> None:
    def build(model: nn.Sequential) -> optim.Optimizer:
        return optim.AdamW(
            [
                {"params": model[0].parameters(), "lr": 0.5, "betas": (0.1, 0.2)},
                {"params": model[2].parameters()},
            ]
        )

    model = net()
    optimizer = build(model)
    train(model, optimizer, range(2))
    optimizer.param_groups[0]["lr"] = 1 / 3  # as a scheduler leaves it
    optimizer.param_groups[0]["initial_lr"] = 0.5
    pieces, described = saved(model, optimizer)
    fresh = net()
    again = build(fresh)
    load_optimizer(fresh, again, pieces, described)
    assert [group["lr"] for group in again.param_groups] == [1 / 3, 0.001]
    assert again.param_groups[0]["initial_lr"] == 0.5
    assert again.param_groups[0]["betas"] == (0.1, 0.2)


def test_a_tensor_learning_rate_is_written_in_place() -> None:
    model = net()
    optimizer = OPTIMIZERS["adam tensor lr"](model.parameters())
    optimizer.param_groups[0]["lr"].fill_(0.125)
    pieces, described = saved(model, optimizer)
    again = OPTIMIZERS["adam tensor lr"](model.parameters())
    held = again.param_groups[0]["lr"]
    load_optimizer(model, again, pieces, described)
    assert again.param_groups[0]["lr"] is held
    assert held.item() == 0.125


def test_the_script_decides_how_a_step_is_executed() -> None:
    model = net()
    optimizer = OPTIMIZERS["adam foreach"](model.parameters())
    train(model, optimizer, range(1))
    pieces, described = saved(model, optimizer)
    again = OPTIMIZERS["adam"](model.parameters())
    load_optimizer(model, again, pieces, described)
    assert again.param_groups[0]["foreach"] is None


def test_state_in_more_bits_than_the_parameter_is_not_rounded() -> None:
    model = net().to(torch.bfloat16)
    optimizer = optim.Adam(model.parameters())
    (parameter, *_) = model.parameters()
    optimizer.state[parameter] = {
        "step": torch.tensor(1.0),
        "exp_avg": torch.rand(8, 4),
        "exp_avg_sq": torch.rand(8, 4),
    }
    pieces, described = saved(model, optimizer)
    again = optim.Adam(model.parameters())
    load_optimizer(model, again, pieces, described)
    assert torch.equal(again.state[parameter]["exp_avg"], pieces["optimizer/0.weight/exp_avg"])


def test_loaded_state_shares_no_memory_with_what_it_was_read_from() -> None:
    model = net()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    train(model, optimizer, range(1))
    pieces = {piece.name: piece.tensor for piece in optimizer_pieces(model, optimizer)}
    again = OPTIMIZERS["adam"](model.parameters())
    load_optimizer(model, again, pieces, optimizer_settings(model, optimizer))
    held = {tensor.data_ptr() for state in again.state.values() for tensor in state.values()}
    assert held.isdisjoint(tensor.data_ptr() for tensor in pieces.values())


def test_another_optimizer_is_refused_and_left_alone() -> None:
    model = net()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    train(model, optimizer, range(1))
    pieces, described = saved(model, optimizer)
    other = optim.SGD(model.parameters(), lr=0.5)
    with pytest.raises(CheckpointMismatch, match="it is Adam, the script builds SGD"):
        load_optimizer(model, other, pieces, described, path="step-000000001")
    assert other.param_groups[0]["lr"] == 0.5


def test_other_groups_are_refused_by_name() -> None:
    model = net()
    optimizer = optim.SGD(model.parameters(), lr=0.5)
    pieces, described = saved(model, optimizer)
    two = optim.SGD([{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=0.5)
    with pytest.raises(CheckpointMismatch, match="1 parameter groups, the script builds 2"):
        load_optimizer(model, two, pieces, described)
    part = optim.SGD(model[0].parameters(), lr=0.5)
    with pytest.raises(CheckpointMismatch, match=r"2\.bias, 2\.weight there alone and nothing here alone"):
        load_optimizer(model, part, pieces, described)


def test_a_tensor_that_is_no_parameter_of_the_model_is_refused() -> None:
    stray = nn.Parameter(torch.zeros(3))
    optimizer = optim.SGD([stray], lr=0.1)
    with pytest.raises(ConfigError, match=r"shape \(3,\) that is not a parameter"):
        list(optimizer_pieces(net(), optimizer))


def test_lbfgs_is_refused() -> None:
    model = net()
    with pytest.raises(ConfigError, match="LBFGS cannot be saved"):
        optimizer_settings(model, optim.LBFGS(model.parameters()))
