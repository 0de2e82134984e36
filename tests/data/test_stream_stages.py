"""Stages of a stream: alike on every rank, and again after a resume."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from pipelines import read, seen
from shoal.data import Dataset
from shoal.data.slice import Weighted
from shoal.errors import ConfigError


class Numbers(IterableDataset):  # type: ignore[type-arg]
    def __init__(self, num_samples: int) -> None:
        self.num_samples, self.num_read, self.epoch = num_samples, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(self.num_samples):
            self.num_read += 1
            yield torch.tensor(number)


def stream(num_samples: int) -> Dataset:
    return Dataset.from_torch(Numbers(num_samples))


def listed(dataset: Dataset, epoch: int = 0) -> list[int]:
    return seen(read(dataset.batch(7), num_workers=1, epoch=epoch))


stages = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(1, 30)),
        st.tuples(st.just("skip"), st.integers(0, 5)),
        st.tuples(st.just("repeat"), st.integers(1, 3)),
        st.tuples(st.just("filter"), st.integers(2, 4)),
        st.tuples(st.just("shuffle"), st.integers(1, 9)),
        st.tuples(st.just("map"), st.just(0)),
        st.tuples(st.just("augment"), st.just(0)),
    ),
    max_size=4,
)


def applied(dataset: Dataset, kind: str, number: int) -> Dataset:
    match kind:
        case "take" | "skip" | "repeat":
            return getattr(dataset, kind)(number)  # type: ignore[no-any-return]
        case "filter":
            return dataset.filter(lambda n: int(n) % number != 1)
        case "shuffle":
            return dataset.shuffle(seed=number, buffer=number)
        case "map":
            return dataset.map(lambda n: n + 1)
        case _:
            return dataset.augment(lambda n, g: n * 10 + torch.randint(9, (), generator=g), seed=number)


def expected(was: Any, kind: str, number: int, epoch: int) -> list[int] | None:
    match kind:
        case "take":
            return was(epoch)[:number]  # type: ignore[no-any-return]
        case "skip":
            return was(epoch)[number:]  # type: ignore[no-any-return]
        case "repeat":
            return [n for r in range(number) for n in was(epoch * number + r)]
        case "filter":
            return [n for n in was(epoch) if n % number != 1]
        case "map":
            return [n + 1 for n in was(epoch)]
    return None


@settings(max_examples=40)
@given(chain=stages, num_workers=st.integers(1, 3), start=st.integers(0, 30))
def test_stages_of_a_stream_do_what_they_say_on_any_rank_and_from_anywhere(
    chain: list[tuple[str, int]], num_workers: int, start: int
) -> None:
    dataset = stream(25)
    for kind, number in chain:
        before, dataset = dataset, applied(dataset, kind, number)
        for epoch in (0, 1):
            if not _has_any(dataset, epoch):
                return
            now = listed(dataset, epoch)
            promised = expected(lambda e, before=before: listed(before, e), kind, number, epoch)
            if promised is not None:
                assert now == promised
            elif kind == "shuffle":
                assert Counter(now) == Counter(listed(before, epoch))
            else:
                assert [n // 10 for n in now] == listed(before, epoch)
    whole = listed(dataset, 1)
    start = min(start, len(whole))
    assert seen(read(dataset.batch(5), num_workers=num_workers, epoch=1, start=start)) == whole[start:]


def _has_any(dataset: Dataset, epoch: int) -> bool:
    dataset._source.set_epoch(epoch)  # type: ignore[union-attr]
    return next(iter(dataset._source), None) is not None  # type: ignore[call-overload]


def test_a_shuffle_buffer_mixes_as_far_as_it_reaches() -> None:
    data = stream(1000).shuffle(seed=1, buffer=100)
    first, second = listed(data), listed(data, 1)
    assert sorted(first) == sorted(second) == list(range(1000))
    assert first != second != list(range(1000))
    assert listed(stream(1000).shuffle(seed=2, buffer=100)) != first
    assert max(first[:10]) < 120  # nothing comes before it has been read


def test_take_reads_not_one_sample_more() -> None:
    numbers = Numbers(100)
    assert list(Dataset.from_torch(numbers).take(5)) == list(range(5))
    assert numbers.num_read == 5


def test_a_stream_repeated_without_end_can_be_taken_from() -> None:
    endless = stream(4).repeat()
    batches = endless.batch(6)
    assert batches.is_endless
    assert "without end" in repr(batches)
    slices = batches.slices(epoch=0, start=0, rank=0, num_workers=1)
    assert [next(slices).batch.tolist() for _ in range(2)] == [[0, 1, 2, 3, 0, 1], [2, 3, 0, 1, 2, 3]]
    assert listed(endless.take(9)) == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert not endless.take(9).batch(2).is_endless
    assert list(stream(0).repeat()) == []


def test_each_repetition_is_an_epoch_of_the_stream() -> None:
    class Epochs(Numbers):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(torch.full((2,), self.epoch))

    assert listed(Dataset.from_torch(Epochs(2)).repeat(3), 1) == [3, 3, 4, 4, 5, 5]


def test_bad_samples_of_a_stream_are_skipped_and_written_down() -> None:
    def fragile(n: torch.Tensor) -> torch.Tensor:
        if int(n) % 4 == 1:
            raise ValueError("odd one")
        return n

    batches = stream(10).map(fragile, on_error="skip", max_skips=3).batch(4)
    assert [batch.tolist() for batch in batches] == [[0, 2, 3, 4], [6, 7, 8]]
    assert [one.index for one in batches.skipped] == [1, 5, 9]
    with pytest.raises(ValueError, match="odd one") as caught:
        list(stream(10).map(fragile).batch(4))
    assert "index 1, in epoch 0" in caught.value.__notes__[0]


def test_samples_of_a_stream_get_weights() -> None:
    pairs = stream(3).map(lambda n: ({"x": n, "w": n * 0.5}, n))
    for data in (pairs.with_weights("w"), pairs.with_weights(lambda sample: sample[0]["w"])):
        [batch] = data.batch(3)
        assert isinstance(batch, Weighted)
        assert batch.weight.tolist() == [0.0, 0.5, 1.0]
    with pytest.raises(ConfigError, match="a column's name or a function"):
        pairs.with_weights([1.0, 2.0, 3.0])


def test_a_stream_says_what_it_is() -> None:
    said = repr(stream(3).map(abs).shuffle(seed=0).take(2))
    assert said == "Dataset(a stream, read from its beginning: stream > map > shuffle > take)"
