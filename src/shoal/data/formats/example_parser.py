"""Parser of serialized `tf.train.Example`s: from records to columns, by a schema.

    Example   { Features features = 1 }
    Features  { map<string, Feature> feature = 1 }
    Feature   { oneof { BytesList = 1, FloatList = 2, Int64List = 3 } }
    ...List   { repeated value = 1 }       numbers packed into one field, or, by old writers, one field each

Every length is checked against its container; nothing is read outside its record. Features of a
fixed number of values are read on the first walk, while the record is in the cache (a walk per
feature took three times as long); lists of any length are only located, because their space is not
known yet. A record that is no Example, or does not match the schema, is named with its reason and
does not stop the others. With 40 numbers each, a record costs 4 µs; protobuf's own classes took 55,
TensorFlow's parse_example takes 4.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.data.formats.example import Wanted, feature_in, list_features
from shoal.data.formats.table import BadRows, Ragged, pack_lists
from shoal.errors import ConfigError
from shoal.runtime.kernel_cache import inlined, kernel, matrix, types, vector

ABSENT, BYTES, FLOATS, INTS = 0, 1, 2, 3
"""Kinds of a list; the last three are the numbers of their fields."""

NOT_THERE, FOUND, OTHER_KIND, OTHER_COUNT, BROKEN = 0, 1, 2, 3, 4
"""States of a feature in a record, as `locate` finds them."""

ANY = -1
"""Number of values of a list of any length."""

_END = -1  # of a walk over a message that broke off
_UNCOUNTABLE = -(1 << 62)  # a count that no other can make good
_HASH_START, _HASH_STEP = 0xCBF29CE484222325, 0x100000001B3


@inlined
def _varint(data: Any, at: int, end: int) -> tuple[Any, int]:
    """A number of seven bits per byte, and where it ends; _END where it does not."""
    if at < end and data[at] < 0x80:  # as nearly all tags and lengths
        return np.uint64(data[at]), at + 1
    value, shift = np.uint64(0), np.uint64(0)
    while at < end and shift < np.uint64(70):
        byte = np.uint64(data[at])
        at += 1
        value |= (byte & np.uint64(0x7F)) << shift if shift < np.uint64(64) else np.uint64(0)
        if byte < np.uint64(0x80):
            return value, at
        shift += np.uint64(7)
    return np.uint64(0), _END


@inlined
def _span(data: Any, at: int, end: int) -> tuple[Any, Any]:
    """Begin and end of a field that says its length first; _END where it would pass the end."""
    length, begin = _varint(data, at, end)
    if begin < 0 or length > np.uint64(end - begin):
        return _END, _END
    return begin, begin + np.int64(length)


@inlined
def _skip(data: Any, tag: Any, at: int, end: int) -> int:
    """End of the field behind a tag; _END where it is none or passes the end."""
    kind = tag & np.uint64(7)
    if kind == np.uint64(0):
        _, at = _varint(data, at, end)
        return at
    if kind == np.uint64(2):
        _, at = _span(data, at, end)
        return at
    if kind == np.uint64(1):
        return at + 8 if at + 8 <= end else _END
    if kind == np.uint64(5):
        return at + 4 if at + 4 <= end else _END
    return _END


@inlined
def _hash(data: Any, begin: int, end: int) -> Any:
    value = np.uint64(_HASH_START)
    for at in range(begin, end):
        value = (value ^ np.uint64(data[at])) * np.uint64(_HASH_STEP)
    return value ^ (value >> np.uint64(29))


@inlined
def _find(data: Any, begin: int, end: int, names: Any, name_ends: Any, places: Any) -> Any:
    """The number of the name that stands at data[begin:end], or -1."""
    mask = len(places) - 1
    place = np.int64(_hash(data, begin, end) & np.uint64(mask))
    while places[place] >= 0:
        number = places[place]
        first = name_ends[number - 1] if number else 0
        if name_ends[number] - first == end - begin:
            same = True
            for offset in range(end - begin):
                if names[first + offset] != data[begin + offset]:
                    same = False
                    break
            if same:
                return np.int64(number)
        place = (place + 1) & mask
    return np.int64(-1)


@kernel((vector(types.uint8), vector(types.int64), vector(types.int32, written=True)))
def place_names(names: Any, name_ends: Any, places: Any) -> None:
    """Fill the table by which a name is found; its length is a power of two, well above the number of names."""
    places[:] = -1
    for number in range(len(name_ends)):
        begin = name_ends[number - 1] if number else 0
        place = np.int64(_hash(names, begin, name_ends[number]) & np.uint64(len(places) - 1))
        while places[place] >= 0:
            place = (place + 1) & (len(places) - 1)
        places[place] = number


@inlined
def _num_varints(data: Any, begin: int, end: int) -> Any:
    """Number of varints; far below zero where one has more than ten bytes or does not end."""
    count, num_bytes = 0, 0
    for at in range(begin, end):
        num_bytes += 1
        if num_bytes > 10:
            return np.int64(_UNCOUNTABLE)
        if data[at] < 0x80:
            count += 1
            num_bytes = 0
    return count if num_bytes == 0 else np.int64(_UNCOUNTABLE)


@inlined
def _num_values(data: Any, kind: int, at: int, end: int) -> int:
    """Values of one list; -1 where it is broken."""
    count = 0
    while at < end:
        tag, at = _varint(data, at, end)
        if at < 0:
            return -1
        if tag == np.uint64(10):
            begin, at = _span(data, at, end)
            if at < 0:
                return -1
            if kind == BYTES:
                count += 1
            elif kind == FLOATS:
                if (at - begin) % 4:
                    return -1
                count += (at - begin) // 4
            else:
                count += _num_varints(data, begin, at)
                if count < 0:
                    return -1
        elif (kind == FLOATS and tag == np.uint64(13)) or (kind == INTS and tag == np.uint64(8)):
            count += 1
            at = _skip(data, tag, at, end)
        else:
            at = _skip(data, tag, at, end)
        if at < 0:
            return -1
    return count


@inlined
def _put_float(data: Any, at: int, out: Any, to: int) -> None:
    out[to] = (
        np.uint32(data[at])
        | (np.uint32(data[at + 1]) << np.uint32(8))
        | (np.uint32(data[at + 2]) << np.uint32(16))
        | (np.uint32(data[at + 3]) << np.uint32(24))
    )


@inlined
def _put_floats(data: Any, at: int, end: int, out: Any, to: int) -> None:
    """The bits of a list's values, from out[to] on. They have been counted."""
    while at < end:
        tag, at = _varint(data, at, end)
        if tag == np.uint64(10):
            at, stop = _span(data, at, end)
            while at < stop:
                _put_float(data, at, out, to)
                to += 1
                at += 4
        elif tag == np.uint64(13):
            _put_float(data, at, out, to)
            to += 1
            at += 4
        else:
            at = _skip(data, tag, at, end)


@inlined
def _put_ints(data: Any, at: int, end: int, out: Any, to: int) -> None:
    """The bits of a list's values, from out[to] on. They have been counted."""
    while at < end:
        tag, at = _varint(data, at, end)
        if tag == np.uint64(10):
            at, stop = _span(data, at, end)
            while at < stop:
                out[to], at = _varint(data, at, stop)
                to += 1
        elif tag == np.uint64(8):
            out[to], at = _varint(data, at, end)
            to += 1
        else:
            at = _skip(data, tag, at, end)


@inlined
def _first_value(data: Any, at: int, end: int) -> tuple[Any, Any]:
    """Begin and end of the first of a list of byte strings. They have been counted."""
    while at < end:
        tag, at = _varint(data, at, end)
        if tag == np.uint64(10):
            return _span(data, at, end)
        at = _skip(data, tag, at, end)
    return at, at


@inlined
def _list_in(data: Any, at: int, end: int) -> tuple[Any, Any, Any]:
    """Kind, begin and end of the one list in a Feature; _END for the begin where it is broken or there are two."""
    kind: Any = ABSENT
    begin, stop = 0, 0
    while at < end:
        tag, at = _varint(data, at, end)
        if at < 0:
            return ABSENT, _END, at
        if tag == np.uint64(10) or tag == np.uint64(18) or tag == np.uint64(26):
            if kind != ABSENT:
                return ABSENT, _END, at
            kind = np.int64(tag >> np.uint64(3))
            begin, stop = _span(data, at, end)
            at = stop
        else:
            at = _skip(data, tag, at, end)
        if at < 0:
            return ABSENT, _END, at
    return kind, begin, stop


@inlined
def _entry(data: Any, at: int, end: int) -> tuple[Any, Any, Any, Any]:
    """Begins and ends of key and value of one entry of the map; _END for the first where it is broken."""
    key_begin, key_end, value_begin, value_end = at, at, at, at
    while at < end:
        tag, at = _varint(data, at, end)
        if at < 0:
            return _END, _END, _END, _END
        if tag == np.uint64(10):
            key_begin, key_end = _span(data, at, end)
            at = key_end
        elif tag == np.uint64(18):
            if value_end > value_begin:
                return _END, _END, _END, _END
            value_begin, value_end = _span(data, at, end)
            at = value_end
        else:
            at = _skip(data, tag, at, end)
        if at < 0:
            return _END, _END, _END, _END
    return key_begin, key_end, value_begin, value_end


@inlined
def _take(
    data: Any, at: int, end: int, kind: int, width: int, place: int,
    floats: Any, ints: Any, begins: Any, ends: Any, counts: Any,
) -> Any:  # fmt: skip
    """Read the list of one Feature, of the kind and number of values it should have; what was found."""
    found, begin, stop = _list_in(data, at, end)
    if begin < 0:
        return BROKEN
    if found == ABSENT:
        return NOT_THERE
    if found != kind and not (width == ANY and begin == stop):  # nothing is of every kind
        return OTHER_KIND
    num_values = _num_values(data, kind, begin, stop)
    if num_values < 0:
        return BROKEN
    if width != ANY and num_values != width:
        return OTHER_COUNT
    if kind == BYTES and width != ANY:
        begins[place], ends[place] = _first_value(data, begin, stop)
    elif width == ANY:
        begins[place], ends[place], counts[place] = begin, stop, num_values
    elif kind == FLOATS:
        _put_floats(data, begin, stop, floats, place)
    else:
        _put_ints(data, begin, stop, ints, place)
    return FOUND


@kernel(
    (
        vector(types.uint8), vector(types.int64), vector(types.int64),
        vector(types.uint8), vector(types.int64), vector(types.int32),
        vector(types.int64), vector(types.int64), vector(types.int64),
        matrix(types.uint8, written=True), vector(types.uint32, written=True), vector(types.uint64, written=True),
        vector(types.int64, written=True), vector(types.int64, written=True), vector(types.int64, written=True),
        vector(types.uint8, written=True),
    )
)  # fmt: skip
def locate(
    data: Any, record_begins: Any, record_ends: Any, names: Any, name_ends: Any, name_places: Any,
    kinds: Any, widths: Any, places: Any, states: Any, floats: Any, ints: Any, begins: Any, ends: Any, counts: Any,
    wrong: Any,
) -> None:  # fmt: skip
    """Find each name in each record that is not `wrong`, and set `wrong` if a record is no Example.

    Name n should have widths[n] values of kinds[n]. They go to place places[n] of the record's row
    of `floats` or `ints`; for a byte string its begin and end do, for a list of any length also its
    number of values, to `begins`, `ends`, `counts`. Of a repeated name the last one counts.
    """
    num_rows = max(len(record_begins), 1)
    num_floats, num_ints, num_spans = len(floats) // num_rows, len(ints) // num_rows, len(begins) // num_rows
    for row in range(len(record_begins)):
        if wrong[row]:
            continue
        at, end = record_begins[row], record_ends[row]
        while at < end and not wrong[row]:
            tag, at = _varint(data, at, end)
            if at >= 0 and tag != np.uint64(10):
                at = _skip(data, tag, at, end)
                wrong[row] = at < 0
                continue
            at, stop = _span(data, at, end) if at >= 0 else (_END, _END)
            wrong[row] = at < 0
            while at < stop:
                tag, at = _varint(data, at, stop)
                if at >= 0 and tag != np.uint64(10):
                    at = _skip(data, tag, at, stop)
                    wrong[row] = at < 0
                    if at < 0:
                        break
                    continue
                at, entry_end = _span(data, at, stop) if at >= 0 else (_END, _END)
                key_begin, key_end, value, value_end = (
                    _entry(data, at, entry_end) if at >= 0 else (_END, _END, _END, _END)
                )
                wrong[row] = key_begin < 0
                if key_begin < 0:
                    break
                at = entry_end
                name = _find(data, key_begin, key_end, names, name_ends, name_places)
                if name >= 0:
                    # Beginning of the row in its kind's output; a view of the row would cost more than the
                    # value.
                    kind, width = kinds[name], widths[name]
                    per_row = num_floats if kind == FLOATS else num_ints
                    if kind == BYTES or width == ANY:
                        per_row = num_spans
                    states[row, name] = _take(
                        data, value, value_end, kind, width, row * per_row + places[name],
                        floats, ints, begins, ends, counts,
                    )  # fmt: skip


_LISTS = (vector(types.uint8), *[vector(types.int64)] * 4)


@kernel((*_LISTS, vector(types.uint32, written=True)))
def fill_floats(data: Any, begins: Any, ends: Any, counts: Any, starts: Any, out: Any) -> None:
    """Write the bits of each list's values from out[starts[row]] on; lists of no values may lie anywhere."""
    for row in range(len(begins)):
        if counts[row]:
            _put_floats(data, begins[row], ends[row], out, starts[row])


@kernel((*_LISTS, vector(types.uint64, written=True)))
def fill_ints(data: Any, begins: Any, ends: Any, counts: Any, starts: Any, out: Any) -> None:
    """Write the bits of each list's values from out[starts[row]] on; lists of no values may lie anywhere."""
    for row in range(len(begins)):
        if counts[row]:
            _put_ints(data, begins[row], ends[row], out, starts[row])


@kernel((*_LISTS, vector(types.int64, written=True), vector(types.int64, written=True)))
def fill_spans(data: Any, begins: Any, ends: Any, counts: Any, starts: Any, firsts: Any, lasts: Any) -> None:
    """Write begin and end of each list's byte strings from firsts[starts[row]] and lasts[starts[row]] on."""
    for row in range(len(begins)):
        at, end, to = begins[row], ends[row], starts[row]
        while counts[row] and at < end:
            tag, at = _varint(data, at, end)
            if tag == np.uint64(10):
                firsts[to], lasts[to] = _span(data, at, end)
                at = lasts[to]
                to += 1
            else:
                at = _skip(data, tag, at, end)


@kernel((vector(types.uint8), *[vector(types.int64)] * 3, vector(types.uint8, written=True)))
def copy_spans(data: Any, firsts: Any, lasts: Any, starts: Any, out: Any) -> None:
    """Write data[firsts[row]:lasts[row]] from out[starts[row]] on."""
    for row in range(len(firsts)):
        for offset in range(lasts[row] - firsts[row]):
            out[starts[row] + offset] = data[firsts[row] + offset]


_KINDS = {"bytes": BYTES, "float": FLOATS, "int64": INTS}
_MOST_LISTED = 100  # records of a stretch that are looked at again to say what they hold

Ints = NDArray[np.int64]
Flags = NDArray[np.uint8]
Where = NDArray[np.bool_]


class _Read(NamedTuple):
    """One feature of a span of records, as the walk over them left it."""

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
        for each in (locate, fill_floats, fill_ints, fill_spans, copy_spans):
            each.prepare()  # here, so that forked processes need not
        place_names(self._names, self._name_ends, self._name_places)
        self._kinds = np.array([_KINDS[feature.list_kind] for feature in features], np.int64)
        self._widths = np.array([_width(feature) for feature in features], np.int64)
        self._places = np.zeros(len(features), np.int64)
        self._num_floats, self._num_ints, self._num_spans = 0, 0, 0
        for number, (kind, width) in enumerate(zip(self._kinds, self._widths, strict=True)):
            if kind == BYTES or width == ANY:
                self._places[number] = self._num_spans
                self._num_spans += 1
            elif kind == FLOATS:
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
        locate(
            data, begins, ends, self._names, self._name_ends, self._name_places,
            self._kinds, self._widths, self._places, states,
            floats.ravel(), ints.ravel(), firsts.ravel(), lasts.ravel(), counts.ravel(), broken,
        )  # fmt: skip
        states[broken != 0] = BROKEN
        for row in np.flatnonzero(broken > wrong).tolist():
            bad.add(row, None, "its data is no tf.train.Example: it cannot be read to its end")
        columns: dict[str, NDArray[Any] | Ragged] = {}
        for number, feature in enumerate(self._features):
            state, place = states[:, number], int(self._places[number])
            is_spans = feature.list_kind == "bytes" or feature.num_values is None
            matrix = floats.view(np.float32) if feature.list_kind == "float" else ints.view(np.int64)
            read = _Read(
                data,
                state == FOUND,
                state == NOT_THERE,
                matrix[:, place : place + int(feature.num_values or 0)] if not is_spans else matrix[:, :0],
                *(array[:, place].copy() if is_spans else begins[:0] for array in (firsts, lasts, counts)),
            )
            columns[feature.column.name], reasons = _column(feature, read)
            for row in np.flatnonzero((state != FOUND) & (broken == 0)).tolist():
                if state[row] == NOT_THERE and feature.default is not None:
                    continue
                record = data[begins[row] : ends[row]].tobytes() if len(bad) < _MOST_LISTED else None
                reasons[row] = _reason(feature, int(state[row]), record)
            for row, reason in reasons.items():
                bad.add(row, feature.column.name, reason)
        return columns


def _width(feature: Wanted) -> int:
    if feature.list_kind == "bytes":
        return ANY if feature.column.is_list else 1
    return ANY if feature.num_values is None else feature.num_values


def _reason(feature: Wanted, state: int, record: bytes | None) -> str:
    declared = _declared(feature)
    if state == NOT_THERE:
        there = "" if record is None else f". It has {list_features(record)}"
        return f"the record has no feature '{feature.key}', and the schema no default for it{there}"
    if state == BROKEN:
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
        fill_floats(*places, bits)
        values, is_out = _converted(bits.view(np.float32), feature)
    else:
        words = np.zeros(int(offsets[-1]), np.uint64)
        fill_ints(*places, words)
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
    fill_spans(read.data, read.begins, read.ends, counts, offsets[:-1], firsts, lasts)
    texts = Ragged(
        np.empty(int((lasts - firsts).sum()), np.uint8), np.concatenate(([0], np.cumsum(lasts - firsts)))
    )
    copy_spans(read.data, firsts, lasts, texts.offsets, texts.values)
    reasons: dict[int, str] = {}
    if feature.num_values is not None:
        for row in np.flatnonzero(read.is_found & (counts != feature.num_values)).tolist():
            reasons[row] = f"the record holds {counts[row]} values, the schema says {_declared(feature)}"
    if feature.column.kind == "text":
        wrong = _not_utf8(texts)
        of_row = np.searchsorted(offsets, wrong, side="right") - 1
        reasons |= dict.fromkeys(map(int, of_row), "it is no text in UTF-8; read it as bytes")
        texts = _blanked(texts, wrong)
    lists, default = pack_lists(texts, offsets), feature.default
    if isinstance(default, np.ndarray) and len(default) and read.is_absent.any():
        rows = [default if read.is_absent[row] else lists.row(row) for row in range(lists.num_rows)]
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
    """Byte strings one behind the other, with the default for missing ones; nothing for bad records."""
    firsts, lasts = np.where(read.is_found, read.begins, 0), np.where(read.is_found, read.ends, 0)
    data = read.data
    if default and read.is_absent.any():
        firsts[read.is_absent], lasts[read.is_absent] = len(data), len(data) + len(default)
        data = np.concatenate((data, np.frombuffer(default, np.uint8)))
    offsets = np.concatenate(([0], np.cumsum(lasts - firsts)))
    values = np.empty(int(offsets[-1]), np.uint8)
    copy_spans(data, firsts, lasts, offsets, values)
    return Ragged(values, offsets)


def _not_utf8(texts: Ragged) -> list[int]:
    """Rows that are not UTF-8: checked together first, and only on failure one by one."""
    starts = texts.offsets[:-1][np.diff(texts.offsets) > 0]
    # Valid together, they are valid apart if none begins in the middle of a character.
    if _is_utf8(texts.values.tobytes()) and not ((texts.values[starts] & 0xC0) == 0x80).any():
        return []
    return [row for row in range(texts.num_rows) if not _is_utf8(texts.row(row).tobytes())]


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _blanked(texts: Ragged, wrong: list[int]) -> Ragged:
    """Empty strings at the rows that are no text: the column must have a value there."""
    if not wrong:
        return texts
    rows = set(wrong)
    return Ragged.of_bytes(
        [b"" if row in rows else texts.row(row).tobytes() for row in range(texts.num_rows)]
    )
