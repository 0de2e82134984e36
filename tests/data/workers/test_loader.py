"""DataLoaders handed to fit: the same samples as torch would give, cut over the workers. Processes: tests/processes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data.distributed import DistributedSampler

from shoal.data import Batches, as_batches
from shoal.errors import BatchTooSmall, ConfigError, DataError


class Numbers(TorchDataset):  # type: ignore[type-arg]
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([float(index)]), index


def indices(batches: Batches, *, num_workers: int = 1, epoch: int = 0, start: int = 0) -> list[list[int]]:
    """The samples of each global batch, joined over the ranks."""
    by_rank = [
        list(batches.slices(epoch=epoch, start=start, rank=rank, num_workers=num_workers))
        for rank in range(num_workers)
    ]
    joined = []
    for step in zip(*by_rank, strict=True):
        for part in step:
            assert part.batch[1][: part.num_local].tolist() == list(part.indices)
        joined.append([index for part in step for index in part.indices])
    return joined


def test_a_plain_loader_gives_torchs_own_batches() -> None:
    loader = DataLoader(Numbers(10), batch_size=4)
    ours = list(as_batches(loader, default_seed=0))
    theirs = list(loader)
    assert len(ours) == len(theirs) == 3
    for mine, other in zip(ours, theirs, strict=True):
        assert isinstance(mine, tuple)
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_batch_size_of_a_loader_is_the_batch_of_one_update(num_workers: int, drop_last: bool) -> None:
    batches = as_batches(DataLoader(Numbers(10), batch_size=4, drop_last=drop_last), default_seed=0)
    expected = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert indices(batches, num_workers=num_workers) == expected[: 2 if drop_last else 3]
    assert batches.batch_size(num_workers) == 4
    assert batches.num_samples == 10


def test_shuffle_is_ours_seeded_by_the_default_seed_and_the_same_at_any_number_of_workers() -> None:
    batches = as_batches(DataLoader(Numbers(30), batch_size=8, shuffle=True), default_seed=3)
    epochs = [indices(batches, epoch=epoch) for epoch in range(3)]
    assert all(sorted(chain(*epoch)) == list(range(30)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [indices(batches, num_workers=3, epoch=epoch) for epoch in range(3)] == epochs
    assert indices(batches, num_workers=2, epoch=1, start=16) == epochs[1][2:]
    other = as_batches(DataLoader(Numbers(30), batch_size=8, shuffle=True), default_seed=4)
    assert indices(other) != epochs[0]


def test_the_seed_a_user_gave_to_a_generator_changes_the_order() -> None:
    def order(seed: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        loader = DataLoader(Numbers(30), batch_size=8, shuffle=True, generator=generator)
        before = generator.get_state()
        found = indices(as_batches(loader, default_seed=0))
        assert torch.equal(generator.get_state(), before)
        return found

    assert order(1) == order(1) != order(2)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_distributed_sampler_is_not_applied_twice_and_its_batch_size_is_per_worker(
    rank: int, shuffle: bool
) -> None:
    sampler = DistributedSampler(Numbers(21), num_replicas=2, rank=rank, shuffle=shuffle, seed=5)
    batches = as_batches(DataLoader(Numbers(21), batch_size=4, sampler=sampler), default_seed=0)
    assert batches.batch_size(2) == 8
    order = indices(batches, num_workers=2)
    assert [len(batch) for batch in order] == [8, 8, 5]
    assert sorted(chain(*order)) == list(range(21))
    assert (list(chain(*order)) == list(range(21))) == (not shuffle)
    # Every rank builds its own sampler; what they read must not depend on which.
    other = DistributedSampler(Numbers(21), num_replicas=2, rank=1 - rank, shuffle=shuffle, seed=5)
    assert (
        indices(
            as_batches(DataLoader(Numbers(21), batch_size=4, sampler=other), default_seed=9), num_workers=2
        )
        == order
    )


def test_the_seed_of_a_distributed_sampler_is_kept() -> None:
    orders = []
    for seed in (5, 6):
        sampler = DistributedSampler(Numbers(21), num_replicas=2, rank=0, seed=seed)
        orders.append(
            indices(as_batches(DataLoader(Numbers(21), batch_size=4, sampler=sampler), default_seed=0))
        )
    assert orders[0] != orders[1]


def test_a_sampler_that_gives_each_rank_its_share_is_refused() -> None:
    class Mine(Sampler):  # type: ignore[type-arg]
        num_replicas, rank = 2, 0

        def __iter__(self) -> Iterator[int]:
            return iter(range(0, 10, 2))

    with pytest.raises(ConfigError, match="Mine gives each of 2 ranks its own share"):
        as_batches(DataLoader(Numbers(10), sampler=Mine()), default_seed=0)

    class MyBatches(BatchSampler):
        pass

    inner = DistributedSampler(Numbers(10), num_replicas=2, rank=0)
    with pytest.raises(ConfigError, match="its own share"):
        as_batches(DataLoader(Numbers(10), batch_sampler=MyBatches(inner, 2, False)), default_seed=0)


class Foreign(Sampler):  # type: ignore[type-arg]
    """Draws from all three global generators, as samplers in the wild do."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.num_samples))
        random.shuffle(order)
        order = np.random.permutation(order).tolist()
        yield from (order[i] for i in torch.randperm(self.num_samples))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Foreign(30),
        lambda: WeightedRandomSampler([1.0] * 30, 40),
        lambda: WeightedRandomSampler([1.0] * 30, 40, generator=torch.Generator().manual_seed(1)),
        lambda: SubsetRandomSampler(range(0, 30, 2)),
        lambda: RandomSampler(Numbers(30), replacement=True),
        lambda: RandomSampler(Numbers(30), num_samples=12),
        lambda: RandomSampler(Numbers(30), num_samples=50, generator=torch.Generator().manual_seed(1)),
    ],
    ids=["foreign", "weighted", "weighted+generator", "subset", "replacement", "fewer", "more"],
)
def test_any_other_sampler_gives_one_order_per_epoch_on_every_rank(make: Any) -> None:
    def fresh() -> Batches:
        """As another rank, or a resumed process, would build it, with its own history of random numbers."""
        random.random(), np.random.rand(), torch.rand(1)
        return as_batches(DataLoader(Numbers(30), batch_size=8, sampler=make()), default_seed=3)

    one_process = [indices(fresh(), epoch=epoch) for epoch in range(3)]
    assert one_process[0] != one_process[1] != one_process[2]
    for num_workers in (2, 3):
        assert [indices(fresh(), num_workers=num_workers, epoch=epoch) for epoch in range(3)] == one_process
    assert indices(fresh(), num_workers=2, epoch=2, start=8) == one_process[2][1:]
    batches = fresh()
    assert len(batches) == len(one_process[0])


def test_drawing_an_order_leaves_every_generator_where_it_was() -> None:
    own = torch.Generator().manual_seed(1)
    loader = DataLoader(Numbers(30), sampler=WeightedRandomSampler([1.0] * 30, 40, generator=own))
    foreign = DataLoader(Numbers(30), sampler=Foreign(30))
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(1), torch.rand(1, generator=own)
    random.seed(1), np.random.seed(1), torch.manual_seed(1), own.manual_seed(1)
    for given in (loader, foreign):
        as_batches(given, default_seed=0).slices(epoch=1, start=0, rank=0, num_workers=1)
    assert (random.random(), np.random.rand(), torch.rand(1), torch.rand(1, generator=own)) == expected


def test_a_sampler_is_told_the_epoch() -> None:
    sampler = Foreign(10)
    batches = as_batches(DataLoader(Numbers(10), batch_size=5, sampler=sampler), default_seed=0)
    for epoch in range(3):
        list(batches.slices(epoch=epoch, start=0, rank=0, num_workers=1))
    assert sampler.epochs == [0, 1, 2]


class ByLength(Sampler):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0], [1, 2, 3], [], [4, 5], [6, 7, 8, 9])


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
def test_the_batches_of_a_batch_sampler_are_the_global_batches(num_workers: int) -> None:
    batches = as_batches(DataLoader(Numbers(10), batch_sampler=ByLength()), default_seed=0)
    assert indices(batches, num_workers=num_workers) == [[0], [1, 2, 3], [4, 5], [6, 7, 8, 9]]
    assert indices(batches, num_workers=num_workers, start=4) == [[4, 5], [6, 7, 8, 9]]
    assert indices(batches, num_workers=num_workers, start=7) == [[7, 8, 9]]
    assert (batches.num_samples, batches.batch_size(num_workers)) == (10, 4)
    assert [batches.num_steps(num_workers, start=start) for start in (0, 4, 10)] == [4, 2, 0]


def test_torchs_own_batch_sampler_is_its_parts() -> None:
    sampler = BatchSampler(SequentialSampler(Numbers(10)), 4, drop_last=True)
    batches = as_batches(DataLoader(Numbers(10), batch_sampler=sampler), default_seed=0)
    assert indices(batches, num_workers=2) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_collate_function_is_kept_and_sees_only_the_own_part() -> None:
    sizes: list[int] = []

    def collate(samples: list[Any]) -> list[Any]:
        sizes.append(len(samples))
        return [[sample[0] for sample in samples], torch.tensor([sample[1] for sample in samples])]

    batches = as_batches(DataLoader(Numbers(10), batch_size=5, collate_fn=collate), default_seed=0)
    parts = list(batches.slices(epoch=0, start=0, rank=1, num_workers=2))
    assert sizes == [3, 3]
    assert isinstance(parts[0].batch, tuple)
    assert isinstance(parts[0].batch[0], list)  # what the collate function made a list stays one
    assert parts[0].batch[1].tolist() == [2, 3, 4]


def test_samples_with_names_instead_of_numbers_are_read_by_name() -> None:
    class ByName(TorchDataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 3

        def __getitem__(self, name: str) -> int:
            return ord(name)

    batches = as_batches(DataLoader(ByName(), batch_size=2, sampler=["b", "c", "a"]), default_seed=0)  # type: ignore[arg-type]
    parts = list(batches.slices(epoch=0, start=0, rank=0, num_workers=1))
    assert [part.batch.tolist() for part in parts] == [[98, 99], [97]]
    assert [part.indices for part in parts] == [(), ()]


def test_what_a_dataset_draws_at_random_is_a_function_of_the_position() -> None:
    class Noisy(Numbers):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            noise = torch.rand(()) + random.random() + np.random.rand()
            return noise, index

    def noise(num_workers: int, epoch: int, start: int = 0) -> list[float]:
        batches = as_batches(DataLoader(Noisy(20), batch_size=6, shuffle=True), default_seed=2)
        parts = [
            list(batches.slices(epoch=epoch, start=start, rank=rank, num_workers=num_workers))
            for rank in range(num_workers)
        ]
        return [
            value
            for step in zip(*parts, strict=True)
            for p in step
            for value in p.batch[0][: p.num_local].tolist()
        ]

    whole = noise(1, epoch=0)
    assert len(set(whole)) == 20
    assert noise(3, epoch=0) == whole
    assert noise(2, epoch=0, start=12) == whole[12:]
    assert noise(1, epoch=1) != whole


def test_a_loader_with_an_iteration_of_its_own_is_refused() -> None:
    class Mine(DataLoader):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            yield from ()

    with pytest.raises(ConfigError, match="Mine has an __iter__ of its own"):
        as_batches(Mine(Numbers(3)), default_seed=0)


def test_a_loader_batch_smaller_than_the_workers_is_refused() -> None:
    batches = as_batches(DataLoader(TensorDataset(torch.zeros(10)), batch_size=2), default_seed=0)
    with pytest.raises(BatchTooSmall):
        batches.slices(epoch=0, start=0, rank=0, num_workers=3)


class Prebatched(TorchDataset):  # type: ignore[type-arg]
    sizes = (4, 3, 5, 1)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> tuple[np.ndarray, torch.Tensor]:
        begin = sum(self.sizes[:index])
        numbers = np.arange(begin, begin + self.sizes[index])
        return numbers * 1.0, torch.from_numpy(numbers)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
def test_without_a_batch_size_every_item_is_a_global_batch(num_workers: int) -> None:
    batches = as_batches(DataLoader(Prebatched(), batch_size=None), default_seed=0)
    assert indices(batches, num_workers=num_workers) == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9, 10, 11], [12]]
    assert indices(batches, num_workers=num_workers, start=7) == [[7, 8, 9, 10, 11], [12]]
    assert (batches.num_samples, batches.batch_size(1), batches.num_steps(1)) == (None, 0, None)


def test_items_that_are_batches_are_shuffled_as_the_sampler_says() -> None:
    batches = as_batches(DataLoader(Prebatched(), batch_size=None, shuffle=True), default_seed=0)
    starts = [
        [part.batch[1][0].item() for part in batches.slices(epoch=e, start=0, rank=0, num_workers=1)]
        for e in range(8)
    ]
    assert all(sorted(order) == [0, 4, 7, 12] for order in starts)
    assert len({tuple(order) for order in starts}) > 1


def test_items_that_cannot_be_cut_are_refused() -> None:
    class Uneven(Prebatched):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
            return torch.zeros(3, 2), torch.zeros(4)

    with pytest.raises(DataError, match=r"batch_size=None.*\(3, 2\), \(4,\)"):
        list(as_batches(DataLoader(Uneven(), batch_size=None), default_seed=0))
