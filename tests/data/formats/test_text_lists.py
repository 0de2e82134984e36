"""Lists of strings come back as they were written, from every format that has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.data import Dataset, Feature, write_tfrecord
from shoal.data.formats.table import Ragged, pack_lists, unpack_list
from shoal.errors import BadSample, ConfigError

TAGS = [["a", "bb"], [], ["ccc"], ["é", "", "x\0"], ["q"]]


@given(st.lists(st.lists(st.binary(max_size=9), max_size=5), max_size=8), st.integers(0, 3))
def test_packing_keeps_every_list(lists: list[list[bytes]], first: int) -> None:
    texts = Ragged.of_bytes([string for row in lists for string in row])
    offsets = np.cumsum([0, *(len(row) for row in lists)])
    part = min(first, len(lists))  # lists need not begin with the first string
    rows = pack_lists(texts, offsets[part:])
    found = [
        unpack_list(rows.values[begin:end].tobytes(), is_text=False).tolist()
        for begin, end in zip(rows.offsets[:-1], rows.offsets[1:], strict=True)
    ]
    assert found == lists[part:]


def spelled(column: Any) -> list[list[str]]:
    assert all(isinstance(string, (str, bytes)) for row in column for string in row)
    return [[string if isinstance(string, bytes) else str(string) for string in row] for row in column]


def parquet(path: Path, **columns: Any) -> Path:
    pq.write_table(
        pa.table({name: pa.array(values) for name, values in columns.items()}), path, row_group_size=2
    )
    return path


@pytest.mark.parametrize("cache", ["auto", None])
def test_lists_of_strings_in_parquet(tmp_path: Path, cache: str | None) -> None:
    path = parquet(
        tmp_path / "a.parquet", tags=TAGS, raw=[[t.encode() for t in row] for row in TAGS], y=range(5)
    )
    data = Dataset.from_parquet(path, label="y", cache=cache)
    shown = [row[:] for row in TAGS]
    shown[3][2] = "x"  # numpy's own strings end before zeros; bytes are whole
    assert [str(string) for string in data[0][0]["tags"]] == TAGS[0]
    for pipeline in (data, data.map(lambda sample: sample), data.map(lambda batch: batch, batched=True)):
        batches = [inputs for inputs, _ in pipeline.batch(3)]
        assert [row for inputs in batches for row in spelled(inputs["tags"])] == shown
        assert [row for inputs in batches for row in spelled(inputs["raw"])] == [
            [tag.encode() for tag in row] for row in TAGS
        ]
    assert data._source.describe()[0]["columns"][0]["dtype"] == "list of str"  # type: ignore[index,union-attr]


def test_missing_lists_and_strings_are_bad_or_filled(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", t=[["a", None], None, ["b"]], x=[0, 1, 2])
    with pytest.raises(BadSample, match=r"row 1, column 't': its list has a missing value, and fill="):
        Dataset.from_parquet(path)[0]
    with pytest.raises(BadSample, match=r"row 2, column 't': the value is missing"):
        Dataset.from_parquet(path)[1]

    def filled(value: Any) -> list[list[str]]:
        return spelled([row["t"] for row in Dataset.from_parquet(path, fill={"t": value}, on_error="skip")])

    assert filled("?") == [["a", "?"], [], ["b"]]
    assert filled(["m", "n"]) == [["m", "n"], ["b"]]
    assert filled([]) == [[], ["b"]]
    with pytest.raises(ConfigError, match=r"fill= gives \[3\] for the column 't', which holds list of str"):
        filled([3])


def test_lists_of_strings_in_records_and_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    write_tfrecord(path, [{"t": row, "y": number} for number, row in enumerate(TAGS)])

    def read(feature: Feature, **options: Any) -> list[list[str]]:
        data = Dataset.from_tfrecord(path, {"t": feature, "y": "int64"}, **options)
        return spelled([sample["t"] for sample in data])

    raw = [[tag.encode() for tag in row] for row in TAGS]
    assert read(Feature("bytes", None)) == raw
    assert read(Feature("str", None))[:3] == TAGS[:3]
    assert read(Feature("str", (2,)), on_error="skip") == [TAGS[0]]
    with pytest.raises(
        BadSample, match=r"row 2, .*column 't': the record holds 0 values, the schema says a bytes list of 2"
    ):
        read(Feature("str", (2,)))
    assert read(Feature("str", None, key="no", default=["u", "v"]))[0] == ["u", "v"]
    assert read(Feature("str", None, key="no")) == [[]] * 5

    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps({"t": row}) + "\n" for row in TAGS[:3]))
    assert spelled(next(iter(Dataset.from_jsonl(lines).batch(3)))["t"]) == TAGS[:3]


def test_text_in_records_that_is_no_utf8_is_bad_by_its_record(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    write_tfrecord(path, [{"t": [b"a", b"b"]}, {"t": [b"c", b"\xff"]}, {"t": [b"d"]}])
    data = Dataset.from_tfrecord(path, {"t": Feature("str", None)}, on_error="skip").batch(3)
    assert [spelled(batch["t"]) for batch in data] == [[["a", "b"], ["d"]]]
    assert [skipped.index for skipped in data.skipped] == [1]
