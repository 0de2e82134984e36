"""Samples whose lists differ in length make a batch, padded as tables pad theirs; what cannot be stacked is refused by torch."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from shoal.data.tree import Collate, collate


class Pair(NamedTuple):
    ids: torch.Tensor
    y: int


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_whole_numbers_are_padded_with_minus_one_and_others_with_nothing() -> None:
    samples = [
        {
            "ids": ids(1),
            "x": torch.tensor([0.5]),
            "b": torch.tensor([True]),
            "u": torch.zeros(1, dtype=torch.uint8),
        },
        {
            "ids": ids(2, 3),
            "x": torch.ones(3),
            "b": torch.ones(2).bool(),
            "u": torch.ones(2, dtype=torch.uint8),
        },
    ]
    batch = collate(samples)
    assert batch["ids"].tolist() == [[1, -1], [2, 3]]
    assert batch["x"].tolist() == [[0.5, 0.0, 0.0], [1.0, 1.0, 1.0]]
    assert batch["b"].tolist() == [[True, False], [True, True]]
    assert batch["u"].tolist() == [[0, 0], [1, 1]]


def test_in_any_nesting_of_dicts_and_tuples() -> None:
    samples: list[Any] = [({"ids": ids(1)}, Pair(ids(), 1), "a"), ({"ids": ids(1, 2)}, Pair(ids(5), 2), "b")]
    inputs, pair, names = Collate()(samples)
    assert inputs["ids"].tolist() == [[1, -1], [1, 2]]
    assert isinstance(pair, Pair)
    assert (pair.ids.tolist(), pair.y.tolist()) == ([[-1], [5]], [1, 2])
    assert names.tolist() == ["a", "b"]


@pytest.mark.parametrize("other", [torch.zeros(2, 2), torch.zeros(3, 1), torch.zeros(3, dtype=torch.float64)])
def test_other_shapes_are_refused_as_torch_does(other: torch.Tensor) -> None:
    with pytest.raises(RuntimeError):
        collate([torch.zeros(2, 1) if other.dim() > 1 else torch.zeros(2), other])
