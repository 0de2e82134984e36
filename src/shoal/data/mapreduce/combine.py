"""What a map task gives, sorted: gathered in memory, combined there, spilled where it grows too large, merged.

Values of a key keep the order in which they were given, through every spill
and merge, so what a combine or reduce function sees does not depend on who
ran the task.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shoal.data.mapreduce import keys, values
from shoal.data.mapreduce.keys import Key
from shoal.data.mapreduce.records import Record, RunFile, RunWriter, merged
from shoal.data.sources.source import name_of

Combine = Callable[[Key, Any], Any]
"""(key, values) -> value: of a list of values, or in a `reduce` without a `combine` of an iterator over them."""

_MAX_RUNS = 64  # files of one task that are open at once
_KEY_BYTES = 120  # an entry of a dict, a list, and what holds a key


class Buffer:
    """The pairs of one map task, in at most about `max_bytes` of memory."""

    def __init__(
        self, directory: Path, name: str, *, combine: Combine | None, num_partitions: int, max_bytes: int
    ) -> None:
        self._directory, self._name = directory, name
        self._combine, self._num_partitions, self._max_bytes = combine, num_partitions, max_bytes
        # Keys that a dict tells apart as we do are kept as they are; the rest (1.0 is not 1 here) by their bytes.
        self._plain: dict[Key, list[Any]] = {}
        self._encoded: dict[bytes, list[Any]] = {}
        self._num_bytes = 0
        self._runs: list[Path] = []
        self.num_spills = 0

    def add(self, key: Any, value: Any) -> None:
        """One pair of the map function's."""
        kind = type(key)
        found: list[Any] | None
        if kind is str or kind is int:
            found = self._plain.get(key)
            if found is None:
                found = self._plain[key] = []
                self._num_bytes += _KEY_BYTES + (len(key) if kind is str else 8)
        else:
            encoded = keys.encode(keys.plain(key))
            found = self._encoded.get(encoded)
            if found is None:
                found = self._encoded[encoded] = []
                self._num_bytes += _KEY_BYTES + len(encoded)
        found.append(value)
        self._num_bytes += 40 if type(value) is int else 8 + values.num_bytes(value)
        if self._num_bytes > self._max_bytes:
            self._make_room()

    def write(self, path: Path) -> None:
        """Everything that was added, as one file of runs; the spilled files are gone."""
        opened: list[RunFile] = []
        writer = RunWriter(path, self._num_partitions)
        try:
            opened = [RunFile(run) for run in self._runs]
            rest = self._sorted()
            for partition in range(self._num_partitions):
                runs = [file.records(partition) for file in opened]
                merging = merged([*runs, rest[partition]]) if opened else rest[partition]
                for key, value in self._combined(merging) if opened else merging:
                    writer.add(partition, key, value)
            writer.commit()
        except BaseException:
            writer.abandon()
            raise
        finally:
            for file in opened:
                file.close()
            self.discard()

    def discard(self) -> None:
        """Remove what was spilled."""
        for run in self._runs:
            run.unlink(missing_ok=True)
        self._runs = []

    def _make_room(self) -> None:
        if self._combine is not None:
            for key, listed in self._plain.items():
                if len(listed) > 1:
                    listed[:] = [combined(self._combine, key, listed)]
            for encoded, listed in self._encoded.items():
                if len(listed) > 1:
                    listed[:] = [combined(self._combine, keys.decode(encoded), listed)]
            self._num_bytes = self._measured()
            if self._num_bytes <= self._max_bytes // 2:
                return
        self._spill()

    def _measured(self) -> int:
        total = 0
        for key, listed in itertools.chain(self._plain.items(), self._encoded.items()):
            size = len(key) if isinstance(key, (str, bytes)) else 8
            total += _KEY_BYTES + size + sum(8 + values.num_bytes(value) for value in listed)
        return total

    def _spill(self) -> None:
        if len(self._runs) == _MAX_RUNS:
            self._merge_runs()
        self.num_spills += 1
        path = self._directory / f".{self._name}-spill-{self.num_spills}"
        writer = RunWriter(path, self._num_partitions)
        try:
            for partition, records in enumerate(self._sorted()):
                for key, value in records:
                    writer.add(partition, key, value)
            writer.commit()
        except BaseException:
            writer.abandon()
            raise
        self._runs.append(path)

    def _merge_runs(self) -> None:
        """All spilled files as one."""
        before, self._runs = self._runs, []
        opened = [RunFile(run) for run in before]
        self.num_spills += 1
        path = self._directory / f".{self._name}-spill-{self.num_spills}"
        writer = RunWriter(path, self._num_partitions)
        try:
            for partition in range(self._num_partitions):
                for key, value in self._combined(merged([file.records(partition) for file in opened])):
                    writer.add(partition, key, value)
            writer.commit()
        except BaseException:
            writer.abandon()
            raise
        finally:
            for file in opened:
                file.close()
            for run in before:
                run.unlink(missing_ok=True)
        self._runs = [path]

    def _sorted(self) -> list[Iterator[Record]]:
        """What is in memory, out of it: a run per partition."""
        entries = [(keys.encode(key), listed) for key, listed in self._plain.items()]
        entries += self._encoded.items()
        self._plain, self._encoded, self._num_bytes = {}, {}, 0
        entries.sort(key=operator.itemgetter(0))
        parts: list[list[tuple[bytes, list[Any]]]] = [[] for _ in range(self._num_partitions)]
        for entry in entries:
            parts[keys.partition_of(entry[0], self._num_partitions)].append(entry)
        return [self._records(part) for part in parts]

    def _records(self, entries: list[tuple[bytes, list[Any]]]) -> Iterator[Record]:
        for encoded, listed in entries:
            if self._combine is not None and len(listed) > 1:
                listed = [combined(self._combine, keys.decode(encoded), listed)]
            for value in listed:
                yield encoded, values.encode(value)

    def _combined(self, records: Iterator[Record]) -> Iterator[Record]:
        if self._combine is None:
            yield from records
            return
        for encoded, group in itertools.groupby(records, key=operator.itemgetter(0)):
            listed = [value for _, value in group]
            if len(listed) == 1:
                yield encoded, listed[0]
            else:
                decoded = [values.decode(value) for value in listed]
                yield encoded, values.encode(combined(self._combine, keys.decode(encoded), decoded))


def combined(combine: Combine, key: Key, listed: Any, *, what: str = "combine") -> Any:
    """What the user's function makes of a key's values; its errors say which key."""
    try:
        return combine(key, listed)
    except Exception as error:
        error.add_note(f"raised by {what}({name_of(combine)}) for the key {key!r}")
        raise
