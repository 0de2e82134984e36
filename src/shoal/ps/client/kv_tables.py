"""What users of `shoal.ps.connect` declare and hand over, checked here before anything is sent.

Turns arrays, tensors and lists into what travels: keys strictly increasing,
one row of values each. Does not know where tables are.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from shoal.embedding.kernels import sum_back, unique
from shoal.embedding.rules import rule_named
from shoal.errors import ConfigError
from shoal.ps.kernels import first_wrong_key
from shoal.ps.numbering import FIRST_NAMED
from shoal.runtime.seeds import mix
from shoal.runtime.transport.messages.client_server import TableSpec

Arrays: TypeAlias = ArrayLike | torch.Tensor
Keys: TypeAlias = NDArray[np.int64]

Init: TypeAlias = Literal["zeros", "normal", "uniform"]
Dtype: TypeAlias = Literal["float32", "float64"]


_INT64 = np.iinfo(np.int64)


def spec_of(
    name: str,
    dim: int,
    rule: str,
    settings: dict[str, float],
    *,
    num_rows: int | None,
    init: Init,
    scale: float,
    seed: int,
    dtype: Dtype,
) -> TableSpec:
    """The table as servers know it; refused where there is no such."""
    for what, value, least in (("dim", dim, 1), ("num_rows", num_rows, 1)):
        if value is not None and (not isinstance(value, int) or value < least):
            raise _wrong(name, f"{what} must be an integer of at least {least}, got {value!r}")
    for what, given, known in (("dtype", dtype, get_args(Dtype)), ("init", init, get_args(Init))):
        if given not in known:
            raise _wrong(name, f"{what} must be one of {', '.join(known)}, got {given!r}")
    if not np.isfinite(scale) or scale < 0:
        raise _wrong(name, f"scale must be a finite number of at least 0, got {scale!r}")
    number = FIRST_NAMED + int.from_bytes(hashlib.blake2b(name.encode(), digest_size=5).digest(), "little")
    return TableSpec(
        number=number,
        name=name,
        dim=dim,
        dtype=dtype,
        rule=rule,
        settings=rule_named(rule).complete(settings),
        num_rows=num_rows,
        init=init,
        scale=float(scale),
        seed=mix(seed, number),  # tables of one seed have different rows
    )


def keys_of(table: TableSpec, keys: Arrays) -> NDArray[np.int64]:
    """The keys as int64, in the shape in which they were given; refused where a table cannot have them."""
    array = _array(keys)
    if array.size == 0 and not isinstance(keys, np.ndarray | torch.Tensor):
        array = array.astype(np.int64)  # numpy takes an empty list for floats
    if array.dtype.kind not in "iu":
        raise _wrong(table.name, f"keys must be integers, got {array.dtype}", "convert them to int64")
    if array.dtype == np.uint64 and array.size and int(array.max()) > _INT64.max:
        raise _wrong(table.name, f"keys must fit into int64, the largest is {int(array.max())}")
    array = np.ascontiguousarray(array, np.int64)
    if table.num_rows is not None and array.size:
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= table.num_rows:
            wrong = low if low < 0 else high
            raise _wrong(
                table.name,
                f"keys must be in 0..{table.num_rows - 1} (num_rows={table.num_rows}), got {wrong}",
            )
    return array


def values_of(table: TableSpec, values: Arrays, shape: tuple[int, ...]) -> NDArray[Any]:
    """One row of values per key of an array of this shape, as a matrix; refused where it is something else."""
    array = _array(values)
    if not isinstance(values, np.ndarray | torch.Tensor) and array.dtype.kind in "iuf":
        array = array.astype(table.dtype)  # plain numbers have no precision of their own
    if array.dtype != np.dtype(table.dtype):
        raise _wrong(
            table.name,
            f"values must be {table.dtype}, got {array.dtype}",
            f"convert them, or declare the table with dtype={str(array.dtype)!r}"
            if str(array.dtype) in get_args(Dtype)
            else f"convert them to {table.dtype}",
        )
    expected = [(*shape, table.dim)]
    if table.dim == 1:
        expected.append(shape)
    if array.shape not in expected:
        raise _wrong(
            table.name,
            f"keys of shape {shape} need values of shape {' or '.join(map(str, expected))}, got {array.shape}",
        )
    return np.ascontiguousarray(array).reshape(-1, table.dim)


def once_each(
    table: TableSpec, keys: Keys, values: NDArray[Any], *, merge: bool
) -> tuple[Keys, NDArray[Any]]:
    """Every key once, in increasing order: rows of the same key summed, or the last of them where rows are stored.

    What is right already is given back as it is.
    """
    if first_wrong_key(keys, int(_INT64.min), int(_INT64.max)) < 0:
        return keys, values
    found, inverse = unique(keys)
    if len(found) < len(keys) and not merge:
        counts = np.bincount(inverse)
        raise _wrong(
            table.name,
            f"{len(keys)} keys were pushed with merge=False, and {len(keys) - len(found)} of them are repeats: key "
            f"{int(found[counts.argmax()])} is there {int(counts.max())} times",
            "push each key once, or leave merge=False out",
        )
    out = np.empty((len(found), table.dim), table.dtype)
    if table.rule == "store":
        out[inverse] = values  # of repeats the last stays
    else:
        sum_back(values, inverse, out)
    return found, out


def _array(given: Arrays) -> NDArray[Any]:
    if isinstance(given, torch.Tensor):
        given = given.detach().cpu()
        if given.dtype == torch.bfloat16:
            raise ConfigError(
                "a bfloat16 tensor was given, and tables hold float32 or float64. Nothing was sent; convert it."
            )
        return given.numpy()
    return np.asarray(given)


def _wrong(table: str, problem: str, remedy: str = "") -> ConfigError:
    return ConfigError(f"table '{table}': {problem}. Nothing was sent{f'; {remedy}' if remedy else ''}.")
