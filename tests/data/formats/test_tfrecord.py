"""Datasets of TFRecord files, from TensorFlow's own bytes to batches, and what is said of damaged ones."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorflow_wrote import GZIPPED, PLAIN

from shoal.data import Dataset, Feature, TFRecordWriter, write_tfrecord
from shoal.data.formats import tfrecord as record_files
from shoal.data.formats.example import example_bytes, frame
from shoal.errors import BadSample, ConfigError, FileDamaged, NoFiles, NoSuchColumn, TooManySkipped
from shoal.runtime import events

SCHEMA = {
    "x": Feature("float32", (4,)),
    "id": "int64",
    "many": Feature("int64", None),
    "name": Feature("str", default="nobody"),
    "raw": Feature("uint8", (2, 3), default=0, raw=True),
}
NUMBERS = {"x": Feature("float32", (2,)), "y": "int64"}


def rows(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [{"x": [number / 2, -1.0], "y": number} for number in range(first, first + count)]


def listed(data: Any) -> list[int]:
    return [int(y) for _, y in data]


@pytest.mark.parametrize("content", [PLAIN, GZIPPED])
def test_what_tensorflow_wrote_is_read(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "f.tfrecord").write_bytes(content)
    samples = list(Dataset.from_tfrecord(tmp_path / "f.tfrecord", SCHEMA))
    assert [sample["x"].tolist() for sample in samples] == [
        [0.5, -1.25, float(np.float32(3e38)), float(np.float32(1e-45))],
        [0.0, 1.0, 2.0, float("inf")],
        [1.0, 1.0, 1.0, 1.0],
    ]
    assert [int(sample["id"]) for sample in samples] == [-1, 0, 7]
    assert [sample["many"].tolist() for sample in samples] == [[1, 300, -(2**63), 2**63 - 1], [], []]
    assert [sample["name"] for sample in samples] == ["größe", "", "nobody"]
    assert [sample["raw"].tolist() for sample in samples] == [
        [[0, 1, 2], [3, 4, 5]],
        [[255] * 3] * 2,
        [[0] * 3] * 2,
    ]
    assert samples[0]["x"].dtype == torch.float32


@pytest.mark.parametrize("content", [PLAIN, GZIPPED])
def test_batches_are_columns_with_lists_padded(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "f.tfrecord").write_bytes(content)
    [(inputs, label)] = Dataset.from_tfrecord(tmp_path / "f.tfrecord", SCHEMA, label="id").batch(3)
    assert label.tolist() == [-1, 0, 7]
    assert inputs["x"].shape == (3, 4)
    assert inputs["many"].tolist() == [[1, 300, -(2**63), 2**63 - 1], [-1] * 4, [-1] * 4]
    assert list(inputs["name"]) == ["größe", "", "nobody"]
    assert inputs["raw"].shape == (3, 2, 3)


def test_several_files_are_one_dataset_by_index_whatever_the_stretches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_files.scan_file, "__kwdefaults__", {"stretch_bytes": 300})
    for number in range(3):
        write_tfrecord(tmp_path / f"part-{number}.tfrecord", rows(40, first=40 * number))
    (tmp_path / "empty.tfrecord").touch()
    data = Dataset.from_tfrecord(tmp_path, NUMBERS, label="y")
    assert len(data) == 120
    assert len(data._source.table.blocks) > 9  # type: ignore[union-attr]
    order = [119, 0, 40, 39, 80, 79, 5]
    assert [int(data[index][1]) for index in order] == order
    assert sorted(listed(data.shuffle(seed=3))) == list(range(120))
    inputs, labels = next(iter(data.shuffle(seed=3).batch(50)))
    assert inputs["x"][:, 0].tolist() == [label / 2 for label in labels.tolist()]


def test_a_wrong_checksum_is_told_with_file_record_and_byte_and_can_be_skipped(tmp_path: Path) -> None:
    path = tmp_path / "f.tfrecord"
    write_tfrecord(path, rows(10))
    data = bytearray(path.read_bytes())
    size = len(data) // 10
    data[4 * size + 30] ^= 1
    path.write_bytes(data)
    dataset = Dataset.from_tfrecord(path, NUMBERS, label="y")
    assert int(dataset[3][1]) == 3, "the others are not held up by it"
    with pytest.raises(BadSample) as found:
        list(dataset.batch(10))
    assert str(found.value).startswith(
        f"{path}, row 5, byte {4 * size}: its data does not match its checksum: 0x"
    )
    assert "This is sample 4 of the dataset." in str(found.value)
    assert (found.value.row, found.value.offset, found.value.index) == (5, 4 * size, 4)
    skipping = Dataset.from_tfrecord(path, NUMBERS, label="y", on_error="skip", max_skips=1)
    assert [n for _, y in skipping.batch(5) for n in y.tolist()] == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    with pytest.raises(TooManySkipped, match="max_skips=0"):
        list(Dataset.from_tfrecord(path, NUMBERS, on_error="skip", max_skips=0).batch(5))


def test_a_file_that_is_cut_short_is_refused_or_its_end_skipped(tmp_path: Path) -> None:
    path = tmp_path / "f.tfrecord"
    write_tfrecord(path, rows(10))
    whole = path.read_bytes()
    size = len(whole) // 10
    path.write_bytes(whole[:-5])
    with pytest.raises(FileDamaged) as found:
        Dataset.from_tfrecord(path, NUMBERS)
    assert str(found.value).startswith(
        f"the file {path} is damaged: it is cut short: record 10 begins at byte {9 * size} and has {size} bytes, and the file "
        f"ends at byte {10 * size - 5}. Nothing of that part was used; write or copy the file again, or leave it out."
    )
    skipping = Dataset.from_tfrecord(path, NUMBERS, label="y", on_error="skip")
    assert len(skipping) == 10, "the damaged end is a sample that cannot be read"
    batches = skipping.batch(5)
    assert [n for _, y in batches for n in y.tolist()] == list(range(9))
    assert [skipped.index for skipped in batches.skipped] == [9]


def test_a_damaged_length_is_refused_when_the_file_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "f.tfrecord"
    write_tfrecord(path, rows(3))
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    with pytest.raises(FileDamaged, match="the length of record 1, at byte 0, does not match its checksum"):
        Dataset.from_tfrecord(path, NUMBERS)


def test_a_record_that_is_not_as_declared_is_told_with_its_column(tmp_path: Path) -> None:
    path = tmp_path / "f.tfrecord"
    write_tfrecord(path, [*rows(2), {"x": [1.0], "y": 2}, {"y": 3}])
    data = Dataset.from_tfrecord(path, NUMBERS)
    with pytest.raises(
        BadSample, match=r"row 3, byte .*, column 'x': the record holds a float list of 1 value"
    ):
        data[2]
    with pytest.raises(
        BadSample, match=r"row 4, .* no feature 'x', and the schema no default for it. It has 'y'"
    ):
        data[3]
    path.write_bytes(frame(example_bytes({"x": [1.0, 2.0], "y": 1})) + frame(b"\xff\xff\xff"))
    with pytest.raises(BadSample, match=r"row 2, byte \d+: its data is no tf.train.Example"):
        Dataset.from_tfrecord(path, NUMBERS)[1]


def test_compressed_files_are_a_stream_and_say_so(tmp_path: Path) -> None:
    write_tfrecord(tmp_path / "a.tfrecord.gz", rows(30))
    write_tfrecord(tmp_path / "b.tfrecord", rows(30, first=30))
    events.emitted.clear()
    data = Dataset.from_tfrecord(tmp_path, NUMBERS, label="y")
    assert "a stream" in repr(data)
    [(kind, facts)] = events.emitted
    assert kind == "read as a stream"
    assert facts["files"] == [str(tmp_path / "a.tfrecord.gz")]
    assert "read again up to its position" in facts["consequence"]
    assert [n for _, y in data.batch(7) for n in y.tolist()] == list(range(60))
    batches = data.batch(8)
    resumed = [
        n for part in batches.slices(epoch=0, start=16, rank=1, num_workers=2) for n in part.batch[1].tolist()
    ]
    assert resumed[:8] == [20, 21, 22, 23, 28, 29, 30, 31]
    with pytest.raises(ConfigError, match="split needs random access, and this is a stream"):
        data.split(0.5, 0.5)


def test_damage_in_a_compressed_file_is_told(tmp_path: Path) -> None:
    path = tmp_path / "f.tfrecord.gz"
    whole = b"".join(frame(example_bytes(row)) for row in rows(10))
    size = len(whole) // 10
    wrong = bytearray(whole)
    wrong[2 * size + 20] ^= 1
    path.write_bytes(gzip.compress(wrong))
    with pytest.raises(BadSample, match=f"row 3, byte {2 * size}: its data does not match its checksum"):
        list(Dataset.from_tfrecord(path, NUMBERS))
    batches = Dataset.from_tfrecord(path, NUMBERS, label="y", on_error="skip").batch(4)
    assert [n for _, y in batches for n in y.tolist()] == [0, 1, 3, 4, 5, 6, 7, 8, 9]
    assert [(one.index, one.error.row) for one in batches.skipped] == [(2, 3)]
    path.write_bytes(gzip.compress(whole[:-3]))
    with pytest.raises(FileDamaged, match=f"record 10 begins at byte {9 * size} of what is unpacked"):
        list(Dataset.from_tfrecord(path, NUMBERS))
    path.write_bytes(gzip.compress(whole)[:-20])
    with pytest.raises(FileDamaged, match="it cannot be unpacked to its end"):
        list(Dataset.from_tfrecord(path, NUMBERS))
    path.write_bytes(gzip.compress(b"a" * 100))
    with pytest.raises(FileDamaged, match="the length of record 1, at byte 0 of what is unpacked"):
        list(Dataset.from_tfrecord(path, NUMBERS))


def test_names_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NoFiles):
        Dataset.from_tfrecord(tmp_path / "*.tfrecord", NUMBERS)
    for name in ("f.tfrecord", "f.tfrecord.gz"):
        write_tfrecord(tmp_path / name, rows(3))
        with pytest.raises(NoSuchColumn, match=r"no column 'z', which label= asks for\. It has x, y"):
            Dataset.from_tfrecord(tmp_path / name, NUMBERS, label="z")


def test_another_schema_is_other_data(tmp_path: Path) -> None:
    path = tmp_path / "f.tfrecord"
    write_tfrecord(path, rows(3))
    one, other = (Dataset.from_tfrecord(path, schema) for schema in (NUMBERS, {**NUMBERS, "y": "int32"}))
    assert one.batch(2).describe() != other.batch(2).describe()
    assert one._source.table.identity != other._source.table.identity  # type: ignore[union-attr]


def test_equal_rows_make_the_bytes_that_tensorflow_makes(tmp_path: Path) -> None:
    with TFRecordWriter(tmp_path / "f.tfrecord") as out:
        out.write(
            {
                "x": torch.tensor([0.5, -1.25, 3e38, 1e-45]),
                "id": np.int64(-1),
                "many": [1, 300, -(2**63), 2**63 - 1],
                "name": "größe",
                "raw": bytes(range(6)),
            }
        )
        out.write(
            {
                "x": [0.0, 1.0, 2.0, float("inf")],
                "id": 0,
                "many": np.zeros(0, np.int64),
                "name": "",
                "raw": b"\xff" * 6,
            }
        )
        out.write({"x": np.ones((2, 2)), "id": [7], "extra": 9.0})
        assert not (tmp_path / "f.tfrecord").exists(), "it has its name when it is whole"
    assert (tmp_path / "f.tfrecord").read_bytes() == PLAIN


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> Any:
        yield {"x": 1.0}
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        write_tfrecord(tmp_path / "f.tfrecord", broken())
    with pytest.raises(
        ConfigError, match=r"record 1 for .* is a tuple, not a dict of features. .* label='y'"
    ):
        write_tfrecord(tmp_path / "f.tfrecord", [({"x": 1.0}, 1)])
    with pytest.raises(ConfigError, match="cannot be written"):
        write_tfrecord(tmp_path / "no such" / "f.tfrecord", [])
    with pytest.raises(ConfigError, match="compression is None, 'gzip' or 'auto'"):
        write_tfrecord(tmp_path / "f.tfrecord", [], compression="zip")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not open"):
        TFRecordWriter(tmp_path / "f.tfrecord").write({})
    assert list(tmp_path.iterdir()) == []


def test_a_dataset_goes_out_and_comes_back(tmp_path: Path) -> None:
    data = Dataset.from_arrays(({"x": torch.rand(20, 2)}, torch.arange(20)))
    for url in (str(tmp_path / "f.tfrecord"), "memory://written/f.tfrecord"):
        assert write_tfrecord(url, data, label="y") == 20
        back = Dataset.from_tfrecord(url, NUMBERS, label="y")
        for (inputs, label), (other, other_label) in zip(data, back, strict=True):
            assert torch.equal(inputs["x"], other["x"])
            assert label == other_label
    written = (tmp_path / "f.tfrecord").read_bytes()
    assert write_tfrecord(tmp_path / "g", data, label="y", compression="gzip") == 20
    assert gzip.decompress((tmp_path / "g").read_bytes()) == written


def test_lists_without_a_value_come_back(tmp_path: Path) -> None:
    path = tmp_path / "lists.tfrecord"
    write_tfrecord(path, [{"ids": list(range(number % 3))} for number in range(6)])
    data = Dataset.from_tfrecord(path, {"ids": Feature("int64", None)})
    assert [sample["ids"].tolist() for sample in data] == [list(range(number % 3)) for number in range(6)]
