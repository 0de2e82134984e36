"""Forward and backward of a partitioned model in a loop that calls them itself.

Backward of such a model sums gradients while it runs, so the weight of a slice is applied before
it: where backward begins, at the gradient of the loss.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.errors import ConfigError
from shoal.parallel import own_gradients

_PLAIN = (Tensor, int, float, str, type(None))


@contextlib.contextmanager
def once_differentiable(strategy: str, applies: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Context that refuses gradients of gradients: autograd records no sums over the workers that backward makes, and the second one lacks them."""
    autograd: Any = torch.autograd
    run = autograd._engine_run_backward  # all of backward, grad and torch.func, also imported by name

    @functools.wraps(run)
    def refusing(
        roots: Any, gradients: Any, retain_graph: Any, create_graph: bool, *args: Any, **settings: Any
    ) -> Any:
        if create_graph and applies():
            raise ConfigError(
                "the model, its loss or the loop differentiates a gradient (create_graph=True, for a gradient penalty say), and under "
                f"'{strategy}' the second backward of layers in parts leaves sums over the workers out. Nothing of this step was "
                "updated; use --strategy ddp or ps, or fsdp with shoal.Trainer."
            )
        return run(roots, gradients, retain_graph, create_graph, *args, **settings)

    autograd._engine_run_backward = refusing
    try:
        yield
    finally:
        autograd._engine_run_backward = run


class OwnForward:
    """Weights the tensors that backward is called on; `weight` is the share of the next slice."""

    def __init__(
        self, model: nn.Module, strategy: str, running: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """`running` is entered around each forward."""
        self.weight = 1.0
        self._strategy, self._depth = strategy, 0
        inner = model.forward

        @functools.wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                with running():
                    output = inner(*args, **kwargs)
            finally:
                self._depth -= 1
            return pytree.tree_map(self._marked, output)

        model.forward = forward
        self._watch_backward()
        for name, module in model.named_modules():
            if name and next(module.parameters(recurse=False), None) is not None:
                module.register_forward_pre_hook(self._refuse_alone(name))

    def _watch_backward(self) -> None:
        """Weight the initial gradients of every backward until the script ends; a loop's models share it."""
        before = getattr(torch.autograd.backward, "shoal_before", torch.autograd.backward)

        @functools.wraps(before)
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
            # Not for a Trainer, nor for a block that runs again within backward.
            if torch._C._current_graph_task_id() == -1 and not own_gradients.rests():
                roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
                given = (
                    [grad_tensors]
                    if grad_tensors is None or isinstance(grad_tensors, Tensor)
                    else grad_tensors
                )
                given = [*given, *[None] * (len(roots) - len(given))]
                self._refuse_parameters(roots)
                tensors = roots
                grad_tensors = [
                    (torch.ones_like(root) if gradient is None else gradient) * self.weight
                    for root, gradient in zip(roots, given, strict=True)
                ]
            before(tensors, grad_tensors, *args, **kwargs)

        backward.shoal_before = before  # type: ignore[attr-defined]
        torch.autograd.backward = backward

    def _refuse_parameters(self, roots: list[Tensor]) -> None:
        """Refuse a loss that reads parameters directly: each rank holds only parts of them, or all
        ranks would add the term.
        """
        left, seen = [root.grad_fn for root in roots], set[Any]()
        while left:
            node = left.pop()
            if node is None or node in seen or node.name() == _MARK:
                continue
            seen.add(node)
            if isinstance(getattr(node, "variable", None), nn.Parameter):
                raise ConfigError(
                    f"the loss reads a parameter past the outputs of the model (a penalty, say), and under '{self._strategy}' workers hold "
                    "parts of parameters, whose gradients would be summed wrongly. Nothing of this step was updated; use the "
                    "optimizer's weight_decay, shoal.Trainer, or --strategy ddp."
                )
            left += [each for each, _ in node.next_functions]

    def _marked(self, leaf: Any) -> Any:
        if not isinstance(leaf, _PLAIN):
            raise ConfigError(
                f"the model returns a {type(leaf).__name__}, in which shoal finds no tensors, "
                f"as a loop of the script's own needs it under '{self._strategy}'. Nothing was updated; return tensors, tuples, "
                "lists or dicts, or use shoal.Trainer or --strategy ddp."
            )
        if not isinstance(leaf, Tensor) or not leaf.requires_grad:
            return leaf
        return _Output.apply(leaf, lambda: self.weight != 0.0)  # type: ignore[no-untyped-call]

    def _refuse_alone(self, name: str) -> Callable[[nn.Module, Any], None]:
        def check(module: nn.Module, args: Any) -> None:
            # Within backward a checkpointed block may run again.
            if not self._depth and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
                raise ConfigError(
                    f"the loop calls the layer '{name}' of the model by itself, and under '{self._strategy}' workers hold parts of "
                    "layers, which only the forward of the whole model puts together. Nothing of this step was updated; call the model, "
                    "or use --strategy ddp."
                )

        return check


class _Output(torch.autograd.Function):
    """Marks the end of the model. A borrowed sample, and a slice without labels, contributes nothing, NaN or not."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, counts: Callable[[], bool]) -> Tensor:
        ctx.counts = counts
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return (gradient if ctx.counts() else torch.zeros_like(gradient)), None


_MARK = "_OutputBackward"
