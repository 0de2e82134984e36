"""From ids to keys and back: against numpy, in every order and width."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.embedding.kernels import expand, sum_back, unique

INT64 = st.integers(-(2**63), 2**63 - 1)
IDS = st.one_of(
    st.lists(INT64, max_size=60),
    st.lists(st.integers(-3, 8), max_size=200),
    st.lists(st.integers(2**40, 2**40 + 5000), max_size=200),
    st.lists(st.sampled_from([-(2**63), 2**63 - 1, 0, -1]), max_size=10),
)


@settings(max_examples=150, deadline=None)
@given(ids=IDS)
def test_unique_is_numpys(ids: list[int]) -> None:
    given_ids = np.array(ids, np.int64)
    keys, inverse = unique(given_ids)
    expected, places = np.unique(given_ids, return_inverse=True)
    assert np.array_equal(keys, expected)
    assert keys.dtype == np.int64
    assert inverse.dtype == np.int32
    assert np.array_equal(inverse, places)


def test_unique_forgets_the_batch_before() -> None:
    rng = np.random.default_rng(0)
    for size in (5000, 10, 3000, 5000, 1, 0, 70_000):
        ids = rng.integers(0, max(1, size // 3), size)
        keys, inverse = unique(ids)
        assert np.array_equal(keys, np.unique(ids))
        assert np.array_equal(keys[inverse], ids)


def test_unique_takes_any_shape_and_narrow_integers() -> None:
    keys, inverse = unique(np.array([[3, 1], [3, 2]], np.int32).T)
    assert keys.tolist() == [1, 2, 3]
    assert inverse.tolist() == [2, 2, 0, 1]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("dim", [1, 3, 16, 40])
def test_expand_and_sum_back_are_a_gather_and_its_transpose(dtype: type, dim: int) -> None:
    rng = np.random.default_rng(dim)
    rows = rng.standard_normal((50, dim)).astype(dtype)
    inverse = rng.integers(0, 49, 400).astype(np.int32)
    out = np.full((400, dim), np.nan, dtype)
    expand(rows, inverse, out)
    assert np.array_equal(out, rows[inverse])
    grad = rng.standard_normal((400, dim)).astype(dtype)
    grad.flags.writeable = False
    back = np.full((50, dim), np.nan, dtype)
    sum_back(grad, inverse, back)
    expected = np.zeros((50, dim), dtype)
    np.add.at(expected, inverse, grad)  # one after the other, in order
    assert np.array_equal(back, expected)
