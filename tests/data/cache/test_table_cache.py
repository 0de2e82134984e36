"""Rows of a table in RAM, on disk and in both: always the same rows, each block decoded once."""

from __future__ import annotations

import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.data import Dataset
from shoal.data.cache import CacheConfig
from shoal.data.cache import cache_plan as available
from shoal.data.cache.table_cache import PassingBlocks, StoredRows, open_storage
from shoal.data.formats.table import Column, DecodedRows, Ragged, TableBlock
from shoal.data.formats.table_source import TableSource
from shoal.errors import BadSample, CacheFull, ConfigError
from shoal.runtime import events

COLUMNS = (
    Column("id", np.dtype(np.int64)),
    Column("price", np.dtype(np.float32)),
    Column("point", np.dtype(np.float32), (3,)),
    Column("flag", np.dtype(np.bool_)),
    Column.text("name"),
    Column.ragged("ids", np.int32),
)
PLAIN = COLUMNS[:4]


class Invented:
    """A table that counts how often its blocks are decoded; in every 7th row something is wrong, if wanted."""

    def __init__(
        self, sizes: list[int], columns: tuple[Column, ...] = COLUMNS, *, is_bad: bool = False
    ) -> None:
        self.columns, self.identity, self.is_bad = columns, f"invented {sizes}", is_bad
        self.blocks = tuple(
            TableBlock(size, size * 60, f"invented.tab, rows {number}", 0)
            for number, size in enumerate(sizes)
        )
        self._bounds = np.cumsum([0, *sizes])
        self.num_reads: Counter[int] = Counter()
        self.lock = threading.Lock()

    def read(self, block: int) -> DecodedRows:
        with self.lock:
            self.num_reads[block] += 1
        numbers = np.arange(self._bounds[block], self._bounds[block + 1])
        made = {
            "id": numbers,
            "price": numbers.astype(np.float32) / 7,
            "point": np.stack([numbers, -numbers, numbers * 2], axis=1).astype(np.float32),
            "flag": numbers % 3 == 0,
            "name": Ragged.of_bytes([f"name {number}{'é' * (number % 4)}".encode() for number in numbers]),
            "ids": Ragged.of([list(range(number % 5)) for number in numbers], np.int32),
        }
        bad = {
            row: BadSample(where="invented.tab", row=int(number) + 1, reason="it is bad")
            for row, number in enumerate(numbers.tolist())
            if self.is_bad and number % 7 == 3
        }
        return DecodedRows(len(numbers), {column.name: made[column.name] for column in self.columns}, bad)

    def describe(self) -> dict[str, Any]:
        return {"format": "invented"}


def configs(tmp_path: Path) -> dict[str, Any]:
    return {
        "auto": "auto",
        "ram": "ram",
        "disk": CacheConfig(where="disk", directory=str(tmp_path)),
        "both": CacheConfig(ram_bytes=3000, directory=str(tmp_path)),
        "nothing": None,
    }


@pytest.mark.parametrize("columns", [COLUMNS, PLAIN], ids=["lists", "plain"])
@pytest.mark.parametrize("kind", ["auto", "ram", "disk", "both", "nothing"])
def test_rows_are_the_same_wherever_they_are_kept(kind: str, columns: Any, tmp_path: Path) -> None:
    table = Invented([30, 1, 50, 19], columns)
    storage = open_storage(table, cache=configs(tmp_path)[kind])
    expected = {
        column.name: _rows(Invented([100], columns).read(0).columns[column.name]) for column in columns
    }
    for rows in (
        np.random.default_rng(0).permutation(100),
        range(100),
        range(25, 40),
        np.array([7]),
        range(3, 4),
    ):
        gathered = storage.gather(rows)
        assert list(gathered.columns) == [column.name for column in columns]
        for name, column in gathered.columns.items():
            assert _rows(column) == [expected[name][row] for row in rows], name
        assert gathered.bad == {}
    assert set(table.num_reads.values()) == {1}
    assert list(tmp_path.iterdir()) == []


def _rows(column: Any) -> list[Any]:
    if isinstance(column, Ragged):
        return [
            column.values[column.offsets[row] : column.offsets[row + 1]].tolist()
            for row in range(column.num_rows)
        ]
    return list(column.tolist())


@pytest.mark.parametrize("ram_bytes", [0, 700, 2500, 10**6])
def test_a_small_limit_gives_the_same_batches(ram_bytes: int, tmp_path: Path) -> None:
    def batches(cache: Any) -> list[Any]:
        data = Dataset(TableSource(Invented([40, 60, 23]), label="price", cache=cache))
        train, _ = data.split(0.9, 0.1, seed=1)
        made = train.shuffle(seed=3).batch(16)
        return [*made, *made]  # two epochs

    plain, limited = batches("ram"), batches(CacheConfig(ram_bytes=ram_bytes, directory=str(tmp_path)))
    assert len(plain) == len(limited)
    for (inputs, label), (other_inputs, other_label) in zip(plain, limited, strict=True):
        assert torch.equal(label, other_label)
        for name, column in inputs.items():
            same = torch.equal if isinstance(column, torch.Tensor) else np.array_equal
            assert same(column, other_inputs[name])


def test_what_is_on_disk_is_read_ahead_by_batches_in_any_order(tmp_path: Path) -> None:
    source = TableSource(
        Invented([5000, 5000], PLAIN), cache=CacheConfig(where="disk", directory=str(tmp_path))
    )
    assert source.looks_ahead
    batches = Dataset(source).shuffle(seed=0).batch(256)
    for _ in batches:
        pass
    figures = source._storage._store.figures()
    assert figures["disk"]["num_ahead"] == 10_000, "no batch had to be read when it was asked for"
    assert sorted(torch.cat([batch["id"] for batch in batches]).tolist()) == list(range(10_000))
    # An epoch that is left in the middle, and another one after it.
    it = iter(batches)
    next(it)
    del it
    assert sorted(torch.cat([batch["id"] for batch in batches]).tolist()) == list(range(10_000))


def test_stages_pass_on_what_will_be_needed(tmp_path: Path) -> None:
    def source() -> TableSource:
        return TableSource(Invented([5000], PLAIN), cache=CacheConfig(where="disk", directory=str(tmp_path)))

    first, second = source(), source()
    data = Dataset(first).map(lambda row: row["id"]).shuffle(seed=1)
    assert sorted(torch.cat(list(data.batch(500))).tolist()) == list(range(5000))
    assert first._storage._store.figures()["disk"]["num_ahead"] == 5000
    zipped = Dataset.zip(Dataset(first), Dataset(second).skip(100)).shuffle(seed=2)
    for left, right in zipped.batch(500):
        assert torch.equal(left["id"] + 100, right["id"])
    assert second._storage._store.figures()["disk"]["num_ahead"] == 4900


def test_bad_rows_are_known_when_they_are_asked_for_and_only_then() -> None:
    storage = open_storage(Invented([10, 10], is_bad=True))
    assert storage.gather(np.array([0, 1, 2])).bad == {}
    bad = storage.gather(np.array([3, 4, 17, 10])).bad
    assert sorted(bad) == [3, 10, 17]
    assert bad[17].row == 18
    assert sorted(storage.gather(range(8, 12)).bad) == [10]


def test_a_block_is_decoded_once_however_many_threads_want_it() -> None:
    table = Invented([50] * 20)
    storage = StoredRows(table, CacheConfig())
    wrong: list[Any] = []

    def work(seed: int) -> None:
        for _ in range(5):
            rows = np.random.default_rng(seed).integers(0, 1000, 64)
            if storage.gather(rows).columns["id"].tolist() != rows.tolist():  # type: ignore[union-attr]  # a tensor
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert set(table.num_reads.values()) == {1}


def test_forked_readers_share_what_one_of_them_decoded() -> None:
    table = Invented([20] * 5)
    storage = StoredRows(table, CacheConfig())
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = 0 if storage.gather(np.arange(100)).columns["id"].tolist() == list(range(100)) else 2  # type: ignore[union-attr]
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
    assert storage.gather(range(100)).columns["id"].tolist() == list(range(100))  # type: ignore[union-attr]  # a tensor
    assert table.num_reads == Counter(), "the first child has done it for all"


def test_an_error_of_decoding_reaches_whoever_asks_and_the_rest_can_be_read() -> None:
    class Broken(Invented):
        def read(self, block: int) -> DecodedRows:
            if block == 1:
                raise ConfigError("no")
            return super().read(block)

    storage = open_storage(Broken([10, 10, 10]))
    assert storage.gather(range(10)).columns["id"].tolist() == list(range(10))  # type: ignore[union-attr]  # a tensor
    for _ in range(2):
        with pytest.raises(ConfigError, match="no"):
            storage.gather(np.array([5, 15]))
    assert storage.gather(range(20, 30)).columns["id"].tolist() == list(range(20, 30))  # type: ignore[union-attr]


def test_a_disk_too_small_for_the_rest_is_said_before_anything_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(available, "free_disk_bytes", lambda directory: 100)
    table = Invented([1000])
    storage = open_storage(table, cache=CacheConfig(where="disk", directory=str(tmp_path)))
    for _ in range(2):
        with pytest.raises(CacheFull, match="where 100 are free"):
            storage.gather(range(10))
    assert table.num_reads == Counter()


def test_where_it_lies_is_written_down_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events.emitted.clear()
    storage = open_storage(Invented([10, 10]), cache=CacheConfig(where="disk", directory=str(tmp_path)))
    assert list(events.emitted) == [], "nothing is kept before anything is read"
    storage.gather(range(5))
    storage.gather(range(20))
    [(kind, facts)] = events.emitted
    assert (kind, facts["what"], facts["ram_bytes"]) == ("cache placed", "invented.tab", 0)
    assert "the cache of invented.tab is on disk" in capsys.readouterr().err


def test_blocks_that_are_not_kept_are_decoded_again_when_memory_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(available, "for_caches", lambda: 3000)
    table = Invented([20] * 10)
    storage = PassingBlocks(table)
    for _ in range(2):
        assert storage.gather(range(200)).columns["id"].tolist() == list(range(200))  # type: ignore[union-attr]
    assert sum(table.num_reads.values()) > 10


def test_an_empty_table_can_be_opened() -> None:
    source = TableSource(Invented([]))
    assert source.num_samples == 0
    assert not source.looks_ahead
