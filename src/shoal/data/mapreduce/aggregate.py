"""The result of a map_reduce: keys in order, read from disk when they are asked for."""

from __future__ import annotations

import bisect
import contextlib
import os
import shutil
import weakref
from collections.abc import ItemsView, Iterator, Mapping
from pathlib import Path
from typing import Any

from shoal.data.mapreduce import keys
from shoal.data.mapreduce.keys import Key
from shoal.data.mapreduce.spill import RunFile, merged, record_bytes
from shoal.runtime.serialization import decode

_INDEX_EVERY = 64


class Aggregate(Mapping[Any, Any]):
    """Results by key, by increasing key. Nothing but a few keys per file is kept in memory.

    counts = data.map_reduce(words, add, add)
    counts["the"], len(counts)
    for word, count in counts.items(): ...
    table = counts.all_gather()          # a dict, on every host
    """

    def __init__(
        self, directory: Path, num_partitions: int, *, own_directory: Path, was_reused: bool
    ) -> None:
        """`own_directory` is where this host keeps its copy, if `directory` is shared by several."""
        self.directory, self._own_directory = directory, own_directory
        self.was_reused = was_reused
        """Nothing had to be computed: it was there, by its key."""
        self._files = [RunFile(directory / f"part-{number:05d}") for number in range(num_partitions)]
        self._indices: dict[int, tuple[list[bytes], list[int]]] = {}
        weakref.finalize(self, _close, self._files)

    def __len__(self) -> int:
        return sum(file.stretches[0].num_records for file in self._files)

    def __iter__(self) -> Iterator[Any]:
        return (key for key, _ in self._decoded())

    def items(self) -> ItemsView[Any, Any]:
        """(key, result) pairs by increasing key."""
        return _Items(self)

    def __getitem__(self, key: Any) -> Any:
        encoded = keys.encode(keys.plain(key))
        number = keys.partition_of(encoded, len(self._files))
        for found, value in self._files[number].records_from(self._start(number, encoded)):
            if found == encoded:
                return decode(value)
            if found > encoded:
                break
        raise KeyError(key)

    def all_gather(self) -> dict[Any, Any]:
        """Everything as a dict, by increasing key, on every rank that calls it; a host keeps its own copy on disk.

        Workers of one host read the same files. Hosts need a run directory
        that all of them see (their file locks must work there, as on NFS 4
        or Lustre): then they share the tasks, and this copies the result
        from there, checked, to each host's cache. Without one, every host
        computes the aggregate for itself, and the results are the same.
        """
        if self._own_directory != self.directory:
            self._copy()
        for file in self._files:
            for _ in file.records(0, check=True):
                pass
        return dict(self._decoded())

    def __repr__(self) -> str:
        return f"Aggregate({len(self)} keys in {self.directory})"

    def _decoded(self) -> Iterator[tuple[Key, Any]]:
        for key, value in merged([file.records(0) for file in self._files]):
            yield keys.decode(key), decode(value)

    def _start(self, number: int, encoded: bytes) -> int:
        """An offset in the file at or before the key."""
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

    def _copy(self) -> None:
        for file in self._files:
            there = self._own_directory / file.path.name
            if not there.exists():
                beside = there.with_name(f".{there.name}.{os.getpid()}")
                shutil.copyfile(file.path, beside)
                os.replace(beside, there)
        before, self._files = (
            self._files,
            [RunFile(self._own_directory / file.path.name) for file in self._files],
        )
        weakref.finalize(self, _close, self._files)
        _close(before)
        self.directory = self._own_directory


class _Items(ItemsView[Any, Any]):
    """Pairs in one pass; the mapping's own would look every key up."""

    _mapping: Aggregate

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return self._mapping._decoded()


def _close(files: list[RunFile]) -> None:
    for file in files:
        with contextlib.suppress(OSError):
            file.close()
