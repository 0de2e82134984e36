"""The tasks of one aggregate: map tasks over stretches of the data, reduce tasks over partitions of the keys.

    <directory>/
        claims/map-00003      attempts: a line each, under a file lock
        map-00003             its output: sorted runs, a stretch per partition
        part-00001            a reduced partition: the keys in order, each with its result

A task's output exists or not; there is no other state. So any number of processes may run `finish`
at the same time, whenever they start, and a death costs only the running task. The process that
holds the lock of a task's claim runs it; the kernel releases the lock when that process ends, in
any way.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import operator
import os
import socket
import struct
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from shoal.config import job as jobs
from shoal.data.mapreduce.shuffle import Shuffle
from shoal.data.mapreduce.spill import (
    Combine,
    Record,
    RunFile,
    RunWriter,
    SpillBuffer,
    combined,
    decode_key,
    encode_value,
    merged,
    merged_in_memory,
)
from shoal.data.order import Order, Shuffled
from shoal.data.reader import Reader, ReadRequest
from shoal.data.skipping import SkipLog
from shoal.data.sources.source import name_of
from shoal.data.stream import Stream
from shoal.data.tree import Collate, collate
from shoal.engines.tasks import run_tasks
from shoal.errors import DataError, MapReduceFailed, MapReduceStalled, ShoalError, TaskKeepsDying
from shoal.runtime import events
from shoal.runtime.forkserver.client import ForkedServer, ForkRefused, ForkServerGone
from shoal.runtime.forkserver.server import is_readable
from shoal.runtime.serialization import decode

_BEAT_S = 1.0
_FLOCK = struct.Struct("hhqqi")  # Linux's struct flock on 64 bits: type, whence, start, length, pid


class Attempt(msgspec.Struct, frozen=True):
    """One line of a task's file: a process began to run it and has not finished."""

    who: str
    run: str
    """Identifies a start of the program; attempts of other starts do not count."""


class Claim:
    """A task claimed by this process until `release`. `beat` is its heartbeat."""

    def __init__(self, path: Path, fd: int, attempts: list[Attempt], num_bytes: int) -> None:
        self._path, self._fd, self._begin = path, fd, num_bytes
        self.attempts = attempts
        """Attempts before this one."""
        self._next_beat = 0.0

    def beat(self) -> None:
        """Heartbeat of a task; cheap enough for every sample."""
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + _BEAT_S
            os.utime(self._fd)

    def release(self) -> None:
        """Release a finished or abandoned task: the attempt does not count as a failure."""
        os.ftruncate(self._fd, self._begin)
        _forget(self._path)
        os.close(self._fd)


class Claims:
    """The claims on the tasks of one directory."""

    def __init__(self, directory: Path, *, run: str) -> None:
        self._directory, self._run = directory, run
        self._directory.mkdir(parents=True, exist_ok=True)

    def take(self, name: str) -> Claim | None:
        path = self._directory / name
        if not _remember(path):
            return None
        fd = -1
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            _forget(path)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return None
            raise
        text = os.pread(fd, 1 << 20, 0)
        whole = text[: text.rfind(b"\n") + 1]  # a process may die within a line
        mine = msgspec.json.encode(Attempt(_who(), self._run)) + b"\n"
        os.pwrite(fd, mine, len(whole))
        return Claim(path, fd, [one for one in _attempts(whole) if one.run == self._run], len(whole))

    def standing(self, names: list[str]) -> dict[str, int]:
        """Last heartbeat of each of these tasks; only changes matter."""
        found = {}
        for name in names:
            try:
                found[name] = (self._directory / name).stat().st_mtime_ns
            except FileNotFoundError:
                found[name] = 0
        return found

    def holder(self, name: str) -> str:
        path = self._directory / name
        if path in _held[1]:
            return "this process"  # opening and closing the file would release its lock
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return "nobody"
        try:
            asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, asked))
            if kind == fcntl.F_UNLCK:
                return "nobody"
            attempts = _attempts(os.pread(fd, 1 << 20, 0))
            return attempts[-1].who if attempts else f"process {pid}"
        finally:
            os.close(fd)


def _who() -> str:
    job = jobs.current()
    return f"rank {job.rank} (process {os.getpid()})" if job.launched else f"process {os.getpid()}"


def _attempts(text: bytes) -> list[Attempt]:
    attempts = []
    for line in text.splitlines():
        try:
            attempts.append(msgspec.json.decode(line, type=Attempt))
        except msgspec.MsgspecError:
            continue
    return attempts


# A POSIX lock does not exclude its own process, so the locks of this process are recorded.
_held: tuple[int, set[Path]] = (os.getpid(), set())
_guard = threading.Lock()


def _remember(path: Path) -> bool:
    global _held
    with _guard:
        if _held[0] != os.getpid():
            _held = (os.getpid(), set())
        if path in _held[1]:
            return False
        _held[1].add(path)
        return True


def _forget(path: Path) -> None:
    with _guard:
        _held[1].discard(path)


MAX_MAP_TASKS = 32
"""A reduce task holds the output of each of them open."""

_MAX_ATTEMPTS = 3
_RETRY_AFTER_S = (0.1, 1.0)
_BEAT_EVERY = 64  # pairs
_POLL_S = (0.005, 0.1)


_Beat = Callable[[], None]
_Run = Callable[[int, _Beat], None]


def _no_beat() -> None:
    """An engine watches its processes itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregatePlan:
    """Definition of an aggregate. Its tasks follow from it alone, never from the processes that run them."""

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
        data: Indexed | Streamed,
        directory: Path,
        *,
        run: str,
        timeout_s: float,
        first: int = 0,
        shuffle: Shuffle | None = None,
    ) -> None:
        """`first` is where this process begins to look for a free task: each somewhere else.

        `shuffle`: other hosts run some of the tasks.
        """
        self.plan, self._data, self.directory = plan, data, directory
        self._claims = Claims(directory / "claims", run=run)
        self._timeout_s, self._first, self._shuffle = timeout_s, first, shuffle
        self.map_names = [f"map-{number:05d}" for number in range(plan.num_map_tasks)]
        self.part_names = [f"part-{number:05d}" for number in range(plan.num_partitions)]
        self.current = ""
        """The task that this process is at."""

    @property
    def is_complete(self) -> bool:
        return not self._missing(self.part_names)

    def finish(self) -> None:
        """Run tasks until none is left, and wait for those of others. Raises errors of a user's function."""
        shuffle = self._shuffle
        if shuffle is None:
            self._run_all(self.map_names, self._map)
            self._run_all(self.part_names, self._reduce)
        elif not shuffle.has_result(self.part_names):
            self._run_all(shuffle.own(self.map_names), self._map)
            self._run_all(shuffle.own(self.part_names), self._reduce)
            self._run_all(self.part_names, self._bring)
        # Sorted runs, and leftovers of killed processes; nothing writes any more.
        for path in self.directory.iterdir():
            if path.name.startswith(("map-", ".")):
                path.unlink(missing_ok=True)

    def watch(self) -> StallWatch:
        return StallWatch(self._claims, self._timeout_s)

    def left(self) -> list[str]:
        parts = self._missing(self.part_names)
        maps = self.map_names if self._shuffle is None else self._shuffle.own(self.map_names)
        return (self._missing(maps) or parts) if parts else []

    def _missing(self, names: list[str]) -> list[str]:
        there = set(os.listdir(self.directory))
        return [name for name in names if name not in there]

    def within(self, directory: Path) -> Tasks:
        """The same tasks in another directory."""
        return Tasks(self.plan, self._data, directory, run="", timeout_s=self._timeout_s)

    def run(self, name: str) -> None:
        """One task, without a claim: for an engine, which itself decides where it runs, and when again."""
        kind = self._map if name in self.map_names else self._reduce
        self._run(name, int(name[-5:]), _no_beat, kind)

    def _run_all(self, names: list[str], run: _Run) -> None:
        at = self._first % max(1, len(names))
        turned = names[at:] + names[:at]
        pauses, watch = _growing(), self.watch()
        while True:
            if self.is_complete:  # perhaps by others, who have then removed the map outputs
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
                    # In this order: who completes the last part removes the map outputs, which are then missing for good.
                    if self._missing([name]) and not self.is_complete:
                        self._attempt(name, int(name[-5:]), claim, run)
                        has_run = True
                finally:
                    claim.release()
            if has_run:
                pauses, watch = _growing(), self.watch()
            else:
                watch.look(left)
                time.sleep(next(pauses))

    def _attempt(self, name: str, number: int, claim: Claim, run: _Run) -> None:
        if claim.attempts:
            events.emit(
                "map-reduce task run again", task=name, after=[attempt.who for attempt in claim.attempts]
            )
        if len(claim.attempts) >= _MAX_ATTEMPTS:
            who = [attempt.who for attempt in claim.attempts]
            raise TaskKeepsDying(task=name, what=self._described(name, number), attempts=who)
        self._run(name, number, claim.beat, run)

    def _run(self, name: str, number: int, beat: _Beat, run: _Run) -> None:
        """Run a task; retried after a system failure, not after an error of the user's function."""
        self.current = name
        for pause_s in (*_RETRY_AFTER_S, None):
            try:
                return run(number, beat)
            except OSError as error:
                if error.errno == errno.ENOSPC:
                    raise DataError(
                        f"the disk of {self.directory} is full: the task '{name}' of map_reduce could not write what it "
                        "sorts. Its unfinished files were removed; make room, or give another "
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

    def _map(self, number: int, beat: _Beat) -> None:
        plan, name = self.plan, self.map_names[number]
        buffer = SpillBuffer(
            self.directory,
            f"{name}.{uuid.uuid4().hex}",  # other hosts may write here too
            combine=plan.combine,
            num_partitions=plan.num_partitions,
            max_bytes=plan.buffer_bytes,
        )
        try:
            for piece in self._data.pieces(*self._stretch(number)):
                beat()
                try:
                    for number_of_pair, pair in enumerate(_pairs(plan.map(piece.value))):
                        if type(pair) is not tuple or len(pair) != 2:
                            raise DataError(
                                f"the map function yielded a {type(pair).__name__} where a pair (key, value) belongs. "
                                "Nothing was computed."
                            )
                        buffer.add(*pair)
                        if number_of_pair % _BEAT_EVERY == 0:
                            beat()
                except Exception as error:
                    error.add_note(f"raised by map_reduce's map({name_of(plan.map)}) for {piece.what}")
                    raise
            buffer.write(self.directory / name)
        finally:
            buffer.discard()

    def _bring(self, number: int, beat: _Beat) -> None:
        assert self._shuffle is not None
        self._shuffle.bring_part(self.part_names[number], len(self.part_names), beat)

    def _inputs(self, number: int, beat: _Beat) -> list[tuple[Path, int]] | None:
        """Files with this partition of what the map tasks gave; None where another host had it reduced already."""
        if self._shuffle is None:
            return [(self.directory / name, number) for name in self.map_names]
        return self._shuffle.inputs(self.map_names, self.part_names[number], beat)

    def _reduce(self, number: int, beat: _Beat) -> None:
        inputs = self._inputs(number, beat)
        if inputs is None:
            return
        with contextlib.ExitStack() as opened:
            files = [
                (opened.enter_context(contextlib.closing(RunFile(path))), partition)
                for path, partition in inputs
            ]
            writer = opened.enter_context(RunWriter(self.directory / self.part_names[number], 1))
            records: Iterable[Record]
            num_bytes = sum(file.stretches[partition].num_bytes_in_memory for file, partition in files)
            if num_bytes <= self.plan.buffer_bytes:
                records = merged_in_memory([file.load(partition) for file, partition in files])
            else:
                records = merged([file.records(partition, check=True) for file, partition in files])
            for encoded, result in self._results(records, beat):
                writer.add(0, encoded, encode_value(result))

    def _results(self, records: Iterable[Record], beat: _Beat) -> Iterator[tuple[bytes, Any]]:
        reduce = self.plan.reduce
        for encoded, group in itertools.groupby(records, key=operator.itemgetter(0)):
            beat()
            found: Iterable[Any] = (decode(value) for _, value in group)
            if self.plan.combine is not None:
                found = list(found)  # there is one per map task, and functions like to look twice
            if reduce is None:
                yield encoded, list(found)
                continue
            result = combined(reduce, decode_key(encoded), found, what="map_reduce's reduce")
            if result is not None:
                yield encoded, result


class StallWatch:
    """Detects that nothing has progressed for too long."""

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
    try:
        return iter(given.items() if isinstance(given, Mapping) else given)
    except TypeError:
        raise DataError(
            f"the map function gave a {type(given).__name__}: it must yield (key, value) pairs, or return a list or dict of "
            "them. Nothing was computed."
        ) from None


def _growing() -> Iterator[float]:
    pause_s, longest_s = _POLL_S
    while True:
        yield pause_s
        pause_s = min(pause_s * 1.5, longest_s)


_AT_ONCE = 256
"""Samples asked for at once where they are mapped one by one; with it, how much a task holds at least."""


class MapInput(NamedTuple):
    """Input of one call of the map function."""

    what: str
    """Name of these samples in messages."""

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
        if self._batch_size is None:
            for number, sample in enumerate(self._stream):
                yield MapInput(f"sample {number} of the stream", sample)
            return
        samples, first = iter(self._stream), 0
        while batch := list(itertools.islice(samples, self._batch_size)):
            yield MapInput(f"samples {first} to {first + len(batch) - 1} of the stream", collate(batch))
            first += len(batch)


_MAX_REPORT = 32_000  # bytes that a pipe holds without a reader
_LOOK_EVERY_S = 1.0


class _Report(msgspec.Struct, frozen=True):
    """How a process failed."""

    task: str
    traceback: str
    is_ours: bool
    """It is an error that shoal raised, and its text says everything."""


def finish_in_processes(make_tasks: Callable[[int], Tasks], num_workers: int) -> None:
    """Run all tasks in `num_workers` processes; `make_tasks(number)` is what each of them works on."""
    tasks = make_tasks(0)
    watch = tasks.watch()
    server = ForkedServer(partial(_work, make_tasks), title="shoal map-reduce")
    reports: dict[int, int] = {}  # pid -> the pipe its report comes through
    try:
        for number in range(num_workers):
            reports.update([_start(server, number)])
        while reports:
            is_readable(server.fileno(), 0.0 if server.has_exits else _LOOK_EVERY_S)
            for exited in server.exits():
                fd = reports.pop(exited.pid)
                text = os.read(fd, 2 * _MAX_REPORT)
                os.close(fd)
                if text:
                    raise _error(msgspec.msgpack.decode(text, type=_Report))
                if exited.code != 0 and not tasks.is_complete:
                    # Killed: its task is free again, and a process is missing.
                    reports.update([_start(server, exited.pid)])
            if left := tasks.left():
                watch.look(left)
    except ForkServerGone:
        raise DataError(
            "the process that forks the workers of map_reduce was killed, and they with it. Finished tasks are kept; start "
            "again to go on from there, with fewer workers= if memory was short."
        ) from None
    finally:
        server.close()
        for fd in reports.values():
            os.close(fd)


def _start(server: ForkedServer, number: int) -> tuple[int, int]:
    reader, writer = os.pipe()
    try:
        child = server.fork(str(number), title="shoal map-reduce worker", fds={"report": writer})
    except ForkRefused as refused:
        os.close(reader)
        raise DataError(
            f"the system refused a process for map_reduce: {refused}. Finished tasks are kept; give fewer workers=, or raise "
            "the limit on processes (ulimit -u)."
        ) from None
    finally:
        os.close(writer)
    os.close(child.ended)
    return child.pid, reader


def _work(make_tasks: Callable[[int], Tasks], number: str, fds: dict[str, int]) -> int:
    """Main of a child: run tasks until none is left; a failure is reported."""
    task = ""
    try:
        tasks = make_tasks(int(number))
        try:
            tasks.finish()
        finally:
            task = tasks.current
    except Exception as error:
        os.write(fds["report"], msgspec.msgpack.encode(_report(task, error)))
        return 1
    return 0


def _report(task: str, error: Exception) -> _Report:
    is_ours = isinstance(error, ShoalError)
    text = "\n".join([str(error), *getattr(error, "__notes__", [])]) if is_ours else _shown(error)
    return _Report(task, text[-_MAX_REPORT // 2 :], is_ours)


def _shown(error: Exception) -> str:
    """The traceback from the user's first line on."""
    own = os.path.dirname(__file__)
    frames = traceback.TracebackException.from_exception(error)
    while frames.stack and os.path.dirname(frames.stack[0].filename) == own:
        frames.stack.pop(0)
    return "".join(frames.format())


def _error(report: _Report, on: str = "") -> Exception:
    if report.is_ours:
        return DataError(report.traceback)
    return MapReduceFailed(traceback=report.traceback, task=report.task, on=on)


@dataclass(frozen=True, slots=True)
class EngineTask:
    """A task of an aggregate as one of Ray or Spark: a function of files that all their machines see."""

    tasks: Tasks
    on: str
    directory: str
    """In which the call was made: files of the data may be named from there."""

    def __call__(self, name: str) -> None:
        if (
            not self.tasks.directory.is_dir()
        ):  # or the call has failed, and this task was left in the engine's queue
            raise DataError(
                f"a task of map_reduce does not see the folder {self.tasks.directory} on {socket.gethostname()}. Nothing of the result was "
                f"written; give a directory= that all machines of {self.on} see at the same path."
            )
        try:
            with contextlib.chdir(self.directory if os.path.isdir(self.directory) else "."):
                self.tasks.run(name)
        except Exception as error:  # most of shoal's own cannot be sent as they are
            raise _error(_report(name, error), self.on) from None


def finish_on_engine(tasks: Tasks, on: str, num_workers: int) -> None:
    """Run all tasks on an engine; `num_workers` at once where that is started for it."""
    task = EngineTask(tasks, on, os.getcwd())
    run_tasks(task, tasks.map_names, on=on, workers=num_workers)
    run_tasks(task, tasks.part_names, on=on, workers=num_workers)
