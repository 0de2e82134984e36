from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import ConfigError
from shoal.runtime.serialization import from_plain, to_plain

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
