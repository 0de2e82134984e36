"""Ids of categorical values: stable hashes, and vocabularies with their unknown values.

Hashes of strings and whole numbers are 64 bits, the same in every process, on
every machine, for ever. A test pins them: they are part of every model that
was trained on hashed ids.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from shoal.data.order.permutation import GOLDEN, splitmix64
from shoal.errors import DataError
from shoal.features.columns import Tokens
from shoal.features.declared import Categorical, Token
from shoal.runtime.kernel_cache import kernel, matrix, mixed, vector

Hashes = NDArray[np.uint64]

_START, _STEP = 0xCBF29CE484222325, 0x100000001B3  # FNV-1a's


def hash_text(texts: NDArray[np.str_], seed: int) -> Hashes:
    """Of strings, by their characters; how wide the array is does not matter."""
    width = texts.dtype.itemsize // 4
    out = np.empty(texts.size, np.uint64)
    codes = np.ascontiguousarray(texts).reshape(-1).view(np.uint32).reshape(texts.size, width)
    _hash_text(codes, np.uint64(seed), out)
    return out.reshape(texts.shape)


def hash_ints(numbers: NDArray[np.int64], seed: int) -> Hashes:
    return splitmix64(
        numbers.astype(np.int64).view(np.uint64) + splitmix64(np.array([seed], np.uint64) + GOLDEN)
    )


def hash_together(parts: Sequence[Hashes], seed: int) -> Hashes:
    total = np.full_like(parts[0], seed)
    for part in parts:
        total = splitmix64((total + GOLDEN) ^ part)
    return total


def bucket_of(hashes: Hashes, buckets: int) -> NDArray[np.int64]:
    return (hashes % np.uint64(buckets)).astype(np.int64)


@kernel((matrix(types.uint32), types.uint64, vector(types.uint64, written=True)))
def _hash_text(codes: Any, seed: Any, out: Any) -> None:
    for row in range(codes.shape[0]):
        length = codes.shape[1]
        while length > 0 and codes[row, length - 1] == 0:
            length -= 1
        value = np.uint64(_START) ^ seed
        for at in range(length):
            value = (value ^ np.uint64(codes[row, at])) * np.uint64(_STEP)
        out[row] = mixed(value ^ np.uint64(length))


Ids = NDArray[np.int64]


def most_frequent(counts: Iterable[tuple[Token, int]], feature: Categorical) -> tuple[Token, ...]:
    """The vocabulary of a feature: the most frequent first, of equals the smaller first."""
    kept = ((-count, token) for token, count in counts if count >= feature.min_count)
    if feature.max_size is None:
        return tuple(token for _, token in sorted(kept))
    return tuple(token for _, token in heapq.nsmallest(feature.max_size, kept))


class Vocabulary:
    """From values to ids: 0 to n - 1 by place, then the unknown, then the missing where they have an id of their own."""

    def __init__(self, feature: Categorical, tokens: Sequence[Token]) -> None:
        self.feature, self.tokens = feature, tuple(tokens)
        self._is_text = not tokens or isinstance(tokens[0], str)
        self._places: dict[Any, int] = {token: place for place, token in enumerate(tokens)}
        if not self._is_text:
            known = np.array(tokens, dtype=np.int64)
            self._order = np.argsort(known, kind="stable")
            self._sorted = known[self._order]

    @property
    def num_ids(self) -> int:
        own = self.feature.missing == "own"
        return len(self.tokens) + self.feature.num_unknown + own

    def ids(self, tokens: Tokens) -> Ids:
        """The id of each value, in their shape."""
        feature = self.feature
        found = self._looked_up(tokens)
        missing, unknown = tokens.missing, (found < 0) & ~tokens.missing
        if missing.any():
            if feature.missing == "raise":
                raise DataError(
                    f"the column '{feature.column}' of the feature '{feature.name}' has {int(missing.sum())} missing values "
                    "in a batch, and missing='raise' says that there are none. Nothing was computed; mend the data, or say "
                    "missing='own' or 'unknown'."
                )
            found[missing] = self.num_ids - 1 if feature.missing == "own" else len(self.tokens)
        if unknown.any():
            found[unknown] = self._unknown(tokens.values[unknown])
        return found

    def _looked_up(self, tokens: Tokens) -> Ids:
        flat = tokens.values.reshape(-1)
        if not self.tokens or not len(flat):
            return np.full(tokens.values.shape, -1, np.int64)
        if tokens.is_text != self._is_text:
            raise DataError(
                f"the vocabulary of the feature '{self.feature.name}' holds {_kind(self._is_text)}, but the column "
                f"'{self.feature.column}' holds {_kind(tokens.is_text)} now. Nothing was computed; give the type that fit saw."
            )
        if self._is_text:
            places = map(self._places.get, flat.tolist(), itertools.repeat(-1))
            return np.fromiter(places, np.int64, len(flat)).reshape(tokens.values.shape)
        at = np.searchsorted(self._sorted, flat).clip(max=len(self._sorted) - 1)
        found = np.where(self._sorted[at] == flat, self._order[at], -1)
        return found.reshape(tokens.values.shape).astype(np.int64)

    def _unknown(self, values: NDArray[Any]) -> Ids:
        feature = self.feature
        if feature.num_unknown == 0:
            shown = ", ".join(repr(value) for value in sorted(set(values.tolist()))[:5])
            raise DataError(
                f"the column '{feature.column}' has values that the vocabulary of the feature '{feature.name}' does not know: "
                f"{shown}. Nothing was computed; num_unknown=1 gives them an id."
            )
        hashes = hash_text(values, 0) if values.dtype.kind == "U" else hash_ints(values, 0)
        return len(self.tokens) + bucket_of(hashes, feature.num_unknown)


def _kind(is_text: bool) -> str:
    return "strings" if is_text else "whole numbers"
