"""Errors in CSV files, as users are told."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from shoal.data.dataset import Dataset
from shoal.data.formats.text import open_csv
from shoal.data.skipping import SkipSamples
from shoal.errors import (
    BadSample,
    ConfigError,
    FileDamaged,
    FileLost,
    NoFiles,
    NoSuchColumn,
    SchemasDiffer,
    TooManySkipped,
)

CURE = "Nothing was changed; mend it there, or leave such samples out, each of them counted, with on_error='skip'."


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def told(data: Dataset, index: int) -> str:
    with pytest.raises(BadSample) as raised:
        data[index]
    return str(raised.value).partition(" The data is opened at ")[0]


def test_too_many_and_too_few_fields(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "a,b\n1,2\n3,4,5\n6\n7,8\n")
    data = Dataset.from_csv(path)
    assert told(data, 1) == (
        f"{path}, row 2, line 3: the row has 3 fields, more than the 2 columns: '3,4,5'. "
        f"This is sample 1 of the dataset. {CURE}"
    )
    assert "row 3, line 4: the row has 1 field, fewer than the 2 columns: '6'" in told(data, 2)
    assert [int(data[index]["b"]) for index in (0, 3)] == [2, 8]


def test_a_wrong_type_far_down_is_found_quickly(tmp_path: Path) -> None:
    rows = ["1,2.5\n"] * 1_100_000
    rows[1_000_002] = "1,abc\n"
    path = write(tmp_path / "a.csv", "n,price\n" + "".join(rows))
    data = Dataset.from_csv(path)
    began = time.process_time()
    text = told(data, 1_000_002)
    assert time.process_time() - began < 5
    assert text.startswith(
        f"{path}, row 1,000,003, line 1,000,004, column 'price': 'abc' is no float32, which the first "
    )
    assert "if such values are meant, say so with schema={'price': 'str'} or another type." in text
    assert float(data[1_000_003]["price"]) == 2.5


def test_a_declared_type_is_named_as_such(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "n\n1\n1.5\n")
    assert "line 3, column 'n': '1.5' is no int64, which schema= says it is." in told(
        Dataset.from_csv(path, schema={"n": "int64"}), 1
    )


def test_lines_are_counted_as_editors_do(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 's,n\r\n"two\r\nlines",1\r\n\r\nx,y\r\n')
    assert "row 2, line 5, column 'n': 'y' is no int64" in told(Dataset.from_csv(path, schema={"n": int}), 1)


def test_a_missing_value_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "n,x\n1,2\n3,\nNA,4\n")
    data = Dataset.from_csv(path)
    assert "row 2, line 3, column 'x': the value is missing, and fill={'x': ...} does not say" in told(
        data, 1
    )
    assert "row 3, line 4, column 'n': the value is missing" in told(data, 2)


def test_several_kinds_of_wrong_in_one_block(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'n,x,s\n1,2,a\n3\nx,4,b\n5,y,"c\nd"\n6,,e\n7,8,f\n')
    data = Dataset.from_csv(path, schema={"n": "int32", "x": "float32"})
    assert "line 3: the row has 1 field" in told(data, 1)
    assert "line 4, column 'n': 'x' is no int32" in told(data, 2)
    assert "line 5, column 'x': 'y' is no float32" in told(data, 3)
    assert "line 7, column 'x': the value is missing" in told(data, 4)
    assert (int(data[5]["n"]), float(data[5]["x"]), data[5]["s"]) == (7, 8.0, "f")
    assert (int(data[0]["n"]), data[0]["s"]) == (1, "a")


def test_text_that_is_no_utf8_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", b"s,n\nok,1\nna\xefve,2\n")
    data = Dataset.from_csv(path, schema={"s": "str"})
    assert r"row 2, line 3, column 's': 'na\\xefve' is no text in UTF-8, which schema= says it is" in told(
        data, 1
    )
    assert data[0]["s"] == "ok"


def test_skipping_within_a_budget(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.csv", "n\n" + "".join("x\n" if row % 5 == 2 else f"{row}\n" for row in range(20))
    )
    source = open_csv(path, schema={"n": int}, on_error="skip", max_skips=4)
    with pytest.raises(SkipSamples) as raised:
        source.batch(range(8))
    assert sorted(raised.value.bad) == [2, 7]
    batches = Dataset(source).batch(5)
    assert [batch["n"].tolist() for batch in batches] == [[5 * b + k for k in (0, 1, 3, 4)] for b in range(4)]
    assert [one.error.line for one in batches.skipped] == [4, 9, 14, 19]
    tight = Dataset.from_csv(path, schema={"n": int}, on_error="skip", max_skips=3).batch(5)
    with pytest.raises(
        TooManySkipped, match=r"4 bad samples were left out, and max_skips=3 allows no more. .*line 19"
    ):
        list(tight)


def test_a_missing_column_lists_those_there_are(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "a,b\n1,2\n")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"columns": ["c"]}, "columns="),
        ({"label": "c"}, "label="),
        ({"schema": {"c": int}}, "schema="),
        ({"fill": {"c": 1}}, "fill="),
    ]
    for options, asked_by in cases:
        with pytest.raises(NoSuchColumn) as raised:
            Dataset.from_csv(path, **options)
        assert str(raised.value).startswith(
            f"{path} has no column 'c', which {asked_by} asks for. It has a, b."
        )


def test_a_header_that_fits_no_row(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "a,b,c\n1,2\n3,4\n")
    with pytest.raises(
        BadSample, match=r"a.csv, row 1: the row has 2 fields, fewer than the 3 columns: '1,2'"
    ):
        Dataset.from_csv(path)
    with pytest.raises(
        ConfigError, match=r"names= gives 1 names, and the first row of .* has 3 fields: 'a', 'b', 'c'"
    ):
        Dataset.from_csv(path, names=["x"])


def test_headers_that_differ_are_told_apart(tmp_path: Path) -> None:
    first, other = write(tmp_path / "1.csv", "a,b\n1,2\n"), write(tmp_path / "2.csv", "a,c\n1,2\n")
    with pytest.raises(SchemasDiffer) as raised:
        Dataset.from_csv(tmp_path)
    assert str(raised.value).startswith(
        f"the file {other} is not of one table with {first}: its header has no column 'b'; its header has a column 'c' more."
    )
    assert len(Dataset.from_csv(tmp_path, columns=["a"])) == 2


def test_types_that_differ_between_files_are_named_by_row(tmp_path: Path) -> None:
    write(tmp_path / "1.csv", "a\n1\n")
    write(tmp_path / "2.csv", "a\nx\n")
    assert "2.csv, row 1, line 2, column 'a': 'x' is no int64" in told(Dataset.from_csv(tmp_path), 1)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"", "it is empty: it has not even a header"),
        (b"\n\n", "it is empty: it has not even a header"),
        ("a,b\n".encode("utf-16"), "it is text in UTF-16 or UTF-32, or no text at all; UTF-8 is read"),
        (b'a,b\n1,2\n"x,3\n4,5\n', "the quote that opens in line 3 is never closed"),
        (b'a,b\n1,2\n1,"x\n' + b"4,5\n" * 9, "the quote that opens in line 3 is never closed"),
    ],
)
def test_a_file_that_is_no_csv(tmp_path: Path, text: bytes, problem: str) -> None:
    path = write(tmp_path / "a.csv", text)
    with pytest.raises(FileDamaged) as raised:
        Dataset.from_csv(path)
    assert str(raised.value).startswith(
        f"the file {path} is damaged: {problem}. Nothing of that part was used;"
    )


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(
        NoFiles, match=r"the pattern matches no file; its directory .* is there and holds 0 entries"
    ):
        Dataset.from_csv(f"{tmp_path}/*.csv")
    (tmp_path / "a.parquet").touch()
    (tmp_path / "_SUCCESS").touch()
    with pytest.raises(
        NoFiles, match=r"of its 1 files none ends in .csv or .csv.gz .*\(endings there: .parquet\)"
    ):
        Dataset.from_csv(tmp_path)
    with pytest.raises(NoFiles, match="an empty list: no path was given"):
        Dataset.from_csv([])


@pytest.fixture
def two_files(tmp_path: Path) -> Path:
    for name in ("1.csv", "2.csv"):
        write(tmp_path / name, "a\n1\n2\n")
    return tmp_path


def test_a_file_that_disappears_in_mid_epoch(two_files: Path) -> None:
    data = Dataset.from_csv(two_files)
    data[0]
    (two_files / "2.csv").unlink()
    with pytest.raises(FileLost, match=r"2.csv cannot be read any further: it is not there any more"):
        data[2]


def test_a_file_that_changes_in_mid_epoch(two_files: Path) -> None:
    data = Dataset.from_csv(two_files)
    data[0]
    write(two_files / "2.csv", "a\n1\n2\n3\n")
    with pytest.raises(FileLost, match=r"2.csv .* it changed since it was found: 6 bytes then, 8 now"):
        list(data.batch(4))


def test_an_unreadable_file(two_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:  # a mode of 0 does not keep the superuser out, who may run the tests
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("shoal.data.files.os.open", refuse)
    with pytest.raises(FileLost, match=r"1.csv cannot be read any further: this user may not read it"):
        Dataset.from_csv(two_files)
