"""Optimizer steps on local tensors of DTensors: the bits and the state of a step on the DTensors themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.testing._internal.distributed.fake_pg import FakeStore

from shoal.parallel.tensor_parallel.dtensor_update import on_local_tensors

NUM_RANKS = 3  # over which the rows of no parameter below divide evenly


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=1, world_size=NUM_RANKS, store=FakeStore())  # type: ignore[no-untyped-call]
    yield init_device_mesh("cpu", (NUM_RANKS,))
    dist.destroy_process_group()


def parameter(mesh: DeviceMesh, rows: int, placement: Placement) -> nn.Parameter:
    shape = torch.Size([rows, 5])
    local = torch.randn(-(-rows // NUM_RANKS) if placement.is_shard() else rows, 5)
    return nn.Parameter(
        DTensor.from_local(local, mesh, [placement], run_check=False, shape=shape, stride=(5, 1))
    )


def parts(tree: Any) -> Any:
    """Tensors of an optimizer's state by this rank's numbers."""
    match tree:
        case dict():
            return {
                f"{key}, a part" if isinstance(value, DTensor) else key: parts(value)
                for key, value in tree.items()
            }
        case DTensor():
            return tree.to_local()
        case _:
            return tree


def trained(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    mesh: DeviceMesh,
    context: Callable[[torch.optim.Optimizer], Any],
) -> tuple[list[torch.Tensor], Any]:
    torch.manual_seed(0)
    parameters = [parameter(mesh, 7, Shard(0)), parameter(mesh, 4, Replicate()), parameter(mesh, 8, Shard(0))]
    optimizer = make(parameters)
    for step in range(4):
        for number, each in enumerate(parameters):
            # One parameter gets its first gradient, and with it its state, at a later step.
            if number < 2 or step > 1:
                each.grad = each.detach() * 0.5 + (step - 1)
        with context(optimizer):
            optimizer.step()
        optimizer.zero_grad()
    states = [optimizer.state.get(each, {}) for each in parameters]
    assert optimizer.param_groups[0]["params"] == parameters
    assert set(optimizer.state) <= set(parameters)
    return [each.detach().to_local() for each in parameters], [parts(state) for state in states]


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": lambda ps: torch.optim.Adam(ps, lr=0.1, amsgrad=True, weight_decay=0.1),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.1),
    "NAdam": lambda ps: torch.optim.NAdam(ps, lr=0.1),
    "RAdam": lambda ps: torch.optim.RAdam(ps, lr=0.1),
    "Adamax": lambda ps: torch.optim.Adamax(ps, lr=0.1),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1),
    "Adadelta": lambda ps: torch.optim.Adadelta(ps, lr=0.1),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_and_state_are_those_of_an_update_of_the_dtensors(name: str, mesh: DeviceMesh) -> None:
    weights, state = trained(OPTIMIZERS[name], mesh, on_local_tensors)
    expected_weights, expected = trained(OPTIMIZERS[name], mesh, lambda _: contextlib.nullcontext())
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=0)
    torch.testing.assert_close(state, expected, rtol=0, atol=0)


def test_the_update_sees_plain_tensors_and_the_parameters_come_back_after_an_error(mesh: DeviceMesh) -> None:
    weight = parameter(mesh, 7, Shard(0))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    weight.grad = torch.ones_like(weight)

    def fail() -> None:
        with on_local_tensors(optimizer):
            (seen,) = optimizer.param_groups[0]["params"]
            assert type(seen) is torch.Tensor
            optimizer.step()
            raise RuntimeError("within")

    with pytest.raises(RuntimeError, match="within"):
        fail()
    assert optimizer.param_groups[0]["params"] == [weight]
    assert isinstance(optimizer.state[weight]["exp_avg"], DTensor)


def test_updates_that_look_at_whole_tensors_or_are_looked_at_keep_their_dtensors(mesh: DeviceMesh) -> None:
    class Norms(torch.optim.AdamW):
        """As LAMB: a step by the norm of a whole parameter."""

    for make in (Norms, torch.optim.Adafactor, torch.optim.AdamW):
        weight = parameter(mesh, 7, Shard(0))
        optimizer = make([weight], lr=0.1)
        if make is torch.optim.AdamW:
            optimizer.register_step_post_hook(lambda *_: None)
        with on_local_tensors(optimizer):
            assert optimizer.param_groups[0]["params"] == [weight]


@pytest.mark.parametrize(
    "register",
    [register_optimizer_step_pre_hook, register_optimizer_step_post_hook],
)
def test_a_hook_of_all_optimizers_sees_dtensors(mesh: DeviceMesh, register: Any) -> None:
    weight = parameter(mesh, 7, Shard(0))
    weight.grad = torch.ones_like(weight)
    optimizer, seen = torch.optim.SGD([weight], lr=0.1), []
    handle = register(lambda optimizer, *_: seen.append(optimizer.param_groups[0]["params"][0]))
    try:
        with on_local_tensors(optimizer):
            optimizer.step()
    finally:
        handle.remove()
    assert seen == [weight]


def test_a_gradient_placed_otherwise_is_left_to_dtensor(mesh: DeviceMesh) -> None:
    weight = parameter(mesh, 6, Shard(0))
    weight.grad = DTensor.from_local(torch.ones(6, 5), mesh, [Replicate()], run_check=False)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with on_local_tensors(optimizer):
        assert optimizer.param_groups[0]["params"] == [weight]
