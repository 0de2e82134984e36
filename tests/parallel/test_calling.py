"""How a model is called with what a batch holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shoal.parallel.model_call import ModelCall

A, B = torch.tensor(1.0), torch.tensor(2.0)


class One(nn.Module):
    def forward(self, x: Any) -> Any:
        return ("x", x)


class Two(nn.Module):
    def forward(self, x: Any, y: Any = None) -> Any:
        return ("x, y", x, y)


class Many(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return (args, kwargs)


@pytest.mark.parametrize(
    ("model", "inputs", "given"),
    [
        (One(), A, ("x", A)),
        (One(), (A,), ("x", A)),
        (One(), {"x": A}, ("x", A)),
        (One(), {"dense": A, "ids": B}, ("x", {"dense": A, "ids": B})),
        (One(), {"dense": A}, ("x", {"dense": A})),
        (Two(), A, ("x, y", A, None)),
        (Two(), (A, B), ("x, y", A, B)),
        (Two(), [A, B], ("x, y", A, B)),
        (One(), [A, B], ("x", [A, B])),
        (Two(), {"y": B, "x": A}, ("x, y", A, B)),
        (Many(), (A, B), ((A, B), {})),
        (Many(), {"a": A}, ((), {"a": A})),
    ],
    ids=str,
)
def test_tensors_tuples_and_dicts_become_arguments(model: nn.Module, inputs: Any, given: Any) -> None:
    assert ModelCall(model)(inputs) == given


def test_hooks_of_the_model_are_heard() -> None:
    model, heard = One(), []
    model.register_forward_hook(lambda *args: heard.append(args))
    ModelCall(model)(A)
    assert len(heard) == 1
