"""Lists of strings, one list per row, as one string of bytes per row: so they are stored as text is.

A row is its number of strings and the length of each, as uint32, and behind
them the strings themselves.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.collate import as_objects
from shoal.data.formats.table import Ragged

_WORD = np.dtype("<u4")


def packed(texts: Ragged, offsets: NDArray[np.int64]) -> Ragged:
    """One row for each list: list i holds the strings offsets[i] to offsets[i + 1] - 1 of `texts`."""
    counts, lengths = np.diff(offsets), np.diff(texts.offsets)
    first, last = texts.offsets[offsets[:-1]], texts.offsets[offsets[1:]]
    head_bytes, text_bytes = _WORD.itemsize * (1 + counts), last - first
    begins = np.concatenate(([0], np.cumsum(head_bytes + text_bytes)))
    values = np.empty(int(begins[-1]), np.uint8)
    words = np.insert(lengths[offsets[0] : offsets[-1]], offsets[:-1] - offsets[0], counts).astype(_WORD)
    values[_places(begins[:-1], head_bytes)] = words.view(np.uint8)
    values[_places(begins[:-1] + head_bytes, text_bytes)] = texts.values[
        texts.offsets[offsets[0]] : texts.offsets[offsets[-1]]
    ]
    return Ragged(values, begins)


def unpacked(row: bytes, *, is_text: bool) -> NDArray[Any]:
    """The strings of one row: an array of str, or one of objects that are bytes. No bytes at all are an empty list."""
    num_strings = int(np.frombuffer(row, _WORD, 1)[0]) if row else 0
    lengths = np.frombuffer(row, _WORD, num_strings, _WORD.itemsize) if num_strings else np.zeros(0, _WORD)
    ends = _WORD.itemsize * (1 + num_strings) + np.cumsum(lengths, dtype=np.int64)
    strings = [row[end - length : end] for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)]
    if is_text:
        return np.array([string.decode() for string in strings], dtype=np.str_)
    return as_objects(strings)


def _places(begins: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """begins[i], begins[i] + 1, ... of each i, lengths[i] of them, one behind the other."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(begins - before, lengths) + np.arange(int(lengths.sum()))
