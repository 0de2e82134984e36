"""Model calls: a batch as positional or keyword arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shoal.data.tree import Tree


class ModelCall:
    """Calls a model with a tensor (one argument), a tuple (positional) or a dict (keywords).

    A dict is passed whole where forward takes a single parameter of another
    name, and so is a list, which only a collate function of the user's makes
    (samples of different sizes); looking at the signature once is what keeps
    the step cheap.
    """

    def __init__(self, model: nn.Module, *, compile: bool = False) -> None:
        self._only = _only_parameter(model)
        self._run: Callable[..., Any] = model
        if compile and (units := _sharded_units(model)):
            for unit in units:  # dynamo stops at what fsdp does around them
                unit.forward = torch.compile(unit.forward)
        elif compile:
            # Not model.compile(): of a class of torch's own, an nn.Sequential say, dynamo would leave it all uncompiled.
            self._run = torch.compile(lambda *args, **kwargs: model(*args, **kwargs))

    def __call__(self, inputs: Tree) -> Any:
        """The model's outputs."""
        if isinstance(inputs, dict):
            if self._only is not None and set(inputs) != {self._only}:
                return self._run(inputs)
            return self._run(**inputs)
        if isinstance(inputs, tuple) or (isinstance(inputs, list) and self._only is None):
            return self._run(*inputs)
        return self._run(inputs)


def _sharded_units(model: nn.Module) -> list[nn.Module]:
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def num_compiled_graphs() -> int:
    """Graphs that torch.compile has made in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def _only_parameter(model: nn.Module) -> str | None:
    parameters = list(inspect.signature(model.forward).parameters.values())
    if len(parameters) != 1 or parameters[0].kind in (
        inspect.Parameter.VAR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
    ):
        return None
    return parameters[0].name
