"""Batches are trees: tensors in any nesting of dicts and tuples.

Small enough to be our own: torch's pytree also walks into lists and
namedtuples that a collate function means as leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

Tree = Any
"""A tensor, or a dict or tuple (or list) of trees; anything else is a leaf that is passed along."""


def leaves(tree: Tree) -> Iterator[Any]:
    """Every leaf, in a fixed order: dict keys as they stand, tuples from the left."""
    if isinstance(tree, dict):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, (tuple, list)):
        for value in tree:
            yield from leaves(value)
    else:
        yield tree


def map_tensors(fn: Callable[[torch.Tensor], Any], tree: Tree) -> Tree:
    """The same tree with `fn` of each tensor; other leaves stay."""
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    if isinstance(tree, dict):
        return {key: map_tensors(fn, value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(fn, value) for value in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tensors(fn, value) for value in tree)
    return tree


def map_leaves(fn: Callable[[str, Any], Any], tree: Tree, path: str = "") -> Tree:
    """The same tree with `fn(path, leaf)` of each leaf, lists as tuples; a path reads like `['dense']` or `[1]['x']`."""
    if isinstance(tree, dict):
        return {key: map_leaves(fn, value, f"{path}[{key!r}]") for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(
            *(map_leaves(fn, value, f"{path}.{name}") for name, value in zip(tree._fields, tree, strict=True))
        )
    if isinstance(tree, (tuple, list)):
        return tuple(map_leaves(fn, value, f"{path}[{number}]") for number, value in enumerate(tree))
    return fn(path, tree)


def tensors(tree: Tree) -> list[torch.Tensor]:
    return [leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]


def concatenate(trees: list[Tree]) -> Tree:
    """One tree whose tensors are those of `trees` joined along the first dim."""
    first = trees[0]
    if isinstance(first, torch.Tensor):
        if len(trees) == 1:
            return first
        return torch.cat(trees) if first.dim() else torch.stack(trees)  # a number each, as an auxiliary loss
    if isinstance(first, dict):
        return {key: concatenate([tree[key] for tree in trees]) for key in first}
    if isinstance(first, (tuple, list)):
        return tuple(concatenate([tree[i] for tree in trees]) for i in range(len(first)))
    return first
