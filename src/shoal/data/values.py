"""Values by which a stage decides, one per sample: a column, an array, or a function of each sample.

Labels to stratify by, groups, times, weights. An array is taken as it is; a
column or a function needs one pass over the data, when the values are first
asked for.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.data.order.order import Order, integers
from shoal.data.randomness import PrivateGenerators
from shoal.data.skipping import SkipSamples
from shoal.data.sources.source import Source, call_user, name_of
from shoal.data.tree import Tree
from shoal.errors import ConfigError, DataError, NoSuchColumn

By = str | Callable[[Any], Any] | NDArray[Any] | torch.Tensor | list[Any]
"""A column's name, a function of a sample, or one value per sample in the order of the dataset."""

NUM_READ_AT_ONCE = 4096


class Values:
    """The value of `by` at each position of a dataset's first epoch."""

    def __init__(self, source: Source, order: Order, by: By, *, caller: str) -> None:
        """`caller` names who asks, as in "split(stratify=)"."""
        if order.varies or source.reorders:
            raise ConfigError(
                f"{caller} comes after a shuffle, so each epoch would have other values at each position. Call it first, "
                "then shuffle."
            )
        if order.is_endless:
            raise ConfigError(
                f"{caller} needs a value for each sample, and repeat() has no end. Call it before repeat."
            )
        self._source, self._order, self._by, self.caller = source, order, by, caller
        self.is_bad: NDArray[np.bool_] | None = None
        """Samples that could not be read and may be skipped; None where none was read."""

        self._array: NDArray[Any] | None = None
        if isinstance(by, str) and not by:
            raise ConfigError(f"{caller} takes the name of a column, an array or a function, got ''")
        if not isinstance(by, str) and not callable(by):
            self._array = _as_array(by, caller)
            if order.is_counted:
                self._check_length()

    @property
    def is_read(self) -> bool:
        """True where the values are at hand."""
        return self._array is not None

    @property
    def is_checkable(self) -> bool:
        """True where they can be looked at without reading a sample."""
        return self.is_read and self._order.is_counted

    def array(self) -> NDArray[Any]:
        """One value per sample."""
        if self._array is None:
            self._array = self._read()
        self._check_length()
        return self._array

    def describe(self) -> str:
        """The column or function by name, an array by what is in it."""
        if isinstance(self._by, str):
            return self._by
        if callable(self._by):
            return name_of(self._by)
        array = np.ascontiguousarray(self.array())
        return f"array {zlib.crc32(array.tobytes()):08x}"

    def _check_length(self) -> None:
        assert self._array is not None
        if len(self._array) != self._order.num_samples:
            raise ConfigError(
                f"{self.caller} was given {len(self._array)} values, and the dataset has {self._order.num_samples} samples "
                "at that point. Give one value per sample, in the order of the dataset."
            )

    def _read(self) -> NDArray[Any]:
        num_samples = self._order.num_samples
        parts = [np.zeros(0)]
        self.is_bad = np.zeros(num_samples, dtype=bool)
        with PrivateGenerators(0) as generators:
            for begin in range(0, num_samples, NUM_READ_AT_ONCE):
                positions = range(begin, min(begin + NUM_READ_AT_ONCE, num_samples))
                values, is_bad = self._read_part(integers(self._order.indices(positions, 0)))
                parts += [values] if len(values) else []
                self.is_bad[positions.start : positions.stop] = is_bad
            if generators.were_used():
                raise ConfigError(
                    f"{self.caller} reads every sample once, and a stage before it draws random numbers: what was read is "
                    "not what will be trained. Call it before that stage, or give an array."
                )
        good = np.concatenate(parts[1:] or parts)
        if not self.is_bad.any():
            return good
        # Bad samples will be skipped by whoever reads them; until then they go with the first good one.
        array = np.full(num_samples, good[0] if len(good) else 0, dtype=good.dtype)
        array[~self.is_bad] = good
        return array

    def _read_part(self, indices: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """The values of the samples that can be read, and which of them cannot."""
        is_bad = np.zeros(len(indices), dtype=bool)
        while not is_bad.all():
            try:
                return self._of(indices[~is_bad]), is_bad
            except SkipSamples as found:
                is_bad |= np.isin(indices, list(found.bad))
        return np.zeros(0), is_bad

    def _of(self, indices: NDArray[np.int64]) -> NDArray[Any]:
        if isinstance(self._by, str):
            return _as_array(column_of(self._source, self._by, indices, self.caller), self.caller)
        values = [
            _plain(call_user(self.caller, self._by, index, 0, sample))
            for index, sample in zip(indices, self._source.samples(indices), strict=True)
        ]
        return _as_array(values, self.caller)


def column_of(source: Source, name: str, indices: Any, caller: str) -> Any:
    """A column of a batch of these samples: among the inputs, or the label where that is its name."""
    batch = source.batch(indices)
    return find_column(batch, name, label_of(source), caller)


def find_column(batch: Tree, name: str, label: Any, caller: str) -> Any:
    """The column of that name in a dict, or in the dict of a pair (inputs, target)."""
    inputs = batch[0] if isinstance(batch, (tuple, list)) and len(batch) else batch
    if isinstance(inputs, dict) and name in inputs:
        return inputs[name]
    if isinstance(batch, (tuple, list)) and len(batch) > 1:
        target = batch[1] if hasattr(batch, "_fields") else batch[-1]
        if name == label:
            return target
        if isinstance(target, dict) and name in target:
            return target[name]
    there = [str(key) for key in inputs] if isinstance(inputs, dict) else []
    if not there:
        raise ConfigError(
            f"{caller} was given the column '{name}', and the samples are no dicts of columns. Give an array with one value "
            "per sample, or a function of a sample."
        )
    if isinstance(label, str):
        there.append(label)
    raise NoSuchColumn(asked=[name], there=there, where="the dataset", asked_by=caller)


def label_of(source: Source) -> Any:
    """The name of the label column, where the source has one."""
    return next((stage["label"] for stage in source.describe() if "label" in stage), None)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    return value


def _as_array(values: Any, caller: str) -> NDArray[Any]:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy()
    array = np.asarray(values)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1 or array.dtype.kind == "O":
        raise DataError(
            f"{caller} needs one number or string per sample, and got values of shape {array.shape} and type {array.dtype}. "
            "Give a column, an array or a function with one plain value for each sample."
        )
    return array
