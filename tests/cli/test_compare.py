from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from shoal.cli.equality import Array, compare, difference

SHAPES = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
FLOATS = st.sampled_from([np.float32, np.float64]).flatmap(lambda dtype: arrays.arrays(dtype, SHAPES))
FINITE = SHAPES.flatmap(
    lambda shape: arrays.arrays(np.float64, shape, elements=st.floats(-1e100, 1e100, allow_subnormal=False))
)
INTEGERS = arrays.arrays(np.int64, SHAPES)
BOOLEANS = arrays.arrays(np.bool_, SHAPES)
NAMES = st.text("abc.", min_size=1, max_size=4)


@given(FLOATS | INTEGERS | BOOLEANS)
def test_an_array_equals_itself_even_with_nan_and_infinity(a: Array) -> None:
    found = difference("w", a, a.copy())
    assert found.absolute == 0
    assert found.relative == 0
    assert found.num_nonfinite == (~np.isfinite(a)).sum()


@given(FINITE, st.data())
def test_the_difference_is_the_largest_and_the_same_from_both_sides(a: Array, data: st.DataObject) -> None:
    b = data.draw(
        arrays.arrays(np.float64, a.shape, elements=st.floats(-1e100, 1e100, allow_subnormal=False))
    )
    there, back = difference("w", a, b), difference("w", b, a)
    assert there == back
    assert there.absolute == (np.abs(a - b).max() if a.size else 0)
    assert there.relative <= 2


@given(FINITE.filter(lambda a: a.size > 0), st.data(), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_a_value_that_is_not_finite_on_one_side_only_is_never_equal(
    a: Array, data: st.DataObject, bad: float
) -> None:
    b = a.copy()
    b.flat[data.draw(st.integers(0, a.size - 1))] = bad
    assert difference("w", a, b).absolute == math.inf
    assert difference("w", b, a).relative == math.inf


@given(INTEGERS.filter(lambda a: a.size > 0), st.data())
def test_integers_one_apart_differ_however_large_they_are(a: Array, data: st.DataObject) -> None:
    b = a.copy()
    at = data.draw(st.integers(0, a.size - 1))
    b.flat[at] ^= 1
    assert difference("n", a, b).absolute >= 1


@given(st.dictionaries(NAMES, FINITE, max_size=5), st.floats(0, 1))
def test_a_state_equals_itself_at_any_tolerance(state: dict[str, Array], tolerance: float) -> None:
    assert compare(state, dict(state), losses=[1.0], reference_losses=[1.0]).beyond(tolerance) == []


@given(
    st.dictionaries(NAMES, arrays.arrays(np.float64, 3, elements=st.floats(-1, 1)), min_size=1, max_size=5),
    st.floats(1e-12, 1e-2),
    st.floats(1e-12, 1e-2),
)
def test_a_wider_tolerance_never_finds_more(state: dict[str, Array], one: float, other: float) -> None:
    moved = {name: array + 1e-6 * index for index, (name, array) in enumerate(state.items())}
    comparison = compare(state, moved)
    narrow, wide = comparison.beyond(min(one, other)), comparison.beyond(max(one, other))
    assert {found.name for found in wide} <= {found.name for found in narrow}


def test_tensors_come_from_the_largest_relative_difference_to_the_smallest() -> None:
    reference = {"a": np.array([100.0]), "b": np.array([1.0]), "c": np.array([1.0])}
    state = {"a": np.array([100.5]), "b": np.array([1.25]), "c": np.array([1.0])}
    assert [found.name for found in compare(state, reference).tensors] == ["b", "a", "c"]


def test_a_tensor_that_only_one_side_has_is_named_with_its_side() -> None:
    comparison = compare({"a": np.ones(2), "extra": np.ones(1)}, {"a": np.ones(2), "lost": np.ones(1)})
    notes = {found.name: found.note for found in comparison.beyond(1e9)}
    assert notes == {"extra": "only in the workers", "lost": "only in one process"}


def test_another_shape_or_type_is_beyond_every_tolerance() -> None:
    for other in (np.ones((1, 2)), np.ones(2, np.float32)):
        (found,) = compare({"a": np.ones(2)}, {"a": other}).beyond(1e9)
        assert found.note


def test_rounding_noise_around_zero_is_not_a_difference_but_a_real_one_is() -> None:
    noise: dict[str, Any] = {"weight": np.array([0.5]), "norm": np.array([1.0]), "bias": np.array([1e-17])}
    assert compare(noise, noise | {"bias": np.array([-2e-17])}).beyond(1e-9) == []
    (found,) = compare(noise, noise | {"bias": np.array([1e-8])}).beyond(1e-9)
    assert found.name == "bias"
    assert found.scale == 0.5  # the median of 1e-8, 0.5 and 1


def test_losses_count_and_another_number_of_steps_is_said() -> None:
    same = {"w": np.ones(3)}
    assert [
        found.name for found in compare(same, same, losses=[1.0], reference_losses=[1.1]).beyond(1e-9)
    ] == ["loss"]
    (found,) = compare(same, same, losses=[1.0, 1.0], reference_losses=[1.0]).beyond(1e-9)
    assert found.note == "2 steps against 1"


def test_nan_at_the_same_places_is_equal_but_named() -> None:
    comparison = compare(
        {"w": np.array([math.nan, 1.0])},
        {"w": np.array([math.nan, 1.0])},
        losses=[math.nan],
        reference_losses=[math.nan],
    )
    assert comparison.beyond(0.0) == []
    assert [(found.name, found.num_nonfinite) for found in comparison.nonfinite] == [("w", 1), ("loss", 1)]
