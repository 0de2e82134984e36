from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from shoal.data import Batches, Dataset
from shoal.errors import ConfigError


def numbers(num_samples: int) -> Dataset:
    return Dataset.from_arrays(torch.arange(num_samples))


def test_a_sample_is_found_by_its_position() -> None:
    data = Dataset.from_arrays(({"x": torch.arange(10.0)}, np.arange(10) * 2))
    inputs, target = data[3]
    assert inputs["x"] == 3
    assert target == 6
    assert data[-1][1] == 18
    assert data[np.int64(2)][1] == 4
    assert len(data) == 10
    with pytest.raises(IndexError, match="position 10 of a dataset of 10"):
        data[10]
    with pytest.raises(IndexError):
        data[-11]
    with pytest.raises(TypeError):
        data["x"]  # type: ignore[index]


def test_iterating_gives_the_samples_of_the_first_epoch() -> None:
    data = numbers(20).shuffle(seed=4)
    [batch] = data.batch(20)
    assert [int(sample) for sample in data] == batch.tolist()


def test_nothing_is_read_before_it_is_asked_for() -> None:
    asked: list[int] = []

    def fn(indices: np.ndarray) -> np.ndarray:
        asked.extend(indices.tolist())
        return indices

    data = (
        Dataset.from_function(fn, 1000)
        .map(lambda sample: sample)
        .split(0.5, 0.5, seed=None)[1]
        .shuffle(seed=0)
    )
    batches = data.batch(10).map(lambda batch: batch)
    assert asked == []
    next(iter(batches))
    assert len(asked) == 10


def test_a_dataset_is_not_changed_by_what_is_made_of_it() -> None:
    data = numbers(10)
    data.shuffle(seed=1).map(lambda sample: -sample).batch(3)
    assert [int(sample) for sample in data] == list(range(10))


def test_shuffles_of_different_seeds_and_epochs_differ_and_hold_the_same_samples() -> None:
    orders = []
    for seed in range(3):
        batches = numbers(50).shuffle(seed=seed).batch(50)
        for _ in range(3):
            [batch] = batches
            orders.append(tuple(batch.tolist()))
    assert len(set(orders)) == 9
    assert all(sorted(order) == list(range(50)) for order in orders)


def test_map_before_batch_sees_single_samples() -> None:
    data = Dataset.from_arrays(({"x": torch.arange(12.0).reshape(6, 2)}, torch.arange(6)))
    mapped = data.map(lambda sample: {"sum": sample[0]["x"].sum(), "label": int(sample[1]), "name": "n"})
    batch = next(iter(mapped.batch(4)))
    assert batch["sum"].tolist() == [1.0, 5.0, 9.0, 13.0]
    assert batch["label"].tolist() == [0, 1, 2, 3]
    assert batch["name"].tolist() == ["n"] * 4


def test_maps_are_applied_in_the_order_they_are_written() -> None:
    data = numbers(3).map(lambda sample: sample + 1).shuffle(seed=0).map(lambda sample: sample * 10)
    assert sorted(int(sample) for sample in data) == [10, 20, 30]


def test_an_error_in_map_says_which_sample() -> None:
    def fragile(sample: torch.Tensor) -> float:
        return 1 / (int(sample) - 7)

    with pytest.raises(ZeroDivisionError) as caught:
        list(numbers(10).map(fragile).batch(4))
    assert any("fragile" in note and "index 7" in note for note in caught.value.__notes__)


def test_what_a_map_draws_at_random_is_a_function_of_the_position_at_any_number_of_workers() -> None:
    data = Dataset.from_arrays(torch.zeros(30)).map(lambda sample: sample + torch.rand(())).shuffle(seed=1)
    batches = data.batch(8)

    def drawn(num_workers: int, epoch: int) -> list[float]:
        parts = [
            list(batches.slices(epoch=epoch, start=0, rank=rank, num_workers=num_workers))
            for rank in range(num_workers)
        ]
        steps = zip(*parts, strict=True)
        return [value for step in steps for part in step for value in part.batch[: part.num_local].tolist()]

    one = drawn(1, epoch=0)
    assert drawn(3, epoch=0) == one
    assert drawn(2, epoch=1) != one
    assert len(set(one)) == 30
    assert [float(sample) for sample in data] == one


def test_random_maps_leave_the_callers_generators_where_they_were() -> None:
    batches = Dataset.from_arrays(torch.zeros(30)).map(lambda sample: sample + torch.rand(())).batch(8)
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    list(batches)
    assert torch.rand(1) == expected


@pytest.mark.parametrize("seed", ["0", None, 1.5])
def test_a_seed_is_a_whole_number(seed: object) -> None:
    with pytest.raises(ConfigError, match="whole number"):
        numbers(10).shuffle(seed=seed)  # type: ignore[arg-type]


class Endless(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(range(100))


def test_a_stream_says_that_it_has_no_random_access() -> None:
    stream = Dataset.from_torch(Endless())
    for attempt in (
        lambda: stream.sample(3),
        lambda: stream.split(0.5, 0.5),
        lambda: stream.folds(2),
        lambda: stream.cache(),
        lambda: Dataset.zip(stream, stream),
        lambda: Dataset.interleave([stream]),
        lambda: stream.map(int, batched=True),
        lambda: stream[0],
    ):
        with pytest.raises(ConfigError, match="is a stream"):
            attempt()
    with pytest.raises(TypeError, match="no length"):
        len(stream)
    with pytest.raises(TypeError, match="not known"):
        len(stream.batch(10))
    assert "stream" in repr(stream)
    assert "stream" in repr(stream.batch(10))


def test_a_stream_can_be_mapped_and_iterated() -> None:
    assert list(Dataset.from_torch(Endless()).map(lambda n: n + 1))[:3] == [1, 2, 3]


def test_a_loader_becomes_batches_at_once() -> None:
    batches = Dataset.from_torch(DataLoader(torch.utils.data.TensorDataset(torch.arange(10)), batch_size=4))
    assert isinstance(batches, Batches)
    assert [batch[0].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_what_is_no_dataset_is_refused() -> None:
    with pytest.raises(ConfigError, match="from_arrays"):
        Dataset.from_torch(7)


def test_a_repr_tells_the_pipeline() -> None:
    assert (
        repr(numbers(10).split(0.5, 0.5)[0].shuffle(seed=0)) == "Dataset(5 samples: arrays > split > shuffle)"
    )
    assert repr(numbers(10).batch(4)) == "Batches(10 samples, 4 per batch)"
