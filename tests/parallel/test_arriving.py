"""Weights that follow while the next step runs: whoever uses one finds it there, and nobody waits for more than it needs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.parallel.ps import arriving
from shoal.parallel.ps.arriving import ArrivingWeights, can_follow, cut_into_waves


class Tied(nn.Module):
    """Uses the weight of one layer in another's place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) @ self.third.weight.t()


class Arrival:
    """One wave per parameter: each fills it with its number, and is noted."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters, self.came, self.weights = list(model.parameters()), [], ArrivingWeights()

    def follow(self) -> None:
        waves = [functools.partial(self._fill, number) for number in range(len(self.parameters))]
        self.weights.follow(waves, [[parameter] for parameter in self.parameters])

    def _fill(self, number: int) -> None:
        with torch.no_grad():
            self.parameters[number].fill_(number + 1.0)
        self.came.append(number)


def test_a_forward_waits_for_the_weights_of_each_layer_when_it_comes_to_it() -> None:
    model = Tied()
    arrival, came = Arrival(model), []
    model.second.register_forward_pre_hook(lambda module, args: came.extend(arrival.came))
    with arrival.weights.watched():
        arrival.follow()
        assert arrival.came == []
        got = model(torch.ones(2, 4))
        assert came == [0, 1, 2, 3]  # of its own too: the hook of all modules comes first
        assert arrival.came == [0, 1, 2, 3, 4]  # a bias that nobody uses has not come
    assert arrival.came == [0, 1, 2, 3, 4, 5]
    assert torch.equal(got, model(torch.ones(2, 4)))


USES: dict[str, Callable[[nn.Parameter], Any]] = {
    "norm": lambda weight: weight.norm().item(),
    "list": lambda weight: sum(weight.detach().flatten().tolist()),
    "numpy": lambda weight: float(weight.detach().numpy().sum()),
    "print": repr,
    "data": lambda weight: weight.data[0, 0].item(),
    "among others": lambda weight: torch.cat([torch.zeros(1, 4), weight]).sum().item(),
    "clone": lambda weight: weight.clone().sum().item(),
    "keyword": lambda weight: torch.add(input=torch.zeros(4, 4), other=weight).sum().item(),
    "state": lambda weight: weight.untyped_storage().tolist(),
    "comparison": lambda weight: bool((weight == 5.0).all()),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_whoever_uses_a_weight_finds_it_there(use: Callable[[nn.Parameter], Any]) -> None:
    model = Tied()
    arrival = Arrival(model)
    with arrival.weights.watched():
        arrival.follow()
        seen = use(model.third.weight)
    assert seen == use(model.third.weight)


def test_a_view_from_before_is_waited_for_too_and_a_look_at_a_shape_is_not() -> None:
    model = Tied()
    arrival, view = Arrival(model), model.first.weight.detach().t()
    with arrival.weights.watched():
        arrival.follow()
        assert all(parameter.shape and parameter.grad is None for parameter in model.parameters())
        assert all(isinstance(parameter._version, int) for parameter in model.parameters())
        assert arrival.came == []
        assert (view + 0 == 1.0).all()
        assert arrival.came == [0]


def test_a_weight_of_several_waves_is_not_waited_for_before_it_is_used() -> None:
    weight, came, weights = nn.Parameter(torch.zeros(4)), list[int](), ArrivingWeights()
    with weights.watched():
        weights.follow([lambda: came.append(0), lambda: came.append(1)], [[weight], [weight]])
        assert came == []
        weight.sum()
        assert came == [0, 1]


def test_a_wrapper_whose_storage_cannot_be_read_waits_for_all() -> None:
    arrival, came = Arrival(Tied()), list[int]()

    def use(wrapped: Tensor) -> Tensor:
        arrival.follow()
        total = wrapped.sum()
        came.extend(arrival.came)
        return total

    with arrival.weights.watched():
        torch.func.vmap(use)(arrival.parameters[4].detach())
    assert came == [0, 1, 2, 3, 4, 5]


def test_nothing_is_left_to_come_outside_of_the_block_also_after_an_error() -> None:
    arrival = Arrival(Tied())

    def fail() -> None:
        with arrival.weights.watched():
            arrival.follow()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert arrival.came == [0, 1, 2, 3, 4, 5]
    arrival.came.clear()
    arrival.follow()
    assert arrival.came == [0, 1, 2, 3, 4, 5]


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_models_whose_uses_of_weights_cannot_be_seen_are_not_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch._dynamo.eval_frame.cached_backends", {})
    assert can_follow(Tied())
    compiled = Tied()
    compiled.second.compile(backend="eager")
    assert not can_follow(Tied())  # something is compiled, and a loss may call it
    monkeypatch.setattr("torch._dynamo.eval_frame.cached_backends", {})
    assert not can_follow(compiled)
    assert not can_follow(nn.Sequential(torch.compile(Tied(), backend="eager")))  # type: ignore[arg-type]
    assert not can_follow(nn.Sequential(Tied(), torch.jit.script(nn.Linear(2, 2))))


def test_waves_are_consecutive_and_of_some_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arriving, "WAVE_BYTES", 10)
    assert cut_into_waves([]) == []
    assert cut_into_waves([4, 4, 4, 30, 1]) == [range(3), range(3, 4), range(4, 5)]
