"""Skipped samples: bad ones that `on_error="skip"` leaves out, counted against a budget.

A stage raises `SkipSamples`, the reader leaves those samples out, and the feed records each of them
here and checks the budget.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.config import job as jobs
from shoal.errors import BadSample, TooManySkipped
from shoal.runtime import events, scratch

_INDEX = struct.Struct("<q")
_NUM_KEPT = 10_000  # of skipped samples, in memory: the job's events hold all of them


class SkipSamples(Exception):
    """Internal: some of the requested samples are bad and may be left out.

    Only the reader catches it, and requests the others again.
    """

    def __init__(
        self, bad: dict[int, BadSample], *, max_skips: int | None = None, stage: str = "source"
    ) -> None:
        """`bad` is by the index that was asked for; `max_skips` is the budget of the `stage` that says so."""
        self.bad, self.max_skips, self.stage = bad, max_skips, stage
        super().__init__(f"{len(bad)} bad samples")

    def __reduce__(self) -> tuple[object, ...]:
        return _revived, (self.bad, self.max_skips, self.stage)

    def renamed(self, asked: Iterable[Any], inner: Iterable[Any]) -> SkipSamples:
        """The same with the indices of a stage that was asked for `asked` and requested `inner`."""
        pairs = zip(asked, inner, strict=True)
        named = {int(own): self.bad[int(theirs)] for own, theirs in pairs if int(theirs) in self.bad}
        return SkipSamples(named, max_skips=self.max_skips, stage=self.stage)


def _revived(bad: dict[int, BadSample], max_skips: int | None, stage: str) -> SkipSamples:
    return SkipSamples(bad, max_skips=max_skips, stage=stage)


@dataclass(frozen=True, slots=True)
class Skipped:
    """One sample that was left out of one epoch."""

    epoch: int
    index: int
    """Index in the dataset's source, as in `Slice.indices`."""

    error: BadSample
    stage: str = "source"
    """The stage that left it out, and its budget:"""

    max_skips: int | None = None

    def facts(self) -> dict[str, Any]:
        told = {
            "epoch": self.epoch,
            "index": self.index,
            "where": self.error.where,
            "reason": self.error.reason,
        }
        for name in ("row", "line", "offset", "column"):
            value = getattr(self.error, name)
            if value is not None:
                told[name] = value
        return told


class SkipLog:
    """Bad samples that one process has left out of one dataset, counted against their budget.

    A budget counts samples, each once, over all epochs and workers of the job: they share a file.
    """

    def __init__(self, name: Callable[[], str] | None = None) -> None:
        """`name` is what all workers of a job call the dataset; without one, each of them meets all samples itself."""
        self.skipped: list[Skipped] = []
        """The first ten thousand, in the order in which they were met."""

        self.num_skipped = 0
        self._name = name
        self._seen: dict[tuple[str, int], _Seen] = {}

    def record(self, skipped: Sequence[Skipped]) -> None:
        """Write these down; raise TooManySkipped where they are more than their stage allows."""
        for one in skipped:
            self.num_skipped += 1
            if len(self.skipped) < _NUM_KEPT:
                self.skipped.append(one)
            events.emit("sample skipped", **one.facts())
            if one.max_skips is None:
                continue
            num_seen = self._budget(one.stage, one.max_skips).add(one.index)
            if num_seen > one.max_skips:
                raise TooManySkipped(num_skipped=num_seen, max_skips=one.max_skips, last=one.error)

    def _budget(self, stage: str, max_skips: int) -> _Seen:
        seen = self._seen.get((stage, max_skips))
        if seen is None:
            path = None
            if self._name is not None and jobs.current().launched:
                said = f"{self._name()} {stage} {max_skips}"
                path = scratch.directory("skipped") / hashlib.sha256(said.encode()).hexdigest()[:24]
            seen = self._seen[stage, max_skips] = _Seen(path)
        return seen


class _Seen:
    """Indices that count against a budget, this process's and those that others have written to the same file."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._num_read = path, 0
        self._indices: set[int] = set()

    def add(self, index: int) -> int:
        """Add an index; returns the number of different ones so far."""
        is_new = index not in self._indices
        self._indices.add(index)
        if self._path is not None:
            with self._path.open("ab+") as file:
                if is_new:
                    file.write(_INDEX.pack(index))  # appended, also beside other writers
                    file.flush()
                file.seek(self._num_read)
                data = file.read()
            whole = len(data) // _INDEX.size * _INDEX.size
            self._num_read += whole
            self._indices.update(other for (other,) in _INDEX.iter_unpack(data[:whole]))
        return len(self._indices)
