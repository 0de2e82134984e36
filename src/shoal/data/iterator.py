"""Resumable iterators over samples or batches: `iterator()`, with a position that can be saved.

Needs no Trainer and no launcher. The position is a place in the data, not the
state of what reads it, so going on costs nothing where there is random access.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypedDict, TypeVar

from shoal.errors import DataError

T = TypeVar("T")


class DataPosition(TypedDict):
    """A place in a dataset, fit for JSON."""

    epoch: int
    next_index: int
    """Position within the epoch of the first sample not given yet."""

    seed: int
    """Of the shuffle."""

    data: str
    """Digest of the dataset: changes with its sources, stages and seeds, not with the size of batches."""


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
    ) -> None:
        """`begin(epoch, start)` gives items, each with the position behind it."""
        self._begin, self._seed = begin, seed
        text = json.dumps(description, sort_keys=True, default=str)
        self._data = hashlib.sha256(text.encode()).hexdigest()[:16]
        self._epoch, self._next_index = (0, 0) if position is None else self._place(position)
        self._items: Iterator[tuple[T, int]] | None = None

    @property
    def position(self) -> DataPosition:
        """The position behind the last item that was given."""
        return {"epoch": self._epoch, "next_index": self._next_index, "seed": self._seed, "data": self._data}

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
        return epoch, next_index
