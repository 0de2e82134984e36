"""A part of an epoch: from one position to another, and nothing of what comes after is read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

import shoal
from shoal.data import Batches


class Counting(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[int]:
        return iter(range(40))


def indexed(fn: Any, workers: int = 0) -> Batches:
    return shoal.Dataset.from_arrays(torch.arange(40)).map(fn, workers=workers).batch(8)


KINDS: dict[str, Callable[[Any], Batches]] = {
    "indexed": indexed,
    "in processes": lambda fn: indexed(fn, workers=2),
    "read ahead": lambda fn: indexed(fn).prefetch(4),
    "a stream": lambda fn: shoal.Dataset.from_torch(Counting()).map(fn).batch(8),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("start", "stop", "begins"), [(8, 24, [8, 16]), (8, 17, [8, 16]), (16, 16, []), (32, 99, [32])]
)
def test_only_what_begins_before_the_end_is_read(kind: str, start: int, stop: int, begins: list[int]) -> None:
    reading, writing = os.pipe()

    def note(sample: Any) -> Any:
        os.write(writing, bytes([int(sample)]))
        return sample

    parts = KINDS[kind](note).slices(epoch=0, start=start, stop=stop, rank=0, num_workers=1)
    assert [part.start for part in parts] == begins
    del parts
    os.close(writing)
    with open(reading, "rb") as file:
        # Of a stream the beginning has to be passed; processes read two batches at a time.
        read = sorted(sample for sample in file.read() if kind != "a stream" or sample >= start)
    assert read == [begin + place for begin in begins for place in range(8)]
