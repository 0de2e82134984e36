"""The k-th of the kept positions is found without a list of them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.order import Bitmap


@given(
    num=st.integers(0, 400),
    density=st.sampled_from([0.0, 0.02, 0.5, 0.97, 1.0]),
    seed=st.integers(0, 1000),
)
def test_select_gives_what_flatnonzero_lists(num: int, density: float, seed: int) -> None:
    is_kept = np.random.default_rng(seed).random(num) < density
    bits, expected = Bitmap(is_kept), np.flatnonzero(is_kept)
    assert bits.num_kept == len(expected)
    numbers = np.arange(len(expected))[::-1]
    assert bits.select(numbers).tolist() == expected[numbers].tolist()


def test_a_bitmap_takes_a_quarter_of_a_byte_for_each_position() -> None:
    bits = Bitmap(np.ones(1 << 20, dtype=bool))
    held = sum(part.nbytes for part in vars(bits).values() if isinstance(part, np.ndarray))
    assert held <= (1 << 20) * 3 // 8 + 1024


def test_another_choice_has_another_digest() -> None:
    one, other = np.zeros(100, dtype=bool), np.zeros(100, dtype=bool)
    one[3], other[4] = True, True
    assert Bitmap(one).digest != Bitmap(other).digest
