"""How a model is called with what a batch holds."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from shoal.data.tree import Tree


class ModelCall:
    """Calls a model with a tensor (one argument), a tuple (positional) or a dict (keywords).

    A dict is passed whole where forward takes a single parameter of another
    name, and so is a list, which only a collate function of the user's makes
    (samples of different sizes); looking at the signature once is what keeps
    the step cheap.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._only = _only_parameter(model)

    def __call__(self, inputs: Tree) -> Any:
        """The model's outputs."""
        if isinstance(inputs, dict):
            if self._only is not None and set(inputs) != {self._only}:
                return self._model(inputs)
            return self._model(**inputs)
        if isinstance(inputs, tuple) or (isinstance(inputs, list) and self._only is None):
            return self._model(*inputs)
        return self._model(inputs)


def _only_parameter(model: nn.Module) -> str | None:
    parameters = list(inspect.signature(model.forward).parameters.values())
    if len(parameters) != 1 or parameters[0].kind in (
        inspect.Parameter.VAR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
    ):
        return None
    return parameters[0].name
