"""Activation checkpointing: blocks of a model keep their inputs only, and run again within backward.

A block's forward is replaced in place, so nothing is renamed: parameters,
hooks and checkpoints stay what they are, under every strategy. What a second
forward must not do twice (count BatchNorm's statistics) rests meanwhile; what
it draws is drawn again.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from shoal.embedding.hash_embedding import HashEmbedding
from shoal.errors import ConfigError

_MARK = "_shoal_runs_again"
_TABLES = (nn.Embedding, nn.EmbeddingBag, HashEmbedding)


def run_again(model: nn.Module, wanted: bool | Sequence[str]) -> list[str]:
    """Let blocks of `model` run again within backward; returns their names. `wanted` may be patterns of names."""
    names = blocks(model) if wanted is True else _named(model, wanted or ())
    for name in names:
        module = model.get_submodule(name)
        if not is_run_again(module):
            module.__dict__[_MARK] = True
            module.forward = _checkpointed(module)
    return names


def is_run_again(module: nn.Module) -> bool:
    """Whether this very module runs again within backward."""
    return _MARK in module.__dict__


def blocks(model: nn.Module) -> list[str]:
    """The outermost members of lists and sequences that hold layers of their own; else the model's parts that do.

    A lookup in a table keeps nothing but ids, and may be a pull from servers: what holds one does not run twice.
    """
    found: list[str] = []

    def visit(name: str, module: nn.Module) -> None:
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            is_member = isinstance(module, (nn.ModuleList, nn.Sequential))
            if is_member and _can_be(child):
                found.append(path)
            else:
                visit(path, child)

    visit("", model)
    found = found or [name for name, child in model.named_children() if _can_be(child)]
    if not found:
        raise ConfigError(
            f"no part of this {type(model).__name__} can be run again within backward: none of its members holds layers of its own. "
            "Nothing was trained; leave --checkpoint-activations out, or name layers with "
            "Trainer(checkpoint_activations=['encoder.*'])."
        )
    return found


def _can_be(module: nn.Module) -> bool:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) or not list(module.children()):
        return False
    return not any(isinstance(each, _TABLES) for each in module.modules())


def _named(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    modules = {name: module for name, module in model.named_modules() if name}
    found: list[str] = []
    for pattern in patterns:
        matching = [name for name in modules if fnmatch.fnmatchcase(name, pattern)]
        if not matching:
            raise ConfigError(
                f"checkpoint_activations names '{pattern}', and no layer of the model is called so. Nothing was trained."
            )
        for name in matching:
            if isinstance(modules[name], (nn.ModuleList, nn.ModuleDict, *_TABLES)):
                raise ConfigError(
                    f"checkpoint_activations names '{name}', a {type(modules[name]).__name__}, which has nothing to run again. "
                    "Nothing was trained."
                )
        found += matching
    # What runs again as a whole need not do so in parts.
    return [name for name in dict.fromkeys(found) if not any(name.startswith(f"{other}.") for other in found)]


def _checkpointed(module: nn.Module) -> Callable[..., Any]:
    forward = module.forward
    norms = [each for each in module.modules() if isinstance(each, _BatchNorm)]

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]  # torch says nothing of its type
        options: dict[str, Any] = {"use_reentrant": False}
        if norms or modes:
            options["context_fn"] = lambda: (contextlib.nullcontext(), _once_more(norms, modes))
        return checkpoint(forward, *args, **options, **kwargs)

    return run


@contextlib.contextmanager
def _once_more(norms: list[_BatchNorm], modes: list[TorchFunctionMode]) -> Iterator[None]:
    """As the first time: within backward, torch's modes are off."""
    with contextlib.ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        if norms:
            stack.enter_context(_counted_already(norms))
        yield


@contextlib.contextmanager
def _counted_already(norms: list[_BatchNorm]) -> Iterator[None]:
    """BatchNorm normalises by its batch and keeps nothing of it. It has to save as many tensors as before, so it still looks."""
    before = [
        (norm, norm.momentum, None if norm.num_batches_tracked is None else norm.num_batches_tracked.clone())
        for norm in norms
    ]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum, count in before:
            norm.momentum = momentum
            if norm.num_batches_tracked is not None and count is not None:
                norm.num_batches_tracked.copy_(count)
