"""Loops over rows of several lists: sums in the order of the lists, to the bit."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.runtime import row_kernels


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(0, 2**32 - 1), st.booleans(), st.sampled_from([np.float32, np.float64]))
def test_sum_of_lists_is_that_of_one_list_after_the_other(
    num_lists: int, seed: int, from_zero: bool, dtype: type
) -> None:
    rng = np.random.default_rng(seed)
    keys_of = [
        np.unique(rng.integers(-9, 300, int(rng.integers(0, 400)))).astype(np.int64) for _ in range(num_lists)
    ]
    keys_of[0] = np.append(keys_of[0], np.iinfo(np.int64).max)  # an id like any other
    rows_of = [rng.standard_normal((len(keys), 3)).astype(dtype) for keys in keys_of]
    for rows in rows_of:
        rows[rng.random(rows.shape) < 0.1] = -0.0
    keys, sums = row_kernels.sum_lists(keys_of, rows_of, from_zero=from_zero)
    expected: dict[int, np.ndarray] = {}
    for of_list, rows in zip(keys_of, rows_of, strict=True):
        for key, row in zip(of_list.tolist(), rows, strict=True):
            start = expected.get(key, np.zeros(3, dtype) if from_zero else None)
            expected[key] = row if start is None else start + row
    assert keys.tolist() == sorted(expected)
    assert sums.tobytes() == np.array([expected[key] for key in sorted(expected)], dtype).tobytes()
