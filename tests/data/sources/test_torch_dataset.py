from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import Subset, TensorDataset

from shoal.data import Dataset
from shoal.errors import ConfigError


class Squares(TorchDataset):  # type: ignore[type-arg]
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.asked: list[Any] = []

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.asked.append(index)
        if index == 13:
            raise KeyError("no such file")
        return torch.tensor([index, index]), index**2


class Many(Squares):
    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, int]]:
        self.asked.append(indices)
        return [(torch.tensor([index, index]), index**2) for index in indices]


def test_samples_are_collated_as_torch_does_into_tuples() -> None:
    batch = next(iter(Dataset.from_torch(Squares(10)).batch(3)))
    assert isinstance(batch, tuple)
    assert batch[0].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert batch[1].tolist() == [0, 1, 4]


def test_a_dataset_is_asked_with_plain_ints() -> None:
    dataset = Squares(10)
    list(Dataset.from_torch(dataset).shuffle(seed=0).batch(4))
    assert {type(index) for index in dataset.asked} == {int}
    assert sorted(dataset.asked) == list(range(10))


def test_many_samples_are_asked_for_at_once_where_the_dataset_offers_it() -> None:
    dataset = Many(10)
    list(Dataset.from_torch(dataset).batch(4))
    assert dataset.asked == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_only_the_own_slice_is_read() -> None:
    dataset = Squares(10)
    list(Dataset.from_torch(dataset).batch(4).slices(epoch=0, start=4, rank=1, num_workers=2))
    assert dataset.asked == [6, 7, 9]


def test_an_error_says_which_sample() -> None:
    with pytest.raises(KeyError) as caught:
        list(Dataset.from_torch(Squares(20)).batch(4))
    assert any("Squares" in note and "index 13" in note for note in caught.value.__notes__)


def test_a_subset_of_torch_is_a_dataset() -> None:
    data = Dataset.from_torch(Subset(Squares(10), [5, 3, 1]))
    assert [sample[1] for sample in data] == [25, 9, 1]


def test_a_tensor_dataset_gives_what_its_own_items_would() -> None:
    dataset = TensorDataset(torch.randn(10, 3), torch.arange(10))
    plain = [dataset[index] for index in range(10)]
    for ours, theirs in zip(Dataset.from_torch(dataset), plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_list_is_a_dataset_too() -> None:
    assert next(iter(Dataset.from_torch([1.0, 2.0, 3.0]).batch(2))).tolist() == [1.0, 2.0]


def test_a_dataset_without_a_length_is_refused() -> None:
    class Endless(TorchDataset):  # type: ignore[type-arg]
        def __getitem__(self, index: int) -> int:
            return index

    with pytest.raises(ConfigError, match="Endless has no length"):
        Dataset.from_torch(Endless())
