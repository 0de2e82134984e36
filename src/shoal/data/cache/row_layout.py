"""Where each column lies within a row: rows are kept one after the other, all columns of a row together.

So a row is one stretch of memory, or of a file, whatever the number of its
columns. Pure: arranges bytes, keeps none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

_WORD = 8
_TILE_BYTES = 1 << 20  # packed at once: what stays in a core's cache
_SMALL_ELEMENTS = (
    32_767  # copied at once: torch starts threads for more, which on a busy machine takes longer
)


class Field(NamedTuple):
    """One column: the type of its elements, and the shape of one row."""

    dtype: torch.dtype
    shape: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Of one row."""
        return self.dtype.itemsize * math.prod(self.shape)

    @classmethod
    def of(cls, dtype: np.dtype[Any], shape: tuple[int, ...] = ()) -> Field:
        """From numpy's type, which must have its like in torch."""
        return cls(torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype, shape)


@dataclass(frozen=True, slots=True)
class _Group:
    """Columns of plain numbers of one type, next to each other."""

    dtype: torch.dtype
    begin: int
    names: tuple[str, ...]

    @property
    def end(self) -> int:
        return self.begin + self.dtype.itemsize * len(self.names)


class RowLayout:
    """Columns within rows of `row_bytes`. Wide types come first, so that everything is aligned."""

    def __init__(self, fields: Mapping[str, Field]) -> None:
        self.fields = dict(fields)
        self._groups: list[_Group] = []
        self._wide: dict[str, int] = {}  # columns with a shape, and where they begin
        end = 0
        by_size = sorted(self.fields, key=lambda name: -self.fields[name].dtype.itemsize)
        for dtype in dict.fromkeys(self.fields[name].dtype for name in by_size):
            of_type = [name for name in self.fields if self.fields[name].dtype == dtype]
            numbers = tuple(name for name in of_type if not self.fields[name].shape)
            if numbers:
                self._groups.append(_Group(dtype, end, numbers))
                end = self._groups[-1].end
            for name in of_type:
                if self.fields[name].shape:
                    self._wide[name] = end
                    end += self.fields[name].num_bytes
        as_packed = [*(name for group in self._groups for name in group.names), *self._wide]
        self._is_in_order = as_packed == list(self.fields)
        widest = max((field.dtype.itemsize for field in self.fields.values()), default=_WORD)
        alignment = max(_WORD, widest)
        self.row_bytes = max(-(-end // alignment) * alignment, _WORD)

    @property
    def num_words(self) -> int:
        """Of eight bytes, in a row."""
        return self.row_bytes // _WORD

    def pack(self, columns: Mapping[str, NDArray[Any]], num_rows: int) -> Iterator[NDArray[np.uint8]]:
        """The rows of some columns, a stretch of them at a time. What is yielded is good until the next is."""
        most = max((len(group.names) for group in self._groups), default=1)
        tile = max(64, min(_TILE_BYTES // self.row_bytes, _SMALL_ELEMENTS // most))
        buffer = np.zeros((min(tile, num_rows), self.row_bytes), np.uint8)
        rows = torch.from_numpy(buffer)
        for begin in range(0, num_rows, tile):
            length = min(tile, num_rows - begin)
            for group in self._groups:
                joined = np.concatenate([columns[name][begin : begin + length] for name in group.names])
                side_by_side = torch.from_numpy(joined).view(group.dtype).view(len(group.names), length)
                rows[:length, group.begin : group.end].view(group.dtype).copy_(side_by_side.t())
            for name, at in self._wide.items():
                field = self.fields[name]
                part = np.ascontiguousarray(columns[name][begin : begin + length]).reshape(length, -1)
                buffer[:length, at : at + field.num_bytes] = part.view(np.uint8)
            yield buffer[:length]

    def unpack(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """The columns of some rows (int64, [n, num_words]), as tensors of their own."""
        raw = rows.view(torch.uint8)
        found: dict[str, torch.Tensor] = {}
        for group in self._groups:
            # Copied together: a transposition per type costs less than a copy per column.
            columns = raw[:, group.begin : group.end].view(group.dtype).t().contiguous()
            found.update(zip(group.names, columns.unbind(0), strict=True))
        for name, at in self._wide.items():
            field = self.fields[name]
            part = raw[:, at : at + field.num_bytes].view(field.dtype)
            found[name] = part.reshape(len(rows), *field.shape).contiguous()
        return found if self._is_in_order else {name: found[name] for name in self.fields}

    def describe(self) -> list[Any]:
        """What two processes compare before they share rows."""
        return [[name, str(field.dtype), list(field.shape)] for name, field in self.fields.items()]
