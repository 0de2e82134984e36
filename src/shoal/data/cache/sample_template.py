"""What samples of one dataset have in common: the nesting, and type and shape of every number in it.

Pure. A sample that fits a template can be kept as a row of bytes, and a batch
of them made without looking at the samples one by one.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch

from shoal.data.cache.row_layout import Field
from shoal.data.collate import to_tensor
from shoal.data.tree import Tree
from shoal.data.weights import Weighted

_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class Template(msgspec.Struct, frozen=True):
    """One node: a dict, tuple, list or weighted sample with parts, or a leaf with a type and a shape."""

    kind: str
    names: tuple[str, ...] = ()
    parts: tuple[Template, ...] = ()
    dtype: str = ""
    shape: tuple[int, ...] = ()

    @classmethod
    def of(cls, sample: Any) -> Template | None:
        """The template that a sample fits; None where it holds anything but numbers."""
        if isinstance(sample, dict):
            if not all(isinstance(name, str) for name in sample):
                return None
            return cls._of_parts("dict", tuple(sample.values()), tuple(sample))
        if isinstance(sample, Weighted):
            return cls._of_parts("weighted", sample)
        if type(sample) in (tuple, list):
            return cls._of_parts(type(sample).__name__, tuple(sample))
        if isinstance(sample, torch.Tensor):
            if sample.layout is not torch.strided or sample.device.type != "cpu" or not sample.numel():
                return None
            return cls("tensor", dtype=str(sample.dtype), shape=tuple(sample.shape))
        if isinstance(sample, (np.ndarray, np.generic)):
            tensor = to_tensor(np.asarray(sample))
            kind = "array" if isinstance(sample, np.ndarray) else "scalar"
            if tensor is None or not tensor.numel():
                return None
            return cls(kind, dtype=str(tensor.dtype), shape=tuple(tensor.shape))
        dtype = _NUMBERS.get(type(sample))
        if dtype is None or (type(sample) is int and not -(1 << 63) <= sample < 1 << 63):
            return None
        return cls("number", dtype=str(dtype))

    @classmethod
    def _of_parts(cls, kind: str, parts: tuple[Any, ...], names: tuple[str, ...] = ()) -> Template | None:
        made = [cls.of(part) for part in parts]
        if not made or any(part is None for part in made):
            return None
        return cls(kind, names, tuple(part for part in made if part is not None))

    def fields(self) -> dict[str, Field]:
        """One for each leaf, in the order in which they stand."""
        return {
            str(number): Field(_DTYPES[leaf.dtype], leaf.shape) for number, leaf in enumerate(self._leaves())
        }

    def columns(self, samples: list[Any]) -> dict[str, np.ndarray[Any, Any]]:
        """The leaves of samples that fit, side by side."""
        rows = [list(self._values(sample)) for sample in samples]
        columns = {}
        for number, leaf in enumerate(self._leaves()):
            values = [row[number] for row in rows]
            if leaf.kind == "tensor":
                stacked = torch.stack([value.detach() for value in values])
                # numpy has no word for some types, such as bfloat16; bytes are bytes.
                columns[str(number)] = _raw(stacked)
            else:
                columns[str(number)] = np.stack([np.asarray(value) for value in values])
                if leaf.kind == "number":
                    columns[str(number)] = columns[str(number)].astype(_numpy(leaf.dtype))
        return columns

    def batch(self, columns: dict[str, Any]) -> Tree:
        """The samples as one batch, as `collate` makes it."""
        return self._built([columns[str(number)] for number in range(len(columns))], as_batch=True)

    def samples(self, columns: dict[str, Any], num_samples: int) -> list[Any]:
        """The samples one by one, each leaf of the type it had."""
        listed = [_as_it_was(leaf, columns[str(number)]) for number, leaf in enumerate(self._leaves())]
        return [self._built([column[row] for column in listed], as_batch=False) for row in range(num_samples)]

    def _leaves(self) -> list[Template]:
        if not self.parts:
            return [self]
        return [leaf for part in self.parts for leaf in part._leaves()]

    def _values(self, sample: Any) -> list[Any]:
        if not self.parts:
            return [sample]
        inside = sample.values() if self.kind == "dict" else sample
        return [value for part, each in zip(self.parts, inside, strict=True) for value in part._values(each)]

    def _built(self, values: list[Any], *, as_batch: bool) -> Any:
        if not self.parts:
            return values.pop(0)
        parts = [part._built(values, as_batch=as_batch) for part in self.parts]
        if self.kind == "dict":
            return dict(zip(self.names, parts, strict=True))
        if self.kind == "weighted":
            return Weighted(*parts)
        return parts if self.kind == "list" and not as_batch else tuple(parts)


def _as_it_was(leaf: Template, column: torch.Tensor) -> Any:
    match leaf.kind:
        case "tensor":
            return column.unbind(0)
        case "number":
            return column.tolist()
    return column.numpy()


def _raw(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    try:
        return tensor.contiguous().numpy()
    except TypeError:
        return tensor.contiguous().view({1: torch.uint8, 2: torch.int16}[tensor.itemsize]).numpy()


def _numpy(dtype: str) -> Any:
    return torch.empty(0, dtype=_DTYPES[dtype]).numpy().dtype
