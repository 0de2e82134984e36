"""Feature declarations: plain settings, refused at birth where they cannot be meant.

    numeric                                  numbers, into the dense part of the input
    bucketized, categorical, hashed, crossed ids, one per row: a one-hot, or rows of a table
    embedding                                the table of such ids, where its width matters
    bag                                      several ids per row, with weights: a sum of rows

Nothing here reads data. What has to be known of it is in statistics.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from shoal.data.arguments import whole_number
from shoal.errors import ConfigError

Table: TypeAlias = Literal["auto", "embedding", "hash"]
Token: TypeAlias = str | int


@dataclass(frozen=True, slots=True, kw_only=True)
class Numeric:
    """Numbers of a column, or lists of always so many; see `numeric`."""

    name: str
    column: str
    normalize: Literal["mean_std", "quantile"] | None
    missing: float | Literal["mean", "raise"]
    indicator: bool
    num_quantiles: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucketized:
    """The bucket of a number; see `bucketized`."""

    name: str
    column: str
    boundaries: tuple[float, ...] | None
    quantiles: int | None
    missing: Literal["own", "raise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Categorical:
    """The place in a vocabulary; see `categorical`."""

    name: str
    column: str
    vocabulary: tuple[Token, ...] | None
    max_size: int | None
    min_count: int
    num_unknown: int
    missing: Literal["own", "unknown", "raise"]
    missing_value: Token | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hashed:
    """A hash of the value; see `hashed`."""

    name: str
    column: str
    buckets: int | None
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossed:
    """A hash of several values together; see `crossed`."""

    name: str
    of: tuple[str | Bucketized, ...]
    buckets: int
    seed: int


IdFeature: TypeAlias = Bucketized | Categorical | Hashed | Crossed


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """Rows of a table for ids; see `embedding`."""

    name: str
    of: str | IdFeature
    dim: int
    table: Table
    sparse: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Bag:
    """A weighted sum of rows for several ids; see `bag`."""

    name: str
    column: str
    weights: str | None
    dim: int
    combine: Literal["mean", "sum", "sqrtn"]
    ids: Categorical | Hashed
    table: Table
    sparse: bool


Feature: TypeAlias = Numeric | Bucketized | Categorical | Hashed | Crossed | Embedding | Bag


def numeric(
    column: str,
    *,
    normalize: Literal["mean_std", "quantile"] | None = "mean_std",
    missing: float | Literal["mean", "raise"] = "mean",
    indicator: bool = False,
    num_quantiles: int = 256,
    name: str | None = None,
) -> Numeric:
    """Numbers of a column, made comparable: to mean 0 and deviation 1, or to their rank between 0 and 1.

    A column whose rows are lists of one length gives as many numbers, each
    with statistics of its own. `missing` is what stands for NaN: the column's
    mean (its median, with quantiles), a number, or "raise". `indicator=True`
    adds a column that is 1 where the value was missing.

        numeric("age"), numeric("income", normalize="quantile", indicator=True)
    """
    _choice("numeric(normalize=)", normalize, ("mean_std", "quantile", None))
    if isinstance(missing, str):
        _choice("numeric(missing=)", missing, ("mean", "raise"))
    elif isinstance(missing, bool) or not isinstance(missing, (int, float)) or not math.isfinite(missing):
        raise ConfigError(f"numeric(missing=) is 'mean', 'raise' or a number, got {missing!r}")
    return Numeric(
        name=_name(name, column),
        column=_name(column),
        normalize=normalize,
        missing=missing if isinstance(missing, str) else float(missing),
        indicator=bool(indicator),
        num_quantiles=whole_number("numeric(num_quantiles=)", num_quantiles, at_least=2),
    )


def bucketized(
    column: str,
    boundaries: Sequence[float] | None = None,
    *,
    quantiles: int | None = None,
    missing: Literal["own", "raise"] = "own",
    name: str | None = None,
) -> Bucketized:
    """The bucket a number falls into: of given boundaries, or of so many that hold about as many rows each.

    n boundaries make n + 1 buckets; a number at a boundary belongs to the one
    above it. NaN has a bucket of its own, unless `missing="raise"`.

        bucketized("age", [18, 30, 50]), bucketized("income", quantiles=10)
    """
    if (boundaries is None) == (quantiles is None):
        raise ConfigError(
            f"bucketized('{column}') takes boundaries=[...] or quantiles=n, and not both of them."
        )
    bounds = None if boundaries is None else tuple(float(bound) for bound in boundaries)
    if bounds is not None and (
        not bounds or list(bounds) != sorted(set(bounds)) or not all(map(math.isfinite, bounds))
    ):
        raise ConfigError(
            f"bucketized('{column}', boundaries=) takes finite numbers in increasing order, got {list(bounds)}"
        )
    return Bucketized(
        name=_name(name, f"{column}_bucket"),
        column=_name(column),
        boundaries=bounds,
        quantiles=None
        if quantiles is None
        else whole_number("bucketized(quantiles=)", quantiles, at_least=2),
        missing=_choice("bucketized(missing=)", missing, ("own", "raise")),
    )


def categorical(
    column: str,
    *,
    vocabulary: Sequence[Token] | None = None,
    max_size: int | None = None,
    min_count: int = 1,
    num_unknown: int = 1,
    missing: Literal["own", "unknown", "raise"] = "unknown",
    missing_value: Token | None = None,
    name: str | None = None,
) -> Categorical:
    """Strings or whole numbers by their place in a vocabulary: the given one, or that of the data by frequency.

    Of the data, values that occur `min_count` times or more are kept, at most
    `max_size` of them, the most frequent first. Any other value falls, by its
    hash, into one of `num_unknown` ids behind them; with `num_unknown=0` it
    is refused. An empty string, NaN and `missing_value` are missing: an id
    of their own, one of the unknown, or "raise".

        categorical("city", max_size=1000, min_count=5)
    """
    known = None if vocabulary is None else tuple(vocabulary)
    if known is not None:
        kinds = {type(token) for token in known}
        if not known or not kinds <= {str, int} or len(kinds) > 1 or len(set(known)) < len(known):
            raise ConfigError(
                f"categorical('{column}', vocabulary=) takes strings, or whole numbers, each once; got {list(known)[:8]}"
            )
    unknown = whole_number("categorical(num_unknown=)", num_unknown, at_least=0)
    if missing == "unknown" and unknown == 0:
        missing = "raise"
    return Categorical(
        name=_name(name, column),
        column=_name(column),
        vocabulary=known,
        max_size=None if max_size is None else whole_number("categorical(max_size=)", max_size, at_least=1),
        min_count=whole_number("categorical(min_count=)", min_count, at_least=1),
        num_unknown=unknown,
        missing=_choice("categorical(missing=)", missing, ("own", "unknown", "raise")),
        missing_value=missing_value,
    )


def hashed(column: str, buckets: int | None = None, *, seed: int = 0, name: str | None = None) -> Hashed:
    """Strings or whole numbers by a hash that is the same everywhere, for ever; no vocabulary, no statistics.

    With `buckets` they share so many ids. Without, an id is 64 bits of hash,
    and its table is a `shoal.nn.HashEmbedding`, which has a row for any.

        hashed("user", buckets=100_000)
    """
    return Hashed(
        name=_name(name, column),
        column=_name(column),
        buckets=None if buckets is None else whole_number("hashed(buckets=)", buckets, at_least=1),
        seed=whole_number("hashed(seed=)", seed, at_least=0),
    )


def crossed(
    of: Sequence[str | Bucketized], buckets: int, *, seed: int = 0, name: str | None = None
) -> Crossed:
    """Combinations of columns, hashed together into `buckets` ids.

    Of columns with numbers that are no ids, cross their buckets: give a
    `bucketized` feature, or the name of one.

        crossed(["city", "hour"], buckets=10_000)
        crossed(["city", bucketized("age", [18, 30, 50])], buckets=10_000)
    """
    parts = tuple(of)
    if len(parts) < 2 or not all(isinstance(part, (str, Bucketized)) for part in parts):
        raise ConfigError(
            f"crossed takes two or more columns or bucketized features, got {[getattr(part, 'name', part) for part in parts]}"
        )
    names = [part if isinstance(part, str) else part.name for part in parts]
    return Crossed(
        name=_name(name, "_x_".join(names)),
        of=parts,
        buckets=whole_number("crossed(buckets=)", buckets, at_least=1),
        seed=whole_number("crossed(seed=)", seed, at_least=0),
    )


def embedding(
    of: str | IdFeature, dim: int, *, table: Table = "auto", sparse: bool = False, name: str | None = None
) -> Embedding:
    """Rows of `dim` numbers for the ids of a feature: one declared beside it, by its name, or one given here.

    `table` is "embedding" for nn.Embedding or "hash" for
    `shoal.nn.HashEmbedding`, whose rows come to be when they are first
    trained on (and which --strategy ddp does not train). `sparse=True` makes
    gradients sparse, for optimizers that take them.

        categorical("city"), embedding("city", dim=8)
        embedding(hashed("user"), dim=16)
    """
    if not isinstance(of, (str, Bucketized, Categorical, Hashed, Crossed)):
        raise ConfigError(
            f"embedding takes the name of a feature that gives ids, or such a feature, got a {type(of).__name__}: "
            "categorical, hashed, bucketized and crossed do."
        )
    return Embedding(
        name=_name(name, of if isinstance(of, str) else of.name),
        of=of,
        dim=whole_number("embedding(dim=)", dim, at_least=1),
        table=_choice("embedding(table=)", table, ("auto", "embedding", "hash")),
        sparse=bool(sparse),
    )


def bag(
    column: str,
    dim: int,
    *,
    weights: str | None = None,
    combine: Literal["mean", "sum", "sqrtn"] = "mean",
    buckets: int | None = None,
    vocabulary: Sequence[Token] | None = None,
    max_size: int | None = None,
    min_count: int = 1,
    num_unknown: int = 1,
    table: Table = "auto",
    sparse: bool = False,
    seed: int = 0,
    name: str | None = None,
) -> Bag:
    """Lists of ids: the mean or sum of their rows, each with its weight from the column `weights`.

    Lists are padded behind, as tables do it: whole numbers with -1, strings
    with "". With `buckets`, or `table="hash"`, ids are hashed; else they have
    a vocabulary as with `categorical`. "sqrtn" divides the sum by the root of
    the sum of squared weights. An empty list gives zeros.

        bag("clicked", dim=16, weights="seconds", buckets=100_000)
    """
    is_hashed = buckets is not None or table == "hash"
    if is_hashed and (vocabulary is not None or max_size is not None or min_count != 1):
        raise ConfigError(
            f"bag('{column}') has hashed ids by buckets= or table='hash', and then no vocabulary: leave out vocabulary=, "
            "max_size= and min_count=, or the other."
        )
    own = _name(name, column)
    ids: Categorical | Hashed
    if is_hashed:
        ids = hashed(column, buckets, seed=seed, name=own)
    else:
        ids = categorical(
            column,
            vocabulary=vocabulary,
            max_size=max_size,
            min_count=min_count,
            num_unknown=num_unknown,
            name=own,
        )
    return Bag(
        name=own,
        column=_name(column),
        weights=None if weights is None else _name(weights),
        dim=whole_number("bag(dim=)", dim, at_least=1),
        combine=_choice("bag(combine=)", combine, ("mean", "sum", "sqrtn")),
        ids=ids,
        table=_choice("bag(table=)", table, ("auto", "embedding", "hash")),
        sparse=bool(sparse),
    )


def _name(given: str | None, default: str | None = None) -> str:
    name = default if given is None else given
    if not isinstance(name, str) or not name:
        raise ConfigError(f"features and columns are named by a text, got {name!r}")
    return name


def _choice(what: str, value: Any, known: tuple[Any, ...]) -> Any:
    if value not in known:
        raise ConfigError(f"{what} is one of {', '.join(map(repr, known))}, got {value!r}")
    return value
