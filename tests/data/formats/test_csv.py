"""CSV files as a table: types, headers, the ways people write CSV."""

from __future__ import annotations

import datetime
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.dataset import Dataset
from shoal.data.files import SharedFiles
from shoal.data.formats import lines
from shoal.data.formats.text import open_csv
from shoal.errors import ConfigError, DataError


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def column(data: Dataset, name: str) -> Any:
    [batch] = list(data.batch(len(data)))
    return batch[name].tolist()


def test_types_are_found_in_the_first_rows(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.csv",
        "i,f,b,s,t,d\n1,0.5,true,x,2024-01-01 10:00:00,2024-01-02\n-2,3,false,,1970-01-01 00:00:01,1970-01-01\n",
    )
    sample = Dataset.from_csv(path)[1]
    assert [(name, getattr(value, "dtype", type(value))) for name, value in sample.items()] == [
        ("i", torch.int64),
        ("f", torch.float32),
        ("b", torch.bool),
        ("s", str),
        ("t", torch.int64),
        ("d", torch.int64),
    ]
    assert sample["s"] == ""
    assert int(sample["t"]) == 1_000_000_000


def test_schema_says_types_of_some_columns_or_all(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "a,b,c\n1,2,3\n")
    sample = Dataset.from_csv(path, schema={"a": "float64", "b": str})[0]
    assert (sample["a"].dtype, sample["b"], sample["c"].dtype) == (torch.float64, "2", torch.int64)


@pytest.mark.parametrize(
    ("said", "text", "value"),
    [
        ("float16", "0.5", 0.5),
        ("int8", "-3", -3),
        ("uint8", "200", 200),
        ("uint64", "77", 77),
        ("bool", "true", True),
        ("date", "1970-01-02", 86_400 * 10**9),
        (np.int16, "5", 5),
        (torch.float64, "0.1", 0.1),
    ],
)
def test_every_type_that_can_be_said(tmp_path: Path, said: Any, text: str, value: Any) -> None:
    path = write(tmp_path / "a.csv", f"x\n{text}\n")
    assert Dataset.from_csv(path, schema={"x": said})[0]["x"].item() == value


def test_timestamps_with_and_without_a_zone(tmp_path: Path) -> None:
    second = int(datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC).timestamp()) * 10**9
    for text in ("2024-01-01T00:00:00Z", "2024-01-01 00:00:00", "2024-01-01"):
        path = write(tmp_path / "a.csv", f"t\n{text}\n")
        for schema in (None, {"t": "timestamp"}):
            assert int(Dataset.from_csv(path, schema=schema)[0]["t"]) == second


def test_a_float_may_be_nan_and_a_missing_one_is_filled(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "x,n\n1.5,1\nnan,NA\n,3\ninf,null\n")
    batch = next(iter(Dataset.from_csv(path, fill={"x": -1, "n": 0}).batch(4)))
    assert batch["x"].isnan().tolist() == [False, True, False, False]
    assert batch["x"][2:].tolist() == [-1, float("inf")]
    assert batch["n"].tolist() == [1, 0, 3, 0]


def test_a_column_that_begins_empty_is_looked_for_further_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "BLOCK_BYTES", 1024)
    path = write(tmp_path / "a.csv", "x,y\n" + "1,\n" * 600 + "1,2.5\n" * 600)
    assert Dataset.from_csv(path, fill={"y": 0})[1199]["y"].dtype == torch.float32
    path = write(tmp_path / "b.csv", "x,y\n" + "1,\n" * 9)
    with pytest.raises(
        DataError, match=r"the column 'y' of .*b.csv is of type null, .* schema=\{'y': 'float32'\}"
    ):
        Dataset.from_csv(path)
    data = Dataset.from_csv(path, schema={"y": "int64"}, fill={"y": 7})
    assert column(data, "y") == [7] * 9


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("a,b\n1,x\n2,y\n", {}),
        ("a,b\n1,x\n2,y", {}),  # a last line without its end
        ("a,b\r\n1,x\r\n2,y\r\n", {}),
        ("\ufeffa,b\n1,x\n2,y\n", {}),
        ("\ufeffa,b\r\n\r\n1,x\r\n\r\n2,y", {}),
        ("a, b\n1,x\n2,y\n", {}),  # names are told without the spaces around them
        ("a;b\n1;x\n2;y\n", {"delimiter": ";"}),
        ("1,x\n2,y\n", {"names": ["a", "b"]}),
        ("p,q\n1,x\n2,y\n", {"names": ["a", "b"], "header": True}),
        ('"a","b"\n"1","x"\n2,"y"\n', {}),
        ("a,b\r1,x\r2,y\r", {}),
        ("c,a,b\nz,1,x\nz,2,y\n", {"columns": ["a", "b"]}),
    ],
)
def test_the_ways_people_write_csv(tmp_path: Path, text: str, options: dict[str, Any]) -> None:
    data = Dataset.from_csv(write(tmp_path / "a.csv", text), **options)
    assert (column(data, "a"), column(data, "b")) == ([1, 2], ["x", "y"])
    assert list(data[0]) == ["a", "b"]


def test_tabs_are_expected_in_tsv(tmp_path: Path) -> None:
    assert column(Dataset.from_csv(write(tmp_path / "a.tsv", "a\tb\n1\t2,5\n")), "b") == ["2,5"]


def test_columns_without_names_are_numbered(tmp_path: Path) -> None:
    assert list(Dataset.from_csv(write(tmp_path / "a.csv", "1,2\n"), header=False)[0]) == ["f0", "f1"]


def test_a_quoted_field_may_hold_everything(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'a,b\n1,"two\nlines, and ""quotes"""\n2,5" pipe\n')
    assert column(Dataset.from_csv(path), "b") == ['two\nlines, and "quotes"', '5" pipe']


def test_quotes_may_be_plain_characters(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'a,b\n1,"x\n2,y"\n')
    assert column(Dataset.from_csv(path, quote=None), "b") == ['"x', 'y"']


def test_files_may_have_their_columns_in_another_order(tmp_path: Path) -> None:
    write(tmp_path / "1.csv", "a,b\n1,x\n")
    write(tmp_path / "2.csv", "b,a\ny,2\n")
    data = Dataset.from_csv(f"{tmp_path}/*.csv")
    assert (column(data, "a"), column(data, "b")) == ([1, 2], ["x", "y"])


def test_a_table_without_rows_is_empty(tmp_path: Path) -> None:
    assert len(Dataset.from_csv(write(tmp_path / "a.csv", "a,b\n"))) == 0
    assert len(Dataset.from_csv(write(tmp_path / "a.csv", ""), names=["a"])) == 0


def test_settings_that_cannot_be_meant(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "a,b\n1,2\n")
    with pytest.raises(ConfigError, match="delimiter= takes one character, not a line end, got '::'"):
        Dataset.from_csv(path, delimiter="::")
    with pytest.raises(ConfigError, match=r"names= gives 1 names, and the header of .* has 2: a, b"):
        Dataset.from_csv(path, names=["x"], header=True)
    with pytest.raises(ConfigError, match=r"schema= says that a hold lists, which CSV cannot"):
        Dataset.from_csv(path, schema={"a": "list[int64]"})
    with pytest.raises(
        ConfigError, match=r"columns= takes a list of names, got the string 'a': write \['a'\]"
    ):
        Dataset.from_csv(path, columns="a")
    with pytest.raises(ConfigError, match="on_error= is 'raise' or 'skip', got 'ignore'"):
        Dataset.from_csv(path, on_error="ignore")  # type: ignore[arg-type]
    twice = write(tmp_path / "b.csv", "a,b,a\n1,2,3\n")
    with pytest.raises(
        ConfigError, match=r"names 'a' more than once, .* give all columns names of their own with names="
    ):
        Dataset.from_csv(twice)


def test_files_are_scanned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.csv", "a\n" + "".join(f"{row}\n" for row in range(1000)))
    first = open_csv(path)
    in_threads, called = lines.in_threads, []

    def watched(fn: Any, items: Any) -> Any:
        called.append(fn.__name__)
        return in_threads(fn, items)

    monkeypatch.setattr(lines, "in_threads", watched)
    open_csv(write(tmp_path / "b.csv", "a\n1\n"))
    assert "scan" in called, "a file that is new is scanned"
    called.clear()
    again = open_csv(path, columns=["a"])
    assert again.num_samples == first.num_samples
    assert "scan" not in called


class CountingFiles(SharedFiles):
    num_bytes = 0

    def read(self, url: str, begin: int, end: int) -> bytes:
        self.num_bytes += end - begin
        return super().read(url, begin, end)


def test_one_sample_reads_one_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.csv", "a,b\n" + "1234567,abcdefg\n" * 700_000)
    files = CountingFiles()
    monkeypatch.setattr("shoal.data.remote.located_files.SharedFiles", lambda: files)
    source = open_csv(path)
    assert len(source.table.blocks) == 3
    files.num_bytes = 0
    source.samples([650_000])
    assert files.num_bytes < 5 << 20


values = st.text(alphabet=st.sampled_from('ab,"\n\r 1'), max_size=6)


@given(
    st.lists(st.tuples(values, st.integers(-9, 9)), min_size=1, max_size=20), st.sampled_from(["\n", "\r\n"])
)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, int]], end: str
) -> None:
    import csv

    path = tmp_path_factory.mktemp("csv") / "a.csv"
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator=end, quoting=csv.QUOTE_NONNUMERIC)
        writer.writerow(["s", "i"])
        writer.writerows(rows)
    data = Dataset.from_csv(path, schema={"s": "str", "i": "int64"})
    assert [(sample["s"], int(sample["i"])) for sample in data] == rows


def test_every_row_once_in_any_order_over_many_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "BLOCK_BYTES", 2048)
    drawn = random.Random(0)
    rows = [(number, "x" * drawn.randrange(40)) for number in range(2000)]
    for name, part in (("1.csv", rows[:900]), ("2.csv", rows[900:])):
        write(tmp_path / name, "n,s\n" + "".join(f"{number},{text}\n" for number, text in part))
    data = Dataset.from_csv(tmp_path)
    seen = {}
    for batch in data.shuffle(seed=3).batch(64):
        seen |= dict(zip(batch["n"].tolist(), batch["s"].tolist(), strict=True))
    assert seen == dict(rows)
    assert np.array_equal(column(data, "n"), np.arange(2000))
