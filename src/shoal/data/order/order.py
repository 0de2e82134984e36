"""Which sample stands at which position of an epoch.

Every order is a function (position, epoch) -> index of the source, built on
the order before it. Nothing here reads a sample. The other orders are in the
files order_*.py; only `Drawn`, the order of a foreign sampler, has to be
stored, and only for the epoch at hand.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.order.permutation import Permutation
from shoal.runtime.seeds import mix

Positions = range | NDArray[np.int64]
"""Places in an epoch: a range where they are contiguous, which lets a source read them without a gather."""

Indices = range | NDArray[np.int64] | list[Any]
"""What a source is asked for; a list where a foreign sampler names its samples by something else than integers."""

ENDLESS = 1 << 62
"""How many samples an epoch without an end has: more than anybody will read."""

_SPLIT = 0x53504C4954  # keeps split(seed=0) and shuffle(seed=0) from being one permutation


def as_array(positions: Positions) -> NDArray[np.int64]:
    """The positions as an array."""
    if isinstance(positions, range):
        return np.arange(positions.start, positions.stop, dtype=np.int64)
    return positions


def shifted(positions: Positions, by: int) -> Positions:
    """The positions so many further on; a range stays one."""
    if isinstance(positions, range):
        return range(positions.start + by, positions.stop + by)
    return positions + by


class Order(ABC):
    """The samples of a dataset in the order of an epoch."""

    name = ""
    """Of the stage, as in the method that makes it."""

    is_computed = False
    """True where indices come out of arithmetic, which is cheaper over many positions at once."""

    seed = 0
    """The seed of the last shuffle."""

    varies = False
    """True where a position holds another sample in another epoch."""

    changes_set = False
    """True where an epoch holds other samples than another: a few of a shuffled dataset, say."""

    length_varies = False
    """True where an epoch holds more samples than another."""

    is_endless = False
    """True where an epoch has no end."""

    is_counted = True
    """False where somebody has to read before it is known how many samples there are."""

    @property
    def num_samples(self) -> int:
        """Samples in the first epoch."""
        return self.length(0)

    @abstractmethod
    def length(self, epoch: int) -> int:
        """Samples in this epoch."""

    @abstractmethod
    def indices(self, positions: Positions, epoch: int) -> Indices:
        """The source's indices at these positions of an epoch."""

    @abstractmethod
    def describe(self) -> list[dict[str, Any]]:
        """The stages from the source on, fit for JSON."""

    def names(self) -> list[str]:
        """What the stages are called. Reads nothing."""
        return [self.name] if self.name else []


class InOrder(Order):
    """As the source has them."""

    def __init__(self, num_samples: int | Callable[[], int], *, parts: Sequence[Order] = ()) -> None:
        """A function where the number follows from orders inside the source (`parts`), which may have to read first."""
        self._num_samples, self._parts = num_samples, parts
        self.is_endless = bool(parts) and all(part.is_endless for part in parts)

    @property
    def is_counted(self) -> bool:  # type: ignore[override]  # a property may stand for a plain attribute
        """Whether those inside the source are."""
        return all(part.is_counted for part in self._parts)

    def length(self, epoch: int) -> int:
        """All of them, always."""
        return self._num_samples if isinstance(self._num_samples, int) else self._num_samples()

    def indices(self, positions: Positions, epoch: int) -> Indices:
        """The positions themselves."""
        return positions

    def describe(self) -> list[dict[str, Any]]:
        """Nothing stands between the source and the epoch."""
        return []


class Stage(Order):
    """An order made of another one, which it resembles in all that it does not say."""

    def __init__(self, parent: Order) -> None:
        self.parent = parent
        self.seed, self.is_computed = parent.seed, parent.is_computed
        self.varies, self.changes_set = parent.varies, parent.changes_set
        self.length_varies, self.is_endless = parent.length_varies, parent.is_endless

    @property
    def is_counted(self) -> bool:  # type: ignore[override]  # a property may stand for a plain attribute
        """Whether the parent's length is known."""
        return self.parent.is_counted

    def length(self, epoch: int) -> int:
        """As many as the parent has."""
        return self.parent.length(epoch)

    def names(self) -> list[str]:
        """The parent's stages, and this one."""
        return [*self.parent.names(), self.name]

    def describe(self) -> list[dict[str, Any]]:
        """The parent's stages, and this one."""
        return [*self.parent.describe(), {"stage": self.name, **self.settings()}]

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What makes this stage differ from another of its kind, fit for JSON."""


class Shuffled(Stage):
    """Another permutation each epoch."""

    name = "shuffle"

    def __init__(self, parent: Order, seed: int) -> None:
        super().__init__(parent)
        self.seed, self.is_computed, self.varies = seed, True, True

    def indices(self, positions: Positions, epoch: int) -> Indices:
        """The parent's indices at the permuted positions."""
        permutation = Permutation(self.parent.length(epoch), seed=self.seed, epoch=epoch)
        return self.parent.indices(permutation(as_array(positions)), epoch)

    def indices_of(self, positions: NDArray[np.int64], epochs: NDArray[np.uint64]) -> Indices:
        """The same, each position in an epoch of its own; for a parent that does not vary."""
        several = Permutation.of_epochs(self.parent.length(0), seed=self.seed, epochs=epochs)
        return self.parent.indices(several(positions), 0)

    def settings(self) -> dict[str, Any]:
        """The seed."""
        return {"seed": self.seed}


class Part(Stage):
    """A range of a fixed permutation: one side of a split. Without a seed, a range of the parent itself."""

    name = "split"

    def __init__(self, parent: Order, *, begin: int, num_samples: int, split_seed: int | None) -> None:
        super().__init__(parent)
        self.begin, self._num_samples = begin, num_samples
        self.split_seed = split_seed
        self.is_computed = parent.is_computed or split_seed is not None
        self.changes_set = parent.changes_set or parent.varies

    def length(self, epoch: int) -> int:
        """As many as the part was given."""
        return self._num_samples

    def indices(self, positions: Positions, epoch: int) -> Indices:
        """The parent's indices in this part's range of the permutation."""
        return self.parent.indices(self._within(self._moved(positions)), epoch)

    def settings(self) -> dict[str, Any]:
        """The seed, and which part of it this is."""
        return {"seed": self.split_seed, "begin": self.begin, "num_samples": self._num_samples}

    def _moved(self, positions: Positions) -> Positions:
        return shifted(positions, self.begin)

    def _within(self, moved: Positions) -> Positions:
        if self.split_seed is None:
            return moved
        # No epoch here: a sample must stay on its side of the split for ever.
        return Permutation(self.parent.num_samples, seed=mix(_SPLIT, self.split_seed))(as_array(moved))


class Rest(Part):
    """What a part leaves of the whole: the training side of a fold."""

    name = "folds"

    def __init__(self, parent: Order, *, begin: int, num_left_out: int, split_seed: int | None) -> None:
        num_samples = parent.num_samples - num_left_out
        super().__init__(parent, begin=begin, num_samples=num_samples, split_seed=split_seed)
        self._num_left_out = num_left_out

    def settings(self) -> dict[str, Any]:
        """The seed, and what is left out."""
        return {"seed": self.split_seed, "begin": self.begin, "num_left_out": self._num_left_out}

    def _moved(self, positions: Positions) -> Positions:
        places = as_array(positions)
        return np.where(places < self.begin, places, places + self._num_left_out)
