"""Transform of the columns of a batch to the tensors of the input layer. Pure: the same batch gives the same tensors.

dense              float32 [rows, numbers]: all numeric features, in their order
<name>             int64 [rows]: ids of a feature
<name>             int64 [rows, longest]: ids of a bag, padded with the id behind the last
<name>.weights     float32 [rows, longest]: their weights, 0 where they are padding
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.errors import DataError
from shoal.features.columns import Columns, Hashes, Tokens, bucket_of, hash_ints, hash_text, hash_together
from shoal.features.declared import Bag, Bucketized, Categorical, Crossed, Hashed, IdFeature, Numeric, Token
from shoal.features.statistics import Statistics, asked

DENSE = "dense"
WEIGHTS = ".weights"

Ids = NDArray[np.int64]


class Vocabulary:
    """Map from values to ids: 0 to n - 1 by place, then the unknown, then the missing where they have an id of their own."""

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


class Transform:
    """The functions of a fitted feature set, one per feature."""

    def __init__(
        self, statistics: Statistics, *, numerics: list[Numeric], ids: list[IdFeature], bags: list[Bag],
        parts: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """`parts` are all features that give ids, by name: what crossed features refer to."""
        self._statistics, self._parts = statistics, parts
        self._numerics, self._ids, self._bags = numerics, ids, bags
        self._vocabularies = {
            part.name: Vocabulary(part, part.vocabulary or statistics.vocabularies.get(part.name, ()))
            for part in [*parts.values(), *(bag.ids for bag in bags)]
            if isinstance(part, Categorical)
        }
        self._boundaries = {
            part.name: np.array(part.boundaries or statistics.quantiles.get(part.name, ((),))[0])
            for part in parts.values()
            if isinstance(part, Bucketized)
        }

        self._points = {
            feature.name: [(np.array(points), np.linspace(0, 1, len(points))) for points in found]
            for feature in numerics
            if (found := statistics.quantiles.get(feature.name))
        }

    def num_ids(self, feature: IdFeature) -> int | None:
        """Different ids of a feature; None where any 64 bits may be one."""
        match feature:
            case Bucketized(name=name, missing=missing):
                return len(self._boundaries[name]) + 1 + (missing == "own")
            case Categorical(name=name):
                return self._vocabularies[name].num_ids
            case _:
                return feature.buckets

    def width(self, feature: Numeric) -> int:
        """Numbers per row of a numeric feature, as far as fit has seen them; without statistics, one."""
        scale = self._statistics.scales.get(feature.name)
        return (len(scale.mean) if scale else 1) * (2 if feature.indicator else 1)

    def __call__(self, columns: Columns) -> dict[str, torch.Tensor]:
        """The tensors of a batch."""
        out: dict[str, torch.Tensor] = {}
        if self._numerics:
            numbers = [self._numbers(feature, columns) for feature in self._numerics]
            out[DENSE] = torch.from_numpy(np.concatenate(numbers, axis=1).astype(np.float32))
        for feature in self._ids:
            out[feature.name] = torch.from_numpy(self._ids_of(feature, columns))
        for bag in self._bags:
            ids, weights = self._bag(bag, columns)
            out[bag.name], out[bag.name + WEIGHTS] = torch.from_numpy(ids), torch.from_numpy(weights)
        return out

    # ---- numbers ----

    def _numbers(self, feature: Numeric, columns: Columns) -> NDArray[np.float64]:
        values = columns.numbers(feature.column, asked(feature))
        width = self.width(feature) // (2 if feature.indicator else 1)
        if values.shape[1] != width:
            raise DataError(
                f"{asked(feature)} takes {width} numbers per row, as fit has seen them (one, without a fit), but the column has "
                f"{values.shape[1]}. Nothing was computed; a numeric column has rows of one length."
            )
        missing = np.isnan(values)
        if missing.any() and feature.missing == "raise":
            raise DataError(
                f"the column '{feature.column}' has {int(missing.sum())} missing values in a batch, and missing='raise' says "
                "that there are none. Nothing was computed; mend the data, or say what stands for them: missing='mean', or "
                "a number."
            )
        scale = self._statistics.scales.get(feature.name)
        if isinstance(feature.missing, float):
            values = np.where(missing, feature.missing, values)
        elif scale is not None:
            values = np.where(missing, scale.mean, values)
        if feature.normalize == "mean_std" and scale is not None:
            spread = np.array(scale.deviation)
            values = (values - np.array(scale.mean)) / np.where(spread > 0, spread, 1.0)
        elif feature.normalize == "quantile":
            values = self._ranks(feature, values, missing)
        return np.concatenate([values, missing], axis=1) if feature.indicator else values

    def _ranks(
        self, feature: Numeric, values: NDArray[np.float64], missing: NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        ranks = np.empty_like(values)
        for number, (points, steps) in enumerate(self._points[feature.name]):
            column = values[:, number]
            # Equal points stand for many equal values: theirs is the middle of the ranks between them.
            low = np.interp(column, points, steps)
            high = 1 - np.interp(-column, -points[::-1], steps)
            ranks[:, number] = (low + high) / 2
        if feature.missing == "mean":
            ranks[missing] = 0.5
        return ranks

    # ---- ids ----

    def _ids_of(self, feature: IdFeature, columns: Columns) -> Ids:
        match feature:
            case Bucketized():
                return self._bucket(feature, columns)
            case Categorical():
                found = columns.tokens(feature.column, asked(feature), missing_value=feature.missing_value)
                return self._vocabularies[feature.name].ids(found)
            case Hashed():
                return _bounded(
                    self._hash(columns.tokens(feature.column, asked(feature)), feature.seed), feature.buckets
                )
            case Crossed():
                parts = [self._hash_part(part, feature, columns) for part in feature.of]
                return bucket_of(hash_together(parts, feature.seed), feature.buckets)

    def _bucket(self, feature: Bucketized, columns: Columns) -> Ids:
        values = columns.numbers(feature.column, asked(feature))
        if values.shape[1] != 1:
            raise DataError(
                f"{asked(feature)} needs one number per row, but the column has {values.shape[1]}. Nothing was computed."
            )
        missing = np.isnan(values[:, 0])
        if missing.any() and feature.missing == "raise":
            raise DataError(
                f"the column '{feature.column}' has {int(missing.sum())} missing values in a batch, and missing='raise' says "
                "that there are none. Nothing was computed; missing='own' gives them a bucket."
            )
        boundaries = self._boundaries[feature.name]
        found = np.searchsorted(boundaries, values[:, 0], side="right")
        return np.where(missing, len(boundaries) + 1, found).astype(np.int64)

    def _hash_part(self, part: str | Bucketized, feature: Crossed, columns: Columns) -> Hashes:
        declared = self._parts.get(part) if isinstance(part, str) else part
        if isinstance(declared, Bucketized):
            return hash_ints(self._bucket(declared, columns), feature.seed)
        assert isinstance(part, str)
        column = getattr(declared, "column", part)
        return self._hash(columns.tokens(column, asked(feature)), feature.seed)

    @staticmethod
    def _hash(found: Tokens, seed: int) -> Hashes:
        if found.is_text:
            return hash_text(found.values, seed)
        hashes = hash_ints(found.values, seed)
        if found.missing.any():  # no number's hash, and the same everywhere
            hashes[found.missing] = hash_text(np.array([""]), seed)[0]
        return hashes

    # ---- bags ----

    def _bag(self, bag: Bag, columns: Columns) -> tuple[Ids, NDArray[np.float32]]:
        found = columns.token_lists(bag.column, asked(bag))
        if found.values.shape[1] == 0:  # all lists of the batch are empty
            found = Tokens(
                np.zeros((len(found.values), 1), np.int64), np.ones((len(found.values), 1), np.bool_)
            )
        padding = found.missing if found.is_text else found.missing | (found.values < 0)
        known = Tokens(found.values, np.zeros_like(padding))
        if isinstance(bag.ids, Hashed):
            ids = _bounded(self._hash(known, bag.ids.seed), bag.ids.buckets)
            behind = bag.ids.buckets or 0
        else:
            vocabulary = self._vocabularies[bag.ids.name]
            ids, behind = np.full(padding.shape, vocabulary.num_ids, np.int64), vocabulary.num_ids
            ids[~padding] = vocabulary.ids(Tokens(found.values[~padding], known.missing[~padding]))
        ids = np.where(padding, behind, ids)
        weights = np.where(padding, 0.0, self._weights(bag, columns, padding.shape))
        if bag.combine != "sum":
            total = (
                weights.sum(1, keepdims=True)
                if bag.combine == "mean"
                else np.sqrt((weights**2).sum(1, keepdims=True))
            )
            weights = weights / np.where(total == 0, 1.0, total)
        return ids, weights.astype(np.float32)

    def _weights(self, bag: Bag, columns: Columns, shape: tuple[int, ...]) -> NDArray[np.float64]:
        if bag.weights is None:
            return np.ones(shape)
        given = columns.number_lists(bag.weights, asked(bag))
        if given.shape[1] == 0:
            given = np.zeros(shape)
        if given.shape != shape:
            raise DataError(
                f"{asked(bag)} has lists of up to {shape[1]} ids, but its weights, the column '{bag.weights}', of up to "
                f"{given.shape[1]}. Nothing was computed; every id needs a weight."
            )
        return given


def _bounded(hashes: Hashes, buckets: int | None) -> Ids:
    return hashes.view(np.int64) if buckets is None else bucket_of(hashes, buckets)
