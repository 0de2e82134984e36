"""The frames of TFRecord files: found by one scan, read by stretches, and every kind of damage with its place."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorflow_wrote import PLAIN

from shoal.data.files import FileInfo, SharedFiles
from shoal.data.formats import tfrecord as record_files
from shoal.data.formats.example import frame, masked_crc
from shoal.data.formats.tfrecord import RecordSpan, Scan, Tail, read_stretch, scan_file
from shoal.errors import FileDamaged, FileLost


class InMemory:
    """Files without a disk, which count what is read of them."""

    def __init__(self, data: bytes) -> None:
        self.data, self.num_read = data, 0

    def read(self, url: str, begin: int, end: int) -> bytes:
        self.num_read += end - begin
        return self.data[begin:end]


INFO = FileInfo("f.tfrecord", 0, "")


def scanned(data: bytes, stretch_bytes: int = 1 << 22) -> tuple[InMemory, Scan]:
    """What a scan finds, as it comes back from JSON."""
    files, info = InMemory(data), INFO._replace(num_bytes=len(data))
    scan = scan_file(files, info, stretch_bytes=stretch_bytes)  # type: ignore[arg-type]  # reads and no more
    stretches, tail = json.loads(json.dumps(scan))
    return files, Scan([RecordSpan(*stretch) for stretch in stretches], tail and Tail(*tail))


def contents(files: InMemory, file: Scan) -> list[bytes]:
    found = []
    for stretch in file.stretches:
        records = read_stretch(files, INFO, stretch)  # type: ignore[arg-type]
        assert not records.wrong.any()
        found += [records.data[a:b].tobytes() for a, b in zip(records.begins, records.ends, strict=True)]
    return found


@given(
    records=st.lists(st.binary(max_size=1200) | st.binary(min_size=1000, max_size=3000), max_size=20),
    stretch_bytes=st.integers(1, 4000),
    scan_bytes=st.integers(16, 3000),
)
@settings(max_examples=80)
def test_every_record_is_found_once_and_in_order(
    records: list[bytes], stretch_bytes: int, scan_bytes: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_files, "_SCAN_BYTES", scan_bytes)
        files, file = scanned(b"".join(map(frame, records)), stretch_bytes)
    assert file.tail is None
    assert contents(files, file) == records
    first, at = 0, 0
    for stretch in file.stretches:
        assert (stretch.first_record, stretch.begin) == (first, at)
        assert stretch.num_records >= 1
        first, at = first + stretch.num_records, stretch.end
        assert stretch.end - stretch.begin <= stretch_bytes + 3016


@given(st.binary(max_size=2000))
def test_short_and_long_data_have_one_checksum(data: bytes) -> None:
    _, file = scanned(frame(data))
    assert contents(InMemory(frame(data)), file) == [data]


def test_the_frames_of_tensorflow_are_ours() -> None:
    files, file = scanned(PLAIN)
    assert b"".join(map(frame, contents(files, file))) == PLAIN
    assert masked_crc(b"\0" * 8) == struct.unpack("<I", frame(b"")[8:12])[0]


def test_of_long_records_only_the_heads_are_read() -> None:
    data = b"".join(frame(bytes(1 << 20)) for _ in range(32))
    files, file = scanned(data)
    assert sum(stretch.num_records for stretch in file.stretches) == 32
    assert files.num_read < len(data) / 2


@pytest.mark.parametrize("missing", [1, 3, 4, 10, 15, 19, 20, 25])
def test_a_file_that_is_cut_short_is_told_with_record_and_byte(missing: int) -> None:
    data = frame(b"first") + frame(b"the second")
    _, file = scanned(data[:-missing])
    assert file.tail is not None
    assert (file.tail.record, file.tail.begin) == (1, 21)
    needs = " and has 26 bytes" if missing < 15 else ""
    assert file.tail.problem == (
        f"it is cut short: record 2 begins at byte 21{needs}, and the file ends at byte {len(data) - missing}"
    )
    assert [stretch.num_records for stretch in file.stretches] == [1]


@pytest.mark.parametrize("at", range(12))
def test_a_damaged_length_is_told_with_record_and_byte(at: int) -> None:
    data = bytearray(frame(b"first") + frame(b"second") + frame(b"third"))
    data[21 + at] ^= 0x10
    _, file = scanned(bytes(data))
    assert file.tail is not None
    assert (file.tail.record, file.tail.begin) == (1, 21)
    assert "the length of record 2, at byte 21, does not match its checksum" in file.tail.problem


def test_a_file_of_something_else_is_told() -> None:
    _, file = scanned(b"a,b,c\n1,2,3\n4,5,6\n")
    assert file.tail is not None
    assert "record 1, at byte 0, does not match its checksum (or it is no TFRecord file)" in file.tail.problem
    assert file.stretches == []


@pytest.mark.parametrize("size", [5, 5000])
def test_damaged_data_is_its_own_record_alone(size: int) -> None:
    data = bytearray(b"".join(frame(bytes([number]) * size) for number in range(3)))
    data[16 + size + 12] ^= 1
    files, file = scanned(bytes(data))
    records = read_stretch(files, INFO, file.stretches[0])  # type: ignore[arg-type]
    assert records.wrong.tolist() == [0, 1, 0]


def test_a_file_that_changed_since_the_scan_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "f.tfrecord"
    path.write_bytes(frame(b"first") + frame(b"second"))
    files = SharedFiles()
    [info] = files.expand(path)
    file = scan_file(files, info)
    path.write_bytes(frame(b"first") + frame(b"other"))
    with pytest.raises(FileLost, match="43 bytes then, 42 now"):
        read_stretch(files, info, file.stretches[0])
    other = InMemory(frame(b"first") + b"x" * 22)
    with pytest.raises(FileDamaged, match="record 2 is not where it was when the file was scanned"):
        read_stretch(other, info, file.stretches[0])  # type: ignore[arg-type]
