"""From serialized `tf.train.Example`s to columns, by a schema.

A record that is no Example, or does not hold what the schema says, is named
with its reason; the others are not held up by it. Of 40 numbers each, a record
costs 4 µs; protobuf's own classes took 55, TensorFlow's parse_example takes 4.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.data.formats import example_kernels as kernels
from shoal.data.formats.arrow import BadRows
from shoal.data.formats.example_schema import Wanted
from shoal.data.formats.example_wire import feature_in, list_features
from shoal.data.formats.table import Ragged
from shoal.data.formats.text_lists import packed
from shoal.errors import ConfigError

_KINDS = {"bytes": kernels.BYTES, "float": kernels.FLOATS, "int64": kernels.INTS}
_MOST_LISTED = 100  # records of a stretch that are looked at again to say what they hold

Ints = NDArray[np.int64]
Flags = NDArray[np.uint8]
Where = NDArray[np.bool_]


class _Read(NamedTuple):
    """What the walk over a stretch of records left of one feature."""

    data: NDArray[np.uint8]
    is_found: Where
    is_absent: Where
    values: NDArray[Any]
    """Of a feature with a fixed number of numbers, in the type in which records hold them: [records, numbers]."""

    begins: Ints
    ends: Ints
    counts: Ints
    """Of the others: where a list of any length, or a byte string, lies."""


class _Found(NamedTuple):
    column: NDArray[Any] | Ragged
    reasons: dict[int, str]
    """Record to what is wrong with its values."""


class ExampleParser:
    """Parses stretches of records at once. Several threads may."""

    def __init__(self, features: tuple[Wanted, ...]) -> None:
        self._features = features
        keys = [feature.key.encode() for feature in features]
        if len(set(keys)) < len(keys):
            twice = next(feature.key for feature in features if keys.count(feature.key.encode()) > 1)
            raise ConfigError(
                f"the schema reads the feature '{twice}' into two columns. Nothing was read; read it once, and make the "
                "other column of it with map."
            )
        self._names = np.frombuffer(b"".join(keys), np.uint8)
        self._name_ends = np.cumsum([len(key) for key in keys], dtype=np.int64)
        self._name_places = np.empty(1 << (4 * len(keys)).bit_length(), np.int32)
        for kernel in (
            kernels.locate,
            kernels.fill_floats,
            kernels.fill_ints,
            kernels.fill_spans,
            kernels.copy_spans,
        ):
            kernel.prepare()  # here, so that processes forked from this one need not
        kernels.place_names(self._names, self._name_ends, self._name_places)
        self._kinds = np.array([_KINDS[feature.list_kind] for feature in features], np.int64)
        self._widths = np.array([_width(feature) for feature in features], np.int64)
        self._places = np.zeros(len(features), np.int64)
        self._num_floats, self._num_ints, self._num_spans = 0, 0, 0
        for number, (kind, width) in enumerate(zip(self._kinds, self._widths, strict=True)):
            if kind == kernels.BYTES or width == kernels.ANY:
                self._places[number] = self._num_spans
                self._num_spans += 1
            elif kind == kernels.FLOATS:
                self._places[number] = self._num_floats
                self._num_floats += int(width)
            else:
                self._places[number] = self._num_ints
                self._num_ints += int(width)

    def parse(
        self, data: NDArray[np.uint8], begins: Ints, ends: Ints, wrong: Flags, bad: BadRows
    ) -> dict[str, NDArray[Any] | Ragged]:
        """Columns of the records at data[begins:ends]; what is wrong with one of them goes to `bad`.

        Records that are `wrong` already are left out and not named.
        """
        num_records = len(begins)
        states = np.zeros((num_records, len(self._features)), np.uint8)
        floats = np.zeros((num_records, self._num_floats), np.uint32)
        ints = np.zeros((num_records, self._num_ints), np.uint64)
        firsts, lasts, counts = (np.zeros((num_records, self._num_spans), np.int64) for _ in range(3))
        broken = wrong.copy()
        kernels.locate(
            data, begins, ends, self._names, self._name_ends, self._name_places,
            self._kinds, self._widths, self._places, states,
            floats.ravel(), ints.ravel(), firsts.ravel(), lasts.ravel(), counts.ravel(), broken,
        )  # fmt: skip
        states[broken != 0] = kernels.BROKEN
        for row in np.flatnonzero(broken > wrong).tolist():
            bad.add(row, None, "its data is no tf.train.Example: it cannot be read to its end")
        columns: dict[str, NDArray[Any] | Ragged] = {}
        for number, feature in enumerate(self._features):
            state, place = states[:, number], int(self._places[number])
            is_spans = feature.list_kind == "bytes" or feature.num_values is None
            matrix = floats.view(np.float32) if feature.list_kind == "float" else ints.view(np.int64)
            read = _Read(
                data,
                state == kernels.FOUND,
                state == kernels.NOT_THERE,
                matrix[:, place : place + int(feature.num_values or 0)] if not is_spans else matrix[:, :0],
                *(array[:, place].copy() if is_spans else begins[:0] for array in (firsts, lasts, counts)),
            )
            columns[feature.column.name], reasons = _column(feature, read)
            for row in np.flatnonzero((state != kernels.FOUND) & (broken == 0)).tolist():
                if state[row] == kernels.NOT_THERE and feature.default is not None:
                    continue
                record = data[begins[row] : ends[row]].tobytes() if len(bad) < _MOST_LISTED else None
                reasons[row] = _reason(feature, int(state[row]), record)
            for row, reason in reasons.items():
                bad.add(row, feature.column.name, reason)
        return columns


def _width(feature: Wanted) -> int:
    if feature.list_kind == "bytes":
        return kernels.ANY if feature.column.is_list else 1
    return kernels.ANY if feature.num_values is None else feature.num_values


def _reason(feature: Wanted, state: int, record: bytes | None) -> str:
    declared = _declared(feature)
    if state == kernels.NOT_THERE:
        there = "" if record is None else f". It has {list_features(record)}"
        return f"the record has no feature '{feature.key}', and the schema no default for it{there}"
    if state == kernels.BROKEN:
        return "its list of values cannot be read to its end"
    if record is None:
        return f"the record holds something else than the schema's {declared}"
    return f"the record holds {feature_in(record, feature.key)}, the schema says {declared}"


def _declared(feature: Wanted) -> str:
    if feature.raw:
        return f"the bytes of {feature.column.type_name}"
    if feature.num_values is None:
        return f"a {feature.list_kind} list of any number of values"
    return f"a {feature.list_kind} list of {feature.num_values} value{'' if feature.num_values == 1 else 's'}"


def _column(feature: Wanted, read: _Read) -> _Found:
    if feature.raw:
        return _raw_column(feature, read)
    if feature.column.is_list:
        return _texts_column(feature, read)
    if feature.list_kind == "bytes":
        return _text_column(feature, read)
    return _ragged_column(feature, read) if feature.num_values is None else _fixed_column(feature, read)


def _fixed_column(feature: Wanted, read: _Read) -> _Found:
    values, is_out = _converted(read.values, feature)
    column = values.reshape(len(values), *feature.column.shape)
    if feature.default is not None:
        column[read.is_absent] = feature.default
    rows = np.flatnonzero(is_out.any(axis=1)).tolist() if is_out is not None else ()
    return _Found(column, dict.fromkeys(rows, _out_of_range(feature)))


def _ragged_column(feature: Wanted, read: _Read) -> _Found:
    default = feature.default
    assert isinstance(default, np.ndarray)
    counts = np.where(read.is_found, read.counts, 0)
    lengths = np.where(read.is_absent, len(default), counts)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    places = (read.data, read.begins, read.ends, counts, offsets[:-1])
    if feature.list_kind == "float":
        bits = np.zeros(int(offsets[-1]), np.uint32)
        kernels.fill_floats(*places, bits)
        values, is_out = _converted(bits.view(np.float32), feature)
    else:
        words = np.zeros(int(offsets[-1]), np.uint64)
        kernels.fill_ints(*places, words)
        values, is_out = _converted(words.view(np.int64), feature)
    if len(default) and read.is_absent.any():
        values[offsets[:-1][read.is_absent][:, None] + np.arange(len(default))] = default
    rows = () if is_out is None else np.searchsorted(offsets, np.flatnonzero(is_out), side="right") - 1
    return _Found(Ragged(values, offsets), dict.fromkeys(map(int, rows), _out_of_range(feature)))


def _converted(values: NDArray[Any], feature: Wanted) -> tuple[NDArray[Any], Where | None]:
    """The values in the type declared, and which of them do not fit into it."""
    dtype = feature.column.dtype
    if values.dtype == dtype:
        return values, None
    if dtype.kind == "f":
        with np.errstate(over="ignore"):  # float16 has infinities of its own
            return values.astype(dtype), None
    limits = np.iinfo(dtype) if dtype.kind != "b" else None
    low, high = (0, 1) if limits is None else (int(limits.min), int(limits.max))
    return values.astype(dtype), (values < low) | (values > min(high, np.iinfo(np.int64).max))


def _out_of_range(feature: Wanted) -> str:
    return f"a value does not fit into the schema's {feature.column.dtype}"


def _text_column(feature: Wanted, read: _Read) -> _Found:
    texts = _gathered(read, feature.default if isinstance(feature.default, bytes) else b"")
    if feature.column.kind == "bytes":
        return _Found(texts, {})
    reasons = dict.fromkeys(_not_utf8(texts), "it is no text in UTF-8; read it as bytes")
    return _Found(_blanked(texts, list(reasons)), reasons)


def _texts_column(feature: Wanted, read: _Read) -> _Found:
    """Lists of strings, a packed row each."""
    counts = np.where(read.is_found, read.counts, 0)
    offsets = np.concatenate(([0], np.cumsum(counts)))
    firsts, lasts = np.zeros((2, int(offsets[-1])), np.int64)
    kernels.fill_spans(read.data, read.begins, read.ends, counts, offsets[:-1], firsts, lasts)
    texts = Ragged(
        np.empty(int((lasts - firsts).sum()), np.uint8), np.concatenate(([0], np.cumsum(lasts - firsts)))
    )
    kernels.copy_spans(read.data, firsts, lasts, texts.offsets, texts.values)
    reasons: dict[int, str] = {}
    if feature.num_values is not None:
        for row in np.flatnonzero(read.is_found & (counts != feature.num_values)).tolist():
            reasons[row] = f"the record holds {counts[row]} values, the schema says {_declared(feature)}"
    if feature.column.kind == "text":
        wrong = _not_utf8(texts)
        of_row = np.searchsorted(offsets, wrong, side="right") - 1
        reasons |= dict.fromkeys(map(int, of_row), "it is no text in UTF-8; read it as bytes")
        texts = _blanked(texts, wrong)
    lists, default = packed(texts, offsets), feature.default
    if isinstance(default, np.ndarray) and len(default) and read.is_absent.any():
        rows = [default if read.is_absent[row] else _row_values(lists, row) for row in range(lists.num_rows)]
        lists = Ragged.of(rows, np.uint8)
    return _Found(lists, reasons)


def _raw_column(feature: Wanted, read: _Read) -> _Found:
    """Arrays that were written as bytes."""
    dtype, shape = feature.column.dtype, feature.column.shape
    lengths, default = read.ends - read.begins, feature.default
    if feature.num_values is None:
        wrong = read.is_found & (lengths % dtype.itemsize != 0)
    else:
        wrong = read.is_found & (lengths != feature.num_values * dtype.itemsize)
    reasons = {
        row: f"the record holds {lengths[row]} bytes, the schema says {_declared(feature)}"
        for row in np.flatnonzero(wrong).tolist()
    }
    read = read._replace(is_found=read.is_found & ~wrong)
    little = dtype.newbyteorder("<")
    if feature.num_values is None:
        assert isinstance(default, np.ndarray)
        found = _gathered(read, default.astype(little).tobytes())
        values = found.values.view(little).astype(dtype, copy=False)
        return _Found(Ragged(values, found.offsets // dtype.itemsize), reasons)
    column = np.zeros((len(lengths), *shape), dtype)
    column[read.is_found] = _gathered(read, b"").values.view(little).reshape(-1, *shape)
    if default is not None:
        column[read.is_absent] = default
    return _Found(column, reasons)


def _gathered(read: _Read, default: bytes) -> Ragged:
    """The byte strings one behind the other, the default where there is none; nothing for a record that is bad."""
    firsts, lasts = np.where(read.is_found, read.begins, 0), np.where(read.is_found, read.ends, 0)
    data = read.data
    if default and read.is_absent.any():
        firsts[read.is_absent], lasts[read.is_absent] = len(data), len(data) + len(default)
        data = np.concatenate((data, np.frombuffer(default, np.uint8)))
    offsets = np.concatenate(([0], np.cumsum(lasts - firsts)))
    values = np.empty(int(offsets[-1]), np.uint8)
    kernels.copy_spans(data, firsts, lasts, offsets, values)
    return Ragged(values, offsets)


def _not_utf8(texts: Ragged) -> list[int]:
    """Rows that are no UTF-8; all are looked at in one go, and only then one by one."""
    starts = texts.offsets[:-1][np.diff(texts.offsets) > 0]
    # Whole together, they are whole apart where none begins in the middle of a character.
    if _is_utf8(texts.values.tobytes()) and not ((texts.values[starts] & 0xC0) == 0x80).any():
        return []
    return [row for row in range(texts.num_rows) if not _is_utf8(_row(texts, row))]


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _blanked(texts: Ragged, wrong: list[int]) -> Ragged:
    """With nothing at the rows that are no text: what stands there must still be."""
    if not wrong:
        return texts
    rows = set(wrong)
    return Ragged.of_bytes([b"" if row in rows else _row(texts, row) for row in range(texts.num_rows)])


def _row(texts: Ragged, row: int) -> bytes:
    return _row_values(texts, row).tobytes()


def _row_values(texts: Ragged, row: int) -> NDArray[Any]:
    return texts.values[texts.offsets[row] : texts.offsets[row + 1]]
