"""Parquet files as a table: what is read, what is kept out by conditions, what is refused and in which words."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.dataset import Dataset
from shoal.data.formats.parquet import ColumnBounds, ParquetTable, Predicate, open_parquet, runs
from shoal.data.skipping import SkipSamples
from shoal.errors import BadSample, ConfigError, FileDamaged, FileLost, NoFiles, NoSuchColumn, SchemasDiffer


def write(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pq.write_table(pa.table(columns), path, **options)
    return path


def clicks(num_rows: int, first: int = 0) -> dict[str, Any]:
    row = np.arange(first, first + num_rows)
    return {
        "price": (row / 2).astype(np.float32),
        "user": row % 7,
        "word": [f"w{number}" for number in row],
        "y": (row % 2).astype(np.int8),
    }


def test_rows_by_index_from_several_files_and_row_groups(tmp_path: Path) -> None:
    write(tmp_path / "b.parquet", clicks(50, 30), row_group_size=20)
    write(tmp_path / "a.parquet", clicks(30), row_group_size=11)
    data = Dataset.from_parquet(tmp_path, label="y")
    assert len(data) == 80
    inputs, label = data[33]
    assert (float(inputs["price"]), inputs["word"], int(label)) == (16.5, "w33", 1)
    [(inputs, label)] = list(data.shuffle(seed=1).batch(80))
    order = np.argsort(inputs["price"].numpy())
    assert inputs["user"][order].tolist() == [row % 7 for row in range(80)]
    assert inputs["word"][order].tolist() == [f"w{row}" for row in range(80)]
    assert label.dtype == torch.int8


def test_only_the_columns_asked_for_are_read_in_their_order(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", clicks(3))
    data = Dataset.from_parquet(path, columns=["user", "price"])
    assert list(data[0]) == ["user", "price"]
    inputs, label = Dataset.from_parquet(path, columns=["user"], label="y")[1]
    assert (list(inputs), int(label)) == (["user"], 1)
    inputs, labels = Dataset.from_parquet(path, label=["y", "user"])[1]
    assert (list(inputs), {name: int(value) for name, value in labels.items()}) == (
        ["price", "word"],
        {"y": 1, "user": 1},
    )


def test_names_may_have_points_and_columns_may_be_lists(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"a.b": ["x", "y"], "a": [1, 2], "l.m": [[1], [2, 3]], "z": [0, 0]})
    table = ParquetTable(path, columns=["a.b", "l.m"])
    assert [sample["a.b"] for sample in Dataset.from_parquet(path, columns=["a.b", "l.m"])] == ["x", "y"]
    assert table.blocks[0].num_bytes > 50
    assert len(table._wanted_ranges(0)) == 3  # two columns and the footer


def test_urls_and_patterns(tmp_path: Path) -> None:
    system = fsspec.filesystem("memory")
    for name, first in (("x1", 0), ("x2", 5)):
        write(tmp_path / "t", clicks(5, first))
        system.pipe(f"/clicks/{name}.parquet", (tmp_path / "t").read_bytes())
    try:
        for place in ("memory://clicks/x*.parquet", "memory://clicks", ["memory://clicks/x1.parquet"]):
            data = Dataset.from_parquet(place)
            assert len(data) == (5 if isinstance(place, list) else 10)
            assert data[4]["word"] == "w4"
    finally:
        system.rm("/clicks", recursive=True)


def test_small_row_groups_are_read_together() -> None:
    assert runs([5, 5, 0, 5, 5, 5], [4, 4, 4, 4, 4, 9], 8) == [(0, 1), (3, 4), (5,)]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), max_size=20),
    st.integers(1, 20),
)
def test_runs_hold_each_group_with_rows_once(groups: list[tuple[int, int]], limit: int) -> None:
    found = runs([count for count, _ in groups], [size for _, size in groups], limit)
    assert [number for run in found for number in run] == [
        number for number, (count, _) in enumerate(groups) if count
    ]
    for run in found:
        assert run == tuple(range(run[0], run[-1] + 1))
        assert len(run) == 1 or sum(groups[number][1] for number in run) <= limit


# ---- conditions --------------------------------------------------------------------------------------


def test_where_keeps_the_rows_and_reads_no_row_group_in_vain(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", clicks(1000), row_group_size=100)
    table = ParquetTable(path, where=[("price", ">=", 201.5), ("user", "in", [1, 3])], columns=["word"])
    expected = [f"w{row}" for row in range(403, 1000) if row % 7 in (1, 3)]
    words = [
        bytes(word).decode()
        for block in range(len(table.blocks))
        for ragged in [table.read(block).columns["word"]]
        for word in np.split(ragged.values, ragged.offsets[1:-1])  # type: ignore[union-attr]
    ]
    assert words == expected
    assert sum(block.num_rows for block in table.blocks) == len(expected)
    assert table.blocks[0].first_row == 400


def test_any_of_several_lists_of_conditions(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", clicks(100), row_group_size=10)
    data = Dataset.from_parquet(path, where=[[("user", "==", 1), ("y", "=", 0)], [("price", "<", 1.0)]])
    assert [sample["word"] for sample in data] == [
        f"w{row}" for row in range(100) if (row % 7 == 1 and row % 2 == 0) or row < 2
    ]


def test_a_bad_row_behind_a_condition_is_named_by_its_row_in_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"x": [1, 2, 3, 4], "z": [1.0, None, 3.0, None]}, row_group_size=2)
    data = Dataset.from_parquet(path, where=("x", ">", 3))
    with pytest.raises(BadSample, match=r"row 4, column 'z': the value is missing.* This is sample 0 "):
        data[0]


def test_times_may_be_compared_with_text(tmp_path: Path) -> None:
    days = [datetime.datetime(2024, 1, day) for day in range(1, 11)]
    path = write(tmp_path / "a.parquet", {"t": days, "x": list(range(10))}, row_group_size=2)
    data = Dataset.from_parquet(path, where=[("t", ">=", "2024-01-09")])
    assert [int(sample["x"]) for sample in data] == [8, 9]
    assert int(data[0]["t"]) == int(datetime.datetime(2024, 1, 9, tzinfo=datetime.UTC).timestamp()) * 10**9


values = st.one_of(st.none(), st.integers(-3, 3))
operations = st.sampled_from(["==", "!=", "<", "<=", ">", ">="])
conditions = st.one_of(
    st.tuples(st.just("x"), operations, st.integers(-3, 3)),
    st.tuples(
        st.just("x"), st.sampled_from(["in", "not in"]), st.lists(st.integers(-3, 3), min_size=1, max_size=3)
    ),
)


@given(st.lists(values, min_size=1, max_size=6), st.lists(conditions, min_size=1, max_size=3))
def test_what_statistics_decide_is_what_the_rows_say(rows: list[int | None], where: list[Any]) -> None:
    table = pa.table({"x": pa.array(rows, pa.int64())})
    predicate = Predicate(where, {"x": pa.int64()}, "a")
    there = [value for value in rows if value is not None]
    known = {"x": ColumnBounds(min(there), max(there), len(there) < len(rows))} if there else {}
    mask, decision = predicate.mask(table), predicate.decide(known)
    assert decision is None or mask.tolist() == [decision] * len(rows)
    assert all(not kept or value is not None for kept, value in zip(mask, rows, strict=True))


def test_statistics_of_floats_and_strings_never_promise_too_much() -> None:
    floats = Predicate([("x", ">", 0.0)], {"x": pa.float32()}, "a")
    assert floats.decide({"x": ColumnBounds(1.0, 2.0, False)}) is None  # a NaN is in no statistics
    assert floats.decide({"x": ColumnBounds(-2.0, -1.0, False)}) is False
    cut_short = Predicate([("s", "!=", "ab")], {"s": pa.string()}, "a")
    assert cut_short.decide({"s": ColumnBounds("ab", "ab", False)}) is None


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ([("price", ">")], r"where= takes conditions like \[\('price', '>', 3\)"),
        ([("price", "~", 3)], "the operations are ==, =, !=, <, <=, >, >=, in, not in. Got"),
        (
            [("price", ">", "three")],
            "where= compares the column 'price', of type float, with 'three', which cannot be",
        ),
        ([("user", "in", 3)], "where= compares 'user' by 'in' with 3: give a list of values"),
    ],
)
def test_conditions_that_cannot_be_meant(tmp_path: Path, where: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Dataset.from_parquet(write(tmp_path / "a.parquet", clicks(3)), where=where)


def test_nothing_is_left_of_an_impossible_condition(tmp_path: Path) -> None:
    assert (
        len(Dataset.from_parquet(write(tmp_path / "a.parquet", clicks(3)), where=[("price", ">", 99)])) == 0
    )


# ---- bad input ---------------------------------------------------------------------------------------


def test_a_truncated_file_is_named_with_its_size(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", clicks(1000))
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(FileDamaged) as raised:
        Dataset.from_parquet(path)
    assert str(raised.value).startswith(
        f"the file {path} is damaged: its 3000 bytes do not end in a Parquet footer ("
    )
    assert "write or copy the file again, or leave it out" in str(raised.value)


def test_an_empty_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").touch()
    with pytest.raises(FileDamaged, match="it is empty, and even a table without rows has a footer"):
        Dataset.from_parquet(tmp_path / "a.parquet")


def test_a_damaged_row_group_makes_its_rows_bad_and_no_others(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal(4000)
    path = write(
        tmp_path / "a.parquet",
        {"x": x},
        row_group_size=2000,
        compression="none",
        use_dictionary=False,
        write_page_checksum=True,
    )
    damaged = bytearray(path.read_bytes())
    at = pq.read_metadata(path).row_group(1).column(0).data_page_offset
    damaged[at + 5000] ^= 0xFF
    path.write_bytes(damaged)
    source = open_parquet(path)
    with pytest.raises(
        BadSample, match=r"a.parquet, row group 1, row 3,001: its row group cannot be decoded \("
    ):
        source.samples([3000])
    assert source.batch(range(1990, 2000))["x"].tolist() == x[1990:2000].tolist()


def test_a_missing_column_lists_those_there_are(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", clicks(3))
    there = "It has price, user, word, y. Nothing was read; use one of those names."
    for options, asked_by in (
        ({"columns": ["prize"]}, "'prize', which columns= asks for"),
        ({"label": "clicked"}, "'clicked', which label= asks for"),
        ({"where": [("prize", ">", 3)]}, "'prize', which where= asks for"),
        ({"fill": {"prize": 0}}, "'prize', which fill= asks for"),
    ):
        with pytest.raises(NoSuchColumn) as raised:
            Dataset.from_parquet(path, **options)  # type: ignore[arg-type]
        assert str(raised.value).startswith(
            f"{path} has no column {asked_by}. {there} The data is opened at {__file__}, "
        )


def test_files_of_different_schemas_are_told_apart(tmp_path: Path) -> None:
    first = write(tmp_path / "a.parquet", {"x": [1], "s": ["a"]})
    other = write(tmp_path / "b.parquet", {"x": [1.5], "z": [1]})
    with pytest.raises(SchemasDiffer) as raised:
        Dataset.from_parquet(tmp_path)
    assert str(raised.value).startswith(
        f"the file {other} is not of one table with {first}: its column 'x' is of type double, not int64; "
        "it has no column 's'; it has a column 'z' more."
    )
    with pytest.raises(SchemasDiffer):
        Dataset.from_parquet(tmp_path, columns=["x"])


def test_nothing_to_read_says_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(
        NoFiles, match=r"the pattern matches no file; its directory .* is there and holds 0 entries"
    ):
        Dataset.from_parquet(f"{tmp_path}/*.parquet")
    with pytest.raises(NoFiles, match="the directory holds no file"):
        Dataset.from_parquet(tmp_path)
    (tmp_path / "a.csv").write_text("x\n1\n")
    with pytest.raises(
        NoFiles, match=r"of its 1 files none ends in .parquet or .pq or .parq \(endings there: .csv\)"
    ):
        Dataset.from_parquet(tmp_path)
    with pytest.raises(NoFiles, match=f"there is no such file; of its path only {tmp_path} is there"):
        Dataset.from_parquet(tmp_path / "x" / "y.parquet")


def test_a_file_that_disappears_or_changes_in_mid_epoch_is_named(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / f"{name}.parquet", clicks(10))
    source = open_parquet(tmp_path)
    source.samples([0])
    (tmp_path / "b.parquet").rename(tmp_path / "gone")
    with pytest.raises(
        FileLost, match=r"b.parquet cannot be read any further: it is not there any more. .*`shoal resume`"
    ):
        source.samples([15])
    write(tmp_path / "b.parquet", clicks(11))
    with pytest.raises(FileLost, match=r"it changed since it was found: \d+ bytes then, \d+ now"):
        source.samples([15])
    (tmp_path / "gone").rename(tmp_path / "b.parquet")
    assert source.samples([15])[0]["word"] == "w5"


def test_an_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.parquet", clicks(3))

    def refuse(*_: Any) -> int:  # a mode of 0 does not keep the superuser out, who may run the tests
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("shoal.data.files.os.open", refuse)
    with pytest.raises(FileLost, match=r"a.parquet cannot be read any further: this user may not read it"):
        Dataset.from_parquet(path)


def test_missing_values_are_skipped_where_that_is_wanted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"x": [1, None, 3, None]})
    source = open_parquet(path, on_error="skip", max_skips=5)
    with pytest.raises(SkipSamples) as raised:
        source.batch(np.array([3, 0, 1]))
    assert (sorted(raised.value.bad), raised.value.max_skips) == ([1, 3], 5)
    assert (raised.value.bad[3].row, raised.value.bad[3].index) == (4, 3)
    assert source.batch([0, 2])["x"].tolist() == [1, 3]
    batches = Dataset(source).batch(2)
    assert [batch["x"].tolist() for batch in batches] == [[1], [3]]
    assert [one.index for one in batches.skipped] == [1, 3]


def test_fill_stands_for_missing_values(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"x": [1, None], "s": ["a", None]})
    batch = next(iter(Dataset.from_parquet(path, fill={"x": 0, "s": "none"}).batch(2)))
    assert (batch["x"].tolist(), batch["s"].tolist()) == ([1, 0], ["a", "none"])


def test_identity_follows_files_and_options(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", clicks(3))
    same = [ParquetTable(path).identity for _ in range(2)]
    other = [ParquetTable(path, columns=["y"]).identity, ParquetTable(path, where=("y", "==", 1)).identity]
    os.utime(path, ns=(1, 1))
    assert len({*same, *other, ParquetTable(path).identity}) == 4


def test_describe_is_the_same_for_the_same_data_elsewhere(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "a.parquet", clicks(3))
    one, two = (open_parquet(tmp_path / folder, label="y").describe() for folder in ("one", "two"))
    assert one == two
    assert one[0]["columns"][0] == {"at": "price", "dtype": "float32", "shape": []}
