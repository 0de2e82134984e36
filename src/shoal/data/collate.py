"""Collation: from samples to a batch, and back."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import collate as collate_by
from torch.utils.data._utils.collate import default_collate_fn_map

from shoal.data.tree import Tree, map_leaves
from shoal.errors import DataError


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
    """Arrays of strings stay what they are, one per sample; of numbers torch knows what to do."""
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
    """True for a column of strings, which `default_collate` leaves as a list."""
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
            # Said of arrays that may not be written, such as a memory map opened for reading; nothing here writes.
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            return torch.from_numpy(leaf)
    except TypeError:
        return None


def to_tensors(tree: Tree) -> Tree:
    """The same tree with arrays as tensors; other leaves stay."""

    def convert(path: str, leaf: Any) -> Any:
        tensor = to_tensor(leaf)
        return leaf if tensor is None else tensor

    return map_leaves(convert, tree)
