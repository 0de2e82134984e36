"""The tasks of one aggregate: map tasks over stretches of the data, reduce tasks over partitions of the keys.

    <directory>/
        claims/map-00003      who runs it (claims.py)
        map-00003             what it gave: sorted runs, a stretch per partition
        part-00001            a reduced partition: the keys in order, each with its result

A task's output exists or it does not; there is nothing else to know about it.
So any number of processes may run `finish` at the same time, whenever they
come, and whoever dies is nobody's loss but the task's it was at.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import operator
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from shoal.data.collate import Collate, collate
from shoal.data.mapreduce import keys
from shoal.data.mapreduce.claims import Claim, Claims
from shoal.data.mapreduce.spill import (
    Combine,
    Record,
    RunFile,
    RunWriter,
    SpillBuffer,
    combined,
    encode_value,
    merged,
    merged_in_memory,
)
from shoal.data.order.order import Order, Shuffled
from shoal.data.reader import Reader, ReadRequest
from shoal.data.skipping import SkipLog
from shoal.data.sources.source import name_of
from shoal.data.stream import Stream
from shoal.errors import DataError, MapReduceStalled, TaskKeepsDying
from shoal.runtime import events
from shoal.runtime.serialization import decode

MAX_MAP_TASKS = 32
"""A reduce task holds the output of each of them open."""

_MAX_ATTEMPTS = 3
_RETRY_AFTER_S = (0.1, 1.0)
_BEAT_EVERY = 64  # pairs
_POLL_S = (0.005, 0.1)


class Readable(Protocol):
    """A dataset that can be read in stretches."""

    num_samples: int
    at_once: int

    def pieces(self, begin: int, end: int) -> Iterator[MapInput]:
        """What to map, of the samples at positions begin..end-1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregatePlan:
    """What is computed. How it is cut into tasks follows from it alone, never from who runs them."""

    map: Callable[[Any], Iterable[tuple[Any, Any]]]
    """Sample or batch -> (key, value) pairs."""

    combine: Combine | None
    """(key, values) -> value, within a map task."""

    reduce: Combine | None
    """(key, values) -> result; None: the values as a list."""

    num_partitions: int
    """Reduce tasks, and files of the result."""

    buffer_bytes: int
    """About how much a map task keeps in memory before it spills."""

    num_map_tasks: int
    """Stretches of the data."""


class Tasks:
    """The tasks of one aggregate, in one directory, as one process sees them."""

    def __init__(
        self,
        plan: AggregatePlan,
        data: Readable,
        directory: Path,
        *,
        run: str,
        timeout_s: float,
        first: int = 0,
    ) -> None:
        """`first` is where this process begins to look for a free task: each somewhere else."""
        self.plan, self._data, self.directory = plan, data, directory
        self._claims = Claims(directory / "claims", run=run)
        self._timeout_s, self._first = timeout_s, first
        self.map_names = [f"map-{number:05d}" for number in range(plan.num_map_tasks)]
        self.part_names = [f"part-{number:05d}" for number in range(plan.num_partitions)]
        self.current = ""
        """The task that this process is at."""

    @property
    def is_complete(self) -> bool:
        """Is every partition reduced?"""
        return not self._missing(self.part_names)

    def finish(self) -> None:
        """Run tasks until there are none left, and wait for those of others. Raises what a user's function raises."""
        self._run_all(self.map_names, self._map)
        self._run_all(self.part_names, self._reduce)
        for path in (
            self.directory.iterdir()
        ):  # what was sorted, and what the killed have left; nobody writes any more
            if path.name.startswith(("map-", ".")):
                path.unlink(missing_ok=True)

    def watch(self) -> StallWatch:
        """A look at the tasks that are left, from outside."""
        return StallWatch(self._claims, self._timeout_s)

    def left(self) -> list[str]:
        """Tasks whose output is missing."""
        parts = self._missing(self.part_names)
        return (self._missing(self.map_names) or parts) if parts else []

    def _missing(self, names: list[str]) -> list[str]:
        there = set(os.listdir(self.directory))
        return [name for name in names if name not in there]

    def _run_all(self, names: list[str], run: Callable[[int, Claim], None]) -> None:
        at = self._first % len(names)
        turned = names[at:] + names[:at]
        pauses, watch = _growing(), self.watch()
        while True:
            if self.is_complete:  # perhaps by others, who have then removed what map tasks gave
                return
            missing = set(self._missing(names))
            left = [name for name in turned if name in missing]
            if not left:
                return
            has_run = False
            for name in left:
                claim = self._claims.take(name)
                if claim is None:
                    continue
                try:
                    if not self.is_complete and self._missing([name]):
                        self._attempt(name, names.index(name), claim, run)
                        has_run = True
                finally:
                    claim.release()
            if has_run:
                pauses, watch = _growing(), self.watch()
            else:
                watch.look(left)
                time.sleep(next(pauses))

    def _attempt(self, name: str, number: int, claim: Claim, run: Callable[[int, Claim], None]) -> None:
        """Run a task; again where the system failed it, not where a function of the user's is wrong."""
        if claim.attempts:
            events.emit(
                "map-reduce task run again", task=name, after=[attempt.who for attempt in claim.attempts]
            )
        if len(claim.attempts) >= _MAX_ATTEMPTS:
            who = [attempt.who for attempt in claim.attempts]
            raise TaskKeepsDying(task=name, what=self._described(name, number), attempts=who)
        self.current = name
        for pause_s in (*_RETRY_AFTER_S, None):
            try:
                return run(number, claim)
            except OSError as error:
                if error.errno == errno.ENOSPC:
                    raise DataError(
                        f"the disk of {self.directory} is full: the task '{name}' of map_reduce could not write what it "
                        "sorts. Its unfinished files were removed, finished tasks are kept; make room, or give another "
                        "directory="
                    ) from error
                if pause_s is None:
                    raise
                events.emit("map-reduce task run again", task=name, after=[repr(error)])
                time.sleep(pause_s)

    def _described(self, name: str, number: int) -> str:
        if name.startswith("part"):
            return f"partition {number} of {self.plan.num_partitions}"
        begin, end = self._stretch(number)
        return f"samples {begin} to {end - 1}"

    def _stretch(self, number: int) -> tuple[int, int]:
        total, num_tasks = self._data.num_samples, self.plan.num_map_tasks
        return number * total // num_tasks, (number + 1) * total // num_tasks

    def _map(self, number: int, claim: Claim) -> None:
        plan, name = self.plan, self.map_names[number]
        buffer = SpillBuffer(
            self.directory,
            f"{name}.{os.getpid()}",
            combine=plan.combine,
            num_partitions=plan.num_partitions,
            max_bytes=plan.buffer_bytes,
        )
        try:
            for piece in self._data.pieces(*self._stretch(number)):
                claim.beat()
                try:
                    for number_of_pair, pair in enumerate(_pairs(plan.map(piece.value))):
                        if type(pair) is not tuple or len(pair) != 2:
                            raise _no_pair(pair)
                        buffer.add(*pair)
                        if number_of_pair % _BEAT_EVERY == 0:
                            claim.beat()
                except Exception as error:
                    error.add_note(f"raised by map_reduce's map({name_of(plan.map)}) for {piece.what}")
                    raise
            buffer.write(self.directory / name)
        finally:
            buffer.discard()

    def _reduce(self, number: int, claim: Claim) -> None:
        with contextlib.ExitStack() as opened:
            files = [RunFile(self.directory / name) for name in self.map_names]
            for file in files:
                opened.callback(file.close)
            writer = RunWriter(self.directory / self.part_names[number], 1)
            try:
                records: Iterable[Record]
                if (
                    sum(file.stretches[number].num_bytes_in_memory for file in files)
                    <= self.plan.buffer_bytes
                ):
                    records = merged_in_memory([file.load(number) for file in files])
                else:
                    records = merged([file.records(number, check=True) for file in files])
                for encoded, result in self._results(records, claim):
                    writer.add(0, encoded, encode_value(result))
                writer.commit()
            except BaseException:
                writer.abandon()
                raise

    def _results(self, records: Iterable[Record], claim: Claim) -> Iterator[tuple[bytes, Any]]:
        reduce = self.plan.reduce
        for encoded, group in itertools.groupby(records, key=operator.itemgetter(0)):
            claim.beat()
            found: Iterable[Any] = (decode(value) for _, value in group)
            if self.plan.combine is not None:
                found = list(found)  # there is one per map task, and functions like to look twice
            if reduce is None:
                yield encoded, list(found)
                continue
            result = combined(reduce, keys.decode(encoded), found, what="map_reduce's reduce")
            if result is not None:
                yield encoded, result


class StallWatch:
    """Notices when nothing has moved for too long."""

    def __init__(self, claims: Claims, timeout_s: float) -> None:
        self._claims, self._timeout_s = claims, timeout_s
        self._standing: dict[str, int] | None = None
        self._since = time.monotonic()

    def look(self, left: list[str]) -> None:
        """Raise MapReduceStalled where these tasks have shown no sign of life for `timeout_s`."""
        standing, now = self._claims.standing(left), time.monotonic()
        if standing != self._standing:
            self._standing, self._since = standing, now
        elif now - self._since > self._timeout_s:
            holders = {name: self._claims.holder(name) for name in left}
            raise MapReduceStalled(waited_s=now - self._since, holders=holders)


def _pairs(given: Any) -> Iterator[Any]:
    """What the map function gave, one by one."""
    try:
        return iter(given.items() if isinstance(given, Mapping) else given)
    except TypeError:
        raise DataError(
            f"the map function gave a {type(given).__name__}: it must yield (key, value) pairs, or return a list or dict of "
            "them. Nothing was computed."
        ) from None


def _no_pair(given: Any) -> DataError:
    return DataError(
        f"the map function yielded a {type(given).__name__} where a pair (key, value) belongs. Nothing was computed."
    )


def _growing() -> Iterator[float]:
    pause_s, longest_s = _POLL_S
    while True:
        yield pause_s
        pause_s = min(pause_s * 1.5, longest_s)


_AT_ONCE = 256
"""Samples asked for at once where they are mapped one by one; with it, how much a task holds at least."""


class MapInput(NamedTuple):
    """What the map function is given once."""

    what: str
    """For messages: which samples these are."""

    value: Any
    """A sample, or a batch of samples."""


class Indexed:
    """A dataset with random access."""

    def __init__(self, reader: Reader, order: Order, batch_size: int | None) -> None:
        while isinstance(order, Shuffled):
            order = order.parent
        self._order, self._batch_size = order, batch_size
        if batch_size is None:
            reader = Reader(reader.source, seed=reader.seed, collate=Collate(_as_they_are))
        self._reader = reader
        self._skips = SkipLog()
        self.num_samples = order.length(0)
        self.at_once = batch_size or _AT_ONCE

    def pieces(self, begin: int, end: int) -> Iterator[MapInput]:
        """What to map, of the samples at positions begin..end-1."""
        for first in range(begin, end, self.at_once):
            last = min(first + self.at_once, end)
            reading = self._reader.read(ReadRequest(self._order.indices(range(first, last), 0), 0, first))
            self._skips.record(reading.skipped)
            if not len(reading.request.indices):
                continue
            if self._batch_size is not None:
                yield MapInput(f"the batch of samples {first} to {last - 1}", reading.batch)
                continue
            for index, sample in zip(reading.request.indices, reading.batch, strict=True):
                yield MapInput(f"the sample with index {index}", sample)


def _as_they_are(samples: list[Any]) -> list[Any]:
    return samples


class Streamed:
    """A dataset that can only be read from its beginning: one task reads all of it."""

    num_samples = 1

    def __init__(self, stream: Stream, batch_size: int | None) -> None:
        self._stream, self._batch_size = stream, batch_size
        self.at_once = 1

    def pieces(self, begin: int, end: int) -> Iterator[MapInput]:
        """What to map: everything."""
        if self._batch_size is None:
            for number, sample in enumerate(self._stream):
                yield MapInput(f"sample {number} of the stream", sample)
            return
        samples, first = iter(self._stream), 0
        while batch := list(itertools.islice(samples, self._batch_size)):
            yield MapInput(f"samples {first} to {first + len(batch) - 1} of the stream", collate(batch))
            first += len(batch)
