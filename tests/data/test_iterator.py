"""A pass that can be left and gone on with, by a position that fits into JSON."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from pipelines import epoch_of, numbers
from shoal.data import Dataset
from shoal.errors import DataError


class Counted(IterableDataset):  # type: ignore[type-arg]
    """Numbers in an order of a shuffle buffer of its own."""

    def __iter__(self) -> Iterator[int]:
        listed = list(range(30))
        random.shuffle(listed)
        return iter(listed)


def pipeline(kind: str) -> Dataset:
    match kind:
        case "shuffled":
            return numbers(30).shuffle(seed=3)
        case "drawn":
            return numbers(30).sample(25, weights=list(range(30)), seed=1)
        case "random":
            return numbers(30).map(lambda n: n + 100 * torch.randint(9, ())).shuffle(seed=1)
        case "endless":
            return numbers(7).shuffle(seed=1).repeat()
        case "stream":
            return Dataset.from_torch(Counted()).map(torch.tensor).shuffle(seed=1, buffer=4)
        case _:
            return (
                numbers(30)
                .filter(lambda n: int(n) % 4 != 1)
                .augment(lambda n, g: n + torch.randint(9, (), generator=g))
            )


KINDS = ["shuffled", "drawn", "random", "endless", "stream", "filtered and augmented"]


def follow(items: Any, count: int) -> list[Any]:
    """So many items, epoch after epoch."""
    got: list[Any] = []
    while len(got) < count:
        got += [item.tolist() for item in itertools.islice(items, count - len(got))]
    return got


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_size", [None, 8])
@settings(max_examples=12)
@given(num_before=st.integers(0, 40), num_after=st.integers(1, 20))
def test_a_saved_position_is_gone_on_from_as_if_nothing_had_been(
    kind: str, batch_size: int | None, num_before: int, num_after: int
) -> None:
    def opened(position: Any = None) -> Any:
        data = pipeline(kind)
        return (data if batch_size is None else data.batch(batch_size)).iterator(position)

    whole = follow(opened(), num_before + num_after)
    one = opened()
    assert follow(one, num_before) == whole[:num_before]
    saved = json.loads(json.dumps(one.position))
    assert follow(opened(saved), num_after) == whole[num_before:]
    assert follow(one, num_after) == whole[num_before:]


def test_next_ends_with_the_epoch_and_then_begins_the_next() -> None:
    it = numbers(5).shuffle(seed=2).batch(3).iterator()
    assert it.position["next_index"] == it.position["epoch"] == 0
    it.next()
    assert (it.position["epoch"], it.position["next_index"], it.position["seed"]) == (0, 3, 2)
    it.next()
    with pytest.raises(StopIteration):
        it.next()
    assert (it.position["epoch"], it.position["next_index"]) == (1, 0)
    assert [n for batch in it for n in batch.tolist()] == epoch_of(numbers(5).shuffle(seed=2), 1)


def test_a_position_counts_samples_so_batches_may_change_their_size() -> None:
    data = numbers(30).shuffle(seed=3)
    it = data.batch(8).iterator()
    it.next()
    rest = [n for batch in data.batch(5).iterator(it.position) for n in batch.tolist()]
    assert rest == epoch_of(data)[8:]
    other = data.iterator()
    for _ in range(8):
        other.next()
    assert other.position == it.position
    it.close()


def test_a_position_is_that_of_what_was_given_not_of_what_was_read_ahead() -> None:
    it = numbers(40).batch(4).prefetch(3).iterator()
    it.next()
    assert it.position["next_index"] == 4
    it.close()
    assert it.next().tolist() == [4, 5, 6, 7]
    it.close()


@pytest.mark.parametrize(
    "other",
    [
        numbers(31).shuffle(seed=3),
        numbers(30).shuffle(seed=4),
        numbers(30),
        numbers(30).shuffle(seed=3).map(abs),
        numbers(30).filter(lambda n: True).shuffle(seed=3),
    ],
)
def test_a_position_of_other_data_is_refused(other: Dataset) -> None:
    position = numbers(30).shuffle(seed=3).iterator().position
    with pytest.raises(DataError, match="saved for another dataset"):
        other.iterator(position)
    with pytest.raises(DataError, match="saved for another dataset"):
        other.batch(4).iterator(position)


@pytest.mark.parametrize(
    "position", [3, {}, {"epoch": 0}, {"epoch": -1, "next_index": 0, "seed": 0, "data": ""}, "epoch"]
)
def test_what_is_no_position_is_refused(position: Any) -> None:
    with pytest.raises(DataError, match="position"):
        numbers(3).iterator(position)


def test_a_loader_can_be_left_and_gone_on_with_too() -> None:
    def batches() -> Any:
        return Dataset.from_torch(DataLoader(TensorDataset(torch.arange(20)), batch_size=6, shuffle=True))

    whole = [batch[0].tolist() for batch in batches().iterator()]
    it = batches().iterator()
    assert it.next()[0].tolist() == whole[0]
    assert [batch[0].tolist() for batch in batches().iterator(it.position)] == whole[1:]


def test_an_error_leaves_the_iterator_where_it_stands() -> None:
    failing = True

    def sometimes(n: torch.Tensor) -> torch.Tensor:
        if failing and int(n) == 5:
            raise ValueError
        return n

    it = numbers(9).map(sometimes).batch(3).iterator()
    it.next()
    with pytest.raises(ValueError):  # noqa: PT011
        it.next()
    failing = False
    assert it.next().tolist() == [3, 4, 5]


def test_bad_samples_are_skipped_and_the_position_counts_them() -> None:
    def fragile(n: torch.Tensor) -> torch.Tensor:
        if int(n) in (1, 2):
            raise ValueError
        return n

    data = numbers(4).map(fragile, on_error="skip")
    it = data.iterator()
    assert (int(it.next()), it.position["next_index"]) == (0, 1)
    assert (int(it.next()), it.position["next_index"]) == (3, 4)
    assert [batch.tolist() for batch in data.batch(1).iterator()] == [[0], [3]]
