"""Whatever orders are made of orders: each does what it says, and any number of workers covers it exactly."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipelines import epoch_of, numbers, read, seen
from shoal.data import Dataset
from shoal.errors import ConfigError

EPOCHS = (0, 1, 2)

stages = st.one_of(
    st.tuples(st.just("shuffle"), st.integers(0, 5)),
    st.tuples(st.just("take"), st.integers(0, 30)),
    st.tuples(st.just("skip"), st.integers(0, 12)),
    st.tuples(st.just("repeat"), st.integers(1, 3)),
    st.tuples(st.just("filter"), st.integers(2, 5)),
    st.tuples(st.just("sample"), st.integers(0, 5)),
    st.tuples(st.just("sample once"), st.integers(1, 20)),
    st.tuples(st.just("split"), st.integers(0, 5)),
    st.tuples(st.just("fold"), st.integers(0, 5)),
    st.tuples(st.just("interleave"), st.integers(1, 4)),
    st.tuples(st.just("map"), st.just(0)),
)
chains = st.lists(stages, max_size=4)


def applied(dataset: Dataset, kind: str, number: int) -> Dataset:
    """The dataset with one stage more; as it was where the stage refuses to stand there."""
    match kind:
        case "shuffle":
            return dataset.shuffle(seed=number)
        case "take":
            return dataset.take(number)
        case "skip":
            return dataset.skip(number)
        case "repeat":
            return dataset.repeat(number)
        case "filter":
            return dataset.filter(lambda sample: int(sample) % number != 0)
        case "sample":
            return dataset.sample(seed=number)
        case "sample once":
            return dataset.sample(min(number, max(len(dataset), 1)), replacement=False)
        case "split":
            return dataset.split(0.6, 0.4, seed=number)[0]
        case "fold":
            return dataset.folds(3, seed=number)[1][0]
        case "interleave":
            return Dataset.interleave([dataset, numbers(5)], block=number)
        case _:
            return dataset.map(lambda sample: sample)


def check(before: Dataset, after: Dataset, kind: str, number: int) -> None:
    """An epoch of `after` follows from those of `before` as the stage promises."""
    for epoch in EPOCHS:
        was, now = epoch_of(before, epoch), epoch_of(after, epoch)
        match kind:
            case "shuffle":
                assert sorted(now) == sorted(was)
            case "take":
                assert now == was[:number]
            case "skip":
                assert now == was[number:]
            case "repeat":
                assert now == [n for r in range(number) for n in epoch_of(before, epoch * number + r)]
            case "filter":
                assert now == [n for n in was if n % number != 0]
            case "sample":
                assert len(now) == len(was)
                assert set(now) <= set(was)
            case "sample once":
                assert not Counter(now) - Counter(was)
                assert len(now) == min(number, len(was))
            case "split" | "fold":
                assert not Counter(now) - Counter(was)
                assert sorted(now) == sorted(epoch_of(after, 0))
            case "interleave":
                assert sorted(now) == sorted([*was, *range(5)])
            case _:
                assert now == was


def build(num_samples: int, chain: list[tuple[str, int]], *, is_checked: bool = False) -> Dataset:
    dataset = numbers(num_samples)
    for kind, number in chain:
        try:
            after = applied(dataset, kind, number)
        except ConfigError:
            continue  # refused, by name: split after shuffle, repeat of epochs of several lengths
        if is_checked:
            check(dataset, after, kind, number)
        dataset = after
    return dataset


@settings(max_examples=60)
@given(num_samples=st.integers(1, 30), chain=chains)
def test_every_stage_does_what_it_says_after_any_others(
    num_samples: int, chain: list[tuple[str, int]]
) -> None:
    build(num_samples, chain, is_checked=True)


@settings(max_examples=60)
@given(
    num_samples=st.integers(1, 40),
    chain=chains,
    batch_size=st.integers(4, 13),
    workers=st.sampled_from([(1, 3), (3, 4), (4, 1), (3, 1)]),
    epoch=st.integers(0, 2),
    data=st.data(),
)
def test_workers_cover_an_epoch_and_others_go_on_with_exactly_the_rest(
    num_samples: int,
    chain: list[tuple[str, int]],
    batch_size: int,
    workers: tuple[int, int],
    epoch: int,
    data: st.DataObject,
) -> None:
    dataset = build(num_samples, chain)
    whole = epoch_of(dataset, epoch)
    assume(whole)
    batches = dataset.batch(batch_size)
    before = read(batches, num_workers=workers[0], epoch=epoch)
    cut = data.draw(st.integers(0, len(before)))
    start = before[cut - 1][0].start + before[cut - 1][0].num_global if cut else 0
    after = read(batches, num_workers=workers[1], epoch=epoch, start=start)
    assert seen(before) == whole
    assert seen(before[:cut]) + seen(after) == whole


@given(num_samples=st.integers(1, 40), chain=chains, epoch=st.integers(0, 2), data=st.data())
@settings(max_examples=40)
def test_any_position_can_be_asked_first(
    num_samples: int, chain: list[tuple[str, int]], epoch: int, data: st.DataObject
) -> None:
    source, order = build(num_samples, chain)._indexed("test")
    length = order.length(epoch)
    assume(length)
    places = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=9))
    whole: Any = order.indices(range(length), epoch)
    some: Any = order.indices(np.array(places, dtype=np.int64), epoch)
    assert [int(i) for i in some] == [int(whole[place]) for place in places]
    assert all(0 <= int(i) < source.num_samples for i in whole)


def test_an_endless_repetition_is_read_as_far_as_anybody_likes() -> None:
    endless = numbers(5).shuffle(seed=1).repeat()
    assert repr(endless) == "Dataset(without end: arrays > shuffle > repeat)"
    first = epoch_of(endless.take(15))
    assert [sorted(first[at : at + 5]) for at in (0, 5, 10)] == [list(range(5))] * 3
    assert first == epoch_of(numbers(5).shuffle(seed=1).repeat(3))
    assert epoch_of(endless.take(15), 1) != first
    batches = endless.batch(4)
    assert batches.is_endless
    assert (batches.num_samples, batches.num_steps(), repr(batches)) == (
        None,
        None,
        "Batches(without end, 4 per batch)",
    )
    far = next(batches.slices(epoch=0, start=10**15, rank=1, num_workers=2))
    assert far.num_local == 2
    with pytest.raises(TypeError, match="without end"):
        len(endless)
    with pytest.raises(TypeError, match="without end"):
        len(batches)


def test_what_needs_an_end_refuses_what_has_none() -> None:
    endless = numbers(5).repeat()
    for attempt in (
        lambda: endless.shuffle(seed=0),
        lambda: endless.split(0.5, 0.5),
        lambda: endless.folds(2),
        lambda: endless.filter(bool),
        lambda: endless.sample(3),
        lambda: endless.repeat(2),
        lambda: Dataset.interleave([endless, numbers(3)]),
    ):
        with pytest.raises(ConfigError, match=r"repeat"):
            attempt()
    assert len(Dataset.zip(endless, numbers(12))) == 12


def test_repetitions_have_indices_of_their_own() -> None:
    [part] = numbers(3).repeat(2).batch(6).slices(epoch=0, start=0, rank=0, num_workers=1)
    assert list(part.indices) == list(range(6))
    assert part.batch.tolist() == [0, 1, 2, 0, 1, 2]


def test_a_split_of_what_moves_is_refused() -> None:
    shuffled = numbers(10).shuffle(seed=0)
    for data in (
        shuffled,
        shuffled.take(4),
        numbers(10).sample(4),
        Dataset.zip(shuffled, numbers(10)),
    ):
        with pytest.raises(ConfigError, match=r"[Ss]plit first, then shuffle"):
            data.split(0.5, 0.5)
        with pytest.raises(ConfigError, match=r"[Ff]olds first, then shuffle"):
            data.folds(2)


def test_numbers_that_cannot_be_meant_are_refused_at_once() -> None:
    data = numbers(10)
    for attempt in (
        lambda: data.take(-1),
        lambda: data.skip("2"),  # type: ignore[arg-type]
        lambda: data.repeat(0),
        lambda: data.folds(1),
        lambda: data.folds(11),
        lambda: data.sample(0),
        lambda: data.sample(11, replacement=False),
        lambda: data.shuffle(0, buffer=0),
        lambda: Dataset.interleave([]),
        lambda: Dataset.interleave([data], block=0),
        lambda: Dataset.zip(data, 3),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError):
            attempt()
