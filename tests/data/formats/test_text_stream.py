"""Compressed CSV and JSON lines: the same samples as uncompressed, in order, as a stream that says so."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from shoal.data.dataset import Dataset
from shoal.data.formats import lines
from shoal.errors import BadSample, ConfigError, FileDamaged, NoFiles, NoSuchColumn, TooManySkipped
from shoal.runtime import events

TEXT = "n,s\n" + "".join(f'{number},"s{number}\nx"\n' for number in range(1000))


def packed(path: Path, text: str) -> Path:
    data = text.encode()
    match path.suffix:
        case ".gz":
            path.write_bytes(
                gzip.compress(data[:3000]) + gzip.compress(data[3000:])
            )  # in two members, as pigz does
        case ".bz2":
            path.write_bytes(bz2.compress(data))
        case ".xz":
            path.write_bytes(lzma.compress(data))
        case ".zst":
            with pa.CompressedOutputStream(str(path), "zstd") as file:
                file.write(data)
        case _:
            path.write_bytes(data)
    return path


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "BLOCK_BYTES", 2048)
    monkeypatch.setattr("shoal.data.formats.lines._UNPACKED_BYTES", 777)


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".xz", ".zst"])
def test_the_same_samples_as_uncompressed(tmp_path: Path, ending: str) -> None:
    plain = Dataset.from_csv(packed(tmp_path / "a.csv", TEXT), label="n")
    data = Dataset.from_csv(packed(tmp_path / f"a.csv{ending}", TEXT), label="n")
    for _ in range(2):  # epochs
        read = [(inputs["s"], int(label)) for inputs, label in data]
        assert read == [(inputs["s"], int(label)) for inputs, label in plain]


def test_batches_resume_where_they_were(tmp_path: Path) -> None:
    batches = Dataset.from_csv(packed(tmp_path / "a.csv.gz", TEXT), columns=["n"]).batch(128)
    whole = [part.batch["n"].tolist() for part in batches.slices(epoch=0, start=0, rank=0, num_workers=1)]
    rest = [part.batch["n"].tolist() for part in batches.slices(epoch=0, start=256, rank=0, num_workers=1)]
    assert [number for batch in whole for number in batch] == list(range(1000))
    assert rest == whole[2:]


def test_compressed_and_plain_files_of_one_table(tmp_path: Path) -> None:
    packed(tmp_path / "1.csv.gz", "a,b\n1,x\n")
    packed(tmp_path / "2.csv", "b,a\ny,2\n")
    assert [(int(sample["a"]), sample["b"]) for sample in Dataset.from_csv(tmp_path)] == [(1, "x"), (2, "y")]


def test_json_lines(tmp_path: Path) -> None:
    text = "".join(json.dumps({"n": number, "l": [number] * (number % 3)}) + "\n" for number in range(300))
    data = Dataset.from_jsonl(packed(tmp_path / "a.jsonl.gz", text))
    assert [sample["l"].tolist() for sample in data] == [[number] * (number % 3) for number in range(300)]


def test_it_says_that_it_is_a_stream_and_refuses_what_streams_cannot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = Dataset.from_csv(packed(tmp_path / "a.csv.gz", TEXT))
    assert capsys.readouterr().err.startswith(
        f"shoal: 1 of 1 file is compressed (0.0 MB), {tmp_path}/a.csv.gz the first of them"
    )
    kind, facts = events.emitted[-1]
    assert (kind, facts["format"], facts["reason"]) == (
        "read as a stream",
        "csv",
        "1 of 1 file is compressed (0.0 MB)",
    )
    assert "a resumed epoch is read again up to its position" in facts["consequence"]
    with pytest.raises(TypeError, match="a stream has no length"):
        len(data)
    with pytest.raises(ConfigError, match="split needs random access"):
        data.split(0.5, 0.5)


def test_bad_rows_are_named_or_skipped(tmp_path: Path) -> None:
    text = "n,x\n" + "".join(f"{number},{number}\n" if number % 400 else "?,1\n" for number in range(1, 1000))
    path = packed(tmp_path / "a.csv.gz", text)
    options: dict[str, Any] = {"schema": {"n": int}}
    with pytest.raises(
        BadSample, match=r"a.csv.gz, row 400, line 401, column 'n': '\?' is no int64, .* This is sample 399"
    ):
        list(Dataset.from_csv(path, **options))
    batches = Dataset.from_csv(path, **options, on_error="skip", max_skips=2).batch(100)
    assert sum(len(batch["n"]) for batch in batches) == 997
    assert [one.error.row for one in batches.skipped] == [400, 800]
    with pytest.raises(TooManySkipped):
        list(Dataset.from_csv(path, **options, on_error="skip", max_skips=1).batch(100))


def test_a_truncated_archive_is_named(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.csv.gz", TEXT)
    path.write_bytes(path.read_bytes()[:-60])
    data = Dataset.from_csv(path)
    with pytest.raises(
        FileDamaged, match=r"a.csv.gz is damaged: it cannot be unpacked to its end \(Compressed file ended"
    ):
        list(data)
    path.write_bytes(b"no archive at all")
    with pytest.raises(FileDamaged, match=r"it cannot be unpacked to its end \(Not a gzipped file"):
        Dataset.from_csv(path)


def test_other_mistakes_are_told_as_for_plain_files(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.csv.gz", TEXT)
    with pytest.raises(NoSuchColumn, match=r"has no column 'y', which label= asks for. It has n, s\."):
        Dataset.from_csv(path, label="y")
    with pytest.raises(FileDamaged, match="it is empty: it has not even a header"):
        Dataset.from_csv(packed(tmp_path / "b.csv.gz", ""))
    with pytest.raises(FileDamaged, match="the quote that opens in line 2 is never closed"):
        list(Dataset.from_csv(packed(tmp_path / "c.csv.gz", 'a\n"x\n')))
    with pytest.raises(NoFiles):
        Dataset.from_csv(tmp_path / "none.csv.gz")
