"""What a forward leaves behind outside of buffers: found by a trial, refused where stages would not have it."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.errors import ConfigError, TrainingError
from shoal.parallel.pipeline.forward_state import attributes_kept, hide, refuse_memory

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)


class Box:
    value: Any = None


class Counts(Model):
    def __init__(self) -> None:
        super().__init__()
        self.count = itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * next(self.count)  # type: ignore[no-any-return]


class Remembers(Model):
    def __init__(self) -> None:
        super().__init__()
        self.box = Box()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        if self.box.value is not None:
            found = found + self.box.value
        self.box.value = found.detach().mean()
        return found


class Bounds(Model):
    def forward(self, x: Tensor) -> Tensor:
        self.layer.weight.data.clamp_(-0.1, 0.1)
        return self.layer(x)  # type: ignore[no-any-return]


class Leaves(Model):
    def __init__(self) -> None:
        super().__init__()
        self.mask: Tensor | None = None
        self.seen: list[Any] = [None]

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(3)
        self.hidden = self.layer(x)
        self.seen[0] = self.hidden.detach()
        return self.hidden * self.mask


def _tried(model: nn.Module) -> Any:
    return refuse_memory(model, model, X, "pp=2")


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (Counts, "an object of its own"),
        (Remembers, "'box.value'"),
        (Bounds, "writes into its parameter 'layer.weight'"),
    ],
)
def test_a_forward_that_depends_on_those_before_it_is_refused(model: type[nn.Module], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        _tried(model())


def test_numbers_in_attributes_and_plain_objects_are_put_back_after_a_trial() -> None:
    class Steps(Model):
        def __init__(self) -> None:
            super().__init__()
            self.count, self.box = 0, Box()
            self.box.value = 1.5

        def forward(self, x: Tensor) -> Tensor:
            self.count, self.box.value = self.count + 1, self.box.value * 2
            return self.layer(x)  # type: ignore[no-any-return]

    model = Steps()
    with attributes_kept(model):
        model(X)
        assert (model.count, model.box.value) == (1, 3.0)
    assert (model.count, model.box.value) == (0, 1.5)


def test_what_forward_leaves_of_its_samples_cannot_be_read_afterwards_and_a_cache_can() -> None:
    model = Leaves()
    hide(_tried(model))
    for read in (lambda: model.hidden.abs().mean(), lambda: model.seen[0] + 1):
        with pytest.raises(
            TrainingError, match=r"which the model's forward leaves in an attribute.*have forward return it"
        ):
            read()
    assert model.mask is not None
    assert model.mask.sum() == 3
    copy.deepcopy(model.__dict__["hidden"])  # as a copy of the model would
    model(X)
    assert model.hidden.shape == (4, 3)
