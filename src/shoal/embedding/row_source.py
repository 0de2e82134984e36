"""Where the rows of an embedding come from, as its forward and backward see it."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shoal.embedding.kernels import unique


class RowSource(Protocol):
    """Rows by key: from this process (local_rows.py) or from servers.

    `pull` is called once per forward of the module, `push` once per backward
    of that forward, with the keys that got a gradient, each once, increasing.
    Whoever provides it decides what becomes of the gradients, and when.
    """

    def uniques(self, ids: Tensor) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """The distinct ids in increasing order, and the place among them of every id."""
        ...

    def pull(self, keys: NDArray[np.int64]) -> Tensor:
        """A row per key, on the CPU. It stays as it is until the backward that belongs to it is over."""
        ...

    def push(self, keys: NDArray[np.int64], gradients: NDArray[Any]) -> None:
        """What backward found for these keys, one row each."""
        ...

    def everything(self) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """All rows that there are, by increasing key: copies."""
        ...


def uniques_of(ids: Tensor) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """What `uniques` gives where nothing is known beforehand."""
    return unique(ids.detach().reshape(-1).cpu().numpy())


def merged(
    gradients: list[tuple[NDArray[np.int64], NDArray[Any]]],
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Several pushes as one, rows of one key added in the order of the pushes. At least one is given."""
    if len(gradients) == 1:
        return gradients[0]
    keys, inverse = unique(np.concatenate([keys for keys, _ in gradients]))
    rows = np.zeros((len(keys), gradients[0][1].shape[1]), gradients[0][1].dtype)
    start = 0
    for part, values in gradients:
        rows[inverse[start : start + len(part)]] += values  # no key twice within one push
        start += len(part)
    return keys, rows
