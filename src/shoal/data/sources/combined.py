"""Sources made of other sources: `zip`, `interleave`, `repeat`, and a dataset's positions taken as indices."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.data.order.order import ENDLESS, Indices, InOrder, Order, inner_epoch, integers
from shoal.data.skipping import SkipSamples
from shoal.data.sources.source import DerivedSource, Source
from shoal.data.tree import Tree
from shoal.errors import DataError

Read = TypeVar("Read")


def groups(keys: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """(key, the rows that have it), for each key that is there."""
    for key in np.unique(keys).tolist():
        yield key, np.flatnonzero(keys == key)


def _read_as(asked: Indices, read: Callable[[Indices, int], Read], inner: Indices, epoch: int) -> Read:
    """`read(inner, epoch)`, with bad samples named by the indices that the stage itself was asked for."""
    try:
        return read(inner, epoch)
    except SkipSamples as found:
        raise found.renamed(asked, inner) from None


def gather_samples(keys: NDArray[np.int64], read: Callable[[int, NDArray[np.int64]], list[Any]]) -> list[Any]:
    """The samples of all groups, in the order of the rows."""
    found: list[Any] = [None] * len(keys)
    for key, rows in groups(keys):
        for row, sample in zip(rows.tolist(), read(key, rows), strict=True):
            found[row] = sample
    return found


def gather_batch(keys: NDArray[np.int64], read: Callable[[int, NDArray[np.int64]], Tree]) -> Tree:
    """The batches of all groups as one, in the order of the rows."""
    parts = [(rows, read(key, rows)) for key, rows in groups(keys)]
    if len(parts) == 1:
        return parts[0][1]
    came = np.concatenate([rows for rows, _ in parts])
    back = np.empty_like(came)
    back[came] = np.arange(len(came))
    return _joined([batch for _, batch in parts], back, "")


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


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Rounds in which each dataset gives as much as in the one before."""

    first_round: int
    first_position: int
    ends: NDArray[np.int64]
    """Within a round, where each dataset's samples end; the last is the size of the round."""


class Interleaving:
    """Round-robin over datasets of these lengths: position -> (which, position there).

    Each gives `block` samples, then the next; who has fewer left gives those,
    and who has none left is passed over. Rounds differ only where a dataset
    gives its last, so there are few kinds of rounds, and a position is found
    by arithmetic within its kind.
    """

    def __init__(self, lengths: Sequence[int], block: int) -> None:
        self.num_samples, self._block = sum(lengths), block
        # A round is another one than that before it where a dataset gives its last full block, or its last samples.
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


class Interleaved(DerivedSource):
    """The samples of all sources, in turns."""

    def __init__(self, sources: Sequence[Source], block: int) -> None:
        super().__init__(*sources)
        self._sources, self._block = list(sources), block

    @property
    def num_samples(self) -> int:  # type: ignore[override]  # a property may stand for a plain attribute
        return sum(source.num_samples for source in self._sources)

    def samples(self, indices: Indices, epoch: int = 0) -> list[Any]:
        asked = integers(indices)
        which, places = self._turns(asked)
        return gather_samples(
            which,
            lambda number, rows: _read_as(asked[rows], self._sources[number].samples, places[rows], epoch),
        )

    def batch(self, indices: Indices, epoch: int = 0) -> Tree:
        asked = integers(indices)
        which, places = self._turns(asked)
        return gather_batch(
            which,
            lambda number, rows: _read_as(asked[rows], self._sources[number].batch, places[rows], epoch),
        )

    def will_need(self, indices: Indices, epoch: int = 0) -> None:
        which, places = self._turns(integers(indices))
        for number, source in enumerate(self._sources):
            source.will_need(places[which == number], epoch)

    def names(self) -> list[str]:
        return ["interleave"]

    def describe(self) -> list[dict[str, Any]]:
        of = [source.describe() for source in self._sources]
        return [{"source": "interleave", "block": self._block, "of": of}]

    @functools.cached_property
    def _turns(self) -> Interleaving:
        return Interleaving([source.num_samples for source in self._sources], self._block)


class Zipped(DerivedSource):
    """Tuples of one sample of each source; as many as the shortest has."""

    def __init__(self, *sources: Source) -> None:
        super().__init__(*sources)
        self._sources = sources

    @property
    def num_samples(self) -> int:  # type: ignore[override]  # a property may stand for a plain attribute
        return min(source.num_samples for source in self._sources)

    def samples(self, indices: Indices, epoch: int = 0) -> list[Any]:
        columns = [source.samples(indices, epoch) for source in self._sources]
        return list(zip(*columns, strict=True))

    def batch(self, indices: Indices, epoch: int = 0) -> Tree:
        return tuple(source.batch(indices, epoch) for source in self._sources)

    def names(self) -> list[str]:
        return ["zip"]

    def describe(self) -> list[dict[str, Any]]:
        return [{"source": "zip", "of": [source.describe() for source in self._sources]}]


def as_source(source: Source, order: Order) -> Source:
    """A source with the samples of a dataset by position."""
    return source if isinstance(order, InOrder) else Ordered(source, order)


class Ordered(DerivedSource):
    """Another source in a given order."""

    def __init__(self, source: Source, order: Order) -> None:
        super().__init__(source)
        self.order = order
        self.uses_epoch = source.uses_epoch or order.varies
        self.reorders = source.reorders or order.varies

    @property
    def num_samples(self) -> int:  # type: ignore[override]  # a property may stand for a plain attribute
        return self.order.num_samples

    def samples(self, indices: Indices, epoch: int = 0) -> list[Any]:
        return _read_as(indices, self._source.samples, self._inner(indices, epoch), epoch)

    def batch(self, indices: Indices, epoch: int = 0) -> Tree:
        return _read_as(indices, self._source.batch, self._inner(indices, epoch), epoch)

    def will_need(self, indices: Indices, epoch: int = 0) -> None:
        self._source.will_need(self._inner(indices, epoch), epoch)

    def names(self) -> list[str]:
        return [*self._source.names(), *self.order.names()]

    def describe(self) -> list[dict[str, Any]]:
        return [*self._source.describe(), *self.order.describe()]

    def _inner(self, indices: Indices, epoch: int) -> Indices:
        return self.order.indices(integers(indices) if isinstance(indices, list) else indices, epoch)


class RepeatedSource(DerivedSource):
    """Another source, as often as wanted, each time as in an epoch of its own."""

    def __init__(self, source: Source, times: int | None) -> None:
        super().__init__(source)
        self._times = times

    @property
    def num_samples(self) -> int:  # type: ignore[override]  # a property may stand for a plain attribute
        return ENDLESS if self._times is None else self._times * self._source.num_samples

    def samples(self, indices: Indices, epoch: int = 0) -> list[Any]:
        repetitions, inner = self._located(indices)
        asked = integers(indices)
        read = self._source.samples
        return gather_samples(
            repetitions,
            lambda number, rows: _read_as(asked[rows], read, inner[rows], self._epoch(epoch, number)),
        )

    def batch(self, indices: Indices, epoch: int = 0) -> Tree:
        if isinstance(indices, range):
            number, first = divmod(indices.start, self._source.num_samples)
            if first + len(indices) <= self._source.num_samples:  # a stretch of one repetition stays one
                inner_range = range(first, first + len(indices))
                return _read_as(indices, self._source.batch, inner_range, self._epoch(epoch, number))
        repetitions, inner = self._located(indices)
        asked = integers(indices)
        read = self._source.batch
        return gather_batch(
            repetitions,
            lambda number, rows: _read_as(asked[rows], read, inner[rows], self._epoch(epoch, number)),
        )

    def will_need(self, indices: Indices, epoch: int = 0) -> None:
        self._source.will_need(self._located(indices)[1], epoch)

    def describe(self) -> list[dict[str, Any]]:
        """The source's own: the order says how often."""
        return self._source.describe()

    def _located(self, indices: Indices) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        repetitions, inner = np.divmod(integers(indices), self._source.num_samples)
        # Where the epoch makes no difference, all repetitions are read as one.
        return repetitions if self._source.uses_epoch else np.zeros_like(repetitions), inner

    def _epoch(self, epoch: int, repetition: int) -> int:
        return inner_epoch(epoch, repetition, self._times)
