from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shoal.data import Dataset
from shoal.errors import ConfigError, DataError


def test_the_function_is_called_once_per_slice_with_its_indices() -> None:
    calls: list[list[int]] = []

    def squares(indices: np.ndarray) -> tuple[dict[str, np.ndarray], torch.Tensor]:
        calls.append(indices.tolist())
        return {"x": indices.astype(np.float32)}, torch.from_numpy(indices**2)

    batches = Dataset.from_function(squares, 10).batch(4)
    parts = list(batches.slices(epoch=0, start=0, rank=1, num_workers=2))
    assert calls == [[2, 3], [6, 7], [9]]
    assert [part.batch[1].tolist() for part in parts] == [[4, 9], [36, 49], [81]]
    assert parts[0].batch[0]["x"].dtype == torch.float32


def test_its_samples_can_be_mapped_one_by_one() -> None:
    data = Dataset.from_function(lambda indices: (indices, indices * 2), 10).map(
        lambda pair: pair[0] + pair[1]
    )
    assert next(iter(data.batch(4))).tolist() == [0, 3, 6, 9]


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (torch.zeros(3), r"shape \(3,\)"),
        ((torch.zeros(4), torch.tensor(1.0)), r"shape \(\) at \[1\]"),
        ({"x": [1, 2, 3, 4]}, r"a int at \['x'\]\[0\]"),
        (None, "a NoneType"),
    ],
)
def test_a_result_without_a_row_per_index_is_refused(result: Any, said: str) -> None:
    with pytest.raises(DataError, match=f"asked for 4 samples and gave {said}"):
        next(iter(Dataset.from_function(lambda indices: result, 100).batch(4)))


@pytest.mark.parametrize("num_samples", [-1, 2.5, None])
def test_the_number_of_samples_is_a_whole_number(num_samples: Any) -> None:
    with pytest.raises(ConfigError, match="whole number"):
        Dataset.from_function(lambda indices: indices, num_samples)
