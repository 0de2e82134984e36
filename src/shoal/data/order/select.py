"""Which samples a dataset has, and in which order: the stages that are orders.

All of them are lazy: what they need to know of the samples is read when
somebody first asks how many there are, or for one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.order.filtering import Filter
from shoal.data.order.kept import Kept
from shoal.data.order.order import Indices, Order, Part, Positions, Rest, Shuffled, Stage, as_array
from shoal.data.order.sampled import Sampled, SampledOnce, checked_weights
from shoal.data.order.split import fold_sizes, grouped, part_sizes, stratified
from shoal.data.order.window import Window
from shoal.data.sources.source import Source, name_of
from shoal.data.values import By, Values
from shoal.errors import ConfigError


def filtered(source: Source, order: Order, fn: Callable[[Any], Any], *, batched: bool) -> Kept:
    """The samples for which a function is true."""
    if order.is_endless:
        raise ConfigError("filter looks at every sample, and repeat() has no end. Call filter before repeat.")
    if source.uses_epoch:
        raise ConfigError(
            f"filter({name_of(fn)}) decides once for all epochs, and a stage before it (augment, or a shuffled dataset in a "
            "zip) gives other samples in each. Call filter before that stage."
        )
    choose = Filter(source, order, fn, batched=batched)
    return Kept(order, choose, name="filter", settings={"fn": name_of(fn)})


def split(
    source: Source,
    order: Order,
    parts: Sequence[float],
    *,
    seed: int | None,
    stratify: By | None,
    group: By | None,
    time: By | None,
) -> list[Order]:
    """Disjoint parts of an order."""
    given = _chosen_one("split", stratify=stratify, group=group, time=time)
    _refuse_moving(source, order, "split")
    sizes = part_sizes(order.num_samples, parts)
    begins = [sum(sizes[:number]) for number in range(len(sizes))]
    if given is None:
        return [
            Part(order, begin=begin, num_samples=size, split_seed=seed)
            for begin, size in zip(begins, sizes, strict=True)
        ]
    name, by = given
    values = Values(source, order, by, caller=f"split({name}=)")
    if name == "time":
        in_time = InTime(order, values)
        return [
            Window(in_time, begin=begin, num_samples=size) for begin, size in zip(begins, sizes, strict=True)
        ]
    if seed is None:
        raise ConfigError(
            f"split({name}=) draws at random and needs a seed; seed=None is for ranges in order"
        )
    plan = Assignment(values, sizes, seed, kind=name)
    return [plan.part(order, number, "split") for number in range(len(sizes))]


def folds(
    source: Source, order: Order, num_folds: int, *, seed: int, stratify: By | None, group: By | None
) -> list[tuple[Order, Order]]:
    """(everything else, one fold) for each fold."""
    given = _chosen_one("folds", stratify=stratify, group=group)
    _refuse_moving(source, order, "folds")
    if num_folds > order.num_samples:
        raise ConfigError(
            f"folds({num_folds}) of {order.num_samples} samples would leave some of them empty; ask for fewer folds"
        )
    sizes = fold_sizes(order.num_samples, num_folds)
    if given is None:
        pairs: list[tuple[Order, Order]] = []
        begin = 0
        for size in sizes:
            rest = Rest(order, begin=begin, num_left_out=size, split_seed=seed)
            pairs.append((rest, Part(order, begin=begin, num_samples=size, split_seed=seed)))
            begin += size
        return pairs
    name, by = given
    plan = Assignment(Values(source, order, by, caller=f"folds({name}=)"), sizes, seed, kind=name)
    numbers = range(num_folds)
    return [(plan.rest(order, number), plan.part(order, number, "folds")) for number in numbers]


def sampled(
    source: Source,
    order: Order,
    *,
    num_samples: int | None,
    weights: By | None,
    replacement: bool,
    seed: int,
) -> Order:
    """Samples drawn at random."""
    if order.is_endless:
        raise ConfigError(
            "sample draws from all samples, and repeat() has no end. Call sample before repeat."
        )
    values = Values(source, order, weights, caller="sample(weights=)") if weights is not None else None
    if values is not None and values.is_checkable:
        checked_weights(values)
    if replacement:
        return Sampled(order, num_samples=num_samples, weights=values, seed=seed)
    if values is not None:
        return SampledOnce(order, num_samples=num_samples, weights=values, seed=seed)
    if num_samples is None:
        return Shuffled(order, seed)
    if order.is_counted and num_samples > order.num_samples:
        raise ConfigError(
            f"sample({num_samples}, replacement=False) of {order.num_samples} samples: there are not so many. Draw fewer, or "
            "with replacement=True."
        )
    return Window(Shuffled(order, seed), num_samples=num_samples)


class InTime(Stage):
    """Another order sorted by a value of each sample, the earliest first; equal ones stay in their order."""

    name = "by time"

    def __init__(self, parent: Order, times: Values) -> None:
        super().__init__(parent)
        self._times = times
        self._sorted = self._sort() if times.is_checkable else None

    def indices(self, positions: Positions, epoch: int) -> Indices:
        """The parent's, at the sorted positions."""
        if self._sorted is None:
            self._sorted = self._sort()
        return self.parent.indices(self._sorted[as_array(positions)], epoch)

    def _sort(self) -> NDArray[np.int64]:
        times = self._times.array()
        if times.dtype.kind in "fmM" and np.isnan(times).any():
            at = int(np.flatnonzero(np.isnan(times))[0])
            raise ConfigError(
                f"{self._times.caller} has no time for the sample at position {at}: it is {times[at]}"
            )
        return np.argsort(times, kind="stable").astype(np.int64)

    def settings(self) -> dict[str, Any]:
        """Where the times come from."""
        return {"by": self._times.describe()}


class Assignment:
    """Which part each sample is in, by strata or groups; decided when the first part is asked."""

    def __init__(self, values: Values, sizes: Sequence[int], seed: int, *, kind: str) -> None:
        self._values, self._sizes, self._seed, self._kind = values, list(sizes), seed, kind
        self._part_of: NDArray[np.int32] | None = None

    def part(self, order: Order, number: int, name: str) -> Kept:
        """The samples of a part."""
        return Kept(
            order, lambda epoch: self._assigned() == number, name=name, settings=self._settings(number)
        )

    def rest(self, order: Order, number: int) -> Kept:
        """The samples of all other parts."""
        settings = self._settings(number) | {"is_rest": True}
        return Kept(order, lambda epoch: self._assigned() != number, name="folds", settings=settings)

    def _settings(self, number: int) -> dict[str, Any]:
        return {self._kind: self._values.describe(), "seed": self._seed, "part": number}

    def _assigned(self) -> NDArray[np.int32]:
        if self._part_of is None:
            assign = stratified if self._kind == "stratify" else grouped
            self._part_of = assign(self._values.array(), self._sizes, self._seed).astype(np.int32)
        return self._part_of


def _chosen_one(what: str, **given: By | None) -> tuple[str, By] | None:
    """The one way of choosing that was asked for, if any."""
    asked = {name: by for name, by in given.items() if by is not None}
    if len(asked) > 1:
        raise ConfigError(
            f"{what} takes one of {', '.join(f'{name}=' for name in given)}, and got {' and '.join(asked)}: parts that "
            "meet both need not exist"
        )
    return next(iter(asked.items()), None)


def _refuse_moving(source: Source, order: Order, what: str) -> None:
    if order.is_endless:
        raise ConfigError(f"{what} needs an end, and repeat() has none. Call {what} before repeat.")
    if order.varies or source.reorders:
        cure = {"split": "data.split(0.9, 0.1, seed=0)[0].shuffle(seed=0)"}.get(what, "train.shuffle(seed=0)")
        raise ConfigError(
            f"{what} after shuffle would move samples between the parts from epoch to epoch, test data into training. "
            f"{what.capitalize()} first, then shuffle the parts: {cure}."
        )
