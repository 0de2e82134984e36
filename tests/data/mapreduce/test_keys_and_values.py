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

from shoal.data.mapreduce import keys, values
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
    back = keys.decode(keys.encode(key))
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
        assert sorted(found) == [keys.decode(one) for one in sorted(map(keys.encode, found))]

    check()


@given(KEYS, KEYS)
def test_different_keys_have_different_bytes(one: Any, other: Any) -> None:
    same = type(one) is type(other) and one == other and repr(one) == repr(other)
    if same:
        assert keys.encode(one) == keys.encode(other)
    elif keys.encode(one) == keys.encode(other):
        assert one == other  # -0.0 and 0.0


def test_a_whole_number_and_a_float_are_two_keys_and_nan_is_one() -> None:
    assert keys.encode(1) != keys.encode(1.0)
    assert keys.encode("a") != keys.encode(b"a")
    assert keys.encode(math.nan) == keys.encode(-math.nan)
    assert keys.encode(-0.0) == keys.encode(0.0)


def test_numbers_of_numpy_and_torch_are_taken_as_pythons() -> None:
    given = [
        np.int32(3),
        torch.tensor(3),
        True,
        np.float32(0.5),
        np.str_("x"),
        (np.int64(1), torch.tensor(2.5)),
    ]
    assert [keys.plain(key) for key in given] == [3, 3, 1, 0.5, "x", (1, 2.5)]
    assert [type(keys.plain(key)) for key in given] == [int, int, int, float, str, tuple]


@pytest.mark.parametrize("key", [[1], {"a": 1}, np.zeros(3), Decimal(1), object()])
def test_other_keys_are_refused_by_their_type(key: Any) -> None:
    with pytest.raises(DataError, match=f"a {type(key).__name__}: keys are whole numbers"):
        keys.plain(key)


LEAVES = (
    st.none()
    | st.booleans()
    | INTS
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | BYTES
)
HASHABLE = INTS | st.text(st.characters(exclude_categories=["Cs"])) | st.tuples(INTS, BYTES)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(HASHABLE, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(VALUES)
def test_a_value_comes_back_exactly(value: Any) -> None:
    assert repr(values.decode(values.encode(value))) == repr(value)
    assert values.num_bytes(value) > 0


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3),
        np.float32(0.1),
        np.zeros((0, 4)),
        np.array(["a", "bcd"]),
        np.bool_(True),
        np.array(3, "i1"),
    ],
)
def test_arrays_and_numbers_of_numpy_come_back_as_they_are(array: Any) -> None:
    back = values.decode(values.encode([array]))[0]
    assert type(back) is type(array)
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert np.array_equal(back, array)


def test_an_array_that_came_back_may_be_written() -> None:
    back = values.decode(values.encode(np.arange(3)))
    back += 1
    assert back.tolist() == [1, 2, 3]


def test_a_tensor_comes_back_as_a_tensor() -> None:
    back = values.decode(values.encode({"t": torch.arange(4.0)}))
    assert torch.equal(back["t"], torch.arange(4.0))


@pytest.mark.parametrize(
    "value", [{1, 2}, Decimal(1), object(), [Decimal(2)], torch.zeros(2, dtype=torch.bfloat16)]
)
def test_what_would_come_back_as_something_else_is_refused(value: Any) -> None:
    with pytest.raises(DataError, match="values are numbers, strings"):
        values.encode(value)


def test_an_array_of_objects_is_refused() -> None:
    with pytest.raises(DataError, match="an array of object"):
        values.encode(np.array([object()]))
