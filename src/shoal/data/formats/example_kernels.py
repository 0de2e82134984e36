"""Loops over `tf.train.Example`, the message in a TFRecord: the values of each feature that is wanted.

    Example   { Features features = 1 }
    Features  { map<string, Feature> feature = 1 }
    Feature   { oneof { BytesList = 1, FloatList = 2, Int64List = 3 } }
    ...List   { repeated value = 1 }       numbers packed into one field, or, by old writers, one field each

Every length is checked against what contains it; nothing is read outside its
record. Features of a fixed number of values are read on the first walk, while
the record is in the cache (a walk per feature took three times as long); of
lists of any length only the place is, because what they need is not yet known.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from shoal.runtime.kernel_cache import inlined, kernel, matrix, vector

ABSENT, BYTES, FLOATS, INTS = 0, 1, 2, 3
"""Kinds of a list; the last three are the numbers of their fields."""

NOT_THERE, FOUND, OTHER_KIND, OTHER_COUNT, BROKEN = 0, 1, 2, 3, 4
"""What `locate` says of a feature in a record."""

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
    """Where the field behind a tag ends; _END where it is none or passes the end."""
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
    """How many there are; far below zero where one has more than ten bytes or does not end."""
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
    """Look for each name in each record that is not `wrong`, and set `wrong` where a record is no Example.

    Name n should have widths[n] values of kinds[n]. They go to place places[n]
    of the record's row of `floats` or `ints`; of a byte string its begin and
    end do, of a list of any length also its number of values, to `begins`,
    `ends`, `counts`. A name that comes twice in a record counts as its last.
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
                    # Where the row begins in what its kind is written to; a view of the row would cost more than the value.
                    kind, width = kinds[name], widths[name]
                    per_row = num_floats if kind == FLOATS else num_ints
                    if kind == BYTES or width == ANY:
                        per_row = num_spans
                    states[row, name] = _take(
                        data, value, value_end, kind, width, row * per_row + places[name],
                        floats, ints, begins, ends, counts,
                    )  # fmt: skip


_LISTS = (
    vector(types.uint8),
    vector(types.int64),
    vector(types.int64),
    vector(types.int64),
    vector(types.int64),
)


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


@kernel(
    (vector(types.uint8), vector(types.int64), vector(types.int64), vector(types.int64), vector(types.uint8, written=True))
)  # fmt: skip
def copy_spans(data: Any, firsts: Any, lasts: Any, starts: Any, out: Any) -> None:
    """Write data[firsts[row]:lasts[row]] from out[starts[row]] on."""
    for row in range(len(firsts)):
        for offset in range(lasts[row] - firsts[row]):
            out[starts[row] + offset] = data[firsts[row] + offset]
