from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from shoal.data import Batches, Dataset, as_batches
from shoal.data.randomness import DrawsWatch
from shoal.data.workers.prefetch import prefetched
from shoal.errors import ConfigError


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "shoal-prefetch"]


class Counted:
    """Numbers, and how many of them have been read."""

    def __init__(self, num_items: int) -> None:
        self.num_read = 0
        self.num_items = num_items
        self.closed_in: str | None = None
        self.changed = threading.Condition()

    def items(self) -> Iterator[int]:
        try:
            for number in range(self.num_items):
                with self.changed:
                    self.num_read += 1
                    self.changed.notify_all()
                yield number
        finally:
            self.closed_in = threading.current_thread().name

    def wait_until_read(self, num_items: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.num_read >= num_items, timeout=10)


def test_order_is_kept_and_nothing_is_lost() -> None:
    assert list(prefetched(iter(range(1000)), 3)) == list(range(1000))
    assert threads() == []


def test_it_reads_ahead_so_many_and_no_more() -> None:
    source = Counted(100)
    items = prefetched(source.items(), 4)
    assert next(items) == 0
    source.wait_until_read(5)
    assert next(items) == 1
    source.wait_until_read(6)
    assert source.num_read == 6
    items.close()  # type: ignore[attr-defined]


def test_dropping_the_iterator_ends_the_thread_and_closes_the_source_there() -> None:
    source = Counted(100)
    items = prefetched(source.items(), 2)
    next(items)
    [thread] = threads()
    del items
    gc.collect()
    assert not thread.is_alive()
    assert source.closed_in == "shoal-prefetch"


def test_an_iterator_that_was_never_asked_starts_no_thread() -> None:
    items = prefetched(iter(range(3)), 2)
    assert threads() == []
    del items


def test_an_exception_arrives_at_the_consumer_in_its_place() -> None:
    def failing() -> Iterator[int]:
        yield 1
        yield 2
        raise ValueError("row 3 is broken")

    items = prefetched(failing(), 8)
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(ValueError, match="row 3 is broken"):
        next(items)
    assert threads() == []


def test_prefetched_batches_are_the_same_batches() -> None:
    data = Dataset.from_arrays(torch.arange(1000)).shuffle(seed=0)
    for _ in range(2):
        plain = [(p.start, p.indices, p.batch.tolist()) for p in _slices(data.batch(64))]
        ahead = [(p.start, p.indices, p.batch.tolist()) for p in _slices(data.batch(64).prefetch(3))]
        assert ahead == plain


def test_leaving_a_pass_in_the_middle_leaves_no_thread() -> None:
    for _ in Dataset.from_arrays(torch.arange(1000)).batch(10).prefetch(2):
        break
    gc.collect()
    assert threads() == []


def test_reading_ahead_leaves_the_consumers_random_numbers_alone() -> None:
    # The thread must not exchange the global generators under a consumer who is drawing from them.
    data = Dataset.from_arrays(torch.arange(1000.0)).map(lambda sample: sample + 1).batch(10)
    torch.manual_seed(7)
    expected = torch.rand(100).tolist()
    torch.manual_seed(7)
    drawn = [torch.rand(()).item() for _ in data.prefetch(2)]
    assert drawn == expected


@pytest.mark.parametrize(
    "pipeline",
    [
        lambda data: data.map(lambda sample: sample + torch.rand(())).batch(10),
        lambda data: data.batch(10).map(lambda batch: batch + torch.rand(10)),
        lambda data: data.batch(10).map(lambda batch: batch + np.random.rand()),
        lambda data: as_batches(DataLoader(Drawing(), batch_size=10), default_seed=0),
    ],
    ids=["map", "batch map", "numpy", "stream"],
)
def test_a_pipeline_that_draws_random_numbers_is_refused(pipeline: Callable[[Dataset], Batches]) -> None:
    batches = pipeline(Dataset.from_arrays(torch.arange(1000.0)))
    list(batches)
    with pytest.raises(ConfigError, match="prefetch reads ahead in a thread"):
        list(batches.prefetch(2))
    assert threads() == []


def test_a_stream_that_draws_nothing_at_first_is_the_same_when_read_ahead() -> None:
    # To see whether it draws, its generators are drawn from: that must leave no trace.
    def late(sample: float) -> float:
        return sample + random.random() if sample > 50 else sample

    batches = Dataset.from_torch(Counting()).map(late).batch(10)
    assert not torch.equal(
        next(batches.slices(epoch=0, start=60, rank=0, num_workers=1)).batch, torch.arange(60, 70)
    )
    plain = batches.slices(epoch=0, start=0, rank=0, num_workers=1)
    watched = batches.slices(epoch=0, start=0, rank=0, num_workers=1)
    with DrawsWatch() as watch:
        first = next(watched)
    assert not watch.drew
    expected = [part.batch.tolist() for part in plain]
    assert [first.batch.tolist(), *(part.batch.tolist() for part in watched)] == expected


class Counting(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[float]:
        return iter([float(number) for number in range(100)])


class Drawing(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[float]:
        for _ in range(100):
            yield random.random()


def _slices(batches):  # type: ignore[no-untyped-def]
    return batches.slices(epoch=1, start=128, rank=1, num_workers=3)
