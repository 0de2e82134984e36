"""Samples that come from several places, asked for place by place and put back into one order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.data.order.order import Indices, as_array
from shoal.data.tree import Tree
from shoal.errors import DataError


def integers(indices: Indices) -> NDArray[np.int64]:
    """Indices as an array."""
    return np.asarray(indices, dtype=np.int64) if isinstance(indices, list) else as_array(indices)


def groups(keys: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """(key, the rows that have it), for each key that is there."""
    for key in np.unique(keys).tolist():
        yield key, np.flatnonzero(keys == key)


def gather_samples(keys: NDArray[np.int64], read: Callable[[int, NDArray[np.int64]], list[Any]]) -> list[Any]:
    """The samples of all groups, in the order of the rows."""
    found: list[Any] = [None] * len(keys)
    for key, rows in groups(keys):
        for row, sample in zip(rows.tolist(), read(key, rows), strict=True):
            found[row] = sample
    return found


def gather_batch(keys: NDArray[np.int64], read: Callable[[int, NDArray[np.int64]], Tree]) -> Tree:
    """The batches of all groups as one, in the order of the rows."""
    parts = [(rows, read(key, rows)) for key, rows in groups(keys)]
    if len(parts) == 1:
        return parts[0][1]
    came = np.concatenate([rows for rows, _ in parts])
    back = np.empty_like(came)
    back[came] = np.arange(len(came))
    return _joined([batch for _, batch in parts], back, "")


def _joined(batches: list[Tree], back: NDArray[np.int64], path: str) -> Tree:
    first = batches[0]
    if isinstance(first, dict):
        if any(not isinstance(batch, dict) or batch.keys() != first.keys() for batch in batches):
            raise _differ([_shape(batch) for batch in batches], path)
        return {key: _joined([batch[key] for batch in batches], back, f"{path}[{key!r}]") for key in first}
    if all(isinstance(batch, torch.Tensor) for batch in batches):
        return _rows(_of_one_width(batches), back, path)
    if all(isinstance(batch, np.ndarray) for batch in batches):
        joined: Tree = np.concatenate(batches)[back]
        return joined
    if isinstance(first, (tuple, list)):
        if any(type(batch) is not type(first) for batch in batches):
            raise _differ([_shape(batch) for batch in batches], path)
        if all(isinstance(value, (str, bytes)) for batch in batches for value in batch):
            strings = [value for batch in batches for value in batch]  # a column of strings
            return type(first)(strings[at] for at in back.tolist())
        if any(len(batch) != len(first) for batch in batches):
            raise _differ([_shape(batch) for batch in batches], path)
        parts = [
            _joined(list(values), back, f"{path}[{at}]")
            for at, values in enumerate(zip(*batches, strict=True))
        ]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    raise _differ([_shape(batch) for batch in batches], path)


def _rows(tensors: list[torch.Tensor], back: NDArray[np.int64], path: str) -> torch.Tensor:
    if len({(tensor.shape[1:], tensor.dtype) for tensor in tensors}) > 1:
        raise _differ([_shape(tensor) for tensor in tensors], path)
    joined = torch.cat(tensors)
    return joined.index_select(0, torch.from_numpy(back).to(joined.device))


def _of_one_width(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Lists of several lengths are padded to the longest of their batch: to one width for all."""
    widths = {tensor.shape[1] for tensor in tensors if tensor.dim() == 2}
    if len(widths) < 2 or any(tensor.dim() != 2 for tensor in tensors):
        return tensors
    widest = max(widths)

    def widened(tensor: torch.Tensor) -> torch.Tensor:
        filled = 0 if tensor.is_floating_point() or tensor.dtype in (torch.bool, torch.uint8) else -1
        return torch.nn.functional.pad(tensor, (0, widest - tensor.shape[1]), value=filled)

    return [widened(tensor) for tensor in tensors]


def _shape(part: Any) -> str:
    if isinstance(part, torch.Tensor):
        return f"{str(part.dtype).removeprefix('torch.')}{list(part.shape[1:])}"
    if isinstance(part, dict):
        return f"a dict of {', '.join(str(key) for key in part)}"
    return f"a tuple of {len(part)}" if isinstance(part, (tuple, list)) else f"a {type(part).__name__}"


def _differ(shapes: list[str], path: str) -> DataError:
    where = f" at {path}" if path else ""
    return DataError(
        f"samples of one batch come from datasets that differ{where}: {' and '.join(dict.fromkeys(shapes))}. They cannot be "
        "one batch; bring them to one form with map first."
    )
