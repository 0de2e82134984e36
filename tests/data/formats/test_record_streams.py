"""Streams of records: the plan of segments, and a real Flight server."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flight_server import FlightProcess, add_endpoint
from shoal import Dataset
from shoal.data.formats.stream import GrowingStreamTable, RecordSegment, SegmentPlan, next_round
from shoal.data.formats.table import Column, DecodedRows
from shoal.data.formats.table_source import TableSource
from shoal.data.order import ENDLESS
from shoal.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    NoRecord,
    StreamEnded,
    StreamRewound,
    StreamUnreachable,
)


class ListLog:
    """Partitions that a test fills; offsets divisible by 7 hold no record."""

    place, row_bytes, segment_rows = "list://", 8, 4

    def __init__(self, *ends: int) -> None:
        self.now = list(ends)

    def begins(self, start: str | Mapping[int, int]) -> list[int]:
        return [0] * len(self.now)

    def ends(self, known: Sequence[int]) -> list[int]:
        return list(self.now)

    def open(self, first: Callable[[], RecordSegment], types: str | None) -> tuple[Column, ...]:
        first()
        return (Column("x", np.dtype(np.int64)),)

    def types(self) -> str:
        return "int64"

    def read(self, segment: RecordSegment) -> DecodedRows:
        offsets = range(segment.begin, segment.end)
        bad = {
            row: NoRecord(where="list://", reason="nothing")
            for row, offset in enumerate(offsets)
            if offset % 7 == 0
        }
        values = np.array([1000 * segment.partition + offset for offset in offsets])
        return DecodedRows(len(values), {"x": values}, bad)

    def describe(self) -> dict[str, Any]:
        return {"format": "list"}


def plan_of(log: ListLog, file: Path, **options: Any) -> SegmentPlan:
    return SegmentPlan(
        log, "earliest", **{"is_whole": False, "most": ENDLESS, "timeout_s": 0.2, "file": file, **options}
    )


def test_segments_are_dealt_round_the_partitions_and_a_silent_one_holds_nobody_up() -> None:
    assert next_round([0, 5, 2], [9, 5, 4], 4, 100) == [RecordSegment(0, 0, 4), RecordSegment(2, 2, 4)]
    assert next_round([4, 5, 4], [9, 5, 4], 4, 3) == [RecordSegment(0, 4, 7)]


def test_workers_go_by_one_plan_whoever_needs_more_of_it_first(tmp_path: Path) -> None:
    log = ListLog(6, 2)
    one, other = plan_of(log, tmp_path / "plan"), plan_of(log, tmp_path / "plan")
    one.extend_to(3)
    log.now = [6, 9]
    other.extend_to(10)
    one.extend_to(10)
    assert one.segments == other.segments
    assert one.segments[:3] == [RecordSegment(0, 0, 4), RecordSegment(1, 0, 2), RecordSegment(0, 4, 6)]
    log.now = [6, 10, 5]  # a partition more
    one.extend_to(20)
    assert RecordSegment(2, 0, 4) in one.segments
    with pytest.raises(
        StreamEnded,
        match=r"has given 21 records and none more for 0.2 s \(offsets by partition: 0: 6, 1: 10, 2: 5\)",
    ):
        one.extend_to(22)
    log.now = [6, 3, 5]
    with pytest.raises(StreamRewound, match="at offset 10 of partition 1, and it ends at offset 3 now"):
        other.extend_to(22)


def test_half_a_line_of_a_worker_that_died_is_cut_off(tmp_path: Path) -> None:
    log = ListLog(8)
    plan_of(log, tmp_path / "plan").extend_to(4)
    with (tmp_path / "plan").open("ab") as file:
        file.write(b"[[0, 4")
    after = plan_of(log, tmp_path / "plan")
    after.extend_to(8)
    assert after.segments == [RecordSegment(0, 0, 4), RecordSegment(0, 4, 8)]
    assert [json.loads(line) for line in (tmp_path / "plan").read_text().splitlines()][1:] == [
        [[0, 0, 4]],
        [[0, 4, 8]],
    ]


def test_a_checkpoint_takes_the_plan_to_another_run_directory(tmp_path: Path) -> None:
    log = ListLog(6, 6)
    before = plan_of(log, tmp_path / "before")
    before.agree_on_types("int64")
    before.extend_to(12)
    saved = json.loads(json.dumps(before.export_state(9)))
    assert saved == {
        "begins": [4, 4],
        "ends": None,
        "base": 8,
        "rounds": [[0, 4, 6], [1, 4, 6]],
        "types": "int64",
    }
    log.now = [20, 30]
    after, beside = plan_of(log, tmp_path / "after"), plan_of(log, tmp_path / "after")
    beside.extend_to(5)
    after.import_state(saved)
    beside.import_state(saved)
    after.extend_to(14)
    beside.extend_to(14)
    assert after.segments == beside.segments
    assert after.segments[:3] == [RecordSegment(0, 4, 6), RecordSegment(1, 4, 6), RecordSegment(0, 6, 10)]
    whole = plan_of(log, tmp_path / "whole", is_whole=True)
    with pytest.raises(CheckpointError, match=r"until='now' is \[0, 0\] to \[20, 30\] today"):
        whole.import_state({**saved, "ends": [6, 6]})


def test_offsets_without_a_record_are_left_out_whatever_on_error_says(tmp_path: Path) -> None:
    log = ListLog(10)
    source = TableSource(GrowingStreamTable(log, plan_of(log, tmp_path / "plan", most=10)))
    assert [int(sample["x"]) for sample in Dataset(source)] == [1, 2, 3, 4, 5, 6, 8, 9]
    batches = Dataset(source).batch(5)
    assert [batch["x"].tolist() for batch in batches] == [[1, 2, 3, 4], [5, 6, 8, 9]]
    assert [skipped.index for skipped in batches.skipped] == [0, 7]


@pytest.fixture(scope="module")
def flight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlightProcess]:
    folder = tmp_path_factory.mktemp("flight")
    add_endpoint(folder, 0, range(10))
    add_endpoint(folder, 1, range(10, 30))
    server = FlightProcess(folder)
    yield server
    server.close()


def numbers(samples: Any) -> list[int]:
    return [int(x["x"]) for x, _ in samples]


def test_a_flight_is_a_table_now_and_goes_on_behind_a_position(flight: FlightProcess) -> None:
    now = Dataset.from_stream(flight.url, label="y", until="now")
    assert len(now) == 30
    assert sorted(numbers(now.shuffle(seed=0))) == list(range(30))
    some = Dataset.from_stream(flight.url, label="y", records=25)
    doubled = some.map(lambda sample: (2 * sample[0]["x"], sample[1]), workers=1).batch(10)
    assert [batch[0].tolist() for batch in doubled][2] == list(range(40, 50, 2))  # read in a fork
    endless = Dataset.from_stream(flight.url, label="y", timeout_s=0.5).batch(8)
    read = endless.iterator()
    assert numbers(({"x": x}, 0) for _ in range(3) for x in read.next()[0]["x"]) == list(range(24))
    position = json.loads(json.dumps(read.position))
    with pytest.raises(StreamEnded, match="has given 30 records and none more"):
        list(itertools.islice(read, 2))
    add_endpoint(flight.folder, 2, range(30, 40))
    again = Dataset.from_stream(flight.url, label="y").batch(8).iterator(position)
    assert [again.next()[0]["x"].tolist() for _ in range(2)] == [list(range(24, 32)), list(range(32, 40))]
    add_endpoint(flight.folder, 1, range(10, 15))  # another one in its place
    shorter = Dataset.from_stream(flight.url, label="y", timeout_s=1).batch(8).iterator(position)
    with pytest.raises(StreamRewound, match="at offset 20 of partition 1, and it ends at offset 5 now"):
        shorter.next()
    with pytest.raises(DataError, match="holds the offsets from sample 10 on alone"):
        Dataset.from_stream(flight.url, label="y").batch(8).iterator({**position, "next_index": 0}).next()


@pytest.mark.parametrize(
    ("url", "options", "words"),
    [
        ("amqp://host/queue", {}, "from_stream takes the address of a Kafka topic"),
        ("grpc://localhost/clicks", {}, "an Arrow Flight is 'grpc://host:8815/path'"),
        ("grpc://localhost:1/clicks", {"start": "middle"}, r"start=\) takes 'earliest', 'latest' or a dict"),
        ("grpc://localhost:1/clicks", {"until": "now", "records": 5}, "until='now' or records=, not both"),
        ("grpc://localhost:1/clicks", {"until": "noon"}, r"until=\) takes 'now'"),
        ("kafka://localhost:9092/a/b", {}, "a Kafka topic is 'kafka://host:9092/topic'"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_asked(
    url: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        Dataset.from_stream(url, **options)


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(
        StreamUnreachable, match=r"grpc://127.0.0.1:1/clicks cannot be read after .*Connection refused"
    ):
        Dataset.from_stream("grpc://127.0.0.1:1/clicks", timeout_s=0.1)


def test_a_stream_without_end_is_refused_where_an_end_is_needed(flight: FlightProcess) -> None:
    endless = Dataset.from_stream(flight.url, label="y")
    with pytest.raises(ConfigError, match="shuffle needs all samples first"):
        endless.shuffle(seed=0)
    with pytest.raises(TypeError):
        len(endless)
