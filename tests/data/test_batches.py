"""Promises of every feed: the same epoch at any number of readers and from any position."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.data import Batches, Dataset, Slice, as_batches
from shoal.errors import BatchTooSmall, ConfigError, DataError, EmptyDataset


def numbers(num_samples: int) -> Dataset:
    return Dataset.from_arrays(torch.arange(num_samples))


def read(batches: Batches, *, num_workers: int, epoch: int = 0, start: int = 0) -> list[list[Slice]]:
    """Step by step, the slices of all ranks."""
    by_rank = [
        list(batches.slices(epoch=epoch, start=start, rank=rank, num_workers=num_workers))
        for rank in range(num_workers)
    ]
    return [list(step) for step in zip(*by_rank, strict=True)]


def seen(steps: list[list[Slice]]) -> list[int]:
    return [int(sample) for step in steps for part in step for sample in part.batch[: part.num_local]]


pipelines = st.sampled_from(["in order", "shuffled", "a part", "a shuffled part"])


def pipeline(kind: str, num_samples: int) -> Dataset:
    match kind:
        case "in order":
            return numbers(num_samples)
        case "shuffled":
            return numbers(num_samples).shuffle(seed=3)
        case "a part":
            return numbers(num_samples + 7).split(num_samples, 7, seed=1)[0]
        case _:
            return numbers(num_samples + 7).split(num_samples, 7, seed=1)[0].shuffle(seed=3)


@given(
    kind=pipelines,
    num_samples=st.integers(1, 120),
    batch_size=st.integers(1, 40),
    per_worker=st.booleans(),
    epoch=st.integers(0, 3),
    num_before=st.integers(1, 5),
    num_after=st.integers(1, 5),
    data=st.data(),
)
def test_an_epoch_goes_on_at_another_number_of_workers_with_exactly_what_was_not_yet_seen(
    kind: str,
    num_samples: int,
    batch_size: int,
    per_worker: bool,
    epoch: int,
    num_before: int,
    num_after: int,
    data: st.DataObject,
) -> None:
    if not per_worker:
        batch_size = max(batch_size, num_before, num_after)
    dataset = pipeline(kind, num_samples)
    batches = dataset.batch(batch_size, per_worker=per_worker)
    one_process = seen(read(dataset.batch(num_samples), num_workers=1, epoch=epoch))

    before = read(batches, num_workers=num_before, epoch=epoch)
    cut = data.draw(st.integers(0, len(before)))
    start = before[cut - 1][0].start + before[cut - 1][0].num_global if cut else 0
    after = read(batches, num_workers=num_after, epoch=epoch, start=start)

    assert seen(before) == one_process
    assert seen(before[:cut]) == one_process[:start]
    assert seen(after) == one_process[start:]
    assert len(after) == batches.num_steps(num_after, start=start)


@given(
    kind=pipelines,
    num_samples=st.integers(1, 60),
    batch_size=st.integers(1, 20),
    num_workers=st.integers(1, 5),
    drop_last=st.booleans(),
)
def test_the_slices_of_a_step_are_one_global_batch_cut_in_order(
    kind: str, num_samples: int, batch_size: int, num_workers: int, drop_last: bool
) -> None:
    batch_size = max(batch_size, num_workers)
    if drop_last:
        num_samples = max(num_samples, batch_size)
    batches = pipeline(kind, num_samples).batch(batch_size, drop_last=drop_last)
    steps = read(batches, num_workers=num_workers)
    one_process = read(batches, num_workers=1)
    assert len(steps) == len(batches) == len(one_process) == batches.num_steps(num_workers)
    position = 0
    for step, [whole] in zip(steps, one_process, strict=True):
        assert {part.start for part in step} == {position}
        assert (
            {part.num_global for part in step} == {whole.num_global} == {sum(part.num_local for part in step)}
        )
        assert (
            [index for part in step for index in part.indices] == list(whole.indices) == whole.batch.tolist()
        )
        assert [part.first for part in step] == [
            sum(p.num_local for p in step[:rank]) for rank in range(num_workers)
        ]
        for part in step:
            assert len(part.batch) == max(part.num_local, 1)
            assert part.borrowed == (part.num_local == 0)
            assert set(part.batch.tolist()) <= set(whole.batch.tolist())
        position += whole.num_global
    assert position == (num_samples // batch_size * batch_size if drop_last else num_samples)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
def test_a_last_batch_smaller_than_the_workers_is_cut_and_the_rest_borrow(num_workers: int) -> None:
    [*_, last] = read(numbers(10).batch(4), num_workers=num_workers)
    assert [part.num_global for part in last] == [2] * num_workers
    assert sum(part.num_local for part in last) == 2
    assert [list(part.indices) for part in last if not part.borrowed] in ([[8, 9]], [[8], [9]])
    assert all(part.batch.tolist() in ([8], [9]) and not part.indices for part in last if part.borrowed)


def test_per_worker_sizes_grow_the_global_batch() -> None:
    batches = numbers(100).batch(8, per_worker=True)
    assert [batches.batch_size(n) for n in (1, 2, 3)] == [8, 16, 24]
    assert [batches.num_steps(n) for n in (1, 2, 3)] == [13, 7, 5]
    assert numbers(2).batch(1, per_worker=True).batch_size(4) == 4


def test_positions_do_not_depend_on_the_number_of_workers() -> None:
    batches = numbers(50).shuffle(seed=0).batch(8)
    starts = {tuple(step[0].start for step in read(batches, num_workers=n)) for n in (1, 2, 3, 4)}
    assert starts == {(0, 8, 16, 24, 32, 40, 48)}


def test_a_batch_smaller_than_the_workers_is_refused_before_the_first_slice() -> None:
    with pytest.raises(BatchTooSmall) as caught:
        numbers(100).batch(3).slices(epoch=0, start=0, rank=0, num_workers=4)
    assert (caught.value.batch_size, caught.value.num_workers) == (3, 4)


def test_an_empty_dataset_is_refused_before_the_first_slice() -> None:
    with pytest.raises(EmptyDataset, match="has no samples"):
        numbers(0).batch(3).slices(epoch=0, start=0, rank=0, num_workers=1)
    with pytest.raises(EmptyDataset):
        iter(numbers(10).split(1.0, 0.0)[1].batch(3))


def test_drop_last_that_would_drop_everything_is_refused() -> None:
    with pytest.raises(DataError, match="5 samples make no batch of 8"):
        iter(numbers(5).batch(8, drop_last=True))


def test_the_end_of_an_epoch_is_a_position_and_what_lies_behind_it_is_not() -> None:
    batches = numbers(10).batch(4)
    assert list(batches.slices(epoch=0, start=10, rank=0, num_workers=2)) == []
    assert batches.num_steps(2, start=10) == 0
    with pytest.raises(DataError, match="10 samples and cannot go on from sample 11"):
        batches.slices(epoch=0, start=11, rank=0, num_workers=2)
    with pytest.raises(ConfigError, match="position -1"):
        batches.slices(epoch=0, start=-1, rank=0, num_workers=2)
    with pytest.raises(ConfigError, match="rank must be from 0 to 1"):
        batches.slices(epoch=0, start=0, rank=2, num_workers=2)


@pytest.mark.parametrize("size", [0, -1, 2.5, "8", None, True])
def test_sizes_that_cannot_be_meant_are_refused(size: object) -> None:
    with pytest.raises(ConfigError, match=r"batch\(size\) takes a whole number"):
        numbers(10).batch(size)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"prefetch\(n\) takes a whole number"):
        numbers(10).batch(2).prefetch(size)  # type: ignore[arg-type]


def test_each_pass_is_the_next_epoch() -> None:
    batches = numbers(30).shuffle(seed=0).batch(30)
    passes = [[batch.tolist() for batch in batches] for _ in range(3)]
    direct = [seen(read(batches, num_workers=1, epoch=epoch)) for epoch in range(3)]
    assert [batch for [batch] in passes] == direct
    assert direct[0] != direct[1] != direct[2]


def test_map_after_batch_is_applied_to_what_a_worker_holds() -> None:
    sizes: list[int] = []

    def double(batch: torch.Tensor) -> torch.Tensor:
        sizes.append(len(batch))
        return batch * 2

    steps = read(numbers(10).batch(6).map(double), num_workers=3)
    assert seen(steps) == [2 * number for number in range(10)]
    assert sizes == [2, 1, 2, 1, 2, 2]  # rank by rank: 6 over three ranks is 2, 2, 2 and 4 is 1, 1, 2


def test_what_a_batch_map_draws_at_random_is_a_function_of_its_place() -> None:
    def noise(batch: torch.Tensor) -> torch.Tensor:
        return batch + torch.rand(len(batch))

    batches = numbers(20).batch(5).map(noise)
    first = [part.batch.tolist() for part in batches.slices(epoch=1, start=0, rank=1, num_workers=2)]
    torch.rand(3)
    later = [part.batch.tolist() for part in batches.slices(epoch=1, start=10, rank=1, num_workers=2)]
    assert later == first[2:]
    assert first != [part.batch.tolist() for part in batches.slices(epoch=2, start=0, rank=1, num_workers=2)]


def test_a_description_is_json_and_tells_apart_what_is_not_the_same_data() -> None:
    data = numbers(100)
    described = [
        json.dumps(batches.describe(), sort_keys=True)
        for batches in (
            data.batch(8),
            data.batch(9),
            data.batch(8, per_worker=True),
            data.batch(8, drop_last=True),
            data.shuffle(seed=0).batch(8),
            data.shuffle(seed=1).batch(8),
            data.split(0.5, 0.5)[0].batch(8),
            data.split(0.5, 0.5)[1].batch(8),
            data.batch(8).map(abs),
            data.map(abs).batch(8),
            numbers(101).batch(8),
        )
    ]
    assert len(set(described)) == len(described)
    assert json.dumps(data.batch(8).describe()) == json.dumps(numbers(100).batch(8).describe())


def test_batches_are_taken_as_they_are() -> None:
    batches = numbers(10).batch(2)
    assert as_batches(batches, default_seed=0) is batches


@pytest.mark.parametrize(
    ("given", "cure"),
    [
        (numbers(3), r"data\.batch\(1024\)"),
        (torch.utils.data.TensorDataset(torch.zeros(3)), "from_torch"),
        (torch.zeros(3), "from_arrays"),
        ([1, 2], "from_arrays"),
        (None, "from_arrays"),
    ],
)
def test_anything_else_is_refused_with_what_to_do(given: object, cure: str) -> None:
    with pytest.raises(ConfigError, match=cure):
        as_batches(given, default_seed=0)


def test_a_map_of_batches_that_loses_samples_is_refused() -> None:
    batches = Dataset.from_arrays(torch.arange(30)).batch(10).map(lambda batch: batch[:2])
    with pytest.raises(DataError, match=r"was given 10 samples and returned tensors of \(2,\)"):
        next(iter(batches))


@pytest.mark.parametrize(
    ("fn", "says"),
    [(lambda sample: None, "NoneType"), (lambda sample: {str(int(sample)): sample}, "some have no")],
)
def test_samples_that_make_no_batch_are_told_as_such(fn: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        next(iter(Dataset.from_arrays(torch.arange(30)).map(fn).batch(3)))
