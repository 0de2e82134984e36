"""However small the buffer: the pairs of a task come out sorted, whole, and in the order in which they were given."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.mapreduce import spill as combining
from shoal.data.mapreduce import spill as records
from shoal.data.mapreduce.spill import RunFile, RunWriter, SpillBuffer, merged
from shoal.errors import DataError
from shoal.runtime.serialization import decode

KEYS = st.integers(-5, 5) | st.sampled_from(["a", "b", "\x00", b"a", 1.0, None, (1, "x")])
PAIRS = st.lists(st.tuples(KEYS, st.integers()), max_size=120)


def written(
    pairs: list[tuple[Any, int]], *, max_bytes: int, partitions: int, combine: Any
) -> tuple[dict[Any, Any], int]:
    """Results by (type, key), and how often was spilled; checks what every file of runs must be."""
    with tempfile.TemporaryDirectory() as folder:
        buffer = SpillBuffer(
            Path(folder), "t", combine=combine, num_partitions=partitions, max_bytes=max_bytes
        )
        for key, value in pairs:
            buffer.add(key, value)
        buffer.write(Path(folder) / "out")
        assert [path.name for path in Path(folder).iterdir()] == ["out"], "spilled files must be gone"
        file = RunFile(Path(folder) / "out")
        found: dict[Any, list[Any]] = defaultdict(list)
        for partition in range(partitions):
            run = list(file.records(partition, check=True))
            assert [key for key, _ in run] == sorted(key for key, _ in run)
            assert all(records.partition_of(key, partitions) == partition for key, _ in run)
            assert len(run) == file.stretches[partition].num_records
            for key, value in run:
                decoded = records.decode_key(key)
                found[type(decoded), decoded].append(decode(value))
        file.close()
        return dict(found), buffer.num_spills


@settings(max_examples=60)
@given(PAIRS, st.sampled_from([1, 300, 2000, 1 << 20]), st.integers(1, 4))
def test_values_keep_their_order_through_every_spill(pairs: Any, max_bytes: int, partitions: int) -> None:
    expected = defaultdict(list)
    for key, value in pairs:
        expected[type(key), key].append(value)
    found, num_spills = written(pairs, max_bytes=max_bytes, partitions=partitions, combine=None)
    assert found == expected
    assert (num_spills >= len(pairs)) if max_bytes == 1 else True


@settings(max_examples=60)
@given(PAIRS, st.sampled_from([1, 300, 2000, 1 << 20]), st.integers(1, 4))
def test_combining_leaves_one_value_per_key(pairs: Any, max_bytes: int, partitions: int) -> None:
    expected: dict[Any, int] = defaultdict(int)
    for key, value in pairs:
        expected[type(key), key] += value
    found, _ = written(
        pairs, max_bytes=max_bytes, partitions=partitions, combine=lambda key, listed: sum(listed)
    )
    assert found == {key: [value] for key, value in expected.items()}


def test_more_spills_than_files_may_be_open_are_merged_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(combining, "_MAX_RUNS", 3)
    at_once: list[int] = []

    def counted(runs: list[Any]) -> Any:
        at_once.append(len(runs))
        return merged(runs)

    monkeypatch.setattr(combining, "merged", counted)
    pairs = [(number % 7, number) for number in range(100)]
    found, num_spills = written(pairs, max_bytes=1, partitions=2, combine=None)
    assert num_spills == 100
    assert max(at_once) == 4, "three files, and what is in memory"
    assert found == {(int, key): [number for number in range(100) if number % 7 == key] for key in range(7)}


def test_memory_stays_within_the_buffer_while_keys_are_few(tmp_path: Path) -> None:
    buffer = SpillBuffer(
        tmp_path, "t", combine=lambda key, listed: sum(listed), num_partitions=1, max_bytes=20_000
    )
    for number in range(20_000):
        buffer.add(number % 10, 1)
        assert buffer._num_bytes <= 20_000
    assert buffer.num_spills == 0
    buffer.discard()


def test_a_file_that_was_cut_or_changed_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunWriter(path, 1) as writer:
        for number in range(100):
            writer.add(0, b"%03d" % number, b"x" * 50)
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    with pytest.raises(DataError, match="is damaged"):
        RunFile(path)
    path.write_bytes(whole[:200] + b"!" + whole[201:])
    file = RunFile(path)
    with pytest.raises(DataError, match="not those that were written"):
        list(file.records(0, check=True))
    file.close()


def test_a_record_may_be_longer_than_what_is_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_BUFFER_BYTES", 16)
    with RunWriter(tmp_path / "run", 2) as writer:
        writer.add(1, b"key", b"v" * 1000)
        writer.add(1, b"kez", b"")
    file = RunFile(tmp_path / "run")
    assert list(file.records(0)) == []
    assert list(file.records(1, check=True)) == [(b"key", b"v" * 1000), (b"kez", b"")]
    file.close()


def test_runs_merge_by_key_and_then_by_their_number() -> None:
    runs = [[(b"a", b"3"), (b"c", b"1")], [(b"a", b"1"), (b"a", b"2"), (b"b", b"0")]]
    assert list(merged(runs)) == [(b"a", b"3"), (b"a", b"1"), (b"a", b"2"), (b"b", b"0"), (b"c", b"1")]
