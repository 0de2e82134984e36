from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import ConfigError
from shoal.runtime.serialization import (
    NotSerializable,
    decode,
    dumps,
    encode,
    from_plain,
    leaf_specs,
    loads,
    num_bytes,
    pack,
    raw_bytes,
    to_plain,
    unpack,
)

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = st.text(max_size=5) | st.integers() | st.sampled_from(["$tuple", "$dict", "$", "$float"])
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=20,
)


@settings(deadline=None)
@given(values)
def test_every_value_comes_back_as_it_went_in(value: Any) -> None:
    text = json.dumps(to_plain(value, "value"), allow_nan=False)
    returned = from_plain(json.loads(text))
    assert returned == value
    assert repr(returned) == repr(value)  # 1 and 1.0 and True are equal, yet not the same


def test_nan_comes_back() -> None:
    assert math.isnan(from_plain(json.loads(json.dumps(to_plain([math.nan], "value"), allow_nan=False)))[0])


def test_a_counter_comes_back_as_a_counter() -> None:
    returned = from_plain(to_plain(Counter({30: 1, 80: 2}), "milestones"))
    assert returned == Counter({30: 1, 80: 2})
    assert isinstance(returned, Counter)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_a_tensor_of_one_number_keeps_type_and_bits(dtype: torch.dtype) -> None:
    tensor = torch.tensor(1 / 3).to(dtype)
    returned = from_plain(json.loads(json.dumps(to_plain(tensor, "lr"))))
    assert returned.dtype == dtype
    assert torch.equal(returned, tensor)


def test_what_cannot_be_held_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"state\.hooks\[1\] is a function"):
        to_plain({"hooks": [1, lambda: None]}, "state")
    with pytest.raises(ConfigError, match="is a Tensor"):
        to_plain({"history": torch.zeros(3)}, "state")


# ---- tensors, arrays and plain values as bytes -------------------------------------------------------

INTS = st.integers(-(1 << 80), 1 << 80)
BYTES = st.binary()
LEAVES = (
    st.none()
    | st.booleans()
    | INTS
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | BYTES
)
HASHABLE = INTS | st.text(st.characters(exclude_categories=["Cs"])) | st.tuples(INTS, BYTES)
ENCODABLE = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(HASHABLE, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(ENCODABLE)
def test_a_value_comes_back_exactly(value: Any) -> None:
    assert repr(decode(encode(value))) == repr(value)
    assert num_bytes(value) > 0


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
    back = decode(encode([array]))[0]
    assert type(back) is type(array)
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert np.array_equal(back, array)


def test_an_array_that_came_back_may_be_written() -> None:
    back = decode(encode(np.arange(3)))
    back += 1
    assert back.tolist() == [1, 2, 3]


def test_a_tensor_comes_back_as_a_tensor() -> None:
    back = decode(encode({"t": torch.arange(4.0)}))
    assert torch.equal(back["t"], torch.arange(4.0))


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ({1, 2}, "a set"),
        (Decimal(1), "a Decimal"),
        ([Decimal(2)], "a Decimal"),
        (OrderedDict(), "a OrderedDict"),
        (np.array([object()]), "an array of object"),
        (torch.eye(2).to_sparse(), "a tensor laid out as"),
    ],
)
def test_what_would_come_back_as_something_else_is_refused(value: Any, what: str) -> None:
    with pytest.raises(NotSerializable, match=what):
        encode(value)


# ---- arrays beside a header -------------------------------------------------------------------------


class Pair(NamedTuple):
    first: Any
    second: Any


def nested() -> dict[Any, Any]:
    return {
        "tensor": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "none": torch.empty(0, 4),
        7: (np.arange(3, dtype=">i2"), [np.float32(0.5), b"x" * 200, b"y"]),
        "pair": Pair(torch.tensor(3), "text"),
    }


def hook(value: Any) -> tuple[str, Any] | None:
    return ("pair", tuple(value)) if isinstance(value, Pair) else None


def unhook(tag: str, parts: Any) -> Any:
    assert tag == "pair"
    return Pair(*parts)


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        one, other = list(one.values()), list(other.values())
    if isinstance(one, (list, tuple)):
        for each, its_like in zip(one, other, strict=True):
            assert_same(each, its_like)
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)
    else:
        assert one == other


def test_a_nested_value_comes_back_from_one_piece_and_may_be_written() -> None:
    back = loads(dumps(nested(), hook), unhook)
    assert_same(back, nested())
    back["tensor"].zero_()
    back[7][0][:] = 0


def test_leaves_are_handed_over_as_they_are_and_described_by_the_header() -> None:
    value = nested()
    header, leaves = pack(value, hook)
    assert leaves[0] is value["tensor"]
    specs = leaf_specs(header)
    assert [(spec.kind, spec.dtype, spec.shape) for spec in specs] == [
        ("tensor", "bfloat16", [2, 3]),
        ("tensor", "float32", [0, 4]),
        ("array", ">i2", [3]),
        ("bytes", "", [200]),
        ("tensor", "int64", []),
    ]
    assert [spec.num_bytes for spec in specs] == [len(raw_bytes(leaf)) for leaf in leaves]
    assert_same(unpack(header, leaves, unhook), value)


def test_a_named_tuple_without_a_hook_is_refused() -> None:
    with pytest.raises(NotSerializable, match="a Pair"):
        pack([Pair(1, 2)])


def test_a_dtype_that_torch_does_not_have_is_refused() -> None:
    with pytest.raises(NotSerializable, match="a tensor of 'floatxx'"):
        loads(dumps(torch.zeros(2)).replace(b"float32", b"floatxx"))
