"""Kafka topics as logs: records by partition and offset, through confluent-kafka (librdkafka).

No consumer group and no commits: offsets are part of the plan of the stream and of checkpoints.
Each process has one consumer for records, assigned to the current segment, and one for metadata,
assigned to nothing: polling it takes no record.
"""

from __future__ import annotations

import base64
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa

from shoal.config.extras import install_command
from shoal.data.arguments import by_name
from shoal.data.formats.arrow import Fill, columns_of, decoded
from shoal.data.formats.lines import TextPlace
from shoal.data.formats.stream import RecordSegment, Wish
from shoal.data.formats.table import Column, DecodedRows
from shoal.data.formats.table_source import check_names, chosen
from shoal.data.formats.text import JsonDecoder
from shoal.errors import BadSample, ConfigError, NoRecord, StreamRewound, StreamUnreachable

_POLL_S = 0.5
_TYPES: dict[str, pa.DataType] = {
    "key": pa.binary(),
    "value": pa.binary(),
    "timestamp": pa.int64(),
    "partition": pa.int64(),
    "offset": pa.int64(),
}
_RAW = pa.schema(_TYPES)


class KafkaLog:
    """A topic."""

    segment_rows = 4096

    def __init__(self, url: str, wish: Wish) -> None:
        parts = urlsplit(url)
        self._topic = parts.path.strip("/")
        if not parts.netloc or not self._topic or "/" in self._topic or "@" in parts.netloc:
            raise ConfigError(
                f"a Kafka topic is 'kafka://host:9092/topic', or with several brokers 'kafka://a:9092,b:9092/topic', got {url!r}. "
                "User and password go into options={'sasl.username': ..., 'sasl.password': ...}."
            )
        if wish.format not in ("json", "bytes"):
            raise ConfigError(f"from_stream(format=) is 'json' or 'bytes', got {wish.format!r}")
        try:
            import confluent_kafka
        except ImportError:
            raise ConfigError(
                "from_stream reads Kafka through the package confluent-kafka, which is not installed. Nothing was read; "
                f"{install_command('kafka')}."
            ) from None
        self._kafka: Any = confluent_kafka
        self.place, self._wish, self.row_bytes = f"kafka://{parts.netloc}/{self._topic}", wish, 64
        self._settings = {
            "group.id": "shoal",  # named because a consumer must be; nothing is committed to it
            "log_level": 0,
            **wish.options,
            "bootstrap.servers": parts.netloc,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "error_cb": self._heard,
        }
        self._consumers: dict[str, Any] = {}
        self._owner, self._lock = os.getpid(), threading.Lock()
        self._next: tuple[int, int] | None = None  # partition and offset that the consumer gives next
        self._trouble = ""

    def begins(self, start: str | Mapping[int, int]) -> list[int]:
        limits = self._limits()
        if isinstance(start, str):
            return [first if start == "earliest" else end for first, end in limits]
        unknown = sorted(set(start) - set(range(len(limits))))
        if unknown:
            raise ConfigError(
                f"start= names the partitions {unknown}, and {self.place} has 0 to {len(limits) - 1}. Nothing was read."
            )
        begins = [start.get(partition, first) for partition, (first, _) in enumerate(limits)]
        for partition, (begin, (first, end)) in enumerate(zip(begins, limits, strict=True)):
            if not first <= begin <= end:
                raise StreamRewound(place=self.place, partition=partition, offset=begin, first=first, end=end)
        return begins

    def ends(self, known: Sequence[int]) -> list[int]:
        return [end for _, end in self._limits()]

    def open(self, first: Callable[[], RecordSegment], types: str | None) -> tuple[Column, ...]:
        wish = self._wish
        if wish.format == "bytes":
            names = chosen(_RAW.names, wish.columns, self.place, needed=wish.label)
            check_names("fill=", wish.fill, names, self.place)
            self._columns = columns_of(_RAW, self.place, names)
            self._fill = Fill(wish.fill, self._columns)
            return self._columns
        schema, texts = by_name("schema=", wish.schema), []
        if types is not None:
            found = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(types)))
            schema = dict(zip(found.names, found.types, strict=True)) | schema
        elif wish.columns is None or not {*wish.columns, *wish.label} <= set(schema):
            segment = first()
            text = _text([record for record in self._fetch(segment) if record is not None])
            self.row_bytes = max(len(text) // (segment.end - segment.begin), 1)
            texts = [(0, text)]
        self._decoder = JsonDecoder(
            self.place, texts, columns=wish.columns, needed=wish.label, schema=schema, fill=wish.fill
        )
        return self._decoder.columns

    def types(self) -> str:
        """The schema of Arrow."""
        if self._wish.format == "bytes":
            return ""
        return base64.b64encode(self._decoder.schema.serialize()).decode()

    def read(self, segment: RecordSegment) -> DecodedRows:
        records = self._fetch(segment)

        def address(row: int) -> dict[str, Any]:
            return {
                "where": f"{self.place}, partition {segment.partition}, offset {segment.begin + row:,}",
            }

        if self._wish.format == "json":
            place = TextPlace(0, self.place, segment.begin)
            rows = self._decoder.decode(_text(records), len(records), place, address)
        else:
            rows = decoded(_raw(records, segment), self._columns, self._fill, address)
        gaps = {row for row, record in enumerate(records) if record is None}
        if not gaps:
            return rows
        bad: dict[int, BadSample] = {row: rows.bad[row] for row in rows.bad if row not in gaps}
        bad |= {row: NoRecord(**address(row), reason="this offset has no record") for row in gaps}
        return DecodedRows(rows.num_rows, rows.columns, bad)

    def describe(self) -> dict[str, Any]:
        described: dict[str, Any] = {"format": f"kafka {self._wish.format}", "stream": self.place}
        return {**described, "fill": self._wish.fill} if self._wish.fill else described

    # ---- the broker ----

    def _fetch(self, segment: RecordSegment) -> list[Any]:
        """The messages of a segment by offset; None at an offset that has none."""
        kafka, (partition, begin, end) = self._kafka, segment
        records: list[Any] = [None] * (end - begin)
        with self._lock_of_process():
            consumer = self._connected("records")
            if self._next != (partition, begin):
                consumer.assign([kafka.TopicPartition(self._topic, partition, begin)])
            self._next, at, since = None, begin, time.monotonic()
            while at < end:
                for message in consumer.consume(end - at, _POLL_S):
                    error = message.error()
                    if error is None:
                        if message.offset() < end:
                            records[message.offset() - begin] = message
                        at = message.offset() + 1
                        since = time.monotonic()
                    elif error.code() == kafka.KafkaError._PARTITION_EOF and message.offset() >= end:
                        at = max(at, message.offset())  # transactions end with offsets that hold nothing
                    elif error.code() == kafka.KafkaError._PARTITION_EOF:
                        self._check(segment)
                    elif error.code() == kafka.KafkaError._AUTO_OFFSET_RESET:
                        self._check(segment)
                        raise StreamUnreachable(place=self.place, reason=error.str(), waited_s=0.0)
                    else:
                        self._trouble = error.str()
                if at < end and time.monotonic() - since > self._wish.timeout_s:
                    self._fail(since)
            self._next = (partition, at) if at == end else None
        return records

    def _check(self, segment: RecordSegment) -> None:
        """Refuse a segment that the partition does not hold any more."""
        first, end = self._limits_of(segment.partition)
        if not first <= segment.begin <= segment.end <= end:
            raise StreamRewound(
                place=self.place, partition=segment.partition, offset=segment.begin, first=first, end=end
            )

    def _limits(self) -> list[tuple[int, int]]:
        """First offset and end of each partition, as they are now."""
        with self._lock_of_process():
            return [self._limits_of(partition) for partition in range(self._num_partitions())]

    def _num_partitions(self) -> int:
        def ask(consumer: Any) -> int:
            found = consumer.list_topics(self._topic, timeout=5.0).topics[self._topic]
            missing = self._kafka.KafkaError.UNKNOWN_TOPIC_OR_PART
            if found.error is not None and found.error.code() != missing:
                raise self._kafka.KafkaException(found.error)
            if found.error is not None or not found.partitions:
                there = sorted(name for name in consumer.list_topics(timeout=5.0).topics if name[:2] != "__")
                raise ConfigError(
                    f"there is no topic '{self._topic}' at {self.place} (topics there: {', '.join(there[:10]) or 'none'}). Nothing "
                    "was read."
                )
            return len(found.partitions)

        return int(self._asked(ask))

    def _limits_of(self, partition: int) -> tuple[int, int]:
        place = self._kafka.TopicPartition(self._topic, partition)
        first, end = self._asked(lambda consumer: consumer.get_watermark_offsets(place, timeout=5.0))
        return first, end

    def _asked(self, ask: Any) -> Any:
        """An answer of the broker, retried until the time is over."""
        since = time.monotonic()
        while True:
            try:
                answer = ask(self._connected("questions"))
            except self._kafka.KafkaException as error:
                self._trouble = error.args[0].str()
                self._connected("questions").poll(0)  # delivers pending callbacks
            else:
                if answer is not None:
                    return answer
            if time.monotonic() - since > min(self._wish.timeout_s, 30.0):
                self._fail(since)
            time.sleep(0.1)

    def _fail(self, since: float) -> None:
        reason = self._trouble or "no answer came"
        raise StreamUnreachable(place=self.place, reason=reason, waited_s=time.monotonic() - since)

    def _heard(self, error: Any) -> None:
        self._trouble = error.str()

    def _lock_of_process(self) -> threading.Lock:
        if self._owner != os.getpid():  # a fork has none of its parent's threads, which consumers need
            _LEFT_TO_THE_PARENT.append(self._consumers)
            self._owner, self._lock, self._consumers, self._next = os.getpid(), threading.Lock(), {}, None
        return self._lock

    def _connected(self, purpose: str) -> Any:
        if purpose not in self._consumers:
            try:
                self._consumers[purpose] = self._kafka.Consumer(self._settings)
            except (self._kafka.KafkaException, TypeError, ValueError) as error:
                raise ConfigError(
                    f"options= of from_stream({self.place}): {error}. Nothing was read."
                ) from None
        return self._consumers[purpose]


_LEFT_TO_THE_PARENT: list[Any] = []


def _text(records: Sequence[Any]) -> bytes:
    """Values as lines: a line end within JSON becomes a blank, and a missing value null."""
    values = [(None if record is None else record.value()) or b"null" for record in records]
    return b"\n".join(
        value.replace(b"\n", b" ").replace(b"\r", b" ") if value.strip() else b"null" for value in values
    )


def _raw(records: Sequence[Any], segment: RecordSegment) -> pa.Table:
    def values(of: Any, default: Any) -> list[Any]:
        return [default if record is None else of(record) or default for record in records]

    return pa.table(
        {
            "key": values(lambda record: record.key(), b""),
            "value": values(lambda record: record.value(), b""),
            "timestamp": values(lambda record: record.timestamp()[1], 0),
            "partition": [segment.partition] * len(records),
            "offset": list(range(segment.begin, segment.end)),
        },
        schema=_RAW,
    )
