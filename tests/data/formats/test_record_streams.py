"""Streams of records: the plan of segments, and a real Flight server."""

from __future__ import annotations

import itertools
import json
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.flight
import pytest

from flight_server import FlightProcess, add_endpoint
from shoal import Dataset
from shoal.data.formats import flight_client
from shoal.data.formats.kafka import KafkaLog
from shoal.data.formats.stream import GrowingStreamTable, RecordSegment, SegmentPlan, Wish, next_round
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


def test_a_plan_that_has_grown_since_the_checkpoint_is_kept(tmp_path: Path) -> None:
    log, file = ListLog(4, 4), tmp_path / "plan"
    ahead = plan_of(log, file)
    ahead.extend_to(8)
    saved = ahead.export_state(8)
    assert saved["rounds"] == []
    log.now = [5, 4, 2]  # a partition more, too
    ahead.extend_to(11)
    written = file.read_bytes()
    log.now = [7, 6, 2]
    replacement = plan_of(log, file)
    replacement.import_state(saved)
    assert file.read_bytes() == written
    assert replacement.segments == ahead.segments
    replacement.import_state({**saved, "begins": [4, 3]})  # another one that stands at the same position
    assert replacement.begins == [4, 3]


def test_a_checkpoint_with_the_same_head_is_noticed_by_all_and_never_seen_half(tmp_path: Path) -> None:
    log, file = ListLog(4, 40), tmp_path / "plan"
    one, other = plan_of(log, file, most=1000), plan_of(log, file, most=1000)
    one.extend_to(20)
    one.agree_on_types("one")
    other.extend_to(20)
    saved = {"begins": [0, 0], "ends": None, "base": 0, "rounds": [[1, 0, 4], [0, 0, 4]], "types": "two"}
    one.import_state(saved)
    taken_up = file.read_bytes()
    file.write_bytes(taken_up[:-9])  # of a worker that died within it
    late = plan_of(log, file, most=1000)
    assert (late.types, late.segments) == ("one", other.segments)
    late.import_state(saved)
    assert file.read_bytes() == taken_up
    other.extend_to(24)
    assert (other.types, other.segments[:2]) == ("two", [RecordSegment(1, 0, 4), RecordSegment(0, 0, 4)])


def test_a_stream_without_partitions_at_first_is_planned_once(tmp_path: Path) -> None:
    log = ListLog()
    first = plan_of(log, tmp_path / "plan")
    log.now = [5]
    first.extend_to(5)
    assert plan_of(log, tmp_path / "plan").segments == first.segments == [(0, 0, 4), (0, 4, 5)]
    (tmp_path / "half").write_bytes(b'{"place": "list://", "beg')
    assert plan_of(log, tmp_path / "half").begins == [0]


def test_a_plan_of_another_stream_is_refused(tmp_path: Path) -> None:
    log, other = ListLog(4), ListLog(4)
    plan_of(log, tmp_path / "plan")
    other.place = "list://other"
    with pytest.raises(ConfigError, match=r"opens list://other .* opens the same streams in the same order"):
        plan_of(other, tmp_path / "plan")
    with pytest.raises(
        ConfigError, match=r"opens list:// \(until now\) where .* list:// \(as records come\)"
    ):
        plan_of(log, tmp_path / "plan", is_whole=True)


class UnsteadyConsumer:
    """A consumer of the topic "t", one partition with 100 records, that fails to say its limits every other time."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._at: int | None = None
        self._fails = itertools.cycle([True, False])

    def assign(self, places: Sequence[tuple[str, int, int]]) -> None:
        self._at = places[0][2]

    def consume(self, most: int, timeout_s: float) -> list[Any]:
        return [self.poll(timeout_s) for _ in range(most)]

    def poll(self, timeout_s: float) -> Any:
        if self._at is None:
            return None
        offset, self._at = self._at, self._at + 1
        return SimpleNamespace(error=lambda: None, offset=lambda: offset)

    def list_topics(self, topic: str, timeout: float) -> Any:
        return SimpleNamespace(topics={topic: SimpleNamespace(error=None, partitions={0: None})})

    def get_watermark_offsets(self, place: Any, timeout: float) -> tuple[int, int]:
        if next(self._fails):
            raise ConnectionError(SimpleNamespace(str=lambda: "timed out"))
        return 0, 100


def test_a_question_to_kafka_that_fails_takes_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    client = SimpleNamespace(
        Consumer=UnsteadyConsumer,
        KafkaException=ConnectionError,
        KafkaError=SimpleNamespace(UNKNOWN_TOPIC_OR_PART=3),
        TopicPartition=lambda *place: place,
    )
    monkeypatch.setitem(sys.modules, "confluent_kafka", client)
    log = KafkaLog("kafka://host:9092/t", Wish("json", (), None, None, None, {}, 5.0))
    for begin in (0, 5):
        assert [record.offset() for record in log._fetch(RecordSegment(0, begin, begin + 5))] == list(
            range(begin, begin + 5)
        )
        assert log.ends([]) == [100]


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
    some = Dataset.from_stream(flight.url, label="y", records=25, timeout_s=float("inf"))
    doubled = some.map(lambda sample: (2 * sample[0]["x"], sample[1]), workers=1).batch(10)
    assert [batch[0].tolist() for batch in doubled][2] == list(range(40, 50, 2))  # read in a fork
    endless = Dataset.from_stream(flight.url, label="y", timeout_s=3).batch(8)
    read = endless.iterator()
    assert numbers(({"x": x}, 0) for _ in range(3) for x in read.next()[0]["x"]) == list(range(24))
    position = json.loads(json.dumps(read.position))
    with pytest.raises(StreamEnded, match="has given 30 records and none more"):
        list(itertools.islice(read, 2))
    add_endpoint(flight.folder, 2, range(30, 40))
    again = Dataset.from_stream(flight.url, label="y").batch(8).iterator(position)
    assert [again.next()[0]["x"].tolist() for _ in range(2)] == [list(range(24, 32)), list(range(32, 40))]
    add_endpoint(flight.folder, 1, range(10, 15))  # another one in its place
    shorter = Dataset.from_stream(flight.url, label="y", timeout_s=5).batch(8).iterator(position)
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


def test_a_server_that_accepts_and_never_answers_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"grpc://127.0.0.1:{server.getsockname()[1]}"
        ticket = pyarrow.flight.Ticket(b"0").serialize()
        for ask in (flight_client.ask, flight_client.ask_apart):
            with pytest.raises(ConnectionError):
                ask("get", address, ticket, {}, 0.2)
        with pytest.raises(StreamUnreachable, match=f"the stream {address}/clicks cannot be read after"):
            Dataset.from_stream(f"{address}/clicks", timeout_s=0.2)


def test_streams_of_one_server_have_their_own_options(flight: FlightProcess) -> None:
    address = flight.url.removesuffix("/clicks")
    clicks = pyarrow.flight.FlightDescriptor.for_path("clicks").serialize()
    assert flight_client.ask("info", address, clicks, {}, 30.0).endpoints
    with pytest.raises(OSError, match="no_such_option"):
        flight_client.ask("info", address, clicks, {"no_such_option": 1}, 30.0)


def test_a_stream_without_end_is_refused_where_an_end_is_needed(flight: FlightProcess) -> None:
    endless = Dataset.from_stream(flight.url, label="y")
    with pytest.raises(ConfigError, match="shuffle needs all samples first"):
        endless.shuffle(seed=0)
    with pytest.raises(TypeError):
        len(endless)
