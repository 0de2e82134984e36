"""Sources made of other sources: map, augment, with_weights; zip, interleave, repeat, and a dataset's order."""

from __future__ import annotations

import functools
import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.data.order import ENDLESS, Indices, InOrder, Order, inner_epoch, integers
from shoal.data.select import Values, checked_weights, find_column, label_of
from shoal.data.skipping import SkipSamples
from shoal.data.slice import Weighted, keep_weights, split_target
from shoal.data.sources.source import DerivedSource, Source, bad_sample, blame, call_user, check_rows, name_of
from shoal.data.tree import Tree, to_tensors, uncollate, with_string_arrays
from shoal.errors import BadSample, ConfigError, DataError
from shoal.runtime.seeds import mix


def mapped(
    source: Source,
    fn: Callable[[Any], Any],
    *,
    batched: bool = False,
    on_error: str = "raise",
    max_skips: int | None = None,
) -> Mapped | BatchMapped:
    """The source with `fn` applied to each sample, or to each batch that is asked for."""
    kind = BatchMapped if batched else Mapped
    return kind(source, fn, on_error=on_error, max_skips=max_skips)


class _Applied(DerivedSource):
    """Common part of `map` in both kinds: a function, and what to do when it raises."""

    name = "map"

    def __init__(
        self,
        source: Source,
        fn: Callable[[Any], Any],
        *,
        on_error: str = "raise",
        max_skips: int | None = None,
    ) -> None:
        super().__init__(source)
        self.runs_user_code = True
        self._fn, self._on_error, self._max_skips = fn, on_error, max_skips

    def describe(self) -> list[dict[str, Any]]:
        stage: dict[str, Any] = {"stage": "map", "fn": name_of(self._fn)}
        if isinstance(self, BatchMapped):
            stage["batched"] = True
        if self._on_error != "raise":
            stage["on_error"] = self._on_error
        return [*self._source.describe(), stage]

    def _skip(self, bad: dict[int, BadSample]) -> SkipSamples:
        return SkipSamples(bad, max_skips=self._max_skips, stage=f"map({name_of(self._fn)})")


class Mapped(_Applied):
    """Another source with a function applied to each sample."""

    def samples(self, indices: Indices, epoch: int = 0) -> list[Any]:
        results: list[Any] = []
        bad: dict[int, BadSample] = {}
        for index, sample in zip(indices, self._source.samples(indices, epoch), strict=True):
            try:
                results.append(keep_weights(sample, self._fn(sample)))
            except Exception as error:
                if self._on_error == "raise":
                    blame("map", self._fn, error, index, epoch)
                    raise
                bad[int(index)] = bad_sample("map", self._fn, error, index)
        if bad:
            raise self._skip(bad)
        return results


class BatchMapped(_Applied):
    """Another source with a function applied to the batch of the samples that are asked for."""

    def samples(self, indices: Indices, epoch: int = 0) -> list[Any]:
        return uncollate(self.batch(indices, epoch), len(indices))

    def batch(self, indices: Indices, epoch: int = 0) -> Tree:
        """`fn` of the source's batch, arrays as tensors, checked to have one row per sample still."""
        given = self._given(indices, epoch)
        try:
            result = keep_weights(given, self._fn(given))
        except Exception as error:
            bad = self._culprits(indices, epoch)
            if bad and self._on_error == "skip":
                raise self._skip(bad) from None
            if bad:
                blame("map", self._fn, error, next(iter(bad)), epoch, f", in a batch of {len(indices)}")
            else:
                error.add_note(
                    f"raised by map({name_of(self._fn)}, batched=True) for a batch of {len(indices)} samples, in epoch "
                    f"{epoch}; for each of them alone it does not raise"
                )
            raise
        return check_rows(
            to_tensors(result),
            len(indices),
            f"the function '{name_of(self._fn)}' of map(batched=True) was given a batch of {len(indices)} samples",
            "one row per sample, in the same order; to leave samples out there is filter",
        )

    def _given(self, indices: Indices, epoch: int) -> Tree:
        return with_string_arrays(self._source.batch(indices, epoch), len(indices))

    def _culprits(self, indices: Indices, epoch: int) -> dict[int, BadSample]:
        """Samples for which the function raises when it is given them alone."""
        bad: dict[int, BadSample] = {}
        for index in indices:
            alone = self._given([int(index)], epoch)
            try:
                self._fn(alone)
            except Exception as error:
                bad[int(index)] = bad_sample("map", self._fn, error, index)
        return bad


_AUGMENT = 0x4155474D454E54  # keeps augment(seed=0) and shuffle(seed=0) apart

Augment = Callable[[Any, torch.Generator], Any]


class Augmented(DerivedSource):
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
        return [*self._source.describe(), {"stage": "augment", "fn": name_of(self._fn), "seed": self._seed}]


def augment_seed(seed: int, epoch: int, index: int) -> int:
    """Seed of the generator for one sample."""
    return mix(_AUGMENT, seed, epoch, index)


WeightBy = str | Callable[[Any], Any] | Values


class WeightedSource(DerivedSource):
    """Another source whose samples (inputs, target) get a weight.

    A column that is the weight is no input any more.
    """

    name = "with_weights"

    def __init__(self, source: Source, by: WeightBy) -> None:
        super().__init__(source)
        self._by, self._label = by, label_of(source)
        self._array: torch.Tensor | None = None
        if callable(by):
            self.runs_user_code = True

    def samples(self, indices: Indices, epoch: int = 0) -> list[Any]:
        samples = self._source.samples(indices, epoch)
        if isinstance(self._by, Values):
            weights: list[Any] = list(self._weights_at(indices))
        elif isinstance(self._by, str):
            weights = [find_column(sample, self._by, self._label, "with_weights") for sample in samples]
        else:
            weights = [
                call_user("with_weights", self._by, index, epoch, sample)
                for index, sample in zip(indices, samples, strict=True)
            ]
        made = [
            self._weighted(sample, checked_weight(weight, index))
            for index, sample, weight in zip(indices, samples, weights, strict=True)
        ]
        return made

    def batch(self, indices: Indices, epoch: int = 0) -> Tree:
        if callable(self._by):
            return super().batch(indices, epoch)
        batch = self._source.batch(indices, epoch)
        if isinstance(self._by, Values):
            return self._weighted(batch, self._weights_at(indices))
        weights = find_column(batch, self._by, self._label, "with_weights")
        return self._weighted(batch, checked_weight(weights, indices))

    def describe(self) -> list[dict[str, Any]]:
        by = self._by.describe() if isinstance(self._by, Values) else self._by
        return [
            *self._source.describe(),
            {"stage": "with_weights", "weights": by if isinstance(by, str) else name_of(by)},
        ]

    def _weights_at(self, indices: Indices) -> torch.Tensor:
        assert isinstance(self._by, Values)
        if self._array is None:
            self._array = torch.from_numpy(checked_weights(self._by).astype(np.float32))
        return self._array[torch.from_numpy(integers(indices))]

    def _weighted(self, sample: Any, weight: torch.Tensor) -> Weighted:
        return weighted(sample, weight, column=self._by if isinstance(self._by, str) else None)


def weighted(sample: Any, weight: torch.Tensor, *, column: str | None) -> Weighted:
    """A sample or batch (inputs, target) with its weight, which is no input any more where it was a column."""
    if isinstance(sample, Weighted):
        raise ConfigError("with_weights was called twice; multiply the weights and call it once")
    if not isinstance(sample, (tuple, list)) or len(sample) < 2:
        raise DataError(
            f"with_weights needs samples of (inputs, target), and these are a {type(sample).__name__}: without a target "
            "there is no loss to weight. Name the target with label=, or make pairs with map."
        )
    inputs, target = split_target(sample)
    if column is not None and isinstance(inputs, dict):
        inputs = {name: values for name, values in inputs.items() if name != column}
    return Weighted(inputs, target, weight)


def checked_weight(weight: Any, where: Any) -> torch.Tensor:
    """Weights as floats: finite, none below 0."""
    found = torch.as_tensor(weight).detach()
    if not found.is_floating_point():
        found = found.to(torch.float32)
    is_fine = torch.isfinite(found) & (found >= 0)
    if not bool(is_fine.all()):
        wrong = int(torch.nonzero(~is_fine.reshape(-1))[0])
        index = integers(where)[wrong] if not isinstance(where, (int, np.integer)) else where
        value = found.reshape(-1)[wrong].item()
        raise DataError(
            f"the weight of the sample with index {index} is {value}. A weight is a finite number of 0 or more; nothing was "
            "trained with it. Mend the column or the function."
        )
    return found


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Rounds in which each dataset contributes as much as in the one before."""

    first_round: int
    first_position: int
    ends: NDArray[np.int64]
    """Within a round, where each dataset's samples end; the last is the size of the round."""


class Interleaving:
    """Round-robin over datasets of these lengths: position -> (which, position there).

    Each contributes `block` samples, then the next; one with fewer left contributes those, and an
    exhausted one is skipped. Rounds differ only where a dataset contributes its last, so there are
    few kinds of rounds, and a position is found by arithmetic within its kind.
    """

    def __init__(self, lengths: Sequence[int], block: int) -> None:
        self.num_samples, self._block = sum(lengths), block
        # A round differs from the previous one where a dataset contributes its last full block, or its last
        # samples.
        cuts = {0} | {edge for length in lengths for edge in (length // block, -(-length // block))}
        edges = sorted(cuts)
        self._stretches: list[_Stretch] = []
        position = 0
        for begin, end in itertools.pairwise(edges):
            sizes = [min(block, max(length - begin * block, 0)) for length in lengths]
            self._stretches.append(_Stretch(begin, position, np.cumsum(sizes, dtype=np.int64)))
            position += sum(sizes) * (end - begin)
        self._begins = np.array([stretch.first_position for stretch in self._stretches], dtype=np.int64)

    def __call__(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(dataset, position in it) of each position; positions must lie in [0, num_samples)."""
        which = np.empty(len(positions), dtype=np.int64)
        place = np.empty(len(positions), dtype=np.int64)
        kinds = np.searchsorted(self._begins, positions, side="right") - 1
        for kind in np.unique(kinds).tolist():
            stretch, of = self._stretches[kind], np.flatnonzero(kinds == kind)
            rounds, within = np.divmod(positions[of] - stretch.first_position, stretch.ends[-1])
            turn = np.searchsorted(stretch.ends, within, side="right")
            begins = np.concatenate([[0], stretch.ends[:-1]])
            which[of] = turn
            place[of] = (stretch.first_round + rounds) * self._block + within - begins[turn]
        return which, place


class _Rerouted(DerivedSource):
    """A source whose samples are elsewhere: at other indices, in several sources, or in other epochs."""

    @abstractmethod
    def _routes(self, indices: Indices, epoch: int) -> Iterator[tuple[Any, Source, Indices, int]]:
        """(rows, source, indices there, epoch there): rows of the batch that are read together."""

    def samples(self, indices: Indices, epoch: int = 0) -> list[Any]:
        parts = self._read("samples", indices, epoch)
        if len(parts) == 1:
            samples: list[Any] = parts[0][1]
            return samples
        found: list[Any] = [None] * len(indices)
        for rows, part in parts:
            for row, sample in zip(rows.tolist(), part, strict=True):
                found[row] = sample
        return found

    def batch(self, indices: Indices, epoch: int = 0) -> Tree:
        parts = self._read("batch", indices, epoch)
        if len(parts) == 1:
            return parts[0][1]
        back = np.argsort(np.concatenate([rows for rows, _ in parts]))
        return _joined([batch for _, batch in parts], back, "")

    def will_need(self, indices: Indices, epoch: int = 0) -> None:
        for _, source, inner, at_epoch in self._routes(indices, epoch):
            source.will_need(inner, at_epoch)

    def _read(self, what: str, indices: Indices, epoch: int) -> list[tuple[Any, Any]]:
        parts = []
        for rows, source, inner, at_epoch in self._routes(indices, epoch):
            try:
                parts.append((rows, getattr(source, what)(inner, at_epoch)))
            # Bad samples are reported by the indices that this stage was asked for.
            except SkipSamples as found:
                raise found.renamed(integers(indices)[rows], inner) from None
        return parts


_ALL = slice(None)


def _grouped(keys: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """(key, the rows that have it), for each key that is there."""
    for key in np.unique(keys).tolist():
        yield key, np.flatnonzero(keys == key)


class Interleaved(_Rerouted):
    """The samples of all sources, in turns."""

    def __init__(self, sources: Sequence[Source], block: int) -> None:
        super().__init__(*sources)
        self._block = block

    @property
    def num_samples(self) -> int:  # type: ignore[override]  # a property may stand for a plain attribute
        return sum(source.num_samples for source in self._inputs)

    def names(self) -> list[str]:
        return ["interleave"]

    def describe(self) -> list[dict[str, Any]]:
        of = [source.describe() for source in self._inputs]
        return [{"source": "interleave", "block": self._block, "of": of}]

    @functools.cached_property
    def _turns(self) -> Interleaving:
        return Interleaving([source.num_samples for source in self._inputs], self._block)

    def _routes(self, indices: Indices, epoch: int) -> Iterator[tuple[Any, Source, Indices, int]]:
        which, places = self._turns(integers(indices))
        for number, rows in _grouped(which):
            yield rows, self._inputs[number], places[rows], epoch


class Ordered(_Rerouted):
    """Another source in a given order."""

    def __init__(self, source: Source, order: Order) -> None:
        super().__init__(source)
        self.order = order
        self.uses_epoch = source.uses_epoch or order.varies
        self.reorders = source.reorders or order.varies

    @property
    def num_samples(self) -> int:  # type: ignore[override]  # a property may stand for a plain attribute
        return self.order.num_samples

    def names(self) -> list[str]:
        return [*self._source.names(), *self.order.names()]

    def describe(self) -> list[dict[str, Any]]:
        return [*self._source.describe(), *self.order.describe()]

    def _routes(self, indices: Indices, epoch: int) -> Iterator[tuple[Any, Source, Indices, int]]:
        places = integers(indices) if isinstance(indices, list) else indices
        yield _ALL, self._source, self.order.indices(places, epoch), epoch


def as_source(source: Source, order: Order) -> Source:
    """A source with the samples of a dataset by position."""
    return source if isinstance(order, InOrder) else Ordered(source, order)


class RepeatedSource(_Rerouted):
    """Another source, as often as wanted, each time as in an epoch of its own."""

    def __init__(self, source: Source, times: int | None) -> None:
        super().__init__(source)
        self._times = times

    @property
    def num_samples(self) -> int:  # type: ignore[override]  # a property may stand for a plain attribute
        return ENDLESS if self._times is None else self._times * self._source.num_samples

    def will_need(self, indices: Indices, epoch: int = 0) -> None:
        self._source.will_need(integers(indices) % self._source.num_samples, epoch)

    def describe(self) -> list[dict[str, Any]]:
        """The source's own: the order says how often."""
        return self._source.describe()

    def _routes(self, indices: Indices, epoch: int) -> Iterator[tuple[Any, Source, Indices, int]]:
        size = self._source.num_samples
        if isinstance(indices, range):
            number, first = divmod(indices.start, size)
            if first + len(indices) <= size:  # a stretch of one repetition stays one
                inner_range = range(first, first + len(indices))
                yield _ALL, self._source, inner_range, inner_epoch(epoch, number, self._times)
                return
        repetitions, inner = np.divmod(integers(indices), size)
        if not self._source.uses_epoch:  # all repetitions are read as one
            repetitions[:] = 0
        for number, rows in _grouped(repetitions):
            yield rows, self._source, inner[rows], inner_epoch(epoch, number, self._times)


class Zipped(DerivedSource):
    """Tuples of one sample of each source; as many as the shortest has."""

    @property
    def num_samples(self) -> int:  # type: ignore[override]  # a property may stand for a plain attribute
        return min(source.num_samples for source in self._inputs)

    def samples(self, indices: Indices, epoch: int = 0) -> list[Any]:
        columns = [source.samples(indices, epoch) for source in self._inputs]
        return list(zip(*columns, strict=True))

    def batch(self, indices: Indices, epoch: int = 0) -> Tree:
        return tuple(source.batch(indices, epoch) for source in self._inputs)

    def names(self) -> list[str]:
        return ["zip"]

    def describe(self) -> list[dict[str, Any]]:
        return [{"source": "zip", "of": [source.describe() for source in self._inputs]}]


def _joined(batches: list[Tree], back: NDArray[np.int64], path: str) -> Tree:
    first = batches[0]
    if isinstance(first, dict):
        if any(not isinstance(batch, dict) or batch.keys() != first.keys() for batch in batches):
            raise _differ([_shape(batch) for batch in batches], path)
        return {key: _joined([batch[key] for batch in batches], back, f"{path}[{key!r}]") for key in first}
    if all(isinstance(batch, torch.Tensor) for batch in batches):
        return _rows(_of_one_width(batches), back, path)
    if all(isinstance(batch, np.ndarray) for batch in batches):
        joined: Tree = np.concatenate(batches)[back]
        return joined
    if isinstance(first, (tuple, list)):
        if any(type(batch) is not type(first) for batch in batches):
            raise _differ([_shape(batch) for batch in batches], path)
        if all(isinstance(value, (str, bytes)) for batch in batches for value in batch):
            strings = [value for batch in batches for value in batch]  # a column of strings
            return type(first)(strings[at] for at in back.tolist())
        if any(len(batch) != len(first) for batch in batches):
            raise _differ([_shape(batch) for batch in batches], path)
        parts = [
            _joined(list(values), back, f"{path}[{at}]")
            for at, values in enumerate(zip(*batches, strict=True))
        ]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    raise _differ([_shape(batch) for batch in batches], path)


def _rows(tensors: list[torch.Tensor], back: NDArray[np.int64], path: str) -> torch.Tensor:
    if len({(tensor.shape[1:], tensor.dtype) for tensor in tensors}) > 1:
        raise _differ([_shape(tensor) for tensor in tensors], path)
    joined = torch.cat(tensors)
    return joined.index_select(0, torch.from_numpy(back).to(joined.device))


def _of_one_width(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Lists of several lengths are padded to the longest of their batch: to one width for all."""
    widths = {tensor.shape[1] for tensor in tensors if tensor.dim() == 2}
    if len(widths) < 2 or any(tensor.dim() != 2 for tensor in tensors):
        return tensors
    widest = max(widths)

    def widened(tensor: torch.Tensor) -> torch.Tensor:
        filled = 0 if tensor.is_floating_point() or tensor.dtype in (torch.bool, torch.uint8) else -1
        return torch.nn.functional.pad(tensor, (0, widest - tensor.shape[1]), value=filled)

    return [widened(tensor) for tensor in tensors]


def _shape(part: Any) -> str:
    if isinstance(part, torch.Tensor):
        return f"{str(part.dtype).removeprefix('torch.')}{list(part.shape[1:])}"
    if isinstance(part, dict):
        return f"a dict of {', '.join(str(key) for key in part)}"
    return f"a tuple of {len(part)}" if isinstance(part, (tuple, list)) else f"a {type(part).__name__}"


def _differ(shapes: list[str], path: str) -> DataError:
    where = f" at {path}" if path else ""
    return DataError(
        f"samples of one batch come from datasets that differ{where}: {' and '.join(dict.fromkeys(shapes))}. They cannot be "
        "one batch; bring them to one form with map first."
    )
