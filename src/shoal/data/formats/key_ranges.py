"""Ranges of a key that together are a whole table, each of about as many rows.

Pure: SQL and numbers. The outermost ranges are open, so that a row that comes
later falls into one of them and is noticed; rows without a key are a range of
their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_TARGET_BYTES = 8 << 20
_FEWEST_ROWS, _MOST_ROWS = 1024, 1 << 17


class KeyRange(NamedTuple):
    """Rows whose key lies in [low, high), where None is no limit; or rows without a key; or all rows."""

    num_rows: int
    low: str | None = None
    """A value as SQL has it."""

    high: str | None = None
    is_null: bool | None = None
    """Whether they are rows without a key, or with one; None where there is no key at all."""

    def condition(self, key: str) -> str:
        """SQL for which rows they are; "" for all."""
        if self.is_null:
            return f"{key} IS NULL"
        limits = [] if self.low is None else [f"{key} >= {self.low}"]
        limits += [] if self.high is None else [f"{key} < {self.high}"]
        if not limits and self.is_null is False:
            return f"{key} IS NOT NULL"
        return " AND ".join(limits)

    def shown(self, key: str) -> str:
        """For people."""
        return self._replace(low=_short(self.low), high=_short(self.high)).condition(key) or "all rows"


def rows_per_range(num_rows: int, row_bytes: int, partitions: int | None) -> int:
    """How many rows a range should have: as `partitions` says, or a few MiB."""
    if partitions is not None:
        return max(-(-num_rows // partitions), 1)
    return max(min(_TARGET_BYTES // max(row_bytes, 1), _MOST_ROWS), _FEWEST_ROWS)


def cuts_query(relation: str, key: str, literal: str, step: int) -> str:
    """SQL for every step-th value of a key, and how many rows lie before it: one pass, in the order of the key.

    `literal` is SQL that gives the value named k as a literal.

    A value that many rows share is given once, and its rows stay together.
    """
    return (
        f"SELECT DISTINCT {literal} AS cut, num_before FROM ("
        f"SELECT {key} AS k, row_number() OVER (ORDER BY {key}) - 1 AS number, "
        f"rank() OVER (ORDER BY {key}) - 1 AS num_before FROM {relation} WHERE {key} IS NOT NULL"
        f") AS numbered WHERE number % {step} = 0 ORDER BY num_before"
    )


def ranges_between(cuts: Sequence[tuple[str, int]], *, num_keyed: int, num_null: int) -> list[KeyRange]:
    """The ranges from cut to cut; the first cut is the smallest key there is."""
    limits = [None, *(value for value, _ in cuts[1:]), None]
    starts = [*(int(start) for _, start in cuts), num_keyed]
    ranges = [
        KeyRange(starts[number + 1] - starts[number], limits[number], limits[number + 1], is_null=False)
        for number in range(len(cuts))
    ]
    return ranges + ([KeyRange(num_null, is_null=True)] if num_null else [])


def _short(literal: str | None) -> str | None:
    return literal if literal is None or len(literal) <= 40 else f"{literal[:37]}..."
