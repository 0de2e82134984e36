"""Tables of an incremental checkpoint: the rows of its base, updated by those that changed since.

A piece that names a piece of keys holds only rows that changed. The keys of a table increase in
both checkpoints, and the keys of deleted rows are stored beside them. Independent of files;
checkpoint.py reads and verifies them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class MergedKeys:
    """Present keys of a table, and the source of each row."""

    keys: NDArray[np.int64]
    of_base: NDArray[np.int64]
    """Rows of the base that are unchanged."""

    at_of_base: NDArray[np.int64]
    """Their places among `keys`."""

    at_of_changed: NDArray[np.int64]

    def merge(self, base: Tensor, changed: Tensor) -> Tensor:
        """One column of the table."""
        whole = torch.empty((len(self.keys), *changed.shape[1:]), dtype=changed.dtype)
        whole[torch.from_numpy(self.at_of_base)] = base[torch.from_numpy(self.of_base)]
        whole[torch.from_numpy(self.at_of_changed)] = changed
        return whole


def merged(base: NDArray[np.int64], changed: NDArray[np.int64], gone: NDArray[np.int64]) -> MergedKeys:
    """All three increasing, each key once."""
    is_as_it_was = ~np.isin(base, changed, assume_unique=True) & ~np.isin(base, gone, assume_unique=True)
    of_base = np.flatnonzero(is_as_it_was)
    keys = np.union1d(base[of_base], changed)
    return MergedKeys(keys, of_base, np.searchsorted(keys, base[of_base]), np.searchsorted(keys, changed))
