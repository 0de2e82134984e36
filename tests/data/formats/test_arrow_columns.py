"""Arrow's columns as rows in memory: every type, missing values, values that do not fit."""

from __future__ import annotations

import datetime
import decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.formats.arrow import Fill, arrow_type, column_of, columns_of, decoded
from shoal.data.formats.table import DecodedRows, Ragged
from shoal.errors import ConfigError, DataError


def rows_of(fill: dict[str, Any] | None = None, **columns: Any) -> DecodedRows:
    table = pa.table(columns)
    described = columns_of(table.schema, "a.parquet")
    return decoded(
        table, described, Fill(fill, described), lambda row: {"where": "a.parquet", "row": row + 101}
    )


def listed(ragged: Any) -> list[list[Any]]:
    assert isinstance(ragged, Ragged)
    return [
        ragged.values[begin:end].tolist()
        for begin, end in zip(ragged.offsets, ragged.offsets[1:], strict=False)
    ]


def texts(ragged: Any) -> list[str]:
    return [bytes(row).decode() for row in listed(ragged)]


@pytest.mark.parametrize(
    ("array", "dtype", "values"),
    [
        (pa.array([1, 2], pa.int8()), "int8", [1, 2]),
        (pa.array([1, 2], pa.uint8()), "uint8", [1, 2]),
        (pa.array([1, 65535], pa.uint16()), "int32", [1, 65535]),
        (pa.array([1, 2**32 - 1], pa.uint32()), "int64", [1, 2**32 - 1]),
        (pa.array([1, 2], pa.uint64()), "int64", [1, 2]),
        (pa.array([0.5, 2], pa.float32()), "float32", [0.5, 2]),
        (pa.array(np.array([0.5, 2], np.float16)), "float16", [0.5, 2]),
        (pa.array([True, False, True]), "bool", [True, False, True]),
        (pa.array([decimal.Decimal("1.25"), decimal.Decimal("-3.50")]), "float64", [1.25, -3.5]),
        (pa.array([datetime.datetime(1970, 1, 2)], pa.timestamp("us")), "int64", [86_400_000_000_000]),
        (pa.array([datetime.date(1970, 1, 2)]), "int64", [86_400_000_000_000]),
        (pa.array([datetime.time(0, 0, 1)], pa.time32("s")), "int64", [1_000_000_000]),
        (pa.array([datetime.timedelta(seconds=2)], pa.duration("ms")), "int64", [2_000_000_000]),
        (pa.array([3, 3, 5]).dictionary_encode(), "int64", [3, 3, 5]),
    ],
)
def test_numbers_of_every_type(array: Any, dtype: str, values: list[Any]) -> None:
    column = rows_of(x=array).columns["x"]
    assert isinstance(column, np.ndarray)
    assert str(column.dtype) == dtype
    assert column.tolist() == values


def test_numbers_without_gaps_are_not_copied() -> None:
    values = np.arange(1000.0)
    assert np.shares_memory(rows_of(x=pa.array(values)).columns["x"], values)


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())],
    ids=str,
)
def test_strings_of_every_type(kind: Any) -> None:
    words = ["a", "", "größer", "a"]
    array = pa.array(words).dictionary_encode() if pa.types.is_dictionary(kind) else pa.array(words, kind)
    rows = rows_of(s=pa.chunked_array([array, array.slice(1)]))
    assert texts(rows.columns["s"]) == [*words, *words[1:]]


def test_bytes_stay_bytes() -> None:
    assert listed(rows_of(b=pa.array([b"\x00\xff", b""])).columns["b"]) == [[0, 255], []]
    assert column_of("b", pa.binary(3), "a").kind == "bytes"


def test_lists_of_one_size_have_a_shape_and_others_are_ragged() -> None:
    fixed = pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int64(), 2)).slice(1)
    ragged = pa.array([[9], [1, 2, 3], []], pa.list_(pa.float32())).slice(1)
    rows = rows_of(f=fixed, r=ragged)
    assert rows.columns["f"].tolist() == [[3, 4], [5, 6]]  # type: ignore[union-attr]
    assert listed(rows.columns["r"]) == [[1, 2, 3], []]


def test_nested_lists_of_fixed_sizes_are_a_tensor() -> None:
    kind = pa.list_(pa.list_(pa.int32(), 2), 3)
    array = pa.array([[[1, 2], [3, 4], [5, 6]], [[7, 8], [9, 10], [11, 12]]], kind)
    column = rows_of(m=array.slice(1)).columns["m"]
    assert column.tolist() == [[[7, 8], [9, 10], [11, 12]]]  # type: ignore[union-attr]


def test_a_missing_value_makes_its_row_bad_and_names_it() -> None:
    rows = rows_of(x=pa.array([1, None, 3]), s=pa.array(["a", None, None]))
    assert sorted(rows.bad) == [1, 2]
    assert (rows.bad[1].row, rows.bad[1].column) == (102, "x")
    assert str(rows.bad[2]).startswith(
        "a.parquet, row 103, column 's': the value is missing, and fill={'s': ...} does not say what stands for it."
    )


def test_fill_stands_for_missing_values() -> None:
    rows = rows_of(
        {"x": -1, "s": "?", "b": True, "t": 0, "r": 7, "l": [1, 2]},
        x=pa.array([1, None]),
        s=pa.array([None, "b"]),
        b=pa.array([None, False]),
        t=pa.array([None, datetime.date(1970, 1, 2)]),
        r=pa.array([[1, None], None]),
        l=pa.array([None, [3]]),
    )
    assert not rows.bad
    assert rows.columns["x"].tolist() == [1, -1]  # type: ignore[union-attr]
    assert texts(rows.columns["s"]) == ["?", "b"]
    assert rows.columns["b"].tolist() == [True, False]  # type: ignore[union-attr]
    assert rows.columns["t"].tolist() == [0, 86_400_000_000_000]  # type: ignore[union-attr]
    assert listed(rows.columns["r"]) == [[1, 7], []]
    assert listed(rows.columns["l"]) == [[1, 2], [3]]


def test_a_missing_value_within_a_list_makes_its_row_bad() -> None:
    rows = rows_of(
        r=pa.array([[1], [2, None], None]), f=pa.array([[1], [2], [None]], pa.list_(pa.int64(), 1))
    )
    assert {row: bad.column for row, bad in rows.bad.items()} == {1: "r", 2: "r"}
    assert "its list has a missing value" in str(rows.bad[1])


def test_values_that_do_not_fit_are_found_one_by_one() -> None:
    big = [1] * 1000
    big[7], big[900] = 2**64 - 1, 2**63
    rows = rows_of(x=pa.array(big, pa.uint64()))
    assert sorted(rows.bad) == [7, 900]
    assert "column 'x': 18446744073709551615 does not fit into int64." in str(rows.bad[7])
    column = rows.columns["x"]
    assert isinstance(column, np.ndarray)
    assert column[[0, 8, 901]].tolist() == [1, 1, 1]


def test_a_date_beyond_nanoseconds_is_a_bad_row() -> None:
    rows = rows_of(t=pa.array([datetime.date(1980, 1, 1), datetime.date(3000, 1, 1)]))
    assert list(rows.bad) == [1]
    assert "does not fit into int64 nanoseconds (it is a date32[day])" in str(rows.bad[1])


@pytest.mark.parametrize(
    "kind",
    [pa.struct({"a": pa.int64()}), pa.list_(pa.struct({"a": pa.int8()})), pa.list_(pa.list_(pa.int8()))],
    ids=str,
)
def test_types_that_no_tensor_holds_are_refused_by_name(kind: Any) -> None:
    with pytest.raises(
        DataError, match=r"the column 'x' of a.parquet is of type .* leave it out with columns="
    ):
        column_of("x", kind, "a.parquet")


def test_a_column_without_any_value_asks_for_its_type() -> None:
    with pytest.raises(DataError, match=r"say what it holds: schema=\{'x': 'float32'\}"):
        column_of("x", pa.null(), "a.csv")


def test_fill_of_the_wrong_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="fill= gives 'no' for the column 'x', which holds int64"):
        rows_of({"x": "no"}, x=pa.array([1]))


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("float32", pa.float32()),
        (float, pa.float32()),
        (np.float64, pa.float64()),
        (np.dtype("int16"), pa.int16()),
        (int, pa.int64()),
        (bool, pa.bool_()),
        (np.bool_, pa.bool_()),
        ("str", pa.string()),
        (str, pa.string()),
        ("timestamp", pa.timestamp("ns")),
        ("list[int64]", pa.list_(pa.int64())),
        ("float32[8]", pa.list_(pa.float32(), 8)),
        (pa.int8(), pa.int8()),
    ],
)
def test_types_as_people_name_them(said: Any, kind: Any) -> None:
    assert arrow_type("x", said) == kind


def test_torch_types_are_names_too() -> None:
    import torch

    assert arrow_type("x", torch.float64) == pa.float64()


def test_an_unknown_type_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        ConfigError, match=r"the type 'flaot' for the column 'x', which there is not. Use one of int8"
    ):
        arrow_type("x", "flaot")


@given(st.lists(st.lists(st.integers(-5, 5), max_size=4), max_size=8), st.integers(0, 8))
def test_ragged_rows_survive(rows: list[list[int]], begin: int) -> None:
    array = pa.array(rows, pa.list_(pa.int64())).slice(begin)
    assert listed(rows_of(r=array).columns["r"]) == rows[begin:]


@given(st.lists(st.text(max_size=5), max_size=8), st.integers(0, 8))
def test_text_survives(words: list[str], begin: int) -> None:
    assert texts(rows_of(s=pa.array(words, pa.string()).slice(begin)).columns["s"]) == words[begin:]


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=6), st.data())
def test_taking_ragged_rows_is_taking_lists(rows: list[list[int]], data: st.DataObject) -> None:
    wanted = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8))
    taken = Ragged.of(rows, np.int64).take(np.array(wanted, dtype=np.int64))
    assert listed(taken) == [rows[row] for row in wanted]
