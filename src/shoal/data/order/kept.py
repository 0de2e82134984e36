"""Some of the samples, chosen once: what `filter` lets pass, and the parts of a stratified split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.order.bitmap import Bitmap
from shoal.data.order.order import Indices, Order, Positions, Stage, as_array


class Kept(Stage):
    """Another order without some of its samples; the others stay in their order.

    Who asks for the length or the first index has them chosen. Where the order
    before varies (a shuffle), so do the positions that are kept, and those of
    the epoch at hand are remembered beside those of the first.
    """

    def __init__(
        self,
        parent: Order,
        choose: Callable[[int], NDArray[np.bool_]],
        *,
        name: str,
        settings: dict[str, Any],
    ) -> None:
        """`choose` says of each position of an epoch of the parent whether it is kept."""
        super().__init__(parent)
        self.name, self._choose, self._settings = name, choose, settings
        self.is_computed = True
        self.length_varies = parent.length_varies or parent.changes_set
        self._chosen: dict[int, Bitmap] = {}

    @property
    def is_counted(self) -> bool:  # type: ignore[override]  # a property may stand for a plain attribute
        """Whether they have been chosen yet."""
        return 0 in self._chosen

    def length(self, epoch: int) -> int:
        """As many as are kept."""
        return self.chosen(epoch if self.length_varies else 0).num_kept

    def indices(self, positions: Positions, epoch: int) -> Indices:
        """The parent's, at the kept positions."""
        return self.parent.indices(self.chosen(epoch).select(as_array(positions)), epoch)

    def chosen(self, epoch: int) -> Bitmap:
        """The kept positions of the parent in this epoch."""
        epoch = epoch if self.parent.varies else 0
        if epoch not in self._chosen:
            bits = Bitmap(self._choose(epoch))
            self._chosen = {kept: old for kept, old in self._chosen.items() if kept == 0} | {epoch: bits}
        return self._chosen[epoch]

    def settings(self) -> dict[str, Any]:
        """What chose them, how many they are and which."""
        first = self.chosen(0)
        return {**self._settings, "num_samples": first.num_kept, "digest": first.digest}
