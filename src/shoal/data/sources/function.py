"""Samples that are computed from their index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.data.collate import to_tensors, uncollate
from shoal.data.order.order import Indices, as_array
from shoal.data.sources.source import Source, name_of
from shoal.data.tree import Tree, map_leaves
from shoal.errors import DataError


class FunctionSource(Source):
    """A vectorised function of the index: an array of indices in, a batch out."""

    runs_user_code = True

    def __init__(self, fn: Callable[[NDArray[np.int64]], Tree], num_samples: int) -> None:
        self._fn, self.num_samples = fn, num_samples

    def samples(self, indices: Indices, epoch: int = 0) -> list[Any]:
        """The rows of one call."""
        return uncollate(self.batch(indices, epoch), len(indices))

    def batch(self, indices: Indices, epoch: int = 0) -> Tree:
        """What the function gives, arrays as tensors, checked to have one row per index."""
        wanted = np.asarray(indices, dtype=np.int64) if isinstance(indices, list) else as_array(indices)

        def check(path: str, leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or len(leaf) != len(wanted):
                got = (
                    f"shape {tuple(leaf.shape)}"
                    if isinstance(leaf, torch.Tensor)
                    else f"a {type(leaf).__name__}"
                )
                where = f" at {path}" if path else ""
                raise DataError(
                    f"the function '{name_of(self._fn)}' was asked for {len(wanted)} samples and gave {got}{where}. It "
                    "must return tensors or arrays with one row per index it is given."
                )
            return leaf

        return map_leaves(check, to_tensors(self._fn(wanted)))

    def describe(self) -> list[dict[str, Any]]:
        """The function's name and the length."""
        return [{"source": "function", "fn": name_of(self._fn), "num_samples": self.num_samples}]
