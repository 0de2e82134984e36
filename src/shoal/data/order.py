"""Which sample stands at which position of an epoch.

Every order is a function (position, epoch) -> index of the source, built on
the order before it. Nothing here reads a sample. Only `Drawn`, the order of a
foreign sampler, has to be stored, and only for the epoch at hand.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.seeds import mix
from shoal.data.permutation import Permutation

Positions = range | NDArray[np.int64]
"""Places in an epoch: a range where they are contiguous, which lets a source read them without a gather."""

Indices = range | NDArray[np.int64] | list[Any]
"""What a source is asked for; a list where a foreign sampler names its samples by something else than integers."""

_SPLIT = 0x53504C4954  # keeps split(seed=0) and shuffle(seed=0) from being one permutation


def as_array(positions: Positions) -> NDArray[np.int64]:
    """The positions as an array."""
    if isinstance(positions, range):
        return np.arange(positions.start, positions.stop, dtype=np.int64)
    return positions


class Order(ABC):
    """The samples of a dataset in the order of an epoch."""

    num_samples: int

    is_computed = False
    """True where indices come out of arithmetic, which is cheaper over many positions at once."""

    seed = 0
    """The seed of the last shuffle."""

    @abstractmethod
    def indices(self, positions: Positions, epoch: int) -> Indices:
        """The source's indices at these positions of an epoch."""

    @abstractmethod
    def describe(self) -> list[dict[str, Any]]:
        """The stages from the source on, fit for JSON."""

    def length(self, epoch: int) -> int:
        """Samples in this epoch; another number than `num_samples` only where a foreign sampler draws so."""
        return self.num_samples


class InOrder(Order):
    """As the source has them."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def indices(self, positions: Positions, epoch: int) -> Indices:
        """The positions themselves."""
        return positions

    def describe(self) -> list[dict[str, Any]]:
        """Nothing stands between the source and the epoch."""
        return []


class Shuffled(Order):
    """Another permutation each epoch."""

    is_computed = True

    def __init__(self, parent: Order, seed: int) -> None:
        self.parent, self.seed = parent, seed
        self.num_samples = parent.num_samples

    def indices(self, positions: Positions, epoch: int) -> Indices:
        """The parent's indices at the permuted positions."""
        permutation = Permutation(self.num_samples, seed=self.seed, epoch=epoch)
        return self.parent.indices(permutation(as_array(positions)), epoch)

    def describe(self) -> list[dict[str, Any]]:
        """The parent's stages and the seed."""
        return [*self.parent.describe(), {"stage": "shuffle", "seed": self.seed}]


class Part(Order):
    """A range of a fixed permutation: one side of a split. Without a seed, a range of the parent itself."""

    def __init__(self, parent: Order, *, begin: int, num_samples: int, split_seed: int | None) -> None:
        self.parent, self.begin, self.num_samples = parent, begin, num_samples
        self.split_seed = split_seed
        self.is_computed = parent.is_computed or split_seed is not None

    def indices(self, positions: Positions, epoch: int) -> Indices:
        """The parent's indices in this part's range of the permutation."""
        moved: Positions
        if isinstance(positions, range):
            moved = range(positions.start + self.begin, positions.stop + self.begin)
        else:
            moved = positions + self.begin
        if self.split_seed is not None:
            # No epoch here: a sample must stay on its side of the split for ever.
            moved = Permutation(self.parent.num_samples, seed=mix(_SPLIT, self.split_seed))(as_array(moved))
        return self.parent.indices(moved, epoch)

    def describe(self) -> list[dict[str, Any]]:
        """The parent's stages, and which part of it this is."""
        stage = {
            "stage": "split",
            "seed": self.split_seed,
            "begin": self.begin,
            "num_samples": self.num_samples,
        }
        return [*self.parent.describe(), stage]
