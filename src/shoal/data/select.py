"""Selection: filters, splits, folds and weighted draws, made into orders, and the values by which they decide.

All of them are lazy: samples are read when the length or the first index is
asked for. How many samples each part gets, and which, is pure arithmetic.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.data.order import (
    GOLDEN,
    DerivedOrder,
    Indices,
    Kept,
    Order,
    Permutation,
    Positions,
    Shuffled,
    SplitPart,
    SplitRest,
    Window,
    as_array,
    integers,
    splitmix64,
)
from shoal.data.randomness import PrivateGenerators
from shoal.data.skipping import SkipSamples
from shoal.data.sources.source import Source, blame, call_user, name_of
from shoal.data.tree import Tree, with_string_arrays
from shoal.errors import ConfigError, DataError, NoSuchColumn
from shoal.runtime.seeds import mix

By = str | Callable[[Any], Any] | NDArray[Any] | torch.Tensor | list[Any]
"""A column's name, a function of a sample, or one value per sample in the order of the dataset."""

NUM_READ_AT_ONCE = 4096


class Values:
    """The value of `by` at each position of a dataset's first epoch."""

    def __init__(self, source: Source, order: Order, by: By, *, caller: str) -> None:
        """`caller` names the caller, as in "split(stratify=)"."""
        if order.varies or source.reorders:
            raise ConfigError(
                f"{caller} comes after a shuffle, so each epoch would have other values at each position. Call it first, "
                "then shuffle."
            )
        if order.is_endless:
            raise ConfigError(
                f"{caller} needs a value for each sample, and repeat() has no end. Call it before repeat."
            )
        self._source, self._order, self._by, self.caller = source, order, by, caller
        self.is_bad: NDArray[np.bool_] | None = None
        """Samples that could not be read and may be skipped; None where none was read."""

        self._array: NDArray[Any] | None = None
        if isinstance(by, str) and not by:
            raise ConfigError(f"{caller} takes the name of a column, an array or a function, got ''")
        if not isinstance(by, str) and not callable(by):
            self._array = _as_array(by, caller)
            if order.is_counted:
                self._check_length()

    @property
    def is_read(self) -> bool:
        return self._array is not None

    @property
    def is_checkable(self) -> bool:
        """True where they can be looked at without reading a sample."""
        return self.is_read and self._order.is_counted

    def array(self) -> NDArray[Any]:
        if self._array is None:
            self._array = self._read()
        self._check_length()
        return self._array

    def describe(self) -> str:
        """The column or function by name, an array by what is in it."""
        if isinstance(self._by, str):
            return self._by
        if callable(self._by):
            return name_of(self._by)
        array = np.ascontiguousarray(self.array())
        return f"array {zlib.crc32(array.tobytes()):08x}"

    def _check_length(self) -> None:
        assert self._array is not None
        if len(self._array) != self._order.num_samples:
            raise ConfigError(
                f"{self.caller} was given {len(self._array)} values, and the dataset has {self._order.num_samples} samples "
                "at that point. Give one value per sample, in the order of the dataset."
            )

    def _read(self) -> NDArray[Any]:
        num_samples = self._order.num_samples
        parts = [np.zeros(0)]
        self.is_bad = np.zeros(num_samples, dtype=bool)
        with PrivateGenerators(0) as generators:
            for begin in range(0, num_samples, NUM_READ_AT_ONCE):
                positions = range(begin, min(begin + NUM_READ_AT_ONCE, num_samples))
                values, is_bad = self._read_part(integers(self._order.indices(positions, 0)))
                parts += [values] if len(values) else []
                self.is_bad[positions.start : positions.stop] = is_bad
            if generators.were_used():
                raise ConfigError(
                    f"{self.caller} reads every sample once, and a stage before it draws random numbers: what was read is "
                    "not what will be trained. Call it before that stage, or give an array."
                )
        good = np.concatenate(parts[1:] or parts)
        if not self.is_bad.any():
            return good
        # Bad samples are skipped when they are read; until then they are grouped with the first good one.
        array = np.full(num_samples, good[0] if len(good) else 0, dtype=good.dtype)
        array[~self.is_bad] = good
        return array

    def _read_part(self, indices: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """The values of the samples that can be read, and which of them cannot."""
        is_bad = np.zeros(len(indices), dtype=bool)
        while not is_bad.all():
            try:
                return self._of(indices[~is_bad]), is_bad
            except SkipSamples as found:
                is_bad |= np.isin(indices, list(found.bad))
        return np.zeros(0), is_bad

    def _of(self, indices: NDArray[np.int64]) -> NDArray[Any]:
        if isinstance(self._by, str):
            return _as_array(column_of(self._source, self._by, indices, self.caller), self.caller)
        values = [
            _plain(call_user(self.caller, self._by, index, 0, sample))
            for index, sample in zip(indices, self._source.samples(indices), strict=True)
        ]
        return _as_array(values, self.caller)


def column_of(source: Source, name: str, indices: Any, caller: str) -> Any:
    batch = source.batch(indices)
    return find_column(batch, name, label_of(source), caller)


def find_column(batch: Tree, name: str, label: Any, caller: str) -> Any:
    """The column of that name in a dict, or in the dict of a pair (inputs, target)."""
    inputs = batch[0] if isinstance(batch, (tuple, list)) and len(batch) else batch
    if isinstance(inputs, dict) and name in inputs:
        return inputs[name]
    if isinstance(batch, (tuple, list)) and len(batch) > 1:
        target = batch[1] if hasattr(batch, "_fields") else batch[-1]
        if name == label:
            return target
        if isinstance(target, dict) and name in target:
            return target[name]
    there = [str(key) for key in inputs] if isinstance(inputs, dict) else []
    if not there:
        raise ConfigError(
            f"{caller} was given the column '{name}', and the samples are no dicts of columns. Give an array with one value "
            "per sample, or a function of a sample."
        )
    if isinstance(label, str):
        there.append(label)
    raise NoSuchColumn(asked=[name], there=there, where="the dataset", asked_by=caller)


def label_of(source: Source) -> Any:
    return next((stage["label"] for stage in source.describe() if "label" in stage), None)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    return value


def _as_array(values: Any, caller: str) -> NDArray[Any]:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy()
    array = np.asarray(values)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1 or array.dtype.kind == "O":
        raise DataError(
            f"{caller} needs one number or string per sample, and got values of shape {array.shape} and type {array.dtype}. "
            "Give a column, an array or a function with one plain value for each sample."
        )
    return array


class SampleFilter:
    """Verdicts of a function on the samples of a source, remembered in a bit each.

    Reads in the order of the source, whatever the order of the dataset.
    """

    def __init__(self, source: Source, order: Order, fn: Callable[[Any], Any], *, batched: bool) -> None:
        self._source, self._order, self._fn, self._batched = source, order, fn, batched
        self._known = self._passes = np.zeros(0, dtype=np.uint8)

    def __call__(self, epoch: int) -> NDArray[np.bool_]:
        """Whether the sample at each position of an epoch passes."""
        num_samples, order = self._source.num_samples, self._order
        known, passes = _unpacked(self._known, num_samples), _unpacked(self._passes, num_samples)
        wanted = np.zeros(num_samples, dtype=bool)
        num_positions = order.length(epoch)
        for begin in range(0, num_positions, 1 << 16):
            positions = range(begin, min(begin + (1 << 16), num_positions))
            wanted[integers(order.indices(positions, epoch))] = True
        wanted &= ~known
        self._evaluate(wanted, passes)
        if order.varies:  # another epoch has them at other positions, or other samples
            self._known, self._passes = np.packbits(known | wanted), np.packbits(passes)
        kept = np.empty(num_positions, dtype=bool)
        for begin in range(0, num_positions, 1 << 16):
            end = min(begin + (1 << 16), num_positions)
            kept[begin:end] = passes[integers(order.indices(range(begin, end), epoch))]
        return kept

    def _evaluate(self, wanted: NDArray[np.bool_], passes: NDArray[np.bool_]) -> None:
        with PrivateGenerators(0) as generators:
            for begin in range(0, len(wanted), NUM_READ_AT_ONCE):
                indices = begin + np.flatnonzero(wanted[begin : begin + NUM_READ_AT_ONCE])
                if len(indices):
                    self._ask(indices, passes)
            if generators.were_used():
                raise ConfigError(
                    f"filter({name_of(self._fn)}) looks at every sample once, and it or a stage before it draws random "
                    "numbers: what passed would not be what is trained. Filter before that stage, and draw in augment."
                )

    def _ask(self, indices: NDArray[np.int64], passes: NDArray[np.bool_]) -> None:
        while len(indices):
            try:
                passes[indices] = self._verdicts(indices)
                return
            except SkipSamples as found:
                bad = np.array(list(found.bad), dtype=np.int64)
                passes[bad] = True  # the reader will skip and record it
                indices = np.setdiff1d(indices, bad)

    def _verdicts(self, indices: NDArray[np.int64]) -> NDArray[np.bool_]:
        if not self._batched:
            verdicts = []
            for index, sample in zip(indices, self._source.samples(indices), strict=True):
                try:
                    verdicts.append(bool(self._fn(sample)))
                except Exception as error:
                    blame("filter", self._fn, error, index, 0)
                    raise
            return np.array(verdicts, dtype=bool)
        batch = with_string_arrays(self._source.batch(indices), len(indices))
        try:
            given = np.asarray(self._fn(batch))
        except Exception as error:
            error.add_note(
                f"raised by filter({name_of(self._fn)}, batched=True) for the samples with indices {indices[0]} to {indices[-1]}"
            )
            raise
        if given.shape != (len(indices),):
            raise DataError(
                f"the function '{name_of(self._fn)}' of filter(batched=True) was given {len(indices)} samples and gave values of "
                f"shape {given.shape}. It must return one truth value per sample."
            )
        return given.astype(bool)


def _unpacked(bits: NDArray[np.uint8], num_samples: int) -> NDArray[np.bool_]:
    if not len(bits):
        return np.zeros(num_samples, dtype=bool)
    return np.unpackbits(bits, count=num_samples).astype(bool)


_ROUNDING = 1e-9  # how far fractions may miss 1: 0.7 + 0.2 + 0.1 is 0.9999999999999999


def part_sizes(num_samples: int, parts: Sequence[float]) -> list[int]:
    """Sizes of the parts, given as fractions (largest remainder) or as whole numbers of samples."""
    if not parts or any(isinstance(part, bool) or not isinstance(part, Real) for part in parts):
        raise ConfigError(
            f"split takes fractions, such as split(0.8, 0.1, 0.1), or numbers of samples, got {_list(parts)}"
        )
    if any(not part >= 0 for part in parts):
        raise ConfigError(f"split takes parts of 0 or more, got {_list(parts)}")
    if all(isinstance(part, Integral) for part in parts):
        sizes = [int(part) for part in parts]
        if sum(sizes) > num_samples:
            raise ConfigError(
                f"split({_list(parts)}) asks for {sum(sizes)} samples and the dataset has {num_samples}. Ask for fewer, "
                "or for fractions, such as split(0.8, 0.2)."
            )
        return sizes
    if any(isinstance(part, Integral) for part in parts):
        raise ConfigError(
            f"split({_list(parts)}) mixes fractions and numbers of samples; use one or the other (1.0 is everything, 1 is "
            "one sample)"
        )
    total = sum(parts)
    if total > 1 + _ROUNDING:
        raise ConfigError(
            f"split({_list(parts)}) asks for {total:g} times the dataset; the fractions may be 1 in all"
        )
    shares = [num_samples * part for part in parts]
    sizes = [math.floor(share) for share in shares]
    num_wanted = math.floor(num_samples * total + _ROUNDING * max(num_samples, 1))
    # Samples left over by rounding down go to the parts that lost most by it.
    by_remainder = sorted(range(len(parts)), key=lambda number: sizes[number] - shares[number])
    for number in by_remainder[: min(num_wanted, num_samples) - sum(sizes)]:
        sizes[number] += 1
    return sizes


def fold_sizes(num_samples: int, num_folds: int) -> list[int]:
    return [num_samples * (k + 1) // num_folds - num_samples * k // num_folds for k in range(num_folds)]


def stratified(labels: NDArray[Any], sizes: Sequence[int], seed: int) -> NDArray[np.int64]:
    """The part of each sample, so that every label has its share of every part; -1 where the sizes leave some over.

    The parts are exactly as large as asked for, and of each label a part has
    its share to within two samples.
    """
    num_samples = len(labels)
    part_of = np.full(num_samples, -1, dtype=np.int64)
    if num_samples == 0:
        return part_of
    _, stratum = np.unique(labels, return_inverse=True)
    # Random within a label, and labels in random order: no label is favoured in any part.
    label_order = Permutation(int(stratum.max()) + 1, seed=seed, epoch=1)
    keys = Permutation(num_samples, seed=seed)(np.arange(num_samples))
    left = np.lexsort((keys, label_order(stratum.astype(np.int64))))
    for number, size in enumerate(sizes):
        # Spread evenly over the rest, which is sorted by label: every stretch of it gives its share.
        before = np.arange(len(left), dtype=np.int64) * size // max(len(left), 1)
        after = np.arange(1, len(left) + 1, dtype=np.int64) * size // max(len(left), 1)
        is_taken = after > before
        part_of[left[is_taken]] = number
        left = left[~is_taken]
    return part_of


def grouped(groups: NDArray[Any], sizes: Sequence[int], seed: int) -> NDArray[np.int64]:
    """The part of each sample, so that a group is never divided; sizes are met as nearly as the groups allow.

    Groups come in random order, each to the part that lacks most.
    """
    names, group_of, counts = np.unique(groups, return_inverse=True, return_counts=True)
    part_of_group = np.full(len(names), -1, dtype=np.int64)
    lacking = np.append(
        np.array(sizes, dtype=np.int64), len(groups) - sum(sizes)
    )  # the last belongs to no part
    if len(names):
        for group in Permutation(len(names), seed=seed)(np.arange(len(names))).tolist():
            part = int(np.argmax(lacking))
            lacking[part] -= counts[group]
            part_of_group[group] = part if part < len(sizes) else -1
    return part_of_group[group_of]


def _list(parts: Sequence[object]) -> str:
    return ", ".join(repr(part) for part in parts) or "nothing"


_DRAW = 0x44524157  # keeps sample(seed=0) and shuffle(seed=0) apart


def uniform(numbers: NDArray[np.int64], key: int) -> NDArray[np.float64]:
    """A number in (0, 1) for each of `numbers`, by hash (splitmix64): never 0, never 1."""
    state = splitmix64(numbers.astype(np.uint64) * GOLDEN + np.uint64(key))
    return ((state >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


class Sampled(DerivedOrder):
    """Positions of another order drawn with replacement.

    A draw is a hash of (seed, epoch, position), so any position can be asked
    first.
    """

    name = "sample"

    def __init__(self, parent: Order, *, num_samples: int | None, weights: Values | None, seed: int) -> None:
        super().__init__(parent)
        self._num_samples, self._weights, self._seed = num_samples, weights, seed
        self.seed, self.is_computed = seed, True
        self.varies = self.changes_set = True
        self.is_endless = False
        self._ends: NDArray[np.float64] | None = None

    def length(self, epoch: int) -> int:
        return self.parent.length(epoch) if self._num_samples is None else self._num_samples

    def indices(self, positions: Positions, epoch: int) -> Indices:
        drawn = uniform(as_array(positions), mix(_DRAW, self._seed, epoch))
        num_there = self.parent.length(epoch)
        if self._weights is None:
            places = (drawn * num_there).astype(np.int64)
        else:
            if self._ends is None:
                self._ends = np.cumsum(checked_weights(self._weights))
            by_size = np.argsort(drawn)  # looked up in order they are found six times as fast
            places = np.empty(len(drawn), dtype=np.int64)
            places[by_size] = np.searchsorted(self._ends, drawn[by_size] * self._ends[-1], side="right")
        return self.parent.indices(np.minimum(places, num_there - 1), epoch)

    def settings(self) -> dict[str, Any]:
        weights = None if self._weights is None else self._weights.describe()
        return {"num_samples": self._num_samples, "weights": weights, "seed": self._seed}


class SampledOnce(Sampled):
    """Positions of another order drawn by weight without replacement, in the order in which they are drawn.

    The order of an epoch follows from one random key per sample (Efraimidis
    and Spirakis: the smallest of -ln(u)/w come first), sorted once per epoch.
    """

    def __init__(self, parent: Order, *, num_samples: int | None, weights: Values, seed: int) -> None:
        super().__init__(parent, num_samples=num_samples, weights=weights, seed=seed)
        self._values = weights
        self._drawn: tuple[int, NDArray[np.int64]] | None = None

    @property
    def is_counted(self) -> bool:  # type: ignore[override]  # a property may stand for a plain attribute
        return self.parent.is_counted and (self._num_samples is not None or self._values.is_read)

    def length(self, epoch: int) -> int:
        if self._num_samples is not None:
            return self._num_samples
        return int(np.count_nonzero(checked_weights(self._values)))

    def indices(self, positions: Positions, epoch: int) -> Indices:
        if self._drawn is None or self._drawn[0] != epoch:
            self._drawn = epoch, self._draw(epoch)
        return self.parent.indices(self._drawn[1][as_array(positions)], epoch)

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "replacement": False}

    def _draw(self, epoch: int) -> NDArray[np.int64]:
        weights = checked_weights(self._values)
        there = np.flatnonzero(weights)
        num_samples = self.length(epoch)
        if num_samples > len(there):
            raise ConfigError(
                f"sample(num_samples={num_samples}, replacement=False) has {len(there)} samples with a weight above 0 to "
                "draw from. Draw fewer, or with replacement=True."
            )
        with np.errstate(over="ignore"):  # of a weight near zero: infinite, and drawn last
            keys = -np.log(uniform(there, mix(_DRAW, self._seed, epoch))) / weights[there]
        first = (
            np.argpartition(keys, num_samples - 1)[:num_samples]
            if num_samples < len(keys)
            else np.arange(len(keys))
        )
        return there[first[np.argsort(keys[first], kind="stable")]]


def checked_weights(values: Values) -> NDArray[np.float64]:
    """Finite, none below 0, some above."""
    found = values.array()
    if found.dtype.kind not in "fiub":
        raise ConfigError(f"the weights of {values.caller} must be numbers, got values of type {found.dtype}")
    weights = found.astype(np.float64, copy=False)
    if values.is_bad is not None and values.is_bad.any():
        weights = np.where(values.is_bad, 0.0, weights)  # what cannot be read is not drawn
    if weights.ndim != 1 or not np.all(np.isfinite(weights)) or np.any(weights < 0):
        wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)).reshape(len(weights), -1).all(1))
        at = (
            f"; that of sample {wrong[0]} is {weights[wrong[0]]}"
            if len(wrong)
            else f", of shape {weights.shape}"
        )
        raise ConfigError(
            f"the weights of {values.caller} must be one finite number of 0 or more per sample{at}"
        )
    if not weights.any():
        raise ConfigError(f"the weights of {values.caller} are all 0: there is nothing to draw or to count")
    return weights


def filtered(source: Source, order: Order, fn: Callable[[Any], Any], *, batched: bool) -> Kept:
    if order.is_endless:
        raise ConfigError("filter looks at every sample, and repeat() has no end. Call filter before repeat.")
    if source.uses_epoch:
        raise ConfigError(
            f"filter({name_of(fn)}) decides once for all epochs, and a stage before it (augment, or a shuffled dataset in a "
            "zip) gives other samples in each. Call filter before that stage."
        )
    choose = SampleFilter(source, order, fn, batched=batched)
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
    given = _chosen_one("split", stratify=stratify, group=group, time=time)
    _refuse_moving(source, order, "split")
    sizes = part_sizes(order.num_samples, parts)
    begins = [sum(sizes[:number]) for number in range(len(sizes))]
    if given is None:
        return [
            SplitPart(order, begin=begin, num_samples=size, split_seed=seed)
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
            rest = SplitRest(order, begin=begin, num_left_out=size, split_seed=seed)
            pairs.append((rest, SplitPart(order, begin=begin, num_samples=size, split_seed=seed)))
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


class InTime(DerivedOrder):
    """Another order sorted by a value of each sample, the earliest first; equal ones stay in their order."""

    name = "by time"

    def __init__(self, parent: Order, times: Values) -> None:
        super().__init__(parent)
        self._times = times
        self._sorted = self._sort() if times.is_checkable else None

    def indices(self, positions: Positions, epoch: int) -> Indices:
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
        return {"by": self._times.describe()}


class Assignment:
    """Assignment of samples to parts, by strata or groups; decided when the first part is asked for."""

    def __init__(self, values: Values, sizes: Sequence[int], seed: int, *, kind: str) -> None:
        self._values, self._sizes, self._seed, self._kind = values, list(sizes), seed, kind
        self._part_of: NDArray[np.int32] | None = None

    def part(self, order: Order, number: int, name: str) -> Kept:
        return Kept(
            order, lambda epoch: self._assigned() == number, name=name, settings=self._settings(number)
        )

    def rest(self, order: Order, number: int) -> Kept:
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
