"""`where=[("price", ">", 3)]`: which rows to keep, decided by statistics where they suffice.

A list of conditions means all of them; a list of such lists means any of
those. A missing value fulfils no condition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.data.formats.arrow import as_numpy
from shoal.errors import ConfigError, NoSuchColumn

if TYPE_CHECKING:
    import pyarrow as pa

OPERATIONS = ("==", "=", "!=", "<", "<=", ">", ">=", "in", "not in")

_FUNCTIONS = {
    "==": "equal",
    "!=": "not_equal",
    "<": "less",
    "<=": "less_equal",
    ">": "greater",
    ">=": "greater_equal",
}


class Statistics(NamedTuple):
    """What is known of a column in a stretch of rows without reading it."""

    smallest: Any
    largest: Any
    has_nulls: bool
    """True also where nobody counted."""


class Condition(NamedTuple):
    """One comparison of a column with a value, or with several."""

    column: str
    operation: str
    value: Any
    is_exact: bool
    """Of a type whose statistics are its values: no NaN beside them, no long string cut short."""

    def decide(self, known: Statistics | None) -> bool | None:
        """Whether all rows fulfil it (True), or none (False); None where only reading them tells."""
        if known is None:
            return None
        low, high = known.smallest, known.largest
        try:
            if self.operation in ("in", "not in"):
                all_in = self.is_exact and low == high and low in self.value
                none_in = all(value < low or value > high for value in self.value)
                holds, fails = (all_in, none_in) if self.operation == "in" else (none_in, all_in)
            else:
                holds, fails = self._compare(low, high)
        except TypeError:
            return None
        if fails:
            return False
        return True if holds and self.is_exact and not known.has_nulls else None

    def _compare(self, low: Any, high: Any) -> tuple[bool, bool]:
        value = self.value
        one_value = self.is_exact and bool(low == high == value)
        outside = bool(value < low or value > high)
        match self.operation:
            case "==":
                return one_value, outside
            case "!=":
                return outside, one_value
            case "<":
                return bool(high < value), bool(low >= value)
            case "<=":
                return bool(high <= value), bool(low > value)
            case ">":
                return bool(low > value), bool(high <= value)
            case _:
                return bool(low >= value), bool(high < value)

    def mask(self, table: pa.Table) -> NDArray[np.bool_]:
        """Which rows fulfil it."""
        import pyarrow as pa
        import pyarrow.compute as pc

        array: Any = table.column(self.column)
        if self.operation in ("in", "not in"):
            found: Any = pc.is_in(array, value_set=pa.array(list(self.value)).cast(array.type))
            if self.operation == "not in":
                found = pc.and_(pc.invert(found), pc.is_valid(array))
        else:
            found = pc.call_function(_FUNCTIONS[self.operation], [array, pa.scalar(self.value)])
        return as_numpy(pc.fill_null(found, False).combine_chunks(), np.bool_)


class Predicate:
    """Any of several lists of conditions, each list as a whole."""

    def __init__(self, where: Any, types: Mapping[str, pa.DataType], file: str) -> None:
        """`types` are those of the columns that `file` has; refuses what cannot be compared."""
        self._any_of = [[_condition(one, types, file) for one in group] for group in _normal(where)]
        self.columns = sorted({one.column for group in self._any_of for one in group})

    def decide(self, known: Mapping[str, Statistics]) -> bool | None:
        """Whether all rows are kept (True), or none (False); None where only reading them tells."""
        decisions = []
        for group in self._any_of:
            each = [one.decide(known.get(one.column)) for one in group]
            decisions.append(False if False in each else None if None in each else True)
        return True if True in decisions else None if None in decisions else False

    def mask(self, table: pa.Table) -> NDArray[np.bool_]:
        """Which rows of a table with these columns are kept."""
        kept = np.zeros(table.num_rows, dtype=bool)
        for group in self._any_of:
            kept |= np.logical_and.reduce([one.mask(table) for one in group])
        return kept

    def describe(self) -> list[list[list[Any]]]:
        """As it was given, fit for JSON."""
        return [[[one.column, one.operation, _plain(one.value)] for one in group] for group in self._any_of]


def _normal(where: Any) -> list[Sequence[Any]]:
    if isinstance(where, tuple) and len(where) == 3 and isinstance(where[0], str):
        return [[where]]
    if not isinstance(where, (list, tuple)) or not where:
        raise ConfigError(_shape(where))
    if all(isinstance(group, list) and group for group in where):
        return list(where)
    return [list(where)]


def _condition(given: Any, types: Mapping[str, pa.DataType], file: str) -> Condition:
    import pyarrow as pa
    import pyarrow.compute as pc

    if not isinstance(given, (tuple, list)) or len(given) != 3 or given[1] not in OPERATIONS:
        raise ConfigError(_shape(given))
    name, operation, value = given
    if name not in types:
        raise NoSuchColumn(asked=[name], there=list(types), where=file, asked_by="where=")
    operation, kind = "==" if operation == "=" else operation, types[name]
    if operation in ("in", "not in"):
        if isinstance(value, str) or not isinstance(value, (list, tuple, set, frozenset)):
            raise ConfigError(
                f"where= compares '{name}' by '{operation}' with {value!r}: give a list of values"
            )
        if not value or any(each is None for each in value):
            raise ConfigError(
                f"where= compares '{name}' by '{operation}' with {value!r}: give values, at least one"
            )
        value = sorted(value)
    elif value is None:
        raise ConfigError(
            f"where= compares '{name}' with None, and a missing value is neither equal to anything nor above or below it"
        )
    try:
        if operation in ("in", "not in"):
            pa.array(value).cast(kind)
        else:
            value = _converted(value, kind)
            pc.call_function(_FUNCTIONS[operation], [pa.array([None], kind), pa.scalar(value)])
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        raise ConfigError(
            f"where= compares the column '{name}', of type {kind}, with {value!r}, which cannot be: {error}"
        ) from error
    is_exact = bool(pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_temporal(kind))
    return Condition(name, operation, value, is_exact)


def _converted(value: Any, kind: Any) -> Any:
    """A time may be given as text."""
    import pyarrow as pa

    if isinstance(value, str) and pa.types.is_temporal(kind):
        return pa.scalar(value).cast(kind).as_py()
    return value


def _shape(given: Any) -> str:
    return (
        f"where= takes conditions like [('price', '>', 3), ('country', 'in', ['de', 'fr'])], all of which must hold, or "
        f"a list of such lists, any of which must; the operations are {', '.join(OPERATIONS)}. Got {given!r}."
    )


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value if isinstance(value, (bool, int, float, str)) else str(value)
