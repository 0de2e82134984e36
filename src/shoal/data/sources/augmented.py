"""Samples changed at random, by (seed, epoch, index): `augment`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shoal.data.order.order import Indices
from shoal.data.sources.source import Derived, Source, name_of
from shoal.data.sources.user_code import blame
from shoal.data.weights import keep_weights
from shoal.runtime.seeds import mix

_AUGMENT = 0x4155474D454E54  # keeps augment(seed=0) and shuffle(seed=0) apart

Augment = Callable[[Any, torch.Generator], Any]


class Augmented(Derived):
    """Another source with a function of (sample, generator) applied to each sample."""

    name = "augment"

    def __init__(self, source: Source, fn: Augment, seed: int) -> None:
        super().__init__(source)
        self._fn, self._seed = fn, seed
        self.runs_user_code = self.uses_epoch = True

    def samples(self, indices: Indices, epoch: int = 0) -> list[Any]:
        """`fn` of each sample, with a generator that is seeded for it."""
        generator = torch.Generator()
        changed = []
        for index, sample in zip(indices, self._source.samples(indices, epoch), strict=True):
            generator.manual_seed(augment_seed(self._seed, epoch, int(index)))
            try:
                changed.append(keep_weights(sample, self._fn(sample, generator)))
            except Exception as error:
                blame("augment", self._fn, error, index, epoch)
                raise
        return changed

    def describe(self) -> list[dict[str, Any]]:
        """The source's own, the function's name and the seed."""
        return [*self._source.describe(), {"stage": "augment", "fn": name_of(self._fn), "seed": self._seed}]


def augment_seed(seed: int, epoch: int, index: int) -> int:
    """What the generator for one sample is seeded with."""
    return mix(_AUGMENT, seed, epoch, index)
