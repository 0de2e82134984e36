"""Exits of a loop: by `break` or `return`, or by an exception raised in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from shoal.train.custom import loop_shape


def data(left: list[bool]) -> Iterator[int]:
    try:
        yield from range(5)
    except GeneratorExit:
        # This frame and its delegate are in this file, too: the loop is the frame that lets go.
        left.append(loop_shape.is_left_by_break(loop_shape.script_frames()[1:]))
        raise


def breaks(left: list[bool]) -> None:
    for number in data(left):
        if number == 2:
            break


def returns(left: list[bool]) -> int:
    for number, _ in enumerate(data(left)):
        if number == 2:
            return number
    return -1


def raises(left: list[bool]) -> None:
    for _ in data(left):
        int("no number")


def catches(left: list[bool]) -> None:
    try:
        for _ in data(left):
            raise ValueError
    except ValueError:
        pass


def ends(left: list[bool]) -> None:
    for _ in data(left):
        pass


@pytest.mark.parametrize(
    ("loop", "expected"),
    [(breaks, [True]), (returns, [True]), (raises, [False]), (catches, [False]), (ends, [])],
)
def test_break_and_return_are_told_from_an_exception(
    loop: Callable[[list[bool]], object], expected: list[bool]
) -> None:
    left: list[bool] = []
    try:
        loop(left)
    except ValueError:
        assert loop is raises
    assert left == expected


def test_only_a_for_over_the_data_itself_says_where_it_ends() -> None:
    class Data:
        def __iter__(self) -> Iterator[int]:
            loop_shape.check_for_loop(loop_shape.script_frames()[1:])
            return iter(range(2))

    data = Data()
    for _ in data:
        pass
    for _ in enumerate(data):
        pass
    with pytest.raises(loop_shape.CannotEnter, match="outside of a `for`"):
        iter(data)
    with pytest.raises(loop_shape.CannotEnter, match=r"inside of `zip"):
        for _ in zip(data, range(2), strict=True):
            pass
