"""Tensors that a forward leaves in attributes, for the loss or for the next forward: additive over samples, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.data.slice import Slice
from shoal.errors import TrainingError
from shoal.parallel.compute import Compute
from shoal.parallel.loss import loss_rule
from shoal.parallel.protocol import TrainJob


class Leaving(nn.Module):
    """Leaves `what(hidden)` in an attribute, if it trains."""

    def __init__(self, what: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.router, self.head, self.what = nn.Linear(6, 5), nn.Linear(5, 3), what
        self.left: Any = None

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.router(x)
        if self.training:
            self.left = self.what(hidden)
        return self.head(hidden.tanh())  # type: ignore[no-any-return]


class Carrying(nn.Module):
    """Adds `what(left)` of what the forward before left."""

    def __init__(self, what: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.what = nn.Linear(6, 3), what
        self.left: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.layer(x)
        output = hidden if self.left is None else hidden + self.what(self.left)
        self.left = hidden.detach()
        return output


def run(
    model: nn.Module, loss: Any, *, num: int = 8, num_steps: int = 2, strategy: str | None = "ddp"
) -> list[Tensor]:
    torch.manual_seed(0)
    x, y = torch.randn(num, 6), torch.randint(0, 3, (num,))
    job = TrainJob(model=model, loss=loss_rule(loss), build_optimizer=None)
    compute = Compute(job, check_loss=True, check_mixing=strategy)
    for step in range(num_steps):
        compute.forward_backward(Slice((x, y), num, 2 * num), rank=0, step=step)
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def balance(hidden: Tensor) -> Tensor:
    scores = hidden.softmax(-1)
    return (scores.mean(0) * F.one_hot(scores.argmax(-1), 5).float().mean(0)).sum()


UNEVEN: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "balance": (balance, lambda left: left),
    "balance in the loss": (lambda hidden: hidden, balance),
    "detached variance": (lambda hidden: hidden.detach().var(), lambda left: left.log() * 0 + left),
    "means in a list": (lambda hidden: [hidden.mean(0)], lambda left: left[0].square().sum()),
}


@pytest.mark.parametrize("name", UNEVEN)
@pytest.mark.parametrize("num", [8, 21])
def test_a_loss_over_an_attribute_that_compares_samples_is_refused_by_its_name(name: str, num: int) -> None:
    torch.manual_seed(1)
    what, term = UNEVEN[name]
    model = Leaving(what)
    with pytest.raises(
        TrainingError, match=r"reads 'left.*computes from several samples.*nothing of this step"
    ):
        run(
            model,
            lambda output, target: F.cross_entropy(output, target) * (1 + 0.01 * term(model.left)),
            num=num,
        )


def test_a_mean_over_samples_and_a_term_of_weights_in_attributes_are_let_through() -> None:
    for what, term in (
        (lambda hidden: hidden.square().mean(), lambda left: left),
        (lambda hidden: hidden, lambda left: left.abs().mean()),
        (lambda hidden: torch.ones(3), lambda left: left.square().sum()),
    ):
        gradients = []
        for strategy in ("ddp", None):
            torch.manual_seed(1)
            model = Leaving(what)
            gradients.append(
                run(
                    model,
                    lambda output, target, model=model, term=term: (
                        F.cross_entropy(output, target) + 0.1 * term(model.left)
                    ),
                    num_steps=4,
                    strategy=strategy,
                )
            )
        assert all(map(torch.equal, *gradients)), "the trial left a trace"


def test_a_tensor_that_a_hook_keeps_for_the_loss_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    from shoal.parallel import compute

    compute._note_read.cache_clear()
    model, kept = Leaving(lambda hidden: None), dict[str, Tensor]()
    model.router.register_forward_hook(lambda module, args, output: kept.update(hidden=output))
    run(model, lambda output, target: F.cross_entropy(output, target) + kept["hidden"].square().mean())
    assert capfd.readouterr().err.count("the loss reads a tensor of this forward that is neither") == 1


@pytest.mark.parametrize("num", [8, 21])
def test_a_forward_over_a_mean_of_the_samples_before_is_refused(num: int) -> None:
    torch.manual_seed(1)
    with pytest.raises(TrainingError, match=r"depends on the samples of the forward before.*'left'.*buffer"):
        run(Carrying(lambda left: left.mean(0)), nn.CrossEntropyLoss(), num=num, num_steps=1)


def test_a_forward_over_the_same_rows_before_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(1)
    model = Carrying(lambda left: left)
    run(model, nn.CrossEntropyLoss(), num_steps=3)
    assert capfd.readouterr().err.count("forward depends on 'left'") == 1
    again = Carrying(lambda left: left)
    again.load_state_dict(model.state_dict())
    run(again, nn.CrossEntropyLoss(), num_steps=3, strategy=None)
    assert model.left is not None
    assert again.left is not None
    assert torch.equal(model.left, again.left)
    run(Carrying(lambda left: left * 0), nn.CrossEntropyLoss())
    assert "forward depends" not in capfd.readouterr().err
