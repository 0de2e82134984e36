"""A copy of a model that has shapes and no data: what its forward does is found out on it, wherever the weights are.

A rank of a pipeline holds a part of the weights alone, and its layers may be
cut and sharded; the copy is made before that, and is as large as names are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from shoal.data.tree import Tree, map_tensors
from shoal.parallel.activations import is_run_again
from shoal.parallel.compute import evaluating
from shoal.parallel.pipeline.trace import Traced, trace


class Blank:
    """The copy, in the mode that the model was in."""

    def __init__(self, model: nn.Module) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        # What is no parameter and no buffer stays what it is, and is used by both.
        plain = [leaf for module in model.modules() for leaf in pytree.tree_leaves(vars(module))]
        memo: dict[int, Any] = {id(leaf): leaf for leaf in plain if isinstance(leaf, (Tensor, np.ndarray))}
        for tensor in (*model.parameters(), *model.buffers()):
            like = self._like(tensor)
            if isinstance(tensor, nn.Parameter):
                like = nn.Parameter(like, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = like
        self.model = copy.deepcopy(model, memo)
        for module in self.model.modules():
            if is_run_again(module):
                del module.forward  # which runs that of the model, and here nothing runs again

    def trace(
        self, inputs: Tree, is_open: Callable[[str, nn.Module], bool], *, training: bool
    ) -> Traced | None:
        """What forward does with inputs of these shapes; None where only data could tell."""
        modules = list(self.model.modules())
        resting = [each for each in modules if isinstance(each, _BatchNorm)] if training else modules
        try:
            with evaluating(resting):
                traced = trace(self.model, map_tensors(self._like, inputs), is_open)
        except (
            Exception
        ):  # of torch's or the user's own: then the stages run as they are, and say what does not fit
            return None
        return None if any(isinstance(each, FakeTensor) for each in traced.constants.values()) else traced

    def _like(self, tensor: Tensor) -> Tensor:
        with self._mode:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def blank_of(model: nn.Module) -> Blank | None:
    """The copy; None of a model that cannot be copied."""
    try:
        return Blank(model)
    except Exception:  # a lock, a socket, a tensor with a past: whatever a user's module holds
        return None
