"""What a schema says of the features in a `tf.train.Example`: type, number of values, what to do without them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.data.formats.table import Column, Ragged
from shoal.data.formats.text_lists import packed
from shoal.errors import ConfigError

ListKind = Literal["bytes", "float", "int64"]
"""The three lists a feature can be."""

_NUMBERS = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")


@dataclass(frozen=True, slots=True)
class Feature:
    """One feature of the records in a TFRecord file.

    Feature("float32")                    one number
    Feature("float32", (4,))              always four
    Feature("int64", None)                any number, padded with -1 behind to the longest of a batch
    Feature("str", default="")            text, with what to take where a record has none
    Feature("str", None)                  a list of strings, an array of `str` in each sample
    Feature("uint8", (28, 28), raw=True)  an array that was written as its bytes
    """

    dtype: Any
    """float32 or float64, a whole number or bool, "str" or "bytes"; numpy's and torch's types are taken too."""

    shape: tuple[int, ...] | None = ()
    """Of one record's values: () one, (k,) always k, also of more dimensions; None: any number."""

    default: Any = None
    """Where a record lacks the feature: one number, or as many as the shape has. Without it such a record is bad."""

    key: str | None = None
    """Its name in the record, where that is another than the column's."""

    raw: bool = False
    """The values lie in the record as one string of bytes, little-endian, as numpy's `tobytes()` makes it."""


class Wanted(NamedTuple):
    """A feature as it is looked for: checked, with everything that follows from its declaration."""

    column: Column
    key: str
    list_kind: ListKind
    num_values: int | None
    """None where it may be any number."""

    raw: bool
    default: NDArray[Any] | bytes | None

    def describe(self) -> dict[str, Any]:
        """Fit for JSON; what differs here gives other samples."""
        default = self.default.tolist() if isinstance(self.default, np.ndarray) else self.default
        described = {**self.column.describe(), "key": self.key, "raw": self.raw}
        return described if default is None else {**described, "default": str(default)}


def wanted_features(schema: Mapping[str, Any]) -> tuple[Wanted, ...]:
    """The features of a schema: name of a column to a `Feature`, or to a type alone, which is one value."""
    if not isinstance(schema, Mapping) or not schema or not all(isinstance(name, str) for name in schema):
        raise ConfigError(
            "from_tfrecord needs schema={name: feature, ...}: records do not say which features they should have. For "
            'instance schema={"x": Feature("float32", (4,)), "label": "int64"}, with Feature from shoal.data. '
            f"Got {schema!r}; nothing was read."
        )
    return tuple(
        _wanted(str(name), feature if isinstance(feature, Feature) else Feature(feature))
        for name, feature in schema.items()
    )


def _wanted(name: str, feature: Feature) -> Wanted:
    shape = feature.shape
    if shape is not None and not _is_shape(shape):
        raise _refused(name, f"shape={shape!r} is no shape; () is one value, (4,) four, None any number")
    key = name if feature.key is None else feature.key
    kind = _text_kind(feature.dtype)
    if kind is not None:
        if feature.raw or (shape is not None and len(shape) > 1):
            raise _refused(
                name,
                f"a feature of {kind} is one string per record, or with shape=None or shape=(k,) a list of them, and "
                f"shape={feature.shape!r}, raw={feature.raw} asks for something else",
            )
        column = (Column.text if kind == "str" else Column.binary)(name, is_list=shape != ())
        if column.is_list:
            num_strings = None if shape is None else shape[0]
            return Wanted(
                column, key, "bytes", num_strings, False, _texts_default(name, kind, feature.default, shape)
            )
        return Wanted(column, key, "bytes", 1, False, _text_default(name, kind, feature.default))
    dtype = _number_type(name, feature.dtype)
    column = Column.ragged(name, dtype) if shape is None else Column(name, dtype, shape)
    num_values = None if shape is None else math.prod(shape)
    list_kind: ListKind = "bytes" if feature.raw else "float" if dtype.kind == "f" else "int64"
    default = _number_default(name, feature.default, dtype, shape)
    return Wanted(column, key, list_kind, num_values, feature.raw, default)


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, tuple) and all(isinstance(size, int) and size >= 1 for size in shape)


def _text_kind(dtype: Any) -> Literal["str", "bytes"] | None:
    if dtype in (str, "str", "string"):
        return "str"
    return "bytes" if dtype in (bytes, "bytes") else None


def _number_type(name: str, dtype: Any) -> np.dtype[Any]:
    try:
        if dtype is None:  # which numpy takes for float64
            raise TypeError
        found = np.dtype(str(dtype).removeprefix("torch.") if type(dtype).__module__ == "torch" else dtype)
    except TypeError:
        raise _refused(name, f"{dtype!r} is no type of numbers, nor 'str' or 'bytes'") from None
    if found.name not in _NUMBERS:
        raise _refused(name, f"{found} is none of {', '.join(_NUMBERS)}, 'str' and 'bytes'")
    return found.newbyteorder("=")


def _number_default(
    name: str, default: Any, dtype: np.dtype[Any], shape: tuple[int, ...] | None
) -> NDArray[Any] | None:
    if default is None:
        return np.zeros(0, dtype) if shape is None else None  # no values at all are a list too
    try:
        given = np.asarray(default)
        values = given.astype(dtype)
        if given.dtype.kind not in "fiub" or (dtype.kind != "f" and not np.array_equal(values, given)):
            raise ValueError
        return np.atleast_1d(values).ravel() if shape is None else np.broadcast_to(values, shape).copy()
    except (TypeError, ValueError, OverflowError):
        raise _refused(name, f"default={default!r} does not fit into {dtype} of shape {shape}") from None


def _text_default(name: str, kind: str, default: Any) -> bytes | None:
    if isinstance(default, str) and kind == "str":
        return default.encode()
    if default is None or isinstance(default, bytes):
        return default
    raise _refused(name, f"default={default!r} is not of type {kind}")


def _texts_default(
    name: str, kind: str, default: Any, shape: tuple[int, ...] | None
) -> NDArray[np.uint8] | None:
    """A list of strings as a row of its column."""
    if default is None:
        return np.zeros(0, np.uint8) if shape is None else None  # no strings at all are a list too
    listed = (
        [_text_default(name, kind, each) for each in default]
        if isinstance(default, (list, tuple))
        else [None]
    )
    strings = [each for each in listed if each is not None]
    if len(strings) < len(listed) or (shape is not None and len(strings) != shape[0]):
        raise _refused(name, f"default={default!r} is no list of {kind} of shape {shape}")
    return packed(Ragged.of_bytes(strings), np.array([0, len(strings)])).values


def _refused(name: str, problem: str) -> ConfigError:
    return ConfigError(f"the schema's feature '{name}' cannot be meant: {problem}. Nothing was read.")
