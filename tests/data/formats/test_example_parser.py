"""`tf.train.Example` by a declared schema: every value as it was written, every record that lacks something by its reason."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data import Feature
from shoal.data.formats.example import example_bytes, list_features, wanted_features
from shoal.data.formats.example_parser import ExampleParser
from shoal.data.formats.table import BadRows, Ragged
from shoal.errors import ConfigError


def parse(records: list[bytes], schema: dict[str, Any]) -> tuple[dict[str, Any], dict[int, str]]:
    """Columns as lists, and row to column and reason."""
    ends = np.cumsum([len(record) for record in records], dtype=np.int64)
    begins = ends - [len(record) for record in records]
    bad = BadRows(lambda row: {"where": "here", "row": row})
    parser = ExampleParser(wanted_features(schema))
    data = np.frombuffer(b"".join(records) or b"\0", np.uint8)
    columns = parser.parse(data, begins, ends, np.zeros(len(records), np.uint8), bad)
    listed = {
        name: [column.values[a:b].tolist() for a, b in zip(column.offsets, column.offsets[1:], strict=False)]
        if isinstance(column, Ragged)
        else column.tolist()
        for name, column in columns.items()
    }
    return listed, {row: f"{bad[row].column}: {bad[row].reason}" for row in bad}


def text(values: list[int]) -> str:
    return bytes(values).decode()


floats = st.floats(width=32, allow_nan=False)
ints = st.integers(-(2**63), 2**63 - 1)


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "one": floats,
                "four": st.lists(floats, min_size=4, max_size=4),
                "id": ints,
                "any": st.lists(ints, max_size=5),
                "some": st.lists(floats, max_size=5),
                "name": st.text(max_size=8),
                "blob": st.binary(max_size=300),
            }
        ),
        min_size=1,
        max_size=6,
    )
)
@settings(max_examples=60)
def test_what_is_written_is_read_to_the_bit(rows: list[dict[str, Any]]) -> None:
    schema = {
        "one": "float32",
        "four": Feature("float32", (2, 2)),
        "id": "int64",
        "any": Feature("int64", None),
        "some": Feature("float64", None),
        "name": "str",
        "blob": Feature("bytes"),
    }
    records = [example_bytes({**row, "any": np.array(row["any"], np.int64)}) for row in rows]
    columns, bad = parse(records, schema)
    assert not bad
    assert columns["one"] == [row["one"] for row in rows]
    assert [[*square[0], *square[1]] for square in columns["four"]] == [row["four"] for row in rows]
    assert columns["id"] == [row["id"] for row in rows]
    assert columns["any"] == [row["any"] for row in rows]
    assert columns["some"] == [row["some"] for row in rows]
    assert [text(name) for name in columns["name"]] == [row["name"] for row in rows]
    assert [bytes(blob) for blob in columns["blob"]] == [row["blob"] for row in rows]


@given(st.data())
@settings(max_examples=150)
def test_no_bytes_are_read_that_are_not_there_and_nothing_is_raised(data: st.DataObject) -> None:
    whole = example_bytes({"x": [1.0, 2.0], "ids": [1, 2, 3], "name": "abc"})
    edits = st.lists(st.tuples(st.integers(0, len(whole) - 1), st.integers(0, 255)), min_size=1, max_size=4)
    broken = bytearray(whole)
    for at, byte in data.draw(edits):
        broken[at] = byte
    cut = bytes(broken[: data.draw(st.integers(0, len(broken)))])
    schema = {"x": Feature("float32", (2,)), "ids": Feature("int64", None), "name": "str"}
    columns, bad = parse([whole, cut, whole], schema)
    assert 0 not in bad
    assert 2 not in bad, "the record behind a broken one is whole"
    for row in (0, 2):
        assert columns["x"][row] == [1.0, 2.0]
        assert columns["ids"][row] == [1, 2, 3]
        assert text(columns["name"][row]) == "abc"


def field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2, len(content)]) + content


def entry(name: str, feature: bytes) -> bytes:
    return field(1, field(1, name.encode()) + field(2, feature))


def test_numbers_that_old_writers_did_not_pack_are_read() -> None:
    unpacked = b"".join(bytes([13]) + struct.pack("<f", value) for value in (1.5, -2.0))
    varints = bytes([8, 3, 8, 0xAC, 2])
    record = field(1, entry("x", field(2, unpacked)) + entry("ids", field(3, varints)))
    schema = {"x": Feature("float32", (2,)), "ids": Feature("int64", None)}
    assert parse([record], schema) == ({"x": [[1.5, -2.0]], "ids": [[3, 300]]}, {})


def test_fields_nobody_knows_are_passed_over_and_of_two_with_one_name_the_last_counts() -> None:
    future = bytes([0x78, 1]) + bytes([0x79]) + bytes(8) + bytes([0x7D]) + bytes(4) + field(15, b"new")
    first, second = (entry("id", field(3, field(1, bytes([number])))) for number in (1, 2))
    record = future + field(1, first) + field(1, future + second)
    assert parse([record], {"id": "int64"}) == ({"id": [2]}, {})


def test_a_feature_of_two_lists_is_no_example() -> None:
    record = field(1, entry("id", field(3, b"") + field(2, b"")))
    _, bad = parse([record], {"id": "int64"})
    assert bad == {0: "id: its list of values cannot be read to its end"}


def test_what_a_record_lacks_or_holds_otherwise_is_named() -> None:
    rows: list[dict[str, Any]] = [
        {"x": [1.0, 2.0], "n": 1, "s": "a"},
        {"n": 1, "s": "a"},
        {"x": [1.0, 2.0, 3.0], "n": 1, "s": "a"},
        {"x": [1, 2], "n": 1, "s": "a"},
        {"x": [1.0, 2.0], "n": 300, "s": "a"},
        {"x": [1.0, 2.0], "n": 1, "s": b"\xff"},
        {"x": [1.0, 2.0], "n": "1", "s": "a"},
    ]
    schema = {"x": Feature("float32", (2,)), "n": "int8", "s": "str"}
    columns, bad = parse([example_bytes(row) for row in rows], schema)
    assert bad == {
        1: "x: the record has no feature 'x', and the schema no default for it. It has 'n' (a int64 list of 1 value), "
        "'s' (a bytes list of 1 value)",
        2: "x: the record holds a float list of 3 values, the schema says a float list of 2 values",
        3: "x: the record holds a int64 list of 2 values, the schema says a float list of 2 values",
        4: "n: a value does not fit into the schema's int8",
        5: "s: it is no text in UTF-8; read it as bytes",
        6: "n: the record holds a bytes list of 1 value, the schema says a int64 list of 1 value",
    }
    assert columns["x"][0] == [1.0, 2.0]


def test_defaults_stand_for_what_is_missing() -> None:
    schema = {
        "x": Feature("float32", (2,), default=7.0),
        "n": Feature("bool", default=True),
        "ids": Feature("int64", None, default=[4, 5]),
        "none": Feature("int64", None),
        "s": Feature("str", default="?"),
        "raw": Feature("int16", (2,), default=[1, 2], raw=True),
        "more": Feature("uint8", None, default=3, raw=True),
    }
    full = {"x": [1.0, 2.0], "n": 0, "ids": [9], "none": [1], "s": "a", "raw": b"\5\0\6\0", "more": b"\1\2\3"}
    columns, bad = parse([example_bytes({}), example_bytes(full)], schema)
    assert not bad
    assert columns["x"] == [[7.0, 7.0], [1.0, 2.0]]
    assert columns["n"] == [True, False]
    assert columns["ids"] == [[4, 5], [9]]
    assert columns["none"] == [[], [1]]
    assert [text(one) for one in columns["s"]] == ["?", "a"]
    assert columns["raw"] == [[1, 2], [5, 6]]
    assert columns["more"] == [[3], [1, 2, 3]]


def test_arrays_that_were_written_as_bytes_must_have_their_size() -> None:
    schema = {"image": Feature("float32", (2, 2), raw=True)}
    image = np.arange(4, dtype="<f4").reshape(2, 2)
    columns, bad = parse(
        [example_bytes({"image": image.tobytes()}), example_bytes({"image": b"123"})], schema
    )
    assert columns["image"][0] == image.tolist()
    assert bad == {1: "image: the record holds 3 bytes, the schema says the bytes of float32[2, 2]"}


def test_a_column_may_have_another_name_than_its_feature() -> None:
    assert parse([example_bytes({"feature/1": 3})], {"one": Feature("int64", key="feature/1")}) == (
        {"one": [3]},
        {},
    )


def test_text_that_is_whole_only_together_with_its_neighbour_is_not_text() -> None:
    whole = "ä".encode()
    records = [example_bytes({"s": whole[:1]}), example_bytes({"s": whole[1:]}), example_bytes({"s": "b"})]
    columns, bad = parse(records, {"s": "str"})
    assert sorted(bad) == [0, 1]
    assert text(columns["s"][2]) == "b"


def test_many_names_are_told_apart() -> None:
    row = {f"feature-{number}": number for number in range(300)}
    columns, bad = parse([example_bytes(row)] * 2, dict.fromkeys(row, "int64"))
    assert not bad
    assert columns == {name: [number, number] for name, number in row.items()}


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({}, "needs schema="),
        ({"x": "complex64"}, "'x' cannot be meant: complex64 is none of"),
        ({"x": "nonsense"}, "'nonsense' is no type"),
        ({"x": Feature("float32", (0,))}, r"shape=\(0,\) is no shape"),
        ({"x": Feature("float32", 4)}, "shape=4 is no shape"),  # type: ignore[arg-type]
        ({"x": Feature("int64", default=0.5)}, r"default=0.5 does not fit into int64"),
        ({"x": Feature("int64", (2,), default=[1, 2, 3])}, "does not fit"),
        ({"x": Feature("str", default=1)}, "not of type str"),
        ({"x": "int64", "y": Feature("int64", key="x")}, "'x' into two columns"),
    ],
)
def test_a_schema_that_cannot_be_meant_is_refused(schema: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ExampleParser(wanted_features(schema))


def test_what_an_example_holds_is_listed_for_people() -> None:
    assert list_features(example_bytes({})) == "no features at all"
    many = example_bytes({f"f{number:02}": number for number in range(22)})
    assert list_features(many).endswith("'f19' (a int64 list of 1 value) and 2 more")


@pytest.mark.parametrize("value", [{"a": 1}, object(), 1 + 2j, [1, None], np.array([2**63], np.uint64)])
def test_a_value_no_example_can_hold_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ConfigError, match="the feature 'x'"):
        example_bytes({"x": value})
