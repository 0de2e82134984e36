from __future__ import annotations

import numpy as np
import pytest
import torch

from shoal.data.sources.source import ArraySource
from shoal.errors import ConfigError


def test_ranges_and_gathers_give_the_same_rows() -> None:
    source = ArraySource(({"x": torch.randn(20, 3)}, np.arange(20)))
    by_range, by_gather = source.batch(range(5, 9)), source.batch(np.arange(5, 9))
    assert torch.equal(by_range[0]["x"], by_gather[0]["x"])
    assert by_range[1].tolist() == by_gather[1].tolist() == [5, 6, 7, 8]
    assert source.batch([7, 2])[1].tolist() == [7, 2]


@pytest.mark.parametrize("indices", [range(2, 4), np.array([2, 3])])
def test_writing_into_a_batch_does_not_change_the_data(indices: range | np.ndarray) -> None:
    data = torch.arange(10)
    source = ArraySource(data)
    source.batch(indices).zero_()
    source.samples(indices)[0].zero_()
    assert data.tolist() == list(range(10))


def test_arrays_are_not_copied() -> None:
    array, tensor = np.arange(10.0), torch.arange(10.0)
    source = ArraySource((array, tensor))
    array[3] = tensor[4] = -1
    assert source.batch(range(3, 4))[0].tolist() == [-1]
    assert source.batch(range(4, 5))[1].tolist() == [-1]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12).reshape(6, 2)[::-1],
        np.arange(12).reshape(2, 6).T,
        np.arange(12, dtype=">i4").reshape(6, 2),
        np.broadcast_to(np.arange(2), (6, 2)),
        np.arange(12).reshape(6, 2) > 5,
        np.arange(12, dtype=np.float16).reshape(6, 2),
        np.arange(12, dtype=np.uint16).reshape(6, 2),
        np.arange(12, dtype=np.complex64).reshape(6, 2),
    ],
    ids=["reversed", "transposed", "byte-swapped", "read-only", "bool", "half", "uint16", "complex"],
)
def test_any_numeric_array_is_read_right(array: np.ndarray) -> None:
    rows = np.array([4, 0, 5])
    batch = ArraySource(array).batch(rows).numpy()
    assert batch.tolist() == array[rows].tolist()


def test_gradients_do_not_flow_into_the_data() -> None:
    source = ArraySource(torch.ones(4, requires_grad=True))
    assert not source.batch(np.array([1])).requires_grad


def test_lists_nest_like_tuples() -> None:
    assert [part.tolist() for part in ArraySource([np.arange(3), np.arange(3)]).batch(range(2))] == [
        [0, 1],
        [0, 1],
    ]


def test_different_lengths_are_refused_and_named() -> None:
    with pytest.raises(ConfigError, match=r"\[0\]\['dense'\] has 10, \[0\]\['ids'\] has 9, \[1\] has 10"):
        ArraySource(({"dense": np.zeros((10, 2)), "ids": np.zeros(9)}, torch.zeros(10)))


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"x": [1, 2, 3]}, r"a int at \['x'\]\[0\]"),
        (np.array(["a", "b"]), "an array of <U1"),
        (np.array([object()]), "an array of object"),
        ((np.zeros(3), np.float64(3)), r"a float64 at \[1\]"),
        (torch.tensor(3), "a single number"),
        (torch.zeros(3, 3).to_sparse(), "sparse"),
        ((), "no array"),
        ({}, "no array"),
    ],
)
def test_what_has_no_rows_is_refused(tree: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ArraySource(tree)
