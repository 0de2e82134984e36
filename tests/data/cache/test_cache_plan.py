from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.cache import CacheConfig
from shoal.data.cache import cache_plan as available
from shoal.data.cache.cache_plan import NUM_AHEAD, amount, piece_bytes, place, say_where
from shoal.errors import ConfigError
from shoal.runtime import events


@given(num_rows=st.integers(0, 500), size=st.integers(1, 50), budget=st.integers(0, 20_000))
def test_what_fits_is_in_ram_and_nothing_more(num_rows: int, size: int, budget: int) -> None:
    placed = place(num_rows, size, CacheConfig(), budget_bytes=budget)
    assert placed.ram_bytes == placed.num_ram_rows * size <= budget
    assert placed.ram_bytes + placed.disk_bytes == num_rows * size
    if placed.num_ram_rows < num_rows:
        assert placed.ram_bytes + size > budget - NUM_AHEAD * piece_bytes(budget)


def test_the_users_word_counts() -> None:
    assert place(2, 10, CacheConfig(where="disk"), budget_bytes=100).ram_bytes == 0
    assert place(2, 10, CacheConfig(where="ram"), budget_bytes=5).ram_bytes == 20
    assert place(2, 10, CacheConfig(ram_bytes=10), budget_bytes=1000).num_ram_rows == 1
    with pytest.raises(ConfigError, match="would need 20 bytes, but ram_bytes is 10 bytes"):
        place(2, 10, CacheConfig(where="ram", ram_bytes=10), budget_bytes=1000)
    for bad in ({"where": "tape"}, {"ram_bytes": -1}):
        with pytest.raises(ConfigError):
            CacheConfig(**bad)  # type: ignore[arg-type]  # that is the point
    assert CacheConfig.of("disk") == CacheConfig(where="disk")


def test_it_says_which_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    events.emitted.clear()
    placed = place(400_000, 1000, CacheConfig(), budget_bytes=250_000_000, num_sharers=2)
    say_where("clicks.parquet", placed, Path("/tmp/x"))
    said = capsys.readouterr().err
    assert said == (
        "shoal: the cache of clicks.parquet is 203 MB in RAM, 197 MB on disk (/tmp/x), because it is 400 MB and half of the "
        "free memory is 250 MB for each of 2 workers\n"
    )
    [(kind, facts)] = events.emitted
    assert kind == "cache placed"
    assert facts["ram_bytes"] + facts["disk_bytes"] == 4 * 10**8
    say_where("small.csv", place(1, 10, CacheConfig(), budget_bytes=100), Path("/tmp/x"))
    assert capsys.readouterr().err == "", "what is in RAM as everybody expects is only written down"
    assert events.emitted[-1][1]["because"] == "it is 10 bytes and half of the free memory is 100 bytes"


def test_amounts_are_readable() -> None:
    assert [amount(n) for n in (0, 999, 1500, 2_000_000, 3.21e9, 5e12)] == [
        "0 bytes",
        "999 bytes",
        "1.5 kB",
        "2 MB",
        "3.21 GB",
        "5 TB",
    ]


def test_promises_that_are_not_kept_yet_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cache:
        name, granted_bytes = "some", 400

        def filled_bytes(self) -> int:
            return 100

    monkeypatch.setattr(available, "available_bytes", lambda: 1_000_000)
    before = available.for_caches()
    cache = Cache()
    available.register(cache)
    assert available.for_caches() == before - 150
    assert available.for_caches(num_sharers=4) == (before - 150) // 4
    del cache
    assert available.for_caches() == before


def test_the_disk_of_a_directory_that_is_not_there_yet(tmp_path: Path) -> None:
    there = os.statvfs(tmp_path)
    free = available.free_disk_bytes(tmp_path / "a" / "b")
    assert 0 < free <= there.f_blocks * there.f_frsize
