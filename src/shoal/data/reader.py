"""The reader of samples by index, one worker's share of a batch, and resumable iterators.

The place where foreign code runs (datasets, map functions, collate functions), in this process or
in a DataLoader's. It makes their random draws a function of (seed, epoch, position), so a resumed
run, or one on another number of workers, sees the same samples to the bit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NotRequired, TypedDict, TypeVar

import numpy as np
from numpy.typing import NDArray

from shoal.data.order import Indices, Order
from shoal.data.randomness import PrivateGenerators
from shoal.data.skipping import SkipLog, Skipped, SkipSamples
from shoal.data.sources.source import Source, StreamPlan, import_plans
from shoal.data.tree import Collate, Tree
from shoal.errors import DataError
from shoal.runtime.seeds import mix

_BLOCK = 1024  # positions whose indices are computed at once


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Samples to be read together."""

    indices: Indices
    """Indices of the source, in the order of the samples wanted."""

    epoch: int
    position: int
    """Position of the first sample in the epoch; the others follow it."""

    places: NDArray[np.int64] | None = None
    """Distance of each sample from the first, where some between them are left out."""

    def without(self, bad: dict[int, Any]) -> ReadRequest:
        listed = list(self.indices)
        kept = [place for place, index in enumerate(listed) if int(index) not in bad]
        places = np.array(kept, dtype=np.int64)
        left = np.array([int(listed[place]) for place in kept], dtype=np.int64)
        return replace(self, indices=left, places=places if self.places is None else self.places[places])

    def place(self, number: int) -> int:
        return self.position + (number if self.places is None else int(self.places[number]))


@dataclass(frozen=True, slots=True)
class Reading:
    """Result of a request."""

    batch: Tree
    """None where nothing was left of it."""

    request: ReadRequest
    """The samples in the batch: those asked for, less the skipped."""

    skipped: tuple[Skipped, ...] = ()


class Reader:
    """Reads requests from a source.

    Deterministic code is run once and costs 50 µs of watching per request.
    When it is seen to draw from a global generator, the request is read again,
    each sample under its own seed, and so are all requests after it.
    """

    def __init__(self, source: Source, *, seed: int, collate: Collate | None = None) -> None:
        self.source, self.seed = source, seed
        self.collate = collate or Collate()
        self._generators = PrivateGenerators(0)

    def read(self, request: ReadRequest) -> Reading:
        """Read a request; bad samples that a stage agrees to skip are left out."""
        skipped: list[Skipped] = []
        while True:
            try:
                return Reading(self(request), request, tuple(skipped))
            except SkipSamples as found:
                if not found.bad:
                    raise AssertionError(
                        "a stage skips samples and names none of those it was asked for"
                    ) from None
                skipped += [
                    Skipped(request.epoch, index, error, found.stage, found.max_skips)
                    for index, error in found.bad.items()
                ]
                request = request.without(found.bad)
            if not len(request.indices):
                return Reading(None, request, tuple(skipped))

    def __call__(self, request: ReadRequest) -> Tree:
        """The batch of a request; SkipSamples where some of it is bad and may be left out."""
        if self.collate.is_default and not self.source.runs_user_code:
            return self.source.batch(request.indices, request.epoch)
        with self._generators as generators:
            if not generators.drew:
                generators.reseed(0)
                try:
                    batch = self._read(request)
                except SkipSamples:
                    if not generators.were_used():
                        raise
                    generators.drew = True  # which are bad may depend on draws: read each under its own seed
                else:
                    generators.drew = generators.were_used()
                if not generators.drew:
                    return batch
            return self._read_seeded(request)

    def sample(self, index: int, *, epoch: int, position: int) -> Any:
        """One sample alone, the same as within a batch; SkipSamples where it is bad and may be left out."""
        if not self.source.runs_user_code:
            return self.source.samples([index], epoch)[0]
        with self._generators as generators:
            generators.reseed(self._seed_of(epoch, position))
            return self.source.samples([index], epoch)[0]

    def _seed_of(self, epoch: int, position: int) -> int:
        return mix(self.seed, epoch, position)

    def _read(self, request: ReadRequest) -> Tree:
        if self.collate.is_default:
            return self.source.batch(request.indices, request.epoch)
        return self.collate(self.source.samples(request.indices, request.epoch))

    def _read_seeded(self, request: ReadRequest) -> Tree:
        indices = request.indices.tolist() if isinstance(request.indices, np.ndarray) else request.indices
        samples: list[Any] = []
        found: SkipSamples | None = None
        for number, index in enumerate(indices):
            self._generators.reseed(self._seed_of(request.epoch, request.place(number)))
            try:
                samples += self.source.samples([index], request.epoch)
            except SkipSamples as bad:
                if found is None:
                    found = bad
                elif found.stage == bad.stage:  # another stage finds its own once these are gone
                    found.bad.update(bad.bad)
        if found is not None:
            raise found
        # A collate function draws for the whole share; its seed must differ from a sample's.
        self._generators.reseed(mix(self.seed, request.epoch, request.position, len(samples)))
        return self.collate(samples)


def samples_from(reader: Reader, order: Order, *, epoch: int, start: int) -> Iterator[tuple[Any, int]]:
    """The samples of an epoch one by one from position `start` on, each with the position behind it; bad ones are skipped."""
    skips = SkipLog()
    num_samples = order.length(epoch)
    if start > num_samples:
        raise DataError(
            f"the epoch has {num_samples} samples and cannot go on from sample {start}: this is not the dataset the "
            "position was saved for. Nothing was read; give the same data, or begin anew."
        )
    for begin in range(start, num_samples, _BLOCK):
        positions = range(begin, min(begin + _BLOCK, num_samples))
        for position, index in zip(positions, order.indices(positions, epoch), strict=True):
            try:
                sample = reader.sample(
                    index if isinstance(index, int) else int(index), epoch=epoch, position=position
                )
            except SkipSamples as found:
                skips.record(
                    [
                        Skipped(epoch, bad, error, found.stage, found.max_skips)
                        for bad, error in found.bad.items()
                    ]
                )
                continue
            yield sample, position + 1


T = TypeVar("T")


class DataPosition(TypedDict):
    """A place in a dataset, fit for JSON."""

    epoch: int
    next_index: int
    """Position within the epoch of the first sample not given yet."""

    seed: int
    """Seed of the shuffle."""

    data: str
    """Digest of the dataset: changes with its sources, stages and seeds, not with the size of batches."""

    streams: NotRequired[list[dict[str, Any]]]
    """Offsets of the streams of records that it is read from."""


class DataIterator(Generic[T]):
    """Samples or batches, one after the other, epoch after epoch.

    A `for` over it ends with the epoch; the next one goes on with the next
    epoch. After a saved position it goes on in the middle.

        it = data.shuffle(seed=0).batch(256).iterator()
        batch = it.next()
        saved = json.dumps(it.position)
        ...
        it = data.shuffle(seed=0).batch(256).iterator(json.loads(saved))
    """

    def __init__(
        self,
        begin: Callable[[int, int], Iterator[tuple[T, int]]],
        *,
        description: Any,
        seed: int,
        position: Any = None,
        plans: Sequence[StreamPlan] = (),
    ) -> None:
        """`begin(epoch, start)` gives items, each with the position behind it."""
        self._begin, self._seed, self._plans = begin, seed, plans
        text = json.dumps(description, sort_keys=True, default=str)
        self._data = hashlib.sha256(text.encode()).hexdigest()[:16]
        self._epoch, self._next_index = (0, 0) if position is None else self._place(position)
        self._items: Iterator[tuple[T, int]] | None = None

    @property
    def position(self) -> DataPosition:
        place: DataPosition = {
            "epoch": self._epoch,
            "next_index": self._next_index,
            "seed": self._seed,
            "data": self._data,
        }
        if self._plans:
            place["streams"] = [plan.export_state(self._next_index) for plan in self._plans]
        return place

    def next(self) -> T:
        """The next item; StopIteration at the end of an epoch, and then the first of the next."""
        return self.__next__()

    def __iter__(self) -> DataIterator[T]:
        return self

    def __next__(self) -> T:
        if self._items is None:
            self._items = self._begin(self._epoch, self._next_index)
        try:
            item, self._next_index = next(self._items)
        except StopIteration:
            self.close()
            self._epoch, self._next_index = self._epoch + 1, 0
            raise
        except BaseException:
            self.close()  # a generator that has raised is over: asked again, it begins where it stands
            raise
        return item

    def close(self) -> None:
        """End what reads ahead, if anything does. It can be gone on with."""
        items, self._items = self._items, None
        if items is not None and hasattr(items, "close"):
            items.close()

    def _place(self, position: Any) -> tuple[int, int]:
        try:
            epoch, next_index = position["epoch"], position["next_index"]
            data, seed = position["data"], position["seed"]
        except (TypeError, KeyError):
            raise DataError(
                f"a position is what `iterator().position` gave, a dict with epoch, next_index, seed and data, but got "
                f"{position!r}"
            ) from None
        if not all(type(number) is int and number >= 0 for number in (epoch, next_index)):
            raise DataError(f"a position has an epoch and a next_index of 0 or more, but got {position!r}")
        if data != self._data:
            seeds = (
                f" (that one was shuffled with seed {seed}, this one with {self._seed})"
                if seed != self._seed
                else ""
            )
            raise DataError(
                f"the position was saved for another dataset than this{seeds}: its sources, stages, seeds or sizes differ, and "
                f"sample {next_index} of epoch {epoch} would be another one. Nothing was read; build the dataset as it was, "
                "or begin anew without a position."
            )
        import_plans(self._plans, position.get("streams", ()))
        return epoch, next_index
