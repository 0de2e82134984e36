"""`map_reduce`: arguments become tasks in a directory, and their results an Aggregate.

An aggregate with known identity is in the host's cache, `~/.cache/shoal/map_reduce/<key>/` (or
under XDG_CACHE_HOME), and is reused, also while it is being computed. It is evicted when unused for
30 days, or as the least recently used when the cache exceeds 8 GiB; the directory may be deleted at
any time. Any other aggregate is in the scratch directory of the job or process and is deleted with
it.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import itertools
import json
import os
import shutil
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from shoal.config import job as jobs
from shoal.config.job import Job
from shoal.data import arguments
from shoal.data.arguments import whole_number
from shoal.data.mapreduce.identity import identity_of
from shoal.data.mapreduce.shuffle import Shuffle
from shoal.data.mapreduce.spill import (
    Combine,
    Key,
    RunFile,
    decode_key,
    encode_key,
    merged,
    partition_of,
    plain_key,
    record_bytes,
)
from shoal.data.mapreduce.tasks import (
    MAX_MAP_TASKS,
    AggregatePlan,
    Indexed,
    Streamed,
    Tasks,
    finish_in_processes,
    finish_on_engine,
)
from shoal.data.order import Order
from shoal.data.reader import Reader
from shoal.data.remote.peers import PeerHosts
from shoal.data.sources.source import Source, name_of
from shoal.data.stream import Stream
from shoal.engines import registry
from shoal.engines import tasks as engine_tasks
from shoal.errors import ConfigError
from shoal.runtime import scratch
from shoal.runtime.serialization import decode

_INDEX_EVERY = 64


class Aggregate(Mapping[Any, Any]):
    """Results by key, by increasing key. Nothing but a few keys per file is kept in memory.

    counts = data.map_reduce(words, add, add)
    counts["the"], len(counts)
    for word, count in counts.items(): ...
    table = counts.all_gather()          # a dict, on every host
    """

    def __init__(self, directory: Path, num_partitions: int, *, was_reused: bool) -> None:
        self.directory = directory
        self.was_reused = was_reused
        """Nothing was computed: the result existed under its key."""
        self._files = [RunFile(directory / f"part-{number:05d}") for number in range(num_partitions)]
        self._indices: dict[int, tuple[list[bytes], list[int]]] = {}
        weakref.finalize(self, _close, self._files)

    def __len__(self) -> int:
        return sum(file.stretches[0].num_records for file in self._files)

    def __iter__(self) -> Iterator[Any]:
        return (key for key, _ in self._decoded())

    def items(self) -> ItemsView[Any, Any]:
        return _Items(self)

    def __getitem__(self, key: Any) -> Any:
        encoded = encode_key(plain_key(key))
        number = partition_of(encoded, len(self._files))
        for found, value in self._files[number].records_from(self._start(number, encoded)):
            if found == encoded:
                return decode(value)
            if found > encoded:
                break
        raise KeyError(key)

    def all_gather(self) -> dict[Any, Any]:
        """Everything as a dict, by increasing key, on every rank that calls it.

        Workers of one host read the same files; each host has a copy of them.
        """
        for file in self._files:
            for _ in file.records(0, check=True):
                pass
        return dict(self._decoded())

    def __repr__(self) -> str:
        return f"Aggregate({len(self)} keys in {self.directory})"

    def _decoded(self) -> Iterator[tuple[Key, Any]]:
        for key, value in merged([file.records(0) for file in self._files]):
            yield decode_key(key), decode(value)

    def _start(self, number: int, encoded: bytes) -> int:
        if number not in self._indices:
            sampled: tuple[list[bytes], list[int]] = ([], [])
            offset = 0
            for place, (key, value) in enumerate(self._files[number].records(0)):
                if place % _INDEX_EVERY == 0:
                    sampled[0].append(key)
                    sampled[1].append(offset)
                offset += record_bytes(key, value)
            self._indices[number] = sampled
        found, offsets = self._indices[number]
        at = bisect.bisect_right(found, encoded) - 1
        return offsets[at] if at >= 0 else 0


class _Items(ItemsView[Any, Any]):
    """Pairs in one pass; the mapping's own would look every key up."""

    _mapping: Aggregate

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return self._mapping._decoded()


def _close(files: list[RunFile]) -> None:
    for file in files:
        with contextlib.suppress(OSError):
            file.close()


_BATCH_SIZE = 1024


def map_reduce(
    source: Source | Stream,
    access: tuple[Reader, Order] | None,
    map: Callable[[Any], Iterable[tuple[Any, Any]]],
    combine: Combine | None,
    reduce: Combine | None,
    *,
    partitions: int = 8,
    batched: bool | int = False,
    key: str | None = None,
    workers: int = 1,
    on: str = "",
    buffer_bytes: int = 64 << 20,
    timeout_s: float = 300.0,
    directory: str | os.PathLike[str] | None = None,
) -> Aggregate:
    """`Dataset.map_reduce`, which says what the arguments mean."""
    _check(map, combine, reduce, key, timeout_s)
    num_partitions = whole_number("map_reduce(partitions=)", partitions, at_least=1)
    num_workers = whole_number("map_reduce(workers=)", workers, at_least=1)
    buffer_bytes = whole_number("map_reduce(buffer_bytes=)", buffer_bytes, at_least=1)
    size = _batch_size(batched)
    data = Streamed(source, size) if access is None else Indexed(*access, size)  # type: ignore[arg-type]
    plan = AggregatePlan(
        map=map,
        combine=combine,
        reduce=reduce or combine,
        num_partitions=num_partitions,
        buffer_bytes=buffer_bytes,
        num_map_tasks=max(1, min(MAX_MAP_TASKS, -(-data.num_samples // data.at_once))),
    )
    sizes = (num_partitions, plan.num_map_tasks, buffer_bytes, size, data.num_samples)
    identity = (
        _given(key, sizes)
        if key is not None
        else identity_of(source, access[1] if access else None, map, combine, reduce, sizes)
    )
    root = Path(arguments.directory("map_reduce(directory=)", directory)) if directory is not None else None
    own = cached(identity, root) if identity is not None else None
    job = jobs.share()
    if on:
        _refuse_engine(on, job)
    parts = [part for part in (source, access[1] if access else None) if part is not None]
    called = [name_of(fn) for fn in (map, combine, reduce) if fn is not None]
    description = _digest([[part.describe() for part in parts], called, sizes])
    shuffle: Shuffle | None = None
    if job.is_on_several_hosts:
        # All hosts know it by its description: the identity of their files may differ.
        name = numbered(description)
        place = own or in_scratch(f"{name}-host-{job.host}")
        shuffle = Shuffle(
            name, place, PeerHosts.of_job(), num_partitions=num_partitions, timeout_s=float(timeout_s)
        )
        shuffle.share()
    elif own is not None:
        place = own
    else:
        place = in_scratch(identity if identity is not None else numbered(description))
    run = f"job {jobs.current().run_dir}" if jobs.current().launched else uuid.uuid4().hex

    def tasks(number: int) -> Tasks:
        first = jobs.rank() * plan.num_map_tasks // max(1, jobs.num_workers()) + number
        return Tasks(plan, data, place, run=run, timeout_s=timeout_s, first=first, shuffle=shuffle)

    try:
        if is_complete(place, num_partitions):
            return Aggregate(place, num_partitions, was_reused=True)
        if on:
            folder = "directory=, a folder that all of them see at the same path" if root is None else ""
            name = "key=, which names the data and functions" if own is None else ""
            _finish_on_engine(tasks(0), on, num_workers, missing=folder or name)
        elif num_workers == 1:
            tasks(0).finish()
        else:
            finish_in_processes(tasks, num_workers)
    finally:
        if shuffle is not None:
            shuffle.close()
    if own is not None:
        sweep(own.parent, keep=own)
    return Aggregate(place, num_partitions, was_reused=False)


def _refuse_engine(on: str, job: Job) -> None:
    if job.num_workers > 1:
        raise ConfigError(
            f"map_reduce(on='{on}') runs the tasks on an engine, and the {job.num_workers} workers of this job share them themselves. "
            "Nothing was computed; leave on= out, or call it in a script of one process."
        )
    engine_tasks.parse(on)


def _finish_on_engine(tasks: Tasks, on: str, num_workers: int, *, missing: str) -> None:
    """In a folder of this call alone: the tasks of an engine take no claims, by which other processes would let go of theirs."""
    place = tasks.directory.absolute()  # tasks run in another directory
    folder = place / f"{_ENGINE}{uuid.uuid4().hex}"
    with engine_tasks.session(on):
        if missing and not registry.is_local(on):
            raise ConfigError(
                f"map_reduce(on='{on}') runs tasks on several machines, which exchange files. Nothing was computed; give {missing}."
            )
        folder.mkdir(mode=0o700)
        try:
            finish_on_engine(tasks.within(folder), on, num_workers)
            for name in tasks.part_names:
                os.replace(folder / name, place / name)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _given(key: str, sizes: tuple[Any, ...]) -> str:
    """The user gives the key; the division into tasks is added, or halves of two could meet."""
    return _digest(["given", key, sizes])


def _digest(parts: Any) -> str:
    return hashlib.blake2b(json.dumps(parts, default=str).encode(), digest_size=16).hexdigest()


def _batch_size(batched: bool | int) -> int | None:
    if batched is True:
        return _BATCH_SIZE
    return None if batched is False else whole_number("map_reduce(batched=)", batched, at_least=1)


def _check(map: Any, combine: Any, reduce: Any, key: Any, timeout_s: Any) -> None:
    for name, fn in (("map", map), ("combine", combine), ("reduce", reduce)):
        if not callable(fn) and not (fn is None and name != "map"):
            raise ConfigError(
                f"map_reduce({name}=) takes a function, got a {type(fn).__name__}: map(sample) yields (key, value) pairs, "
                "combine(key, values) and reduce(key, values) make one value of several."
            )
    if key is not None and (not isinstance(key, str) or not key):
        raise ConfigError(f"map_reduce(key=) takes a text that names the data and the functions, got {key!r}")
    if not isinstance(timeout_s, (int, float)) or not timeout_s > 0:
        raise ConfigError(f"map_reduce(timeout_s=) takes a positive number of seconds, got {timeout_s!r}")


_MAX_BYTES = 8 << 30
_MAX_IDLE_S = 30 * 86400.0
_IN_USE_S = 3600.0
_USED = "used"
_ENGINE = "engine-"

_num_calls: Counter[str] = Counter()


def cache_root() -> Path | None:
    """This host's cache of aggregates; None where there can be none."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    job = jobs.current()
    host = f"-host-{job.host}" if job.is_on_several_hosts else ""  # they may share a home directory
    root = Path(home) / "shoal" / f"map_reduce{host}"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return None
    return root if os.access(root, os.W_OK) else None


def cached(key: str, root: Path | None) -> Path | None:
    """The directory of an aggregate in the host's cache, made where it is missing; None where there can be none."""
    root = root or cache_root()
    if root is None:
        return None
    entry = root / key
    entry.mkdir(mode=0o700, parents=True, exist_ok=True)
    (entry / _USED).touch()
    return entry


def in_scratch(name: str) -> Path:
    """A directory that all workers of the job see, and that goes with it."""
    return scratch.directory("map_reduce", name)


def numbered(description: str) -> str:
    """Name of a call of the script, equal on every rank.

    Calls that look alike are numbered, so that a rank's additional calls do not collide with
    another's.
    """
    _num_calls[description] += 1
    return f"{description}-{_num_calls[description]}"


def sweep(root: Path, *, keep: Path, max_bytes: int = _MAX_BYTES, max_idle_s: float = _MAX_IDLE_S) -> None:
    """Remove aggregates unused for long, and the least recently used beyond the limit."""
    now = time.time()
    entries = sorted(((_last_used(entry), entry) for entry in root.iterdir() if entry.is_dir()), reverse=True)
    total = 0
    for last_used, entry in entries:
        total += _num_bytes(entry)
        idle_s = now - last_used
        if entry != keep and idle_s > _IN_USE_S and (idle_s > max_idle_s or total > max_bytes):
            shutil.rmtree(entry, ignore_errors=True)


def _last_used(entry: Path) -> float:
    files = itertools.chain([entry / _USED], (entry / "claims").glob("*"), entry.glob(f"{_ENGINE}*"))
    return max((file.stat().st_mtime for file in files if file.exists()), default=entry.stat().st_mtime)


def _num_bytes(entry: Path) -> int:
    return sum(file.stat().st_size for file in entry.iterdir() if file.is_file())


def is_complete(directory: Path, num_partitions: int) -> bool:
    return all((directory / f"part-{number:05d}").exists() for number in range(num_partitions))
