"""JSON lines as a table: types, lists, and what is wrong with them in the words that people are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.dataset import Dataset
from shoal.data.formats.text import open_jsonl
from shoal.data.skipping import SkipSamples
from shoal.errors import BadSample, DataError, FileLost, NoFiles, NoSuchColumn


def write(path: Path, *rows: Any, end: str = "\n") -> Path:
    said = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_bytes("".join(row + end for row in said).encode())
    return path


def told(data: Dataset, index: int) -> str:
    with pytest.raises(BadSample) as raised:
        data[index]
    return str(raised.value)


def test_types_and_lists(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        {"i": 1, "f": 0.5, "b": True, "s": "é", "l": [1, 2], "t": "1970-01-01 00:00:01", "y": 1},
        {"f": 2, "i": 2, "b": False, "s": "", "l": [], "t": "1970-01-02", "y": 0},
    )
    data = Dataset.from_jsonl(path, label="y")
    [(inputs, label)] = list(data.batch(2))
    assert list(inputs) == ["i", "f", "b", "s", "l", "t"]
    assert (inputs["i"].dtype, inputs["f"].dtype, inputs["b"].dtype) == (
        torch.int64,
        torch.float32,
        torch.bool,
    )
    assert inputs["l"].tolist() == [[1, 2], [-1, -1]]
    assert inputs["s"].tolist() == ["é", ""]
    assert inputs["t"].tolist() == [10**9, 86_400 * 10**9]
    assert label.tolist() == [1, 0]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n", "\n  \n"])
def test_lines_end_in_many_ways(tmp_path: Path, end: str) -> None:
    path = write(tmp_path / "a.jsonl", *({"n": number} for number in range(5)), end=end)
    assert [int(sample["n"]) for sample in Dataset.from_jsonl(path)] == list(range(5))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().rstrip())
    assert [int(sample["n"]) for sample in Dataset.from_jsonl(path)] == list(range(5))


def test_schema_says_types_sizes_and_keys_that_come_late(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"x": 1, "v": [1, 2]}, {"x": 2, "v": [3, 4], "late": 5})
    data = Dataset.from_jsonl(
        path, schema={"x": "float16", "v": "float32[2]", "late": "int64"}, fill={"late": 0}
    )
    [batch] = list(data.batch(2))
    assert (batch["x"].dtype, batch["v"].dtype, batch["v"].shape) == (torch.float16, torch.float32, (2, 2))
    assert batch["late"].tolist() == [0, 5]


def test_fill_stands_for_null_and_absent_keys(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"a": 1, "l": [1]}, {"a": None}, {"l": [2, None]})
    [batch] = list(Dataset.from_jsonl(path, fill={"a": -1, "l": 9}).batch(3))
    assert (batch["a"].tolist(), batch["l"].tolist()) == ([1, -1, -1], [[1, -1], [-1, -1], [2, 9]])


def test_files_of_a_directory_in_the_order_of_their_names(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", {"n": 2})
    write(tmp_path / "a.ndjson", {"n": 1})
    write(tmp_path / "c.txt", "no")
    assert [int(sample["n"]) for sample in Dataset.from_jsonl(tmp_path)] == [1, 2]


def test_a_line_that_is_null_is_named_and_never_parsed_by_arrow_which_dies_of_it(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "null", {"n": 2}, " null", {"n": 4})
    data = Dataset.from_jsonl(path, schema={"n": "int64"}, fill={"n": 0})
    assert "row 1, line 1: the line is null and should be an object" in told(data, 0)
    assert "row 3, line 3: the line is null" in told(data, 2)
    assert int(data[3]["n"]) == 4


def test_what_is_wrong_with_a_line_is_told(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        {"n": 1, "s": "a"},
        '{"n": 2, "s": "b"',
        "",
        "[3]",
        {"n": "four", "s": "d"},
        {"n": 5.5, "s": "e"},
        {"n": True, "s": "f"},
        {"s": "g"},
        '{"n": 8, "s": "h"} {"n": 9, "s": "i"}',
        {"n": 10, "s": 10},
        {"n": 11, "s": "k"},
    )
    data = Dataset.from_jsonl(path, schema={"n": "int64", "s": "str"})
    assert len(data) == 10
    assert told(data, 1).startswith(
        f"{path}, row 2, line 2: the line is no JSON (Expecting ',' delimiter at character 18): "
        """'{"n": 2, "s": "b"'. This is sample 1 of the dataset."""
    )
    assert "row 3, line 4: the line is an array and should be an object: [3]" in told(data, 2)
    assert "row 4, line 5, column 'n': 'four' is no int64, which schema= says it is" in told(data, 3)
    assert "row 5, line 6, column 'n': 5.5 is no int64" in told(data, 4)
    assert "row 6, line 7, column 'n': True is no int64" in told(data, 5)
    assert "row 7, line 8, column 'n': the value is missing, and fill={'n': ...}" in told(data, 6)
    assert "row 8, line 9: the line is no JSON (Extra data at character 20)" in told(data, 7)
    assert [data[index]["s"] for index in (0, 8, 9)] == ["a", "10", "k"], "schema= says that it is text"


def test_a_type_that_was_found_is_told_as_such(tmp_path: Path) -> None:
    write(tmp_path / "1.jsonl", {"n": 1}, {"n": 2})
    write(tmp_path / "2.jsonl", {"n": 3}, {"n": 4.5})
    text = told(Dataset.from_jsonl(tmp_path), 3)
    assert (
        "2.jsonl, row 2, line 2, column 'n': 4.5 is no int64, which the first 2 rows have there; if such"
        in text
    )


def test_text_that_is_no_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"s": "ok"}\n{"s": "na\xefve"}\n')
    data = Dataset.from_jsonl(path, schema={"s": "str"})
    assert r"""row 2, line 2: the line is no text in UTF-8: b'{"s": "na\xefve"}'""" in told(data, 1)
    assert data[0]["s"] == "ok"


def test_lists_of_another_size_than_declared(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"v": [1, 2]}, {"v": [1, 2, 3]}, {"v": [5, 6]})
    data = Dataset.from_jsonl(path, schema={"v": "int64[2]"})
    assert "column 'v': its list has 3 values, and the column holds lists of 2" in told(data, 1)
    assert data[2]["v"].tolist() == [5, 6]


def test_times_with_a_zone_survive_the_careful_way(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"t": "1970-01-01T00:00:01Z"}, {"t": "soon"})
    data = Dataset.from_jsonl(path, schema={"t": "timestamp"})
    assert int(data[0]["t"]) == 10**9
    assert "column 't': 'soon' is no timestamp[ns]" in told(data, 1)


def test_columns_that_cannot_be_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"a": {"b": 1}, "n": None, "e": [], "x": 1})
    for name, text in (
        (
            "a",
            "is of type struct<b: int64>, which cannot be read into tensors: .* leave it out with columns=",
        ),
        ("n", r"is of type null, .* schema=\{'n': 'float32'\}"),
        ("e", r"is of type list<item: null>, .* schema=\{'e': 'float32'\}"),
    ):
        with pytest.raises(DataError, match=f"the column '{name}' of .* {text}"):
            Dataset.from_jsonl(path, columns=[name])
    assert int(Dataset.from_jsonl(path, columns=["x"])[0]["x"]) == 1
    with pytest.raises(
        NoSuchColumn, match=r"has no column 'z', which columns= asks for. It has a, n, e, x\."
    ):
        Dataset.from_jsonl(path, columns=["z"])


def test_json_that_is_not_in_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"a": 1}, {"a": 2}]))
    with pytest.raises(DataError, match="is one JSON array, and one object per line is wanted"):
        Dataset.from_jsonl(path)
    path.write_text(json.dumps([{"a": 1}, {"a": 2}], indent=1))
    with pytest.raises(DataError, match="is one JSON array, and one object per line is wanted"):
        Dataset.from_jsonl(path)


def test_skipping_bad_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"n": 1}, "?", {"n": 3})
    source = open_jsonl(path, on_error="skip", max_skips=1)
    with pytest.raises(SkipSamples) as raised:
        source.batch(range(3))
    assert list(raised.value.bad) == [1]
    assert [batch["n"].tolist() for batch in Dataset(source).batch(3)] == [[1, 3]]


def test_files_that_are_not_there_or_not_any_more(tmp_path: Path) -> None:
    with pytest.raises(NoFiles, match="the directory holds no file"):
        Dataset.from_jsonl(tmp_path)
    path = write(tmp_path / "a.jsonl", {"n": 1})
    data = Dataset.from_jsonl(path)
    path.unlink()
    with pytest.raises(FileLost, match="it is not there any more"):
        data[0]
    assert len(Dataset.from_jsonl(write(tmp_path / "b.jsonl"))) == 0


numbers = st.one_of(st.integers(-(2**40), 2**40), st.none())
objects = st.fixed_dictionaries(
    {"i": numbers, "s": st.text(max_size=4), "l": st.lists(st.integers(-9, 9), max_size=3)}
)


@settings(max_examples=40)
@given(st.lists(objects, min_size=1, max_size=12), st.booleans())
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], with_a_bad_line: bool
) -> None:
    path = tmp_path_factory.mktemp("jsonl") / "a.jsonl"
    write(path, *rows, *(["?"] if with_a_bad_line else []))  # which makes the block be read carefully
    schema = {"i": "int64", "s": "str", "l": "list[int64]"}
    data = Dataset.from_jsonl(path, schema=schema, fill={"i": 0})
    for index, row in enumerate(rows):
        sample = data[index]
        assert {"i": int(sample["i"]), "s": sample["s"], "l": sample["l"].tolist()} == {
            **row,
            "i": row["i"] or 0,
        }
