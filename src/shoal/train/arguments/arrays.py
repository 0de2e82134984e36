"""Arrays and DataFrames as batches, for `fit(x, y)`, `evaluate(x, y)` and `predict(x)`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from shoal.data import Dataset
from shoal.data.batches import Batches
from shoal.data.tree import leaves
from shoal.errors import ConfigError


def is_arrays(data: Any) -> bool:
    """Whether this is data itself, not a dataset: arrays, tensors, tables, or a dict or tuple of them."""
    if isinstance(data, (tuple, list)):
        return bool(data) and all(is_arrays(each) for each in data)
    if isinstance(data, Mapping):
        return bool(data) and all(is_arrays(each) for each in data.values())
    return isinstance(data, (Tensor, np.ndarray)) or _is_frame(data)


def batches_of_arrays(
    data: Any, target: Any, *, batch_size: int | None, shuffle: bool, seed: int, what: str
) -> Any:
    """Arguments of a Trainer call, with arrays as batches and everything else unchanged."""
    if target is None and not is_arrays(data):
        if batch_size is not None:
            raise ConfigError(
                f"{what}(batch_size={batch_size!r}) is for arrays, and this is a {type(data).__name__}. Nothing was started; say the size "
                f"where batches are made: data.batch({batch_size})."
            )
        return data
    given = data if target is None else (data, target)
    if isinstance(given, Batches) or not is_arrays(given):
        wrong = target if is_arrays(data) else data
        cure = f"a dataset holds inputs and target: {what}(data.batch(32))"
        if isinstance(data, nn.Module):
            cure = f"the model is the Trainer's: shoal.Trainer(model, loss=...).{what}(data)"
        elif isinstance(wrong, (list, tuple)):
            cure = "make arrays of lists, numpy.asarray(x)"
        elif what == "fit" and not is_arrays(target):
            cure += ", and what it is measured on is validation_data="
        raise ConfigError(
            f"{what}(x, y) takes arrays, tensors and DataFrames, and was given a {type(wrong).__name__}. Nothing was started; {cure}."
        )
    tree = _converted(given)
    if any(not leaf.ndim for leaf in leaves(tree)):
        raise ConfigError(
            f"{what}(x, y) was given a single number in the place of an array, and takes arrays with a row for each sample. Nothing was "
            "started; give each sample its own."
        )
    lengths = sorted({len(leaf) for leaf in leaves(tree)})
    if len(lengths) > 1:
        raise ConfigError(
            f"{what}(x, y): the arrays have different numbers of rows, {' and '.join(map(str, lengths))}. Nothing was started; each "
            "row of x has one in y."
        )
    dataset = Dataset.from_arrays(tree)
    if shuffle:
        dataset = dataset.shuffle(seed=seed)
    num_rows = lengths[0] if lengths else 0
    return dataset.batch(min(32 if batch_size is None else batch_size, max(num_rows, 1)))


def _is_frame(data: Any) -> bool:
    # By what it has: pandas is not imported for it.
    return hasattr(data, "to_numpy") and (hasattr(data, "columns") or hasattr(data, "name"))


def _converted(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {name: _converted(each) for name, each in data.items()}
    if isinstance(data, (tuple, list)):
        return tuple(_converted(each) for each in data)
    if isinstance(data, Tensor):
        return data
    if _is_frame(data):
        columns = list(data.columns) if hasattr(data, "columns") else []
        words = [str(name) for name in columns if data[name].to_numpy().dtype.kind not in "biuf"]
        if words:
            raise ConfigError(
                f"the DataFrame's column '{words[0]}' holds no numbers (of {len(words)} such columns). Nothing was started; encode it, or "
                "describe the columns with shoal.features, which also keeps what it learnt for serving."
            )
        whole = data.to_numpy()
        if columns and whole.dtype.kind == "O":  # pandas, of integers and booleans
            whole = np.concatenate(
                [data[name].to_numpy().reshape(len(data), -1) for name in dict.fromkeys(columns)], axis=1
            )
        data = whole
    array = np.asarray(data)
    if array.dtype.kind not in "biuf":
        raise ConfigError(
            f"an array of {array.dtype} holds no numbers. Nothing was started; encode it first."
        )
    # As in Keras: weights are float32, and numpy's default is not.
    array = array.astype(np.float32) if array.dtype == np.float64 else array
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)
    return array
