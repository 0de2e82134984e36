"""An aggregate is computed once and found again by what it is made of; anything else is another aggregate."""

from __future__ import annotations

import functools
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shoal
from shoal.data import generated
from shoal.data.mapreduce import api as places
from shoal.runtime import scratch

FACTOR = 2
PATTERN = re.compile("a+")


def _wrapped(fn: Any) -> Any:
    @functools.wraps(fn)
    def inner(*args: Any) -> Any:
        return fn(*args)

    return inner


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "shoal" / "map_reduce"


def arrays(start: int = 0) -> shoal.Dataset:
    return shoal.Dataset.from_arrays(torch.arange(start, start + 100))


def scaled(number: Any) -> Any:
    return [(int(number) % 3, int(number) * FACTOR)]


def add(key: Any, values: Any) -> Any:
    return sum(values)


def test_the_same_data_and_functions_are_not_computed_again(cache: Path) -> None:
    first = arrays().map_reduce(scaled, add)
    again = arrays().shuffle(seed=5).map_reduce(scaled, add)
    assert (first.was_reused, again.was_reused) == (False, True)
    assert dict(first) == dict(again)
    assert [entry.name for entry in cache.iterdir()] == [first.directory.name]
    assert {path.name for path in first.directory.iterdir()} == {
        "used",
        "claims",
        *(f"part-{n:05d}" for n in range(8)),
    }


def test_anything_that_changes_the_result_is_another_aggregate(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays().map_reduce(scaled, add)
    assert not arrays(1).map_reduce(scaled, add).was_reused
    assert not arrays().map_reduce(scaled, add, partitions=3).was_reused
    assert not arrays().map(lambda number: number + 1).map_reduce(scaled, add).was_reused
    assert not arrays().split(0.5, 0.5, seed=0)[0].map_reduce(scaled, add).was_reused
    assert not arrays().map_reduce(scaled, lambda key, values: max(values)).was_reused
    monkeypatch.setitem(globals(), "FACTOR", 3)
    other = arrays().map_reduce(scaled, add)
    assert not other.was_reused, "a global that the function reads has changed"
    assert other[0] == 3 * sum(range(0, 100, 3))


def test_what_a_function_closes_over_is_part_of_it(cache: Path) -> None:
    def made(shift: Any) -> Any:
        return lambda number: [(0, int(number) + int(np.sum(shift)))]

    assert not arrays().map_reduce(made(1), add).was_reused
    assert not arrays().map_reduce(made(2), add).was_reused
    assert arrays().map_reduce(made(2), add).was_reused
    assert not arrays().map_reduce(made(np.arange(3)), add).was_reused
    assert arrays().map_reduce(made(np.arange(3)), add).was_reused


@dataclass(frozen=True)
class Shift:
    by: int

    def __call__(self, number: Any) -> Any:
        return [(0, int(number) + self.by)]


def test_frozen_dataclasses_and_partials_are_looked_into(cache: Path) -> None:
    def shifted(by: int, number: Any) -> Any:
        return [(0, int(number) + by)]

    for made in (Shift, lambda by: functools.partial(shifted, by)):
        assert not arrays().map_reduce(made(1), add).was_reused
        assert arrays().map_reduce(made(1), add).was_reused
        assert not arrays().map_reduce(made(2), add).was_reused


@pytest.mark.parametrize(
    "make",
    [
        lambda by: {number: [(0, number + by)] for number in range(200)}.get,
        lambda by: _wrapped(lambda number: [(0, int(number) + by)]),
        lambda by: lambda number, shift=by: [(0, int(number) + shift)],
        lambda by: Shift(by).__call__,
        lambda by: lambda number: [(0, int(number) + len(re.compile("x" * by).pattern))] if PATTERN else [],
    ],
)
def test_whatever_carries_the_difference_makes_one(cache: Path, make: Any) -> None:
    data = arrays().map(int)
    assert not data.map_reduce(make(1), add).was_reused
    assert data.map_reduce(make(1), add).was_reused
    other = data.map_reduce(make(2), add)
    assert not other.was_reused
    assert other[0] == sum(range(100)) + 200


def test_generated_data_is_known_by_what_it_is_generated_from(cache: Path) -> None:
    def clicked(batch: Any) -> Any:
        return [(0, int(batch[1].sum()))]

    def found(**settings: Any) -> Any:
        return generated.clicks(500, **settings).map_reduce(clicked, add, batched=100)

    assert not found(num_ids=1000).was_reused
    assert found(num_ids=1000).was_reused
    assert not found(num_ids=2000).was_reused


def test_what_nobody_can_look_into_is_computed_anew_unless_a_key_is_given(cache: Path) -> None:
    class Foreign:
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> int:
            return index

    data = shoal.Dataset.from_torch(Foreign())
    assert not data.map_reduce(scaled, add).was_reused
    assert not data.map_reduce(scaled, add).was_reused
    assert not list(cache.iterdir()) if cache.exists() else True
    assert not data.map_reduce(scaled, add, key="foreign, 2024-05").was_reused
    assert data.map_reduce(scaled, add, key="foreign, 2024-05").was_reused
    assert not data.map_reduce(scaled, add, key="foreign, 2024-06").was_reused


def test_a_directory_of_ones_own_may_be_given(tmp_path: Path, cache: Path) -> None:
    found = arrays().map_reduce(scaled, add, directory=tmp_path / "mine")
    assert found.directory.parent == tmp_path / "mine"
    assert arrays().map_reduce(scaled, add, directory=tmp_path / "mine").was_reused
    assert not cache.exists()


def test_without_a_cache_the_scratch_directory_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    found = arrays().map_reduce(scaled, add)
    assert found.directory.is_relative_to(scratch.directory())
    assert found[0] == 2 * sum(range(0, 100, 3))


def test_what_was_not_used_for_long_goes_and_what_is_too_much(cache: Path) -> None:
    made = [arrays(start).map_reduce(scaled, add).directory for start in range(4)]
    now = time.time()
    for age_days, entry in zip((40, 20, 10, 0), made, strict=True):
        for file in (entry / "used", *(entry / "claims").iterdir()):
            os.utime(file, (now - age_days * 86400, now - age_days * 86400))
    places.sweep(cache, keep=made[3])
    assert [entry.exists() for entry in made] == [False, True, True, True]
    size = sum(file.stat().st_size for file in made[2].iterdir() if file.is_file())
    places.sweep(cache, keep=made[3], max_bytes=2 * size)
    assert [entry.exists() for entry in made] == [False, False, True, True]
    places.sweep(cache, keep=made[1], max_bytes=0)
    assert [entry.exists() for entry in made] == [False, False, False, True], "what was just used stays"


def test_an_open_result_can_be_read_when_its_files_are_gone(cache: Path) -> None:
    found = arrays().map_reduce(scaled, add)
    for file in found.directory.glob("part-*"):
        file.unlink()
    assert found.all_gather() == {rest: 2 * sum(range(rest, 100, 3)) for rest in range(3)}
