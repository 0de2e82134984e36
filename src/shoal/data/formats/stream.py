"""Streams of records as tables: Kafka partitions and Flight endpoints, read in an order that all workers agree on.

A log keeps records by (partition, offset). The plan of a stream assigns them to positions: a list
of segments (partition, begin, end), round-robin over the partitions, each read as one block. With
`until="now"` the plan is complete when the stream is opened and the stream is an ordinary table;
otherwise it grows as records arrive. A plan is written to the run directory before any worker reads
by it, and to checkpoints, so a replaced or resumed worker reads the same records at the same
positions. `kafka.py` and `flight.py` are the logs.
"""

from __future__ import annotations

import atexit
import bisect
import contextlib
import fcntl
import itertools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from shoal.config import job as jobs
from shoal.data.arguments import OnError, above_zero, by_name, shown, skipping, whole_number
from shoal.data.files import identity_of
from shoal.data.formats.table import Column, DecodedRows, TableBlock
from shoal.data.formats.table_source import TableSource, label_names
from shoal.data.order import ENDLESS
from shoal.errors import CheckpointError, ConfigError, EmptyDataset, StreamEnded, StreamRewound

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0

_numbers = itertools.count()


class RecordSegment(NamedTuple):
    """Records begin..end-1 of a partition."""

    partition: int
    begin: int
    end: int


class Wish(NamedTuple):
    """Options of the user for the rows of a stream."""

    format: str
    label: tuple[str, ...]
    columns: Sequence[str] | None
    schema: Mapping[str, Any] | None
    fill: Mapping[str, Any] | None
    options: Mapping[str, Any]
    timeout_s: float


class RecordLog(Protocol):
    """Records by partition and offset. Reading one twice gives the same."""

    place: str
    """For messages: the address, without secrets."""

    row_bytes: int
    """About, of one record."""

    segment_rows: int
    """Records of a partition that are read in one piece, before those of the next partition."""

    def begins(self, start: str | Mapping[int, int]) -> list[int]:
        """The first offset of each partition: the earliest there is, the latest, or as given."""

    def ends(self, known: Sequence[int]) -> list[int]:
        """The end of each partition as it is now, after those that were planned; there may be more partitions than before."""

    def open(self, first: Callable[[], RecordSegment], types: str | None) -> tuple[Column, ...]:
        """The columns: of the types that were found before, or of those that the first records have."""

    def types(self) -> str:
        """Types of the columns, for `open`: the first records may be gone when a run is resumed."""

    def read(self, segment: RecordSegment) -> DecodedRows:
        """The rows of a segment: one for each offset, an offset without a record among the bad ones as a NoRecord."""

    def describe(self) -> dict[str, Any]:
        """Identity, fit for JSON."""


def open_stream(
    url: str,
    *,
    start: str | Mapping[int, int] = "earliest",
    until: str | None = None,
    records: int | None = None,
    format: str = "json",
    label: str | Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    schema: Mapping[str, Any] | None = None,
    fill: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    cache: Any = "auto",
    timeout_s: float = 300.0,
    on_error: OnError = "raise",
    max_skips: int | None = None,
) -> TableSource:
    """Records of a Kafka topic ("kafka://host:9092/topic") or of an Arrow Flight ("grpc://host:8815/path").

    `until="now"` takes what is there when the job begins: a table like any
    other, with a length, shuffle, split and any strategy. `records=1_000_000`
    takes so many, as they come. Without either the stream has no end: train
    with `fit(..., max_steps=...)`. It begins at the earliest record there is,
    at the "latest", or where `start={partition: offset}` says.

    The offsets are kept in checkpoints and in the run directory, nowhere
    else: after a kill or `shoal resume` every record is trained once.
    Each worker reads the records of its own samples. The values of Kafka are
    JSON objects, read as `from_jsonl` reads lines, or with `format="bytes"`
    columns key, value, timestamp, partition and offset, for `map` to decode.
    `options` are settings of the client (of librdkafka: "sasl.password"). A stream
    that gives nothing new for `timeout_s` is an error that says where it stands.

        Dataset.from_stream("kafka://localhost:9092/clicks", label="clicked").batch(256)
        Dataset.from_stream("grpc://localhost:8815/clicks", label="clicked", until="now").shuffle(seed=0).batch(256)
    """
    on_error, max_skips = skipping("", on_error, max_skips)
    if records is not None:
        records = whole_number("from_stream(records=)", records, at_least=1)
    if until not in (None, "now"):
        raise ConfigError(f"from_stream(until=) takes 'now', or is left out, got {shown(until)}")
    if until is not None and records is not None:
        raise ConfigError("from_stream takes until='now' or records=, not both")
    wish = Wish(
        format,
        tuple(label_names(label)),
        columns,
        schema,
        fill,
        by_name("options=", options),
        above_zero("from_stream(timeout_s=)", timeout_s, "seconds"),
    )
    log = _log_of(url, wish)
    plan = SegmentPlan(
        log,
        _checked_start(start),
        is_whole=until == "now",
        most=ENDLESS if records is None else records,
        timeout_s=wish.timeout_s,
        file=_shared_file(),
    )
    table = StreamTable(log, plan) if until == "now" else GrowingStreamTable(log, plan)
    return TableSource(table, label=label, cache=cache, on_error=on_error, max_skips=max_skips)


def _log_of(url: Any, wish: Wish) -> RecordLog:
    scheme = urlsplit(url).scheme if isinstance(url, str) else ""
    if scheme == "kafka":
        from shoal.data.formats.kafka import KafkaLog

        return KafkaLog(url, wish)
    if scheme in ("grpc", "grpc+tls", "grpc+tcp", "flight"):
        from shoal.data.formats.flight import FlightLog

        return FlightLog(url, wish)
    raise ConfigError(
        "from_stream takes the address of a Kafka topic, 'kafka://host:9092/topic', or of an Arrow Flight, "
        f"'grpc://host:8815/path', got {shown(url)}. Nothing was read."
    )


def _checked_start(start: Any) -> str | Mapping[int, int]:
    if start in ("earliest", "latest"):
        return str(start)
    is_offsets = isinstance(start, Mapping) and all(
        type(number) is int and number >= 0 for pair in start.items() for number in pair
    )
    if not is_offsets:
        raise ConfigError(
            "from_stream(start=) takes 'earliest', 'latest' or a dict of partition to offset, whole numbers, got "
            f"{shown(start)}"
        )
    return dict(start)


def _shared_file() -> Path:
    """File in which the workers of a job, and their reader processes, agree on the plan of the script's n-th stream."""
    job, number = jobs.share(), next(_numbers)
    if not job.launched:
        here = Path(tempfile.mkdtemp(prefix="shoal-streams-"))
        atexit.register(shutil.rmtree, here, ignore_errors=True)
        return here / f"{number}.jsonl"
    if job.num_workers > 1 and not job.shares_run_dir:
        raise ConfigError(
            "from_stream: workers agree on the offsets of each batch through the run directory, and the hosts of this job do not "
            "share one. Nothing was read; give --run-dir a folder that all hosts see."
        )
    folder = job.run_dir / "streams"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{number}.jsonl"


def next_round(nexts: Sequence[int], ends: Sequence[int], size: int, most: int) -> list[RecordSegment]:
    """Segments of the records that came since: one of at most `size` of each partition that has any, `most` in all."""
    found = []
    for partition, end in enumerate(ends):
        begin = nexts[partition]
        num_rows = min(end - begin, size, most)
        if num_rows > 0:
            found.append(RecordSegment(partition, begin, begin + num_rows))
            most -= num_rows
    return found


class SegmentPlan:
    """The records at each position: append-only, written before it is used, and equal for all workers.

    The file's first line, its head, holds the place of the stream and the first offsets, a later
    one the types of the columns, the others a round of segments each. A resumed checkpoint appends
    one more head, with types and rounds, that replaces all before it: no line is ever changed.
    `base` is the position of the first segment that is kept: a checkpoint of an endless stream only
    has the segments behind it.
    """

    def __init__(
        self,
        log: RecordLog,
        start: str | Mapping[int, int],
        *,
        is_whole: bool,
        most: int,
        timeout_s: float,
        file: Path,
    ) -> None:
        self._log, self._file, self._most, self._timeout_s = log, file, most, timeout_s
        self.is_whole = is_whole
        self._num_read = 0  # bytes of the file
        self._head: Mapping[str, Any] | None = None
        self.types: str | None = None
        """Types of the columns, once known."""
        with self._agreed():
            if self._head is None:
                begins, ends = log.begins(start), log.ends([]) if is_whole else None
                self._write({"place": log.place, "begins": begins, "ends": ends, "base": 0})
            self._refuse_another()
        if is_whole:
            while found := next_round(self._nexts, self.ends, log.segment_rows, ENDLESS):
                self._append(found)

    @property
    def num_rows(self) -> int:
        """Positions of an epoch; ENDLESS where there is no end."""
        return self.bounds[-1] if self.is_whole else self._most

    @property
    def is_endless(self) -> bool:
        return self.num_rows == ENDLESS

    def extend_to(self, num_rows: int) -> None:
        """Return when this many positions are planned; waits for records that have not arrived."""
        if num_rows <= self.bounds[-1]:
            return
        since, pause_s = time.monotonic(), _FIRST_PAUSE_S
        while True:
            before = self.bounds[-1]
            with self._agreed():  # another worker's additions come first
                while self.bounds[-1] < num_rows:
                    ends = self._log.ends(self._nexts)
                    self._refuse_shrunk(ends)
                    self._nexts += [0] * (len(ends) - len(self._nexts))
                    found = next_round(
                        self._nexts, ends, self._log.segment_rows, self._most - self.bounds[-1]
                    )
                    if not found:
                        break
                    self._write([list(segment) for segment in found])
            if self.bounds[-1] >= num_rows:
                return
            if self.bounds[-1] > before:
                since, pause_s = time.monotonic(), _FIRST_PAUSE_S
            elif time.monotonic() - since >= self._timeout_s:
                raise StreamEnded(
                    place=self._log.place,
                    num_planned=self.bounds[-1],
                    wanted=None if self._most == ENDLESS else self._most,
                    offsets=self._nexts,
                    waited_s=self._timeout_s,
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def first(self) -> RecordSegment:
        """The first records, once there are some."""
        if not self.segments:
            self.extend_to(self.bounds[-1] + 1)
        return self.segments[0]

    def agree_on_types(self, types: str) -> str:
        """The types that were found first, by any worker."""
        with self._agreed():
            if self.types is None:
                self._write({"types": types})
            assert self.types is not None
            return self.types

    def export_state(self, position: int) -> dict[str, Any]:
        """Plan for a checkpoint: all of it; of an endless stream what is at `position` and after it."""
        first = 0
        if self.is_endless:
            first = max(bisect.bisect_right(self.bounds, position) - 1, 0)
        kept = self.segments[first:]
        return {
            "begins": self._nexts_at(first),
            "ends": list(self.ends) if self.is_whole else None,
            "base": self.bounds[first],
            "rounds": [] if self.is_whole else [list(segment) for segment in kept],
            "types": self.types,
        }

    def import_state(self, state: Mapping[str, Any]) -> None:
        """Continue by the plan of a checkpoint, in another run directory too."""
        base, rounds = state["base"], [RecordSegment(*each) for each in state["rounds"]]
        if self.is_whole:
            if (state["begins"], state["ends"]) != (self.begins, self.ends):
                raise CheckpointError(
                    f"{self._log.place}: the checkpoint stands in the records from offsets {state['begins']} to {state['ends']}, and "
                    f"until='now' is {self.begins} to {self.ends} today. Nothing was loaded; resume with `shoal resume` in the run "
                    "directory, which keeps them, or take over the weights alone with trainer.load()."
                )
            return
        with self._agreed():
            begin = min(bisect.bisect_left(self.bounds, base), len(self.segments))
            ours = self.segments[begin : begin + len(rounds)]
            pairs = itertools.zip_longest(self._nexts_at(begin), state["begins"], fillvalue=0)
            is_same = self.bounds[begin] == base and ours == rounds and all(a == b for a, b in pairs)
            if not is_same:  # one that has grown since is the same
                self._write({"place": self._log.place, **state})

    # ---- agreement between workers ----

    @contextlib.contextmanager
    def _agreed(self) -> Iterator[None]:
        """Context with the lock of all workers, after reading everything written."""
        with self._file.open("a+b") as held:
            fcntl.flock(held, fcntl.LOCK_EX)  # released when the process ends, in any way
            self._learn()
            yield

    def _learn(self) -> None:
        with self._file.open("rb") as file:
            file.seek(self._num_read)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]  # a process may die within a line
        for line in whole.splitlines():
            self._take(json.loads(line))
        self._num_read += len(whole)

    def _write(self, said: Any) -> None:
        line = json.dumps(said).encode() + b"\n"
        descriptor = os.open(self._file, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.ftruncate(descriptor, self._num_read)  # a partial line of a dead process
            os.pwrite(descriptor, line, self._num_read)
        finally:
            os.close(descriptor)
        self._num_read += len(line)
        self._take(said)

    def _take(self, said: Any) -> None:
        if "begins" in said:
            self._head, self.types = said, said.get("types")
            self.begins, self.ends = list(said["begins"]), list(said["ends"] or ())
            self._nexts = list(self.begins)
            self.segments: list[RecordSegment] = []
            self.bounds: list[int] = [said["base"]]
            self._append([RecordSegment(*each) for each in said.get("rounds", ())])
        elif "types" in said:
            self.types = said["types"]
        else:
            self._append([RecordSegment(*each) for each in said])

    def _append(self, segments: Sequence[RecordSegment]) -> None:
        for segment in segments:
            self._nexts += [0] * (segment.partition + 1 - len(self._nexts))  # partitions may be added
            self._nexts[segment.partition] = segment.end
            self.segments.append(segment)
            self.bounds.append(self.bounds[-1] + segment.end - segment.begin)

    def _nexts_at(self, number: int) -> list[int]:
        """The next offset of each partition before the segment of that number."""
        nexts = list(self._nexts)
        for segment in reversed(self.segments[number:]):
            nexts[segment.partition] = segment.begin
        return nexts

    def _refuse_another(self) -> None:
        """Refuse the plan of another stream: files are numbered in the order in which a script opens its streams."""
        assert self._head is not None
        there = self._head.get("place", self._log.place), self._head["ends"] is not None
        if there != (self._log.place, self.is_whole):
            place, other = (
                f"{place} ({'until now' if is_whole else 'as records come'})"
                for place, is_whole in ((self._log.place, self.is_whole), there)
            )
            raise ConfigError(
                f"from_stream opens {place} where this job has the offsets of {other}, in {self._file}. Every worker, and a "
                "resumed script, opens the same streams in the same order. Nothing was read, and the offsets are kept; "
                "open the streams in that order, or begin anew with another run directory."
            )

    def _refuse_shrunk(self, ends: Sequence[int]) -> None:
        for partition, planned in enumerate(self._nexts):
            end = ends[partition] if partition < len(ends) else 0
            if end < planned:
                raise StreamRewound(
                    place=self._log.place, partition=partition, offset=planned, first=None, end=end
                )


class StreamTable:
    """The records of a stream that were there when it was opened."""

    def __init__(self, log: RecordLog, plan: SegmentPlan) -> None:
        self._log, self.plan = log, plan
        if plan.is_whole and not plan.segments:
            raise EmptyDataset(what=f"from_stream ({log.place}, until='now')")
        self.columns = log.open(plan.first, plan.types)
        if plan.types is None and plan.agree_on_types(log.types()) != log.types():
            self.columns = log.open(plan.first, plan.types)
        self.blocks: tuple[TableBlock, ...] = tuple(map(self._block, plan.segments))

    @property
    def identity(self) -> str:
        return identity_of((), **self.describe(), columns=[column.describe() for column in self.columns])

    def read(self, block: int) -> DecodedRows:
        return self._log.read(self.plan.segments[block])

    def describe(self) -> dict[str, Any]:
        plan = self.plan
        ends = {"ends": plan.ends} if plan.is_whole else {}
        begins = {} if plan.is_endless else {"begins": plan.begins}
        return {**self._log.describe(), **begins, **ends}

    def _block(self, segment: RecordSegment) -> TableBlock:
        num_rows = segment.end - segment.begin
        where = f"{self._log.place}, partition {segment.partition}"
        return TableBlock(num_rows, num_rows * self._log.row_bytes, where, segment.begin)


class GrowingStreamTable(StreamTable):
    """The records of a stream as they come."""

    @property
    def num_rows(self) -> int:
        return self.plan.num_rows

    def bounds_to(self, num_rows: int) -> list[int]:
        """Positions at which segments begin, and the last one's end, for at least so many positions; waits for them."""
        self.plan.extend_to(num_rows)
        return self.plan.bounds
