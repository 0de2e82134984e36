"""Keys sort as bytes as they do as keys, and come back; so do values, exactly as they were."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from shoal.data.mapreduce import spill
from shoal.errors import DataError

INTS = st.integers(-(1 << 80), 1 << 80)
FLOATS = st.floats(allow_nan=False)
TEXTS = st.text()
BYTES = st.binary()
SIMPLE = INTS | FLOATS | TEXTS | BYTES | st.none()
KEYS = st.recursive(SIMPLE, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6)


@given(KEYS)
@example("\x00")
@example(b"\x00\xff\x00\x01")
@example(("a\x00", ("", None), -(1 << 63)))
@example((1 << 63) - 1)
@example(-(1 << 63) - 1)
@example("\ud800")
def test_a_key_comes_back_with_its_type(key: Any) -> None:
    back = spill.decode_key(spill.encode_key(key))
    assert back == key
    assert (
        repr(back) == repr(key)
        or 0.0 in (key, *(key if isinstance(key, tuple) else ()))
        or "-0.0" in repr(key)
    )


@pytest.mark.parametrize(
    "kind", [INTS, FLOATS, TEXTS, BYTES, st.tuples(INTS, TEXTS), st.lists(BYTES).map(tuple)]
)
def test_keys_of_a_kind_sort_as_python_has_them(kind: Any) -> None:
    @given(st.lists(kind, max_size=20))
    def check(found: list[Any]) -> None:
        assert sorted(found) == [spill.decode_key(one) for one in sorted(map(spill.encode_key, found))]

    check()


@given(KEYS, KEYS)
def test_different_keys_have_different_bytes(one: Any, other: Any) -> None:
    same = type(one) is type(other) and one == other and repr(one) == repr(other)
    if same:
        assert spill.encode_key(one) == spill.encode_key(other)
    elif spill.encode_key(one) == spill.encode_key(other):
        assert one == other  # -0.0 and 0.0


def test_a_whole_number_and_a_float_are_two_keys_and_nan_is_one() -> None:
    assert spill.encode_key(1) != spill.encode_key(1.0)
    assert spill.encode_key("a") != spill.encode_key(b"a")
    assert spill.encode_key(math.nan) == spill.encode_key(-math.nan)
    assert spill.encode_key(-0.0) == spill.encode_key(0.0)


def test_numbers_of_numpy_and_torch_are_taken_as_pythons() -> None:
    given = [
        np.int32(3),
        torch.tensor(3),
        True,
        np.float32(0.5),
        np.str_("x"),
        (np.int64(1), torch.tensor(2.5)),
    ]
    assert [spill.plain_key(key) for key in given] == [3, 3, 1, 0.5, "x", (1, 2.5)]
    assert [type(spill.plain_key(key)) for key in given] == [int, int, int, float, str, tuple]


@pytest.mark.parametrize("key", [[1], {"a": 1}, np.zeros(3), Decimal(1), object()])
def test_other_keys_are_refused_by_their_type(key: Any) -> None:
    with pytest.raises(DataError, match=f"a {type(key).__name__}: keys are whole numbers"):
        spill.plain_key(key)
