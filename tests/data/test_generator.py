"""Datasets of generator functions: a new pass each epoch, the same on every worker, and what is said when one misbehaves."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.data import Dataset
from shoal.errors import ConfigError, DataError, EmptyDataset


def numbers() -> Iterator[int]:
    yield from range(10)


def of_epoch(epoch: int) -> Iterator[int]:
    return iter(range(100 * epoch, 100 * epoch + 4))


def seen(batches: Any) -> list[int]:
    return [int(number) for batch in batches for number in batch]


def test_every_epoch_is_a_new_pass() -> None:
    batches = Dataset.from_generator(numbers).batch(4)
    assert [seen(batches) for _ in range(3)] == [list(range(10))] * 3
    assert list(Dataset.from_generator(lambda: [1, 2, 3])) == [1, 2, 3]


@pytest.mark.parametrize(
    "fn", [of_epoch, lambda epoch=5: of_epoch(epoch), partial(of_epoch), lambda wanted: of_epoch(wanted)]
)
def test_a_function_with_an_argument_is_told_the_epoch(fn: Any) -> None:
    batches = Dataset.from_generator(fn).batch(4)
    assert [seen(batches) for _ in range(3)] == [[0, 1, 2, 3], [100, 101, 102, 103], [200, 201, 202, 203]]


def test_an_argument_with_a_default_that_is_no_epoch_keeps_it() -> None:
    assert list(Dataset.from_generator(lambda count=2: iter(range(count)))) == [0, 1]


@given(num_workers=st.integers(1, 4), start=st.integers(0, 12))
def test_workers_share_an_epoch_and_a_resumed_one_is_read_again(num_workers: int, start: int) -> None:
    read: list[int] = []

    def counted() -> Iterator[int]:
        for number in range(12):
            read.append(number)
            yield number

    batches = Dataset.from_generator(counted).batch(5)
    parts = [
        list(batches.slices(epoch=0, start=start, rank=rank, num_workers=num_workers))
        for rank in range(num_workers)
    ]
    together = [
        int(n) for step in zip(*parts, strict=True) for part in step for n in part.batch[: part.num_local]
    ]
    assert together == list(range(start, 12))
    assert read == list(range(12)) * num_workers, "from the beginning, by every worker"


def test_what_it_draws_is_a_function_of_seed_and_epoch() -> None:
    def drawing() -> Iterator[float]:
        for _ in range(6):
            yield random.random() + float(torch.rand(()))

    one, other = (Dataset.from_generator(drawing, seed=seed).batch(6) for seed in (1, 2))
    first = [[batch.tolist() for batch in one] for _ in range(2)]
    random.random()
    [whole] = one.slices(epoch=1, start=0, rank=0, num_workers=1)
    assert whole.batch.tolist() == first[1][0]
    assert first[0] != first[1]
    assert [batch.tolist() for batch in other] != first[0]
    assert one.describe() != other.describe()


def test_an_endless_generator_ends_where_num_samples_says() -> None:
    batches = Dataset.from_generator(itertools.count, num_samples=7).batch(5)
    assert [seen(batches) for _ in range(2)] == [list(range(7))] * 2


def test_one_that_ends_too_early_is_told_with_both_numbers() -> None:
    with pytest.raises(DataError, match="numbers ended after 10 samples of epoch 0, and num_samples says 11"):
        seen(Dataset.from_generator(numbers, num_samples=11).batch(4))


def test_a_generator_that_raises_is_told_with_its_own_line() -> None:
    def broken() -> Iterator[int]:
        yield 1
        yield 2
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as found:
        seen(Dataset.from_generator(broken).batch(1))
    [note] = found.value.__notes__
    assert "broken after 2 samples of epoch 0 at " in note
    assert 'raise KeyError("mine")' in note


def test_the_same_iterator_twice_is_told() -> None:
    once = numbers()
    batches = Dataset.from_generator(lambda: once).batch(4)
    assert seen(batches) == list(range(10))
    with pytest.raises(DataError, match="returned the iterator of the epoch before"):
        seen(batches)


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (numbers(), r"takes a function .* got a generator; give a function that makes it"),
        (5, "got a int"),
        (lambda a, b: iter(()), "it wants a, b"),
        (lambda *, path: iter(()), "it wants path"),
    ],
)
def test_what_is_no_such_function_is_refused(fn: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Dataset.from_generator(fn)


def test_what_is_no_iterator_is_refused_when_it_is_read() -> None:
    with pytest.raises(ConfigError, match="should return an iterator of samples, and returned a int"):
        seen(Dataset.from_generator(lambda: 5).batch(1))  # type: ignore[arg-type, return-value]
    with pytest.raises(EmptyDataset):
        seen(Dataset.from_generator(list).batch(1))
    with pytest.raises(ConfigError, match="num_samples"):
        Dataset.from_generator(numbers, num_samples=0)


def test_it_says_that_it_is_a_stream() -> None:
    data = Dataset.from_generator(numbers)
    assert repr(data) == "Dataset(a stream, read from its beginning: generator)"
    [stage] = data.batch(2).describe()["stages"]
    assert stage == {"source": "generator", "fn": "numbers", "resumes": "by reading again"}
    with pytest.raises(ConfigError, match="split needs random access, and this is a stream"):
        data.split(0.5, 0.5)
    with pytest.raises(TypeError, match="no length"):
        len(data)
