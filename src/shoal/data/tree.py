"""Batches and outputs as trees: tensors in any nesting of containers; collation of samples to a batch, and back.

A container keeps its class through every walk: dicts, tuples, named tuples and
lists, other mappings (a BatchEncoding), dataclasses, and whatever is registered
with torch's pytree (transformers' ModelOutput). The walks are our own because
pytree takes mappings and dataclasses of a class that nobody registered as leaves.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._pytree import SUPPORTED_NODES
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import collate as collate_by
from torch.utils.data._utils.collate import default_collate_fn_map

from shoal.errors import DataError

Tree = Any
"""A tensor, or a container of trees; anything else is a leaf that is passed along."""


def _parts(tree: Tree) -> tuple[Iterable[Any], Callable[[Iterable[Any]], Tree]] | None:
    """The members of a container, and a function that makes one of its class of others; None for a leaf."""
    kind = type(tree)
    if kind is torch.Tensor:  # most of what is asked
        return None
    if kind is dict:
        return tree.values(), lambda values: dict(zip(tree, values, strict=True))
    if isinstance(tree, (tuple, list)):
        return tree, lambda values: kind(*values) if hasattr(tree, "_fields") else kind(tuple(values))
    if kind in SUPPORTED_NODES:
        members, context = SUPPORTED_NODES[kind].flatten_fn(tree)
        return members, lambda values: SUPPORTED_NODES[kind].unflatten_fn(list(values), context)
    if isinstance(tree, MutableMapping):
        return tree.values(), lambda values: _refilled(tree, dict(zip(tree, values, strict=True)))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = [each.name for each in dataclasses.fields(tree)]
        members = [getattr(tree, name) for name in names]
        return members, lambda values: _with_fields(tree, zip(names, values, strict=True))
    return None


def _refilled(tree: Any, items: dict[Any, Any]) -> Any:
    # Not by its constructor, whose arguments are unknown.
    filled = copy.copy(tree)
    filled.update(items)
    return filled


def _with_fields(tree: Any, items: Iterable[tuple[str, Any]]) -> Any:
    filled = copy.copy(tree)
    for name, value in items:
        object.__setattr__(filled, name, value)  # a frozen one too
    return filled


def leaves(tree: Tree) -> Iterator[Any]:
    """Every leaf, in a fixed order: dict keys as they stand, tuples from the left."""
    parts = _parts(tree)
    if parts is None:
        yield tree
    else:
        for value in parts[0]:
            yield from leaves(value)


def map_tensors(fn: Callable[[torch.Tensor], Any], tree: Tree) -> Tree:
    """The same tree with `fn` of each tensor; other leaves stay."""
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    parts = _parts(tree)
    return tree if parts is None else parts[1](map_tensors(fn, value) for value in parts[0])


def refill(tree: Tree, values: Iterator[Any]) -> Tree:
    """The same tree with other leaves, in the order of `leaves`."""
    parts = _parts(tree)
    return next(values) if parts is None else parts[1]([refill(value, values) for value in parts[0]])


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
    parts = _parts(first)
    if parts is None:
        return first
    members = [list(_members(tree)) for tree in trees]
    return parts[1](concatenate(list(each)) for each in zip(*members, strict=True))


def _members(tree: Tree) -> Iterable[Any]:
    parts = _parts(tree)
    assert parts is not None, "trees of one model have one structure"
    return parts[0]


def collate(samples: list[Any]) -> Tree:
    """One batch of the samples: torch's own rule, but tuples for its lists, arrays for strings, and short lists padded."""
    return with_string_arrays(lists_to_tuples(_default_collate(samples)), len(samples))


def _default_collate(samples: list[Any]) -> Tree:
    try:
        return collate_by(samples, collate_fn_map=_RULES)
    except (TypeError, KeyError) as error:
        kinds = sorted({type(sample).__name__ for sample in samples})
        raise DataError(
            f"{len(samples)} samples ({', '.join(kinds)}) cannot be put together to a batch: {_short(error)}. Every sample must "
            "be numbers, tensors, arrays or text, or dicts or tuples of them with the same keys: look at what the last map "
            "function, or the dataset, returns."
        ) from error
    except RuntimeError:
        padded = _padded(samples)
        if padded is None:
            raise
        return collate_by(padded, collate_fn_map=_RULES)


def _arrays(arrays: list[Any], *, collate_fn_map: Any = None) -> Any:
    if arrays[0].dtype.kind in "USO":
        return as_objects(arrays)
    return default_collate_fn_map[np.ndarray](arrays, collate_fn_map=collate_fn_map)


_RULES: dict[Any, Any] = {**default_collate_fn_map, np.ndarray: _arrays}


def as_objects(values: Sequence[Any]) -> NDArray[Any]:
    """An array of one object per value, whatever the values are."""
    array = np.empty(len(values), dtype=object)
    for at, value in enumerate(values):  # not by slice: numpy would take arrays of one length for rows
        array[at] = value
    return array


def _short(error: Exception) -> str:
    said = str(error).split(";")[0]
    return f"some have no {said}" if isinstance(error, KeyError) else said


def _padded(samples: list[Any]) -> list[Any] | None:
    """The samples with lists that differ in length padded behind, as tables have them; None where none does."""
    first = samples[0]
    if isinstance(first, torch.Tensor) and all(
        isinstance(sample, torch.Tensor) and sample.dim() == 1 and sample.dtype == first.dtype
        for sample in samples
    ):
        if len({len(sample) for sample in samples}) == 1:
            return None
        is_signed = not first.is_floating_point() and first.dtype not in (torch.uint8, torch.bool)
        filled = torch.nn.utils.rnn.pad_sequence(
            samples, batch_first=True, padding_value=-1 if is_signed else 0
        )
        return list(filled.unbind(0))
    if isinstance(first, dict):
        keys = list(first)
        if not all(isinstance(sample, dict) and sample.keys() == first.keys() for sample in samples):
            return None
        columns = [[sample[key] for key in keys] for sample in samples]
        padded = _padded([tuple(column) for column in columns])
        return None if padded is None else [dict(zip(keys, row, strict=True)) for row in padded]
    if isinstance(first, tuple):
        if not all(isinstance(sample, tuple) and len(sample) == len(first) for sample in samples):
            return None
        parts = [list(part) for part in zip(*samples, strict=True)]
        found = [_padded(part) for part in parts]
        if all(part is None for part in found):
            return None
        kept = [part if new is None else new for part, new in zip(parts, found, strict=True)]
        rows = list(zip(*kept, strict=True))
        return [type(first)(*row) for row in rows] if hasattr(first, "_fields") else rows
    return None


class Collate:
    """A collate function, torch's or the user's, whose batches of (inputs, target) are tuples."""

    def __init__(self, fn: Callable[[Any], Any] = default_collate) -> None:
        self._fn = fn
        self.is_default = fn is default_collate

    def __call__(self, samples: Any) -> Tree:
        return collate(samples) if self.is_default else self.tidy(self._fn(samples))

    def tidy(self, batch: Tree) -> Tree:
        """The batch with tuples for the lists that torch makes of them; lists inside a user's own batch are meant."""
        if self.is_default:
            return lists_to_tuples(batch)
        return tuple(batch) if type(batch) is list else batch


def lists_to_tuples(tree: Tree) -> Tree:
    """The same tree with every list a tuple: a list is what `default_collate` makes of a tuple."""
    if isinstance(tree, dict):
        return {key: lists_to_tuples(value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(lists_to_tuples(value) for value in tree))
    if isinstance(tree, (tuple, list)):
        return tuple(lists_to_tuples(value) for value in tree)
    return tree


def uncollate(batch: Tree, num_samples: int) -> list[Any]:
    """The samples of a batch whose tensors all have `num_samples` rows; rows are views."""
    if isinstance(batch, torch.Tensor):
        return list(batch.unbind(0))
    if isinstance(batch, np.ndarray):
        return batch.tolist() if batch.dtype.kind in "USO" and batch.ndim == 1 else list(batch)
    if _is_column(batch, num_samples):
        return list(batch)
    if isinstance(batch, dict):
        columns = {key: uncollate(value, num_samples) for key, value in batch.items()}
        return [{key: column[row] for key, column in columns.items()} for row in range(num_samples)]
    if isinstance(batch, (tuple, list)):
        parts = [uncollate(value, num_samples) for value in batch]
        if isinstance(batch, tuple) and hasattr(batch, "_fields"):
            return [type(batch)(*(part[row] for part in parts)) for row in range(num_samples)]
        return [tuple(part[row] for part in parts) for row in range(num_samples)]
    return [batch] * num_samples


def with_string_arrays(batch: Tree, num_samples: int) -> Tree:
    """The same batch with columns of strings as arrays, as tables have them: one leaf per column."""
    if _is_column(batch, num_samples):
        # Of bytes numpy's own strings would lose zeros at the end.
        return np.array(batch) if all(isinstance(value, str) for value in batch) else as_objects(batch)
    if isinstance(batch, dict):
        return {key: with_string_arrays(value, num_samples) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        parts = [with_string_arrays(value, num_samples) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def _is_column(batch: Tree, num_samples: int) -> bool:
    is_list = isinstance(batch, (tuple, list)) and len(batch) == num_samples > 0
    return is_list and all(isinstance(value, (str, bytes)) for value in batch)


def to_tensor(leaf: Any) -> torch.Tensor | None:
    """The leaf as a tensor, without a copy where its memory allows it; None where it is no array of numbers."""
    if isinstance(leaf, torch.Tensor):
        return leaf.detach()
    if not isinstance(leaf, np.ndarray):
        return None
    if not leaf.dtype.isnative:
        leaf = leaf.astype(leaf.dtype.newbyteorder("="))
    if any(stride < 0 for stride in leaf.strides):
        leaf = np.ascontiguousarray(leaf)
    try:
        with warnings.catch_warnings():
            # Issued for read-only arrays, such as a memory map opened for reading; nothing here writes.
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            return torch.from_numpy(leaf)
    except TypeError:
        return None


def to_tensors(tree: Tree) -> Tree:
    def convert(path: str, leaf: Any) -> Any:
        tensor = to_tensor(leaf)
        return leaf if tensor is None else tensor

    return map_leaves(convert, tree)
