from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.generated import bell, bits, uniform

MANY = np.arange(200_000)


@given(key=st.integers(0, 2**63 - 1), index=st.integers(-(2**62), 2**62), column=st.integers(0, 1000))
def test_bits_depend_on_the_coordinates_and_not_on_what_is_asked_with_them(
    key: int, index: int, column: int
) -> None:
    together = bits(key, np.arange(index - 3, index + 4), np.arange(column, column + 5)[:, None])
    assert together[0, 3] == bits(key, np.array([index]), np.array([column]))[0]


def test_every_bit_is_set_half_of_the_time() -> None:
    random = bits(7, MANY)
    shares = [((random >> np.uint64(bit)) & np.uint64(1)).mean() for bit in range(64)]
    assert np.abs(np.array(shares) - 0.5).max() < 0.01


def test_keys_and_neighbours_give_unrelated_numbers() -> None:
    here = uniform(bits(7, MANY))
    for other in (uniform(bits(8, MANY)), uniform(bits(7, MANY + 1)), uniform(bits(7, MANY, np.array([1])))):
        assert abs(np.corrcoef(here, other)[0, 1]) < 0.01


def test_uniform_fills_zero_to_one_evenly() -> None:
    share = uniform(bits(1, MANY))
    assert 0 <= share.min() < share.max() < 1
    assert np.abs(np.histogram(share, bins=20, range=(0, 1))[0] / len(MANY) - 0.05).max() < 0.003


def test_bell_has_mean_zero_variance_one_and_normal_tails_up_to_three() -> None:
    value = bell(bits(2, MANY))
    assert abs(value.mean()) < 0.01
    assert abs(value.var() - 1) < 0.01
    assert abs((np.abs(value) < 1).mean() - 0.683) < 0.02
    assert np.abs(value).max() < 3.47
