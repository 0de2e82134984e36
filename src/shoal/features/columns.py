"""Columns of a batch as numpy arrays: numbers, or tokens (strings or whole numbers), and hashes of tokens.

Batches come from tables (tensors, arrays of str), from torch's collate
(tensors, lists of str) and from a model server (lists of anything).
Hashes are 64 bits, the same in every process, on every machine, for ever. A
test pins them: they are part of every model that was trained on hashed ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.data.order import GOLDEN, splitmix64
from shoal.errors import ConfigError, DataError, NoSuchColumn
from shoal.runtime.kernel_cache import kernel, matrix, mixed, types, vector

PADDING = -1
"""Padding behind the end of lists of whole numbers."""


class Tokens(NamedTuple):
    """Strings or whole numbers of one shape."""

    values: NDArray[Any]
    """Values as np.str_ or int64."""

    missing: NDArray[np.bool_]
    """NaN, None and the empty string; those stand in `values` as 0 and ''."""

    @property
    def is_text(self) -> bool:
        return bool(self.values.dtype.kind == "U")


class Columns:
    """The columns of one batch by name; each is made an array once, however many features look at it."""

    def __init__(self, inputs: Mapping[str, Any]) -> None:
        self._inputs = inputs
        self._arrays: dict[str, NDArray[Any]] = {}

    def raw(self, column: str, asked_by: str) -> Any:
        """A column as it is; refused with the names that there are."""
        try:
            return self._inputs[column]
        except KeyError:
            raise NoSuchColumn(
                asked=[column],
                there=[str(name) for name in self._inputs],
                where="the batch",
                asked_by=asked_by,
            ) from None

    def numbers(self, column: str, asked_by: str) -> NDArray[np.float64]:
        """A column of numbers as [rows, width]; NaN where they are missing."""
        array = self._array(column, asked_by)
        if array.dtype.kind == "O":
            array = np.array([np.nan if value is None else value for value in array.reshape(-1).tolist()])
        if array.dtype.kind not in "biuf":
            raise DataError(
                f"{asked_by} needs numbers, but the column '{column}' holds {_kind(array)}, for instance {_example(array)}. "
                "Nothing was computed; use categorical or hashed for it, or read it as numbers (schema=)."
            )
        return _rows(array, column, asked_by).astype(np.float64)

    def tokens(self, column: str, asked_by: str, *, missing_value: Any = None) -> Tokens:
        """A column of strings or whole numbers, [rows]."""
        array = self._array(column, asked_by)
        if array.ndim == 0:
            raise _single(asked_by)
        if array.ndim > 1:
            raise DataError(
                f"{asked_by} needs one value per row, but the column '{column}' has the shape {array.shape}. Nothing was "
                "computed; use bag for lists of ids."
            )
        return _tokens(array, column, asked_by, missing_value)

    def token_lists(self, column: str, asked_by: str) -> Tokens:
        """A column of lists of strings or whole numbers, [rows, longest]; behind their ends '' and -1."""
        array = _padded(self.raw(column, asked_by), padding=PADDING)
        if array.ndim != 2:
            raise DataError(
                f"{asked_by} needs a list per row, but the column '{column}' has the shape {array.shape}. Nothing was "
                "computed; use categorical or hashed for single values."
            )
        return _tokens(array, column, asked_by, None)

    def number_lists(self, column: str, asked_by: str) -> NDArray[np.float64]:
        """A column of lists of numbers, [rows, longest]; behind their ends 0."""
        array = _padded(self.raw(column, asked_by), padding=0.0)
        if array.ndim != 2 or array.dtype.kind not in "biuf":
            raise DataError(
                f"{asked_by} needs a list of numbers per row as weights, but the column '{column}' holds {_kind(array)} of "
                f"the shape {array.shape}. Nothing was computed."
            )
        return array.astype(np.float64)

    def _array(self, column: str, asked_by: str) -> NDArray[Any]:
        if column not in self._arrays:
            self._arrays[column] = _array(self.raw(column, asked_by))
        return self._arrays[column]


def columns_of(batch: Any) -> tuple[Columns, Callable[[Any], Any]]:
    """The named columns of a batch, and how to put something else in their place."""
    if isinstance(batch, Mapping):
        return Columns(batch), lambda inputs: inputs
    if isinstance(batch, (tuple, list)) and batch and isinstance(batch[0], Mapping):
        return Columns(batch[0]), lambda inputs: (inputs, *batch[1:])
    raise ConfigError(
        f"features need batches with named columns: a dict, or (dict, label), but got a {type(batch).__name__}. Tables give "
        "such batches; arrays do by from_arrays(({'age': age, 'city': city}, label))."
    )


def _tokens(array: NDArray[Any], column: str, asked_by: str, missing_value: Any) -> Tokens:
    if array.dtype.kind in "OST":
        array = _from_objects(array, column, asked_by)
    kind = array.dtype.kind
    if kind == "U":
        found = array if missing_value is None else np.where(array == str(missing_value), "", array)
        return Tokens(found, found == "")
    if kind in "biu":
        found = array.astype(np.int64)
        missing = np.zeros(found.shape, np.bool_)
    elif kind == "f":
        missing = np.isnan(array)
        found = np.where(missing, 0, array).astype(np.int64)
        wrong = ~missing & (found != array)
        if wrong.any():
            raise DataError(
                f"{asked_by} needs strings or whole numbers, but the column '{column}' holds numbers like "
                f"{array[wrong].tolist()[0]!r}. Nothing was computed; cut it into buckets first, with bucketized."
            )
    else:
        raise DataError(f"{asked_by} cannot read the column '{column}': it holds {_kind(array)}.")
    if missing_value is not None:
        missing |= found == missing_value
        found = np.where(missing, 0, found)
    return Tokens(found, missing)


def _array(raw: Any) -> NDArray[Any]:
    if isinstance(raw, torch.Tensor):
        return raw.detach().cpu().numpy()
    if isinstance(raw, np.ndarray):
        return raw
    if isinstance(raw, Sequence) and not isinstance(raw, str):
        if raw and isinstance(raw[0], torch.Tensor):
            raw = [part.tolist() for part in raw]
        return np.array(raw, dtype=object) if None in raw else np.array(raw)
    return np.array(raw)


def _rows(array: NDArray[Any], column: str, asked_by: str) -> NDArray[Any]:
    if array.ndim == 1:
        return array[:, None]
    if array.ndim == 2:
        return array
    if array.ndim == 0:
        raise _single(asked_by)
    raise DataError(
        f"{asked_by} needs a number or a list of numbers per row, but the column '{column}' has the shape {array.shape}."
    )


def _single(asked_by: str) -> ConfigError:
    return ConfigError(
        f"{asked_by} was given a single sample: features work on batches. Put them behind batch, "
        "data.batch(1024).map(features), or say data.map(features, batched=True)."
    )


def _padded(raw: Any, *, padding: Any) -> NDArray[Any]:
    """Lists of several lengths as one array."""
    if isinstance(raw, (torch.Tensor, np.ndarray)) and _array(raw).dtype.kind != "O":
        return _array(raw)
    if not all(isinstance(row, (list, tuple, np.ndarray, torch.Tensor)) for row in raw):
        return _array(raw)
    rows = [list(row) if isinstance(row, (list, tuple)) else row.tolist() for row in raw]
    longest = max(map(len, rows), default=0)
    if any(isinstance(value, (str, bytes)) for row in rows for value in row):
        padding = ""
    filled = [[*row, *[padding] * (longest - len(row))] for row in rows]
    return np.array(filled, dtype=None if longest else np.int64).reshape(len(rows), longest)


def _from_objects(array: NDArray[Any], column: str, asked_by: str) -> NDArray[Any]:
    listed = array.reshape(-1).tolist()
    if all(value is None or isinstance(value, (str, bytes)) for value in listed):
        texts = [
            "" if value is None else value if isinstance(value, str) else value.decode("utf-8", "replace")
            for value in listed
        ]
        return np.array(texts, dtype=np.str_).reshape(array.shape)
    if all(value is None or isinstance(value, (bool, int, float, np.number)) for value in listed):
        numbers = [np.nan if value is None else value for value in listed]
        return np.array(numbers).reshape(array.shape)
    odd = next(value for value in listed if not isinstance(value, (str, bytes, bool, int, float, type(None))))
    raise DataError(
        f"{asked_by} needs strings or whole numbers, but the column '{column}' holds a {type(odd).__name__}. Nothing was "
        "computed."
    )


def _kind(array: NDArray[Any]) -> str:
    return {"U": "strings", "S": "bytes", "T": "strings", "O": "objects"}.get(
        array.dtype.kind, str(array.dtype)
    )


def _example(array: NDArray[Any]) -> str:
    return repr(array.reshape(-1)[:1].tolist()[0]) if array.size else "nothing"


Hashes = NDArray[np.uint64]

_START, _STEP = 0xCBF29CE484222325, 0x100000001B3  # FNV-1a's


def hash_text(texts: NDArray[np.str_], seed: int) -> Hashes:
    """Hash of strings by their characters, whatever the width of the array."""
    width = texts.dtype.itemsize // 4
    out = np.empty(texts.size, np.uint64)
    codes = np.ascontiguousarray(texts).reshape(-1).view(np.uint32).reshape(texts.size, width)
    _hash_text(codes, np.uint64(seed), out)
    return out.reshape(texts.shape)


def hash_ints(numbers: NDArray[np.int64], seed: int) -> Hashes:
    return splitmix64(
        numbers.astype(np.int64).view(np.uint64) + splitmix64(np.array([seed], np.uint64) + GOLDEN)
    )


def hash_together(parts: Sequence[Hashes], seed: int) -> Hashes:
    total = np.full_like(parts[0], seed)
    for part in parts:
        total = splitmix64((total + GOLDEN) ^ part)
    return total


def bucket_of(hashes: Hashes, buckets: int) -> NDArray[np.int64]:
    return (hashes % np.uint64(buckets)).astype(np.int64)


@kernel((matrix(types.uint32), types.uint64, vector(types.uint64, written=True)))
def _hash_text(codes: Any, seed: Any, out: Any) -> None:
    for row in range(codes.shape[0]):
        length = codes.shape[1]
        while length > 0 and codes[row, length - 1] == 0:
            length -= 1
        value = np.uint64(_START) ^ seed
        for at in range(length):
            value = (value ^ np.uint64(codes[row, at])) * np.uint64(_STEP)
        out[row] = mixed(value ^ np.uint64(length))
