"""How tables are numbered, and which of them count their updates together.

Tables of a model are numbered in its own thousand; those that a low-level
client declared by name lie above all of them.
"""

from __future__ import annotations

from collections.abc import Iterable

TABLES_PER_MODEL, CHUNKS_PER_MODEL = 1_000, 100_000
FIRST_NAMED = 1 << 40
"""Number of the first table that was declared by name."""


def counter_of(table: int) -> int:
    """What counts the updates of a table: its model's steps, or, of one declared by name, its own pushes."""
    return table if table >= FIRST_NAMED else table // TABLES_PER_MODEL


def counter_of_update(tables: Iterable[int], model: int) -> int:
    """The same of an update of these tables: a model's, or a low-level push to a single table."""
    return next((table for table in tables if table >= FIRST_NAMED), model)
