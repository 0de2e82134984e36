from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from shoal.data import Batches, Dataset, Slice, as_batches
from shoal.errors import BatchTooSmall, DataError, EmptyDataset


class Counting(IterableDataset):  # type: ignore[type-arg]
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num_samples))


class Buffered(Counting):
    """A shuffle buffer over the global generators, drawn from while the stream is read."""

    def __iter__(self) -> Iterator[int]:
        buffer: list[int] = []
        for number in range(self.num_samples):
            buffer.append(number)
            if len(buffer) == 8:
                yield buffer.pop(random.randrange(8))
        while buffer:
            yield buffer.pop(int(torch.randint(len(buffer), ())))


def read(batches: Batches, *, num_workers: int, epoch: int = 0, start: int = 0) -> list[list[Slice]]:
    """Rank by rank, with other random draws in between, as training would make them."""
    by_rank = []
    for rank in range(num_workers):
        parts = []
        for part in batches.slices(epoch=epoch, start=start, rank=rank, num_workers=num_workers):
            random.random(), torch.rand(rank + 1)
            parts.append(part)
        by_rank.append(parts)
    return [list(step) for step in zip(*by_rank, strict=True)]


def seen(steps: list[list[Slice]]) -> list[int]:
    return [int(sample) for step in steps for part in step for sample in part.batch[: part.num_local]]


@given(
    num_samples=st.integers(1, 60),
    batch_size=st.integers(1, 15),
    num_workers=st.integers(1, 4),
    per_worker=st.booleans(),
    start=st.integers(0, 60),
)
def test_every_rank_reads_the_stream_and_keeps_its_part(
    num_samples: int, batch_size: int, num_workers: int, per_worker: bool, start: int
) -> None:
    start = min(start, num_samples)
    batch_size = batch_size if per_worker else max(batch_size, num_workers)
    batches = Dataset.from_torch(Counting(num_samples)).batch(batch_size, per_worker=per_worker)
    steps = read(batches, num_workers=num_workers, start=start)
    assert seen(steps) == list(range(start, num_samples))
    for step in steps:
        assert {part.num_global for part in step} == {sum(part.num_local for part in step)}
        assert all(len(part.batch) == max(part.num_local, 1) for part in step)
        assert [i for part in step for i in part.indices] == list(
            range(step[0].start, step[0].start + step[0].num_global)
        )


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_a_stream_that_shuffles_gives_every_rank_the_same_order(num_workers: int) -> None:
    batches = as_batches(DataLoader(Buffered(40), batch_size=6), default_seed=1)
    whole = [seen(read(batches, num_workers=1, epoch=epoch)) for epoch in range(2)]
    assert sorted(whole[0]) == list(range(40))
    assert whole[0] != whole[1]
    assert seen(read(batches, num_workers=num_workers, epoch=1)) == whole[1]
    assert seen(read(batches, num_workers=num_workers, epoch=1, start=13)) == whole[1][13:]


def test_what_a_collate_function_draws_does_not_make_the_ranks_read_different_streams() -> None:
    def jitter(samples: list[int]) -> tuple[torch.Tensor, list[float]]:
        return torch.tensor(samples), [random.random() for _ in samples]

    batches = as_batches(DataLoader(Buffered(40), batch_size=5, collate_fn=jitter), default_seed=1)
    by_rank = [list(batches.slices(epoch=0, start=0, rank=rank, num_workers=3)) for rank in range(3)]
    numbers = [int(n) for step in zip(*by_rank, strict=True) for p in step for n in p.batch[0][: p.num_local]]
    assert sorted(numbers) == list(range(40))
    resumed = list(batches.slices(epoch=0, start=15, rank=1, num_workers=3))
    assert [part.batch[1] for part in resumed] == [part.batch[1] for part in by_rank[1][3:]]


def test_a_loader_over_a_stream_keeps_batch_size_and_drop_last() -> None:
    batches = as_batches(DataLoader(Counting(10), batch_size=4, drop_last=True), default_seed=0)
    assert seen(read(batches, num_workers=2)) == list(range(8))
    assert (batches.batch_size(2), batches.num_samples, batches.num_steps(2)) == (4, None, None)


def test_a_stream_is_told_the_epoch() -> None:
    class Knowing(Counting):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter([self.epoch] * self.num_samples)

    batches = Dataset.from_torch(Knowing(2)).map(lambda n: n * 10).batch(2)
    assert [[batch.tolist() for batch in batches] for _ in range(3)] == [[[0, 0]], [[10, 10]], [[20, 20]]]


def test_an_empty_stream_is_refused_when_its_end_is_read() -> None:
    with pytest.raises(EmptyDataset):
        list(Dataset.from_torch(Counting(0)).batch(4))


def test_a_batch_of_a_stream_smaller_than_the_workers_is_refused() -> None:
    with pytest.raises(BatchTooSmall):
        Dataset.from_torch(Counting(10)).batch(2).slices(epoch=0, start=0, rank=0, num_workers=3)


def test_items_that_are_batches_are_cut_and_a_position_inside_one_is_refused() -> None:
    class InBatches(Counting):
        def __iter__(self) -> Iterator[torch.Tensor]:  # type: ignore[override]
            return iter(torch.arange(self.num_samples).split(4))

    batches = as_batches(DataLoader(InBatches(10), batch_size=None), default_seed=0)
    assert seen(read(batches, num_workers=3)) == list(range(10))
    assert seen(read(batches, num_workers=2, start=8)) == [8, 9]
    with pytest.raises(DataError, match="from sample 4 to 8 and cannot go on from sample 6"):
        read(batches, num_workers=1, start=6)
