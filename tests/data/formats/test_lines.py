"""Ends of rows in text: against Arrow's own parser, at every chunk size."""

from __future__ import annotations

import itertools

import pyarrow as pa
import pyarrow.csv
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shoal.data.formats.lines import LineScanner, LineSpan, RowRules, rows_of, spans_of
from shoal.errors import DataError

CSV = RowRules(delimiter=ord(","), quote=ord('"'), cr_ends=True)
JSON = RowRules(blanks_are_empty=True)


def scanned(text: bytes, rules: RowRules, *, chunk_bytes: int, block_bytes: int) -> list[LineSpan]:
    chunks = [text[begin : begin + chunk_bytes] for begin in range(0, len(text), chunk_bytes)]
    return list(spans_of(chunks, LineScanner(rules, block_bytes=block_bytes)))


def parsed(text: bytes) -> list[str]:
    """The rows as Arrow sees them, whatever their number of fields."""
    seen: list[str] = []

    def note(row: pyarrow.csv.InvalidRow) -> str:
        seen.append(row.text)
        return "skip"

    pyarrow.csv.read_csv(
        pa.BufferReader(text),
        read_options=pyarrow.csv.ReadOptions(column_names=["never"] * 90, use_threads=False),
        parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True, invalid_row_handler=note),
    )
    return seen


pieces = st.lists(st.sampled_from(["a", ",", '"', '""', "\n", "\r\n", "\r", "\n\n", "bc", " "]), max_size=30)


@given(pieces, st.integers(1, 7), st.integers(1, 9))
@example(['"', "\n"], 1, 1)
@example(["a", "\r"], 1, 1)
@example(["a", '"', "\n", "bc"], 2, 1)
def test_rows_are_those_that_arrow_sees(parts: list[str], chunk_bytes: int, block_bytes: int) -> None:
    text = "".join(parts).encode()
    try:
        found = scanned(text, CSV, chunk_bytes=chunk_bytes, block_bytes=block_bytes)
    except DataError:
        return  # an open quote: Arrow takes such a field as ended by the end of the file
    if any(line.strip("\r") for line in text.decode().split("\n")):
        assert sum(stretch.num_rows for stretch in found) == len(parsed(text))
        for stretch in found:
            assert len(parsed(text[stretch.begin : stretch.end])) == stretch.num_rows
    else:
        assert not found
    for one, other in itertools.pairwise(found):
        assert one.end <= other.begin


@given(pieces)
def test_first_lines_are_as_editors_count(parts: list[str]) -> None:
    text = "".join(parts).replace("\r", "").encode()
    try:
        found = rows_of(text, CSV)
    except DataError:
        return
    for stretch in found:
        assert stretch.num_rows == 1
        assert stretch.first_line == text[: stretch.begin].count(b"\n") + 1


lines = st.lists(st.sampled_from(['{"a": 1}', "", "  ", "\t", '{"b": "x\\ny"}', ' {"c": 2}']), max_size=20)


@given(lines, st.sampled_from(["\n", "\r\n"]), st.booleans(), st.integers(1, 9), st.integers(1, 40))
def test_lines_of_json_are_rows_unless_they_are_blank(
    said: list[str], end: str, is_ended: bool, chunk_bytes: int, block_bytes: int
) -> None:
    text = (end.join(said) + (end if is_ended else "")).encode()
    found = scanned(text, JSON, chunk_bytes=chunk_bytes, block_bytes=block_bytes)
    assert sum(stretch.num_rows for stretch in found) == sum(1 for line in said if line.strip())


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=400), st.sampled_from([b"\n", b"\r\n"]), st.booleans()
)
def test_the_fast_way_and_the_careful_way_agree(lengths: list[int], end: bytes, with_quote: bool) -> None:
    text = b"".join(b"x" * length + b",1" + end for length in lengths)
    careful = scanned(b'"q",1' + end + text, CSV, chunk_bytes=1 << 20, block_bytes=1024)
    fast = scanned(b"'q',1" + end + text, CSV, chunk_bytes=2000, block_bytes=1024)
    assert fast == careful


def test_blocks_are_as_long_as_asked_and_end_with_a_row() -> None:
    text = b"12345,7\n" * 1000
    found = scanned(text, CSV, chunk_bytes=777, block_bytes=1024)
    assert found[0] == LineSpan(0, 1024, 128, 1)
    assert found[1] == LineSpan(1024, 2048, 128, 129)
    assert found[-1].end == len(text)


def test_an_open_quote_names_its_line() -> None:
    with pytest.raises(DataError, match="the quote that opens in line 3 is never closed"):
        rows_of(b'a,b\n1,2\n"x,4\n5,6\n', CSV)
