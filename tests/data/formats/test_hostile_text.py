"""Rows that would end a parser: each is read, or named by its row and left out with on_error="skip"."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.data.formats import lines
from shoal.errors import BadSample, FileDamaged

GOOD = [json.dumps({"a": number, "t": "x"}).encode() for number in range(4)]
LONG = b"y" * 5_000_000


def with_row(row: bytes, at: int) -> bytes:
    return b"\n".join([*GOOD[:at], row, *GOOD[at:]]) + b"\n"


DEEP = b"[" * 20_000 + b"]" * 20_000
DEEP_OBJECT = b'{"y":' * 20_000 + b"1" + b"}" * 20_000


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (b'{"a": 1, "t": "x", "other": %s}' % DEEP, "nested too deeply"),
        (b'{"a": 1, "t": "x", "other": %s}' % DEEP_OBJECT, "nested too deeply"),
        (b'{"a": 1, "t": "\xff"}', "no text in UTF-8"),
    ],
    ids=["array", "object", "bytes"],
)
def test_a_json_line_that_cannot_be_parsed_is_named_or_left_out(
    tmp_path: Path, row: bytes, problem: str, at: int
) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(with_row(row, at))
    with pytest.raises(BadSample, match=rf"row {at + 1}, line {at + 1}: the line is {problem}"):
        list(shoal.Dataset.from_jsonl(path).batch(5))
    [batch] = shoal.Dataset.from_jsonl(path, on_error="skip").batch(5)
    assert batch["a"].tolist() == [0, 1, 2, 3]


def test_a_csv_field_that_is_no_utf8_is_a_bad_row_and_not_a_column_of_bytes(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b"a,t\n1,x\n2,\xff\n3,z\n")
    with pytest.raises(
        BadSample, match=r"row 2, line 3, column 't'.*is no text in UTF-8.*schema=\{'t': 'bytes'\}"
    ):
        list(shoal.Dataset.from_csv(path).batch(3))
    [batch] = shoal.Dataset.from_csv(path, on_error="skip").batch(3)
    assert list(batch["t"]) == ["x", "z"]


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("kind", ["jsonl", "csv", "quoted csv"])
def test_a_row_longer_than_arrows_block_is_read(tmp_path: Path, kind: str, at: int) -> None:
    path = tmp_path / f"rows.{kind.split()[-1]}"
    if kind == "jsonl":
        path.write_bytes(with_row(b'{"a": 9, "t": "%s"}' % LONG, at))
        data = shoal.Dataset.from_jsonl(path)
    else:
        rows = [b"%d,x" % number for number in range(4)]
        rows.insert(at, b'9,"%s"' % LONG if kind == "quoted csv" else b"9," + LONG)
        path.write_bytes(b"a,t\n" + b"\n".join(rows) + b"\n")
        data = shoal.Dataset.from_csv(path)
    [batch] = data.batch(5)
    assert len(batch["t"][at]) == len(LONG)
    assert batch["a"].tolist() == [*range(at), 9, *range(at, 4)]


@pytest.mark.parametrize("name", ["rows.csv", "rows.csv.gz", "rows.jsonl", "rows.jsonl.gz"])
def test_a_file_without_line_ends_is_refused_before_it_is_in_memory(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "ROW_BYTES_LIMIT", 2 << 20)
    is_csv = "csv" in name
    text = b"a,t\n1,x\n2," if is_csv else GOOD[0] + b'\n{"a": 1, "t": "'
    pack: Callable[..., Any] = gzip.open if name.endswith(".gz") else open
    with pack(tmp_path / name, "wb") as out:
        out.write(text)
        for _ in range(40):
            out.write(b"y" * (1 << 20))
    read = shoal.Dataset.from_csv if is_csv else shoal.Dataset.from_jsonl
    with pytest.raises(FileDamaged, match=rf"line {3 if is_csv else 2} is longer than 2 MiB"):
        list(read(tmp_path / name).batch(1))


def test_a_quote_that_is_never_closed_is_found_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "ROW_BYTES_LIMIT", 2 << 20)
    (tmp_path / "rows.csv").write_bytes(b'a,t\n1,x\n2,"y\n' + b"3,z\n" * (4 << 20))
    with pytest.raises(FileDamaged, match="the quote that opens in line 3 is not closed within 2 MiB"):
        shoal.Dataset.from_csv(tmp_path / "rows.csv")
