"""Orders of torch samplers: an order of the whole data, the same on every rank.

torch's own simple samplers become computed orders. Any other is asked once per
epoch for its indices, under seeds that are a function of (seed, epoch), so all
ranks get one answer and a resumed run gets it again.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from shoal.data.order.order import Indices, InOrder, Order, Positions, Shuffled
from shoal.data.randomness import PrivateGenerators
from shoal.errors import ConfigError
from shoal.runtime.seeds import mix


def order_of(sampler: Any, *, seed: int) -> Order:
    """The order a sampler stands for.

    A DistributedSampler is not applied: it would leave each rank its share of
    the data, of which shoal would take a share once more. Its dataset is used
    whole; its shuffle flag and seed are kept.
    """
    if isinstance(sampler, DistributedSampler):
        dataset: Any = sampler.dataset
        whole = InOrder(len(dataset))
        return Shuffled(whole, sampler.seed) if sampler.shuffle else whole
    if type(sampler) is SequentialSampler:
        return InOrder(len(sampler.data_source))
    if type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None:
        return Shuffled(InOrder(len(sampler.data_source)), seed_with(seed, sampler.generator))
    return Drawn(sampler, seed)


def seed_with(seed: int, generator: torch.Generator | None) -> int:
    """The seed, and the one a user gave to a generator: changing either changes the order."""
    return seed if generator is None else mix(seed, generator.initial_seed())


@dataclass(frozen=True, slots=True)
class _Epoch:
    """Indices that a sampler gave for one epoch."""

    indices: Indices
    ends: list[int]
    """End of each of its batches; empty for a sampler of single samples."""


class Drawn(Order):
    """The indices a foreign sampler gives, drawn anew each epoch and kept for that epoch.

    Also those of a batch sampler, joined; `DrawnCut` cuts them again.
    """

    def __init__(self, sampler: Any, seed: int, *, in_batches: bool = False) -> None:
        for part in _parts(sampler):
            if getattr(part, "num_replicas", 1) > 1:
                raise ConfigError(
                    f"the sampler {type(part).__name__} gives each of {part.num_replicas} ranks its own share of the "
                    "data, and shoal shares every batch out itself: samples would be lost. Nothing was read; give the "
                    "DataLoader a sampler over the whole data, or torch's DistributedSampler, which shoal knows."
                )
        self.sampler, self.seed = sampler, seed
        self._in_batches = in_batches
        self._epochs: dict[int, _Epoch] = {}

    @property
    def num_samples(self) -> int:
        """The sampler's own length, or the number of indices it gives in the first epoch."""
        if not self._in_batches and hasattr(self.sampler, "__len__"):
            return len(self.sampler)
        return self.length(0)

    def length(self, epoch: int) -> int:
        return len(self.drawn(epoch).indices)

    def indices(self, positions: Positions, epoch: int) -> Indices:
        indices = self.drawn(epoch).indices
        if isinstance(positions, range):
            return indices[positions.start : positions.stop]
        return indices[positions] if isinstance(indices, np.ndarray) else [indices[at] for at in positions]

    def describe(self) -> list[dict[str, Any]]:
        return [{"stage": "sampler", "sampler": type(self.sampler).__qualname__, "seed": self.seed}]

    def drawn(self, epoch: int) -> _Epoch:
        """Indices of this epoch, drawn once."""
        if epoch not in self._epochs:
            for other in [kept for kept in self._epochs if kept != 0]:
                del self._epochs[other]  # epoch 0 stays: sizes are asked of it
            given = draw(self.sampler, seed=self.seed, epoch=epoch)
            ends: list[int] = []
            if self._in_batches:
                given = [batch for batch in given if len(batch)]
                ends = list(itertools.accumulate(len(batch) for batch in given))
                given = list(itertools.chain.from_iterable(given))
            self._epochs[epoch] = _Epoch(_as_integers(given), ends)
        return self._epochs[epoch]


class DrawnCut:
    """The batches of a foreign batch sampler are the global batches."""

    def __init__(self, order: Drawn) -> None:
        self._order = order

    def batch_size(self, num_workers: int) -> int:
        """The sampler's own batch size, or its largest batch in the first epoch."""
        size = getattr(self._order.sampler, "batch_size", None)
        if isinstance(size, int):
            return size
        ends = self._order.drawn(0).ends
        return max((end - begin for begin, end in zip([0, *ends], ends, strict=False)), default=0)

    def num_steps(self, num_samples: int, num_workers: int, start: int) -> int:
        return sum(end > start for end in self._order.drawn(0).ends)

    def batches(
        self, num_samples: int, *, epoch: int, start: int, num_workers: int
    ) -> Iterator[tuple[int, int]]:
        """(begin, end) of each, from `start` on; of one that `start` lies in, the rest."""
        begin = 0
        for end in self._order.drawn(epoch).ends:
            if end > start:
                yield max(begin, start), end
            begin = end

    def describe(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size(1), "per_worker": False, "drop_last": False}


def draw(sampler: Any, *, seed: int, epoch: int) -> list[Any]:
    """Everything a sampler gives in an epoch, on every rank the same; generators are as before afterwards."""
    parts = _parts(sampler)
    own = [part.generator for part in parts if isinstance(getattr(part, "generator", None), torch.Generator)]
    states = [generator.get_state() for generator in own]
    for part in parts:
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
    try:
        for generator in own:
            generator.manual_seed(mix(seed, generator.initial_seed(), epoch))
        with PrivateGenerators(mix(seed, epoch)):
            return list(sampler)
    finally:
        for generator, state in zip(own, states, strict=True):
            generator.set_state(state)


def _parts(sampler: Any) -> list[Any]:
    """The sampler, and the one inside a batch sampler."""
    inner = getattr(sampler, "sampler", None)
    return [sampler] if inner is None else [sampler, inner]


def _as_integers(given: list[Any]) -> Indices:
    try:
        return np.array([operator.index(index) for index in given], dtype=np.int64)
    except TypeError:
        return given  # samples named by something else: the dataset knows
