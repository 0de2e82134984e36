"""Hashes are part of every model trained on them: they must never change."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.features.columns import bucket_of, hash_ints, hash_text, hash_together

MASK = (1 << 64) - 1


def mixed(word: int) -> int:
    word ^= word >> 30
    word = word * 0xBF58476D1CE4E5B9 & MASK
    word ^= word >> 27
    word = word * 0x94D049BB133111EB & MASK
    return word ^ (word >> 31)


def by_hand(text: str, seed: int) -> int:
    value = 0xCBF29CE484222325 ^ seed
    for character in text:
        value = (value ^ ord(character)) * 0x100000001B3 & MASK
    return mixed(value ^ len(text))


@given(
    st.lists(st.text(st.characters(exclude_characters="\x00"), max_size=12), min_size=1, max_size=20),
    st.integers(0, 2**40),
)
def test_strings_hash_as_written_down_whatever_the_arrays_width(texts: list[str], seed: int) -> None:
    expected = [by_hand(text, seed) for text in texts]
    assert hash_text(np.array(texts), seed).tolist() == expected
    assert hash_text(np.array(texts, dtype="<U40"), seed).tolist() == expected


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20), st.integers(0, 2**40))
def test_whole_numbers_hash_as_written_down(numbers: list[int], seed: int) -> None:
    start = mixed((seed + 0x9E3779B97F4A7C15) & MASK)
    expected = [mixed((number + start) & MASK) for number in numbers]
    assert hash_ints(np.array(numbers), seed).tolist() == expected


def test_the_values_are_pinned() -> None:
    assert hash_text(np.array(["", "a", "Zürich", "日本"]), 0).tolist() == [
        17665956581633026203,
        9266097309480679803,
        3049235559309286315,
        5721481943757540430,
    ]
    assert hash_ints(np.array([0, 1, -1]), 0).tolist() == [
        5197578548964807871,
        16899028431761561291,
        11385487063155714807,
    ]
    together = hash_together([hash_ints(np.array([7]), 0), hash_text(np.array(["x"]), 0)], 3)
    assert together.tolist() == [12894850607390733505]


def test_order_and_seed_matter() -> None:
    one, other = hash_ints(np.arange(100), 0), hash_ints(np.arange(100, 200), 0)
    assert not (hash_together([one, other], 0) == hash_together([other, one], 0)).any()
    assert not (hash_together([one, other], 0) == hash_together([one, other], 1)).any()


@pytest.mark.parametrize("kind", ["numbers", "texts"])
def test_buckets_fill_evenly(kind: str) -> None:
    numbers = np.arange(100_000)
    hashes = hash_ints(numbers, 0) if kind == "numbers" else hash_text(numbers.astype(np.str_), 0)
    counts = np.bincount(bucket_of(hashes, 100), minlength=100)
    assert abs(counts - 1000).max() < 150  # 4.7 deviations
    assert len(set(hashes.tolist())) == 100_000
