"""The rows of one table in one process: values and optimizer state side by side, found by key, changed by a rule.

Single-threaded. Knows nothing of servers, slots or ranks: ps/server/contents.py adds
those. A row nobody wrote has values that are a function of (seed, key).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from shoal.embedding.row_index import ArrayIndex, GrowingArray, HashedIndex, RowIndex
from shoal.embedding.rules import rule_named
from shoal.errors import ConfigError
from shoal.runtime.kernel_cache import INT, ask_ahead, floating_kernel, inlined, matrix, mixed, vector
from shoal.runtime.seeds import mix
from shoal.runtime.transport.messages.client_server import TableSpec

_BLOCK = 16384
_INITS = {"zeros": 0, "normal": 1, "uniform": 2}


class RowTable:
    """Rows by key. What is read or written comes as C-contiguous arrays of the table's dtype, keys strictly increasing.

    Rows are numbered 0..n-1 without holes, so every pass over the table is
    a pass over the beginning of an array.
    """

    def __init__(self, spec: TableSpec) -> None:
        self.spec, self.dim, self.dtype = spec, spec.dim, np.dtype(spec.dtype)
        if spec.dim < 1 or spec.num_rows == 0:
            raise ConfigError(
                f"table '{spec.name}' has {spec.dim} numbers per row and {spec.num_rows} rows; both must be at least 1. "
                "Nothing was declared."
            )
        self.rule = rule_named(spec.rule)
        self._settings = self.rule.complete(spec.settings)
        self.step = 0
        self.state_dim = self.rule.state_dim(spec.dim)
        self._first_state = self._settings[self.rule.first_state] if self.rule.first_state else 0.0
        self._init = (_INITS[spec.init], spec.scale, mix(spec.seed))
        self._table = GrowingArray((self.dim + self.state_dim,), self.dtype, spec.num_rows)
        self._index: RowIndex = (
            HashedIndex(self._table.row_bytes) if spec.num_rows is None else ArrayIndex(spec.num_rows)
        )
        self._rows = np.empty(_BLOCK, np.int32)
        self._new_state = np.empty((0, self.state_dim), self.dtype)

    @property
    def settings(self) -> dict[str, float]:
        """The rule's hyper-parameters; what is assigned may be a part of them."""
        return self._settings

    @settings.setter
    def settings(self, settings: dict[str, float]) -> None:
        self._settings = self.rule.complete({**self._settings, **settings})

    @property
    def num_rows(self) -> int:
        """Rows that there are."""
        return self._index.num_rows

    @property
    def num_bytes(self) -> int:
        """Of values and state."""
        return self.num_rows * self._table.row_bytes

    @property
    def num_index_bytes(self) -> int:
        """Of what finds a row by its key."""
        return self._index.num_bytes

    def pull(self, keys: np.ndarray[Any, Any], out: np.ndarray[Any, Any], *, create: bool) -> None:
        """Write the values of `keys` to `out`. With `create`, rows that are not there come to be."""
        for start in range(0, len(keys), _BLOCK):
            block = keys[start : start + _BLOCK]
            rows = self._find(block, create=create)
            _gather(rows, block, self._table.array, out[start : start + _BLOCK], *self._init)

    def apply(self, keys: np.ndarray[Any, Any], grads: np.ndarray[Any, Any], factor: float = 1.0) -> None:
        """One update of the table: the rule, with gradients times `factor`. Counts also where no key is given."""
        self.step += 1
        numbers = np.array(self.rule.numbers(self._settings, self.step), self.dtype)
        for start in range(0, len(keys), _BLOCK):
            rows = self._find(keys[start : start + _BLOCK], create=True)
            self.rule.kernel(rows, grads[start : start + _BLOCK], self._table.array, factor, numbers)

    def set(
        self,
        keys: np.ndarray[Any, Any],
        values: np.ndarray[Any, Any],
        state: np.ndarray[Any, Any] | None,
        step: int,
    ) -> None:
        """Set rows, and how many updates there were. Without `state` they have that of new rows."""
        self.step = step
        for start in range(0, len(keys), _BLOCK):
            rows = self._find(keys[start : start + _BLOCK], create=True)
            some = values[start : start + _BLOCK]
            with_state = self._new_state if state is None else state[start : start + _BLOCK]
            _scatter(rows, some, with_state, self._table.array, self._first_state)

    def read_rows(
        self, rows: np.ndarray[Any, Any]
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Keys in increasing order, values and state of these rows by number: copies."""
        keys = self._index.keys.array[rows]
        order = np.argsort(keys)
        whole = self._table.array[rows[order]]
        return (
            keys[order],
            np.ascontiguousarray(whole[:, : self.dim]),
            np.ascontiguousarray(whole[:, self.dim :]),
        )

    def drop_rows(self, is_dropped: np.ndarray[Any, Any]) -> None:
        """Drop rows by number (a bool per row). The last ones move to the holes, and what they held is given back."""
        num_left = len(is_dropped) - int(np.count_nonzero(is_dropped))
        if num_left == len(is_dropped):
            return
        keys = self._index.keys.array
        dropped = keys[: len(is_dropped)][is_dropped]
        holes = np.flatnonzero(is_dropped[:num_left])
        moved = num_left + np.flatnonzero(~is_dropped[num_left:])
        keys[holes] = keys[moved]
        for start in range(0, len(holes), _BLOCK):
            part = slice(start, start + _BLOCK)
            self._table.array[holes[part]] = self._table.array[moved[part]]
        self._index.rebuild(dropped, num_left)
        self._table.shrink(num_left)

    def _find(self, keys: np.ndarray[Any, Any], *, create: bool) -> np.ndarray[Any, Any]:
        rows = self._rows[: len(keys)]
        num_missing = self._index.find(keys, rows)
        if num_missing and create:
            first = self._index.num_rows
            self._table.reserve(first + num_missing)
            self._index.add(keys, rows, num_missing)
            last = self._index.num_rows
            _begin(
                self._index.keys.array[first:last],
                self._table.array[first:last],
                self.dim,
                self._first_state,
                *self._init,
            )
            if rows.min() < 0:
                raise ConfigError(
                    f"table '{self.spec.name}' has {self.spec.num_rows} rows, but a key lies outside 0.."
                    f"{self.spec.num_rows}-1. Rows before it may be new, none was changed."
                )
        return rows


# ---- what a row is before anybody wrote it ------------------------------------------------------------


@inlined
def _first_values(out: Any, i: int, dim: int, key: int, init: int, scale: float, seed: int) -> None:
    if init == 0:
        for d in range(dim):
            out[i, d] = 0
        return
    golden = np.uint64(0x9E3779B97F4A7C15)
    word = mixed(np.uint64(key) * golden + np.uint64(seed))
    for d in range(0, dim, 2):
        word += golden
        first = (np.float64(mixed(word) >> np.uint64(11)) + 0.5) * (1.0 / 9007199254740992.0)
        word += golden
        second = (np.float64(mixed(word) >> np.uint64(11)) + 0.5) * (1.0 / 9007199254740992.0)
        if init == 1:  # two normals from two uniforms (Box and Muller)
            radius, angle = np.sqrt(-2.0 * np.log(first)), 2.0 * np.pi * second
            first, second = radius * np.cos(angle), radius * np.sin(angle)
        else:
            first, second = 2.0 * first - 1.0, 2.0 * second - 1.0
        out[i, d] = scale * first
        if d + 1 < dim:
            out[i, d + 1] = scale * second


@floating_kernel(
    lambda dtype: (
        vector(types.int64), matrix(dtype, written=True), INT, types.float64, INT, types.float64, INT
    )
)  # fmt: skip
def _begin(keys: Any, table: Any, dim: int, first_state: float, init: int, scale: float, seed: int) -> None:
    for i in range(len(keys)):
        _first_values(table, i, dim, keys[i], init, scale, seed)
        for d in range(dim, table.shape[1]):
            table[i, d] = first_state


@floating_kernel(
    lambda dtype: (
        vector(types.int32), vector(types.int64), matrix(dtype), matrix(dtype, written=True),
        INT, types.float64, INT,
    )
)  # fmt: skip
def _gather(rows: Any, keys: Any, table: Any, out: Any, init: int, scale: float, seed: int) -> None:
    dim = out.shape[1]
    for i in range(len(rows)):
        ask_ahead(rows, i, table)
        row = rows[i]
        if row < 0:
            _first_values(out, i, dim, keys[i], init, scale, seed)
        else:
            for d in range(dim):
                out[i, d] = table[row, d]


@floating_kernel(
    lambda dtype: (
        vector(types.int32), matrix(dtype), matrix(dtype), matrix(dtype, written=True), types.float64
    )
)  # fmt: skip
def _scatter(rows: Any, values: Any, state: Any, table: Any, first_state: float) -> None:
    """Set rows; where `state` has none, to that of new rows."""
    dim = values.shape[1]
    for i in range(len(rows)):
        ask_ahead(rows, i, table)
        row = rows[i]
        for d in range(dim):
            table[row, d] = values[i, d]
        for d in range(dim, table.shape[1]):
            table[row, d] = state[i, d - dim] if len(state) else first_state
