"""Values through shared memory: the same on the other side, and the memory used again."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.workers.reader_process import Receiver, Sender
from shoal.errors import DataError


class Line:
    """A sender and a receiver, and what passes between them."""

    def __init__(self) -> None:
        self.sender, self.receiver = Sender(), Receiver()
        self.num_new = 0

    def __call__(self, value: Any) -> Any:
        self.sender.released(self.receiver.releases())
        parcel, fd = self.sender.send(value)
        received = self.receiver.receive(parcel, fd)
        if fd is not None:
            self.num_new += 1
            os.close(fd)
        return received

    @property
    def num_segments(self) -> int:
        return len(self.sender._segments)


@pytest.fixture
def line() -> Iterator[Line]:
    line = Line()
    yield line
    del line
    gc.collect()


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "floats": lambda: torch.arange(3000.0).reshape(30, 100),
    "every second column": lambda: torch.arange(3000.0).reshape(30, 100)[:, ::2],
    "small": lambda: torch.tensor([1, 2]),
    "a number": lambda: torch.tensor(3.5),
    "none": lambda: torch.empty(0, 7),
    "bfloat16": lambda: torch.arange(1000).bfloat16(),
    "float8": lambda: torch.arange(1000).to(torch.float8_e4m3fn),
    "booleans": lambda: torch.arange(1000) % 3 == 0,
    "complex": lambda: torch.view_as_complex(torch.rand(500, 2)).conj(),
    "with a gradient": lambda: torch.ones(1000, requires_grad=True),
    "sparse": lambda: torch.eye(40).to_sparse(),
}


@pytest.mark.parametrize("name", TENSORS)
def test_every_tensor_arrives_as_it_was(line: Line, name: str) -> None:
    tensor = TENSORS[name]().detach()
    [received] = line((TENSORS[name]() if name != "complex" else tensor,))
    assert received.dtype == tensor.dtype
    assert received.shape == tensor.shape
    if tensor.dtype == torch.float8_e4m3fn:
        tensor, received = tensor.view(torch.uint8), received.view(torch.uint8)
    assert torch.equal(received.to_dense() if received.is_sparse else received, tensor.to_dense())


def test_arrays_strings_and_objects_arrive_wherever_they_stand(line: Line) -> None:
    value = {
        "names": np.array(["a", "bcd"] * 500),
        "fortran": np.asfortranarray(np.arange(1200.0).reshape(30, 40)),
        "rest": ("text", 3, None, [np.arange(5), {"deep": torch.arange(1000)}]),
        "objects": np.array([{"a": 1}, None], dtype=object),
    }
    received = line(value)
    assert list(received) == list(value)
    assert (received["names"] == value["names"]).all()
    assert (received["fortran"] == value["fortran"]).all()
    assert received["fortran"].flags.f_contiguous
    assert received["rest"][:3] == ("text", 3, None)
    assert torch.equal(received["rest"][3][1]["deep"], torch.arange(1000))
    assert received["objects"].tolist() == [{"a": 1}, None]


def test_what_arrives_is_the_consumers_to_change(line: Line) -> None:
    for size in (3, 3000):
        received = line({"x": torch.zeros(size), "y": np.zeros(size)})
        received["x"] += 1
        received["y"] += 1
        assert received["x"].sum() == received["y"].sum() == size


def test_memory_is_used_again_when_the_last_part_of_a_value_is_gone_and_not_before(line: Line) -> None:
    first = line({"x": torch.full((1000,), 1.0), "y": torch.full((1000,), 1.0)})
    kept = first["y"][10:20]
    del first
    second = line(torch.full((2000,), 2.0))
    assert line.num_new == 2
    assert kept.eq(1).all()
    del kept
    line(torch.full((2000,), 3.0))
    assert line.num_new == 2
    assert second.eq(2).all()


def test_a_hundred_values_of_one_size_need_one_segment(line: Line) -> None:
    for number in range(100):
        assert line(torch.full((5000,), number))[17] == number
    assert line.num_new == 1


def test_values_that_grow_do_not_leave_what_is_too_small_behind(line: Line) -> None:
    for number in range(60):
        line(torch.zeros(1000 * (number + 1)))
    assert line.num_segments <= 2


def test_a_consumer_that_keeps_everything_is_given_memory_of_its_own_in_the_end(line: Line) -> None:
    kept = [line(torch.full((1000,), number)) for number in range(60)]
    assert line.num_new < 25
    assert [int(value[0]) for value in kept] == list(range(60))
    del kept
    line(torch.zeros(1000))
    assert line.num_segments <= 5


def test_what_cannot_be_handed_over_is_refused_and_the_next_value_arrives(line: Line) -> None:
    with pytest.raises(DataError, match="on the device meta"):
        line(torch.zeros(3, device="meta"))
    with pytest.raises(Exception, match="pickle"):
        line((torch.zeros(3000), lambda: None))
    assert line(torch.zeros(3000)).shape == (3000,)


@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 6)), max_size=60))
def test_values_keep_their_content_however_long_they_are_kept(steps: list[tuple[int, int]]) -> None:
    line = Line()
    kept: dict[int, tuple[int, torch.Tensor]] = {}
    for number, (size, place) in enumerate(steps):
        kept[place] = number, line(torch.full((size,), number))
        for value, tensor in kept.values():
            assert tensor.eq(value).all()
    assert line.num_segments <= 7 + 4 + 1
