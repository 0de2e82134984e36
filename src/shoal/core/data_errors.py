"""What is wrong with data that was found: its files, their columns, one sample.

Part of the tree of `core/errors.py`, under DataError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from shoal.core.errors import DataError


class BadSample(DataError):
    """One sample that cannot be read, and where it stands. Raised when it is asked for, not before."""

    def __init__(
        self,
        *,
        where: str,
        reason: str,
        row: int | None = None,
        line: int | None = None,
        offset: int | None = None,
        column: str | None = None,
        index: int | None = None,
    ) -> None:
        """`where` is a file, a table or a function; `row` and `line` count from 1, `offset` is in bytes."""
        self.where, self.reason, self.row, self.line = where, reason, row, line
        self.offset, self.column, self.index = offset, column, index
        address = [where]
        address += [] if row is None else [f"row {row:,}"]
        address += [] if line is None else [f"line {line:,}"]
        address += [] if offset is None else [f"byte {offset:,}"]
        address += [] if column is None else [f"column '{column}'"]
        sample = "" if index is None else f" This is sample {index} of the dataset."
        super().__init__(
            f"{', '.join(address)}: {reason.rstrip('.')}.{sample} Nothing was changed; mend it there, or leave such "
            "samples out, each of them counted, with on_error='skip'."
        )

    def at_index(self, index: int) -> Self:
        """The same, as the sample with this index of a dataset."""
        return type(self)(
            where=self.where,
            reason=self.reason,
            row=self.row,
            line=self.line,
            offset=self.offset,
            column=self.column,
            index=index,
        )


class TooManySkipped(DataError):
    """More bad samples than `max_skips` allows."""

    def __init__(self, *, num_skipped: int, max_skips: int, last: BadSample) -> None:
        self.num_skipped, self.max_skips, self.last = num_skipped, max_skips, last
        super().__init__(
            f"{num_skipped} bad {'sample was' if num_skipped == 1 else 'samples were'} left out, and max_skips={max_skips} allows no more. The last was: "
            f"{str(last).partition(' Nothing was changed;')[0]} Training stopped before the batch with it; what was "
            "trained and saved before is whole. Mend the data, or raise max_skips."
        )
        self.opened_by(last.opened_at)


class NoFiles(DataError):
    """A path, pattern or directory that gives no file to read."""

    def __init__(self, *, where: str, problem: str) -> None:
        self.where, self.problem = where, problem
        super().__init__(
            f"there is nothing to read at {where}: {problem}. Nothing was read; check the spelling, and that this host "
            "sees the path."
        )


class FileLost(DataError):
    """A file that is gone, that changed since it was opened, or that cannot be read."""

    def __init__(self, *, url: str, reason: str) -> None:
        self.url, self.reason = url, reason
        super().__init__(
            f"the file {url} cannot be read any further: {reason}. Nothing of it was used since; checkpoints written so "
            "far are whole. Put the file back as it was and go on with `shoal resume`, or start anew with the data as it "
            "is now."
        )


class FileDamaged(DataError):
    """A file whose bytes are not what its format says."""

    def __init__(self, *, url: str, problem: str) -> None:
        self.url, self.problem = url, problem
        super().__init__(
            f"the file {url} is damaged: {problem}. Nothing of that part was used; write or copy the file again, or leave "
            "it out."
        )


class NoSuchColumn(DataError):
    """A column that was asked for and is not there."""

    def __init__(self, *, asked: Sequence[str], there: Sequence[str], where: str, asked_by: str) -> None:
        self.asked, self.there, self.where = list(asked), list(there), where
        names = ", ".join(f"'{name}'" for name in asked)
        super().__init__(
            f"{where} has no column {names}, which {asked_by} asks for. It has {', '.join(there)}. Nothing was read; "
            "use one of those names."
        )


class SchemasDiffer(DataError):
    """Files that are read as one table and are not one."""

    def __init__(self, *, first: str, other: str, differences: Sequence[str]) -> None:
        self.first, self.other, self.differences = first, other, list(differences)
        super().__init__(
            f"the file {other} is not of one table with {first}: {'; '.join(self.differences[:5])}. Nothing was read; "
            "read them apart, choose columns=[...] that they share, or say the types with schema={...}."
        )


class SampleEndsReader(DataError):
    """Some samples that end every process that reads them."""

    def __init__(self, *, what: str, indices: Sequence[object], how: str, num_deaths: int) -> None:
        self.what, self.indices, self.how, self.num_deaths = what, list(indices), how, num_deaths
        super().__init__(
            f"{num_deaths} processes in turn were lost over the same {len(self.indices)} samples, the last one of them "
            f"{how}: {what}, the samples with indices {_first(self.indices)}. No sample was left out and nothing of this "
            "batch was trained. SIGKILL is mostly the system's answer to a lack of memory, so try fewer workers; else run "
            "the function on those samples in one process, with workers=0, to see where it crashes."
        )


class ReaderStuck(DataError):
    """A process that takes too long over one batch."""

    def __init__(
        self,
        *,
        reader: int,
        rank: int,
        what: str,
        indices: Sequence[object],
        waited_s: float,
        stack: Sequence[str],
    ) -> None:
        self.reader, self.rank, self.what, self.indices = reader, rank, what, list(indices)
        self.waited_s, self.stack = waited_s, list(stack)
        shown = self.stack if len(self.stack) <= 4 else [self.stack[0], *self.stack[-3:]]
        where = f" It stands at {', called from '.join(shown)}." if shown else ""
        super().__init__(
            f"reader {reader} of worker {rank} has been at {len(self.indices)} samples for {waited_s:g} s: {what}, the "
            f"samples with indices {_first(self.indices)}.{where} It was ended, no sample was left out, and nothing of "
            "this batch was trained. Mend what it waits for; if it is only slow, raise timeout_s in map(..., timeout_s=...)."
        )


class ReadersLost(DataError):
    """Processes that read are lost again and again, whatever they are given."""

    def __init__(self, *, num_lost: int, how: str) -> None:
        self.num_lost, self.how = num_lost, how
        super().__init__(
            f"{num_lost} processes that were to read data were lost before one of them had read a batch; the last {how}. No "
            "sample was left out; find out who ends them (a limit on memory or on processes, perhaps), or take workers= out "
            "of map."
        )


def _first(indices: Sequence[object], limit: int = 8) -> str:
    listed = ", ".join(str(index) for index in indices[:limit])
    return f"{listed} and {len(indices) - limit} more" if len(indices) > limit else listed


class DatabaseRefused(DataError):
    """A database that cannot be reached, or does not let us in, when a table of it is opened."""

    def __init__(self, *, place: str, reason: str) -> None:
        self.place, self.reason = place, reason
        super().__init__(
            f"the database {place} cannot be read: {reason}. Nothing was read; check the address, the user and the "
            "password, and that the database answers from this host."
        )


class DatabaseLost(DataError):
    """A database that closed the connection in the middle, and did not come back in time."""

    def __init__(self, *, place: str, reading: str, reason: str, num_attempts: int, waited_s: float) -> None:
        self.place, self.reading, self.reason = place, reading, reason
        self.num_attempts, self.waited_s = num_attempts, waited_s
        super().__init__(
            f"the connection to the database {place} was lost while reading {reading}, and {num_attempts} attempts within "
            f"{waited_s:.1f} s did not bring it back: {reason}. Nothing of that range was used, and checkpoints written so "
            "far are whole. Bring the database back and go on with `shoal resume`; timeout_s= says how long to wait for it."
        )


class QueryRefused(DataError):
    """A query that the database does not understand, or does not allow."""

    def __init__(self, *, place: str, what: str, reason: str) -> None:
        self.place, self.what, self.reason = place, what, reason
        super().__init__(
            f"the database {place} refuses {what}: {reason}. Nothing was read or changed; mend the query, or the names of "
            "table, key and columns."
        )


class TableChanged(DataError):
    """A table that has another number of rows than when it was opened."""

    def __init__(self, *, table: str, place: str, rows: str, then: int, now: int) -> None:
        self.table, self.place, self.rows, self.then, self.now = table, place, rows, then, now
        super().__init__(
            f"{table} at {place} changed while it was read: it had {then:,} rows ({rows}) when it was opened, and has "
            f"{now:,} now. Nothing of them was used, and checkpoints written so far are whole. Read from a copy, or from a "
            "query whose rows stay as they are, for instance up to a date; then start anew."
        )
