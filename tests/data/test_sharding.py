"""Cuts of every kind: each sample once, in the order of the ranks, at any number of workers."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from shoal.data import Batches, Dataset, Slice, as_batches
from shoal.data.sharding import UNSAID, BySpeed, DynamicRanges, weighted_cuts
from shoal.errors import ConfigError, DataError

TEXTS = ["a" * length for length in (9, 1, 1, 1, 1, 1, 30, 2, 2, 2, 1, 1, 5, 5)]


def parts(batches: Batches, num_workers: int, *, epoch: int = 0, start: int = 0) -> list[tuple[Slice, ...]]:
    by_rank = [
        list(batches.slices(epoch=epoch, start=start, rank=rank, num_workers=num_workers))
        for rank in range(num_workers)
    ]
    return list(zip(*by_rank, strict=True))


def seen(steps: list[tuple[Slice, ...]]) -> list[int]:
    return [int(x) for step in steps for part in step for x in part.batch[: part.num_local]]


def sharded(batches: Batches, how: str, num_workers: int, num_samples: int) -> Batches:
    match how:
        case "balanced":
            costs = np.random.default_rng(0).exponential(size=num_samples)
            return batches.shard("balanced", cost=costs)
        case "weighted":
            return batches.shard("weighted", weights=[rank**2 for rank in range(1, num_workers + 1)])
        case "empty":
            return batches.shard(
                "weighted", weights=[0, *[1] * (num_workers - 1)] if num_workers > 1 else [1]
            )
    return batches.shard(how)


@given(
    how=st.sampled_from(["equal", "balanced", "weighted", "empty", "dynamic"]),
    num_samples=st.integers(1, 90),
    batch_size=st.integers(5, 40),
    before=st.integers(1, 5),
    after=st.integers(1, 5),
    epoch=st.integers(0, 2),
    data=st.data(),
)
def test_an_epoch_is_every_sample_once_and_goes_on_at_another_number_of_workers(
    how: str, num_samples: int, batch_size: int, before: int, after: int, epoch: int, data: st.DataObject
) -> None:
    plain = Dataset.from_arrays(torch.arange(num_samples)).shuffle(seed=3).batch(batch_size)
    whole = seen(parts(plain, 1, epoch=epoch))
    first = parts(sharded(plain, how, before, num_samples), before, epoch=epoch)
    assert seen(first) == whole
    stop = data.draw(st.integers(0, len(first)))
    start = first[stop - 1][0].start + first[stop - 1][0].num_global if stop else 0
    rest = parts(sharded(plain, how, after, num_samples), after, epoch=epoch, start=start)
    assert seen(first[:stop]) + seen(rest) == whole


@given(st.integers(0, 1000), st.lists(st.floats(0, 1e6), min_size=1, max_size=8).filter(any))
def test_weighted_cuts_cover_everything_in_proportion(num_samples: int, weights: list[float]) -> None:
    cuts = weighted_cuts(num_samples, weights)
    assert (cuts[0], cuts[-1], len(cuts)) == (0, num_samples, len(weights) + 1)
    for (begin, end), weight in zip(itertools.pairwise(cuts), weights, strict=True):
        assert abs(end - begin - num_samples * weight / sum(weights)) <= 1.001


@given(st.integers(1, 1000), st.integers(1, 9))
def test_equal_weights_are_equal_cuts(num_samples: int, num_workers: int) -> None:
    cuts = weighted_cuts(num_samples, [1.0] * num_workers)
    assert cuts == list(UNSAID.cuts(0, num_samples, num_workers, 0))


def test_a_worker_without_a_share_borrows() -> None:
    batches = Dataset.from_arrays(torch.arange(8)).batch(4).shard("weighted", weights=[1, 0, 1])
    step = parts(batches, 3)[0]
    assert [part.num_local for part in step] == [2, 0, 2]
    assert step[1].borrowed
    assert step[1].cuts == (0, 2, 2, 4)


class Texts(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        self.num_read = 0

    def __len__(self) -> int:
        return len(TEXTS)

    def __getitem__(self, index: int) -> Any:
        self.num_read += 1
        return {"text": TEXTS[index], "cost": len(TEXTS[index])}, index


@pytest.mark.parametrize(
    "cost",
    ["length", "bytes", "cost", "text", lambda sample: len(sample[0]["text"]), [len(t) for t in TEXTS]],
)
def test_balanced_by_whatever_samples_cost(cost: Any) -> None:
    batches = Dataset.from_torch(Texts()).batch(14)
    (step,) = parts(batches.shard("balanced", cost=cost), 3)
    loads = [sum(len(text) for text in part.batch[0]["text"]) for part in step]
    assert sum(loads) == sum(map(len, TEXTS))
    if cost != "bytes":  # where the other columns weigh too
        assert max(loads) == 30
    assert max(loads) < 40


def test_costs_are_read_once_and_in_any_order_of_the_epochs() -> None:
    texts = Texts()
    batches = Dataset.from_torch(texts).shuffle(seed=1).batch(7).shard("balanced", cost="length")
    num_own = 0
    for epoch in range(3):
        for part in batches.slices(epoch=epoch, start=0, rank=0, num_workers=2):
            num_own += max(part.num_local, 1)
    assert texts.num_read == num_own + len(TEXTS)


def test_a_column_of_numbers_is_read_as_a_whole() -> None:
    lengths = torch.tensor([1.0, 1, 1, 1, 8, 8])
    data = Dataset.from_arrays(({"x": torch.arange(6), "n": lengths}, torch.zeros(6)))
    (step,) = parts(data.batch(6).shard("balanced", cost="n"), 2)
    assert step[0].cuts == (0, 5, 6)


def test_how_even_it_is_can_be_told() -> None:
    costs = [8, 1, 1, 1, 1, 1, 1, 2]
    batches = Dataset.from_arrays(torch.arange(8)).batch(8).shard("balanced", cost=costs)
    mine, equal, _ = batches.loads(epoch=0, start=0, num_workers=2)
    assert (mine.max_over_mean, equal.max_over_mean) == (1.0, 11 / 8)


def test_measured_weights_hold_for_the_workers_they_were_measured_of() -> None:
    sharding = BySpeed()
    assert list(sharding.cuts(0, 8, 2, 0)) == [0, 4, 8]
    sharding.weights = (3.0, 1.0)
    assert list(sharding.cuts(0, 8, 2, 0)) == [0, 6, 8]
    assert list(sharding.cuts(0, 9, 3, 0)) == [0, 3, 6, 9]


def test_dynamic_keeps_its_settings_and_cuts_equally_where_batches_are_cut() -> None:
    batches = Dataset.from_arrays(torch.arange(8)).batch(4).shard("dynamic", drain_slower_than=3.0)
    assert batches.sharding == DynamicRanges(3.0)
    assert [part.num_local for part in parts(batches, 2)[0]] == [2, 2]


class Counting(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(10))


@pytest.mark.parametrize("processes", [0, 2])
def test_streams_are_cut_by_weights_too(processes: int) -> None:
    loader: DataLoader[Any] = DataLoader(Counting(), batch_size=4, num_workers=min(processes, 1))
    batches = as_batches(loader, default_seed=0).shard("weighted", weights=[3, 1])
    steps = parts(batches, 2)
    assert [part.num_local for part in steps[0]] == [3, 1]
    assert sorted(seen(steps)) == list(range(10))


@pytest.mark.parametrize("pinned_to", [{"num_workers": 1}, {}])
def test_loaders_are_cut_by_costs_too(pinned_to: dict[str, Any]) -> None:
    loader: DataLoader[Any] = DataLoader(
        Texts(), batch_size=14, collate_fn=lambda samples: samples, **pinned_to
    )
    batches = as_batches(loader, default_seed=0).shard("balanced", cost="length")
    (step,) = parts(batches, 3)
    assert step[0].cuts[-1] == 14
    assert step[0].num_local < 7 <= 14 - step[1].num_local


@pytest.mark.parametrize(
    ("how", "options", "said"),
    [
        ("even", {}, "equal, balanced, weighted, dynamic"),
        ("balanced", {}, "needs to know what a sample costs"),
        ("equal", {"cost": "length"}, "is for shard('balanced')"),
        ("weighted", {}, "needs weights"),
        ("balanced", {"cost": "length", "weights": [1]}, "is for shard('weighted')"),
        ("weighted", {"weights": "fast"}, "or 'measured'"),
        ("weighted", {"weights": [1, -1]}, "not negative"),
        ("weighted", {"weights": [0, 0]}, "all 0"),
        ("weighted", {"weights": 3}, "one for each worker"),
        ("balanced", {"cost": [1, 2]}, "one number for each"),
        ("balanced", {"cost": [1, 2, float("nan"), 4]}, "cost of sample 2 is nan"),
        ("balanced", {"cost": {"a": 1}}, "got a dict"),
        ("dynamic", {"drain_slower_than": 0.5}, "above 1 or None"),
    ],
)
def test_what_cannot_be_meant_is_refused(how: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("(", r"\(").replace(")", r"\)")):
        Dataset.from_arrays(torch.arange(4)).batch(2).shard(how, **options)


def test_weights_for_another_number_of_workers_are_refused_at_once_but_one_process_is_fine() -> None:
    batches = Dataset.from_arrays(torch.arange(8)).batch(4).shard("weighted", weights=[2, 1])
    with pytest.raises(ConfigError, match="2 workers, and this job has 3"):
        batches.slices(epoch=0, start=0, rank=0, num_workers=3)
    assert seen(parts(batches, 1)) == list(range(8))


@pytest.mark.parametrize(
    ("cost", "said"),
    [
        ("length", "nothing in it has a length"),
        ("n", "no column 'n'"),
        (lambda sample: -1, "not negative"),
        (lambda sample: float("inf"), "not negative"),
    ],
)
def test_samples_without_a_cost_are_named(cost: Any, said: str) -> None:
    batches = Dataset.from_arrays(torch.arange(4)).batch(2).shard("balanced", cost=cost)
    with pytest.raises(DataError, match=f"sample 0 .*{said}"):
        list(batches.slices(epoch=0, start=0, rank=0, num_workers=2))


def test_streams_have_no_costs() -> None:
    stream = as_batches(DataLoader(Counting(), batch_size=4), default_seed=0)
    with pytest.raises(ConfigError, match="random access"):
        stream.shard("balanced", cost="length")
    with pytest.raises(ConfigError, match="random access"):
        stream.shard("weighted", weights="measured")
