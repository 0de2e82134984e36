"""Feature declarations: frozen settings that refuse impossible values when they are made.

    numeric                                  numbers, into the dense part of the input
    bucketized, categorical, hashed, crossed ids, one per row: a one-hot, or rows of a table
    embedding                                the table of such ids, where its width matters
    bag                                      several ids per row, with weights: a sum of rows

Nothing here reads data; statistics of it are in statistics.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, TypeAlias

from shoal.data.arguments import whole_number
from shoal.errors import ConfigError

TableKind: TypeAlias = Literal["auto", "embedding", "hash"]
Token: TypeAlias = str | int


@dataclass(frozen=True, slots=True)
class Numeric:
    """Numbers of a column, made comparable: to mean 0 and deviation 1, or to their rank between 0 and 1.

    A column whose rows are lists of one length gives as many numbers, each
    with statistics of its own. `missing` is what stands for NaN: the column's
    mean (its median, with quantiles), a number, or "raise". `indicator=True`
    adds a column that is 1 where the value was missing.

        numeric("age"), numeric("income", normalize="quantile", indicator=True)
    """

    column: str
    _: KW_ONLY
    normalize: Literal["mean_std", "quantile"] | None = "mean_std"
    missing: float | Literal["mean", "raise"] = "mean"
    indicator: bool = False
    num_quantiles: int = 256
    name: str = ""

    def __post_init__(self) -> None:
        _choice("numeric(normalize=)", self.normalize, ("mean_std", "quantile", None))
        missing = self.missing
        if isinstance(missing, str):
            _choice("numeric(missing=)", missing, ("mean", "raise"))
        elif isinstance(missing, bool) or not isinstance(missing, (int, float)) or not math.isfinite(missing):
            raise ConfigError(f"numeric(missing=) is 'mean', 'raise' or a number, got {missing!r}")
        _set(
            self,
            column=_name(self.column),
            missing=missing if isinstance(missing, str) else float(missing),
            indicator=bool(self.indicator),
            num_quantiles=whole_number("numeric(num_quantiles=)", self.num_quantiles, at_least=2),
            name=_name(self.name or self.column),
        )


@dataclass(frozen=True, slots=True)
class Bucketized:
    """The bucket a number falls into: of given boundaries, or of so many that hold about as many rows each.

    n boundaries make n + 1 buckets; a number at a boundary belongs to the one
    above it. NaN has a bucket of its own, unless `missing="raise"`.

        bucketized("age", [18, 30, 50]), bucketized("income", quantiles=10)
    """

    column: str
    boundaries: Sequence[float] | None = None
    _: KW_ONLY
    quantiles: int | None = None
    missing: Literal["own", "raise"] = "own"
    name: str = ""

    def __post_init__(self) -> None:
        if (self.boundaries is None) == (self.quantiles is None):
            raise ConfigError(
                f"bucketized('{self.column}') takes boundaries=[...] or quantiles=n, and not both of them."
            )
        bounds = None if self.boundaries is None else tuple(float(bound) for bound in self.boundaries)
        if bounds is not None and (
            not bounds or list(bounds) != sorted(set(bounds)) or not all(map(math.isfinite, bounds))
        ):
            raise ConfigError(
                f"bucketized('{self.column}', boundaries=) takes finite numbers in increasing order, got {list(bounds)}"
            )
        _choice("bucketized(missing=)", self.missing, ("own", "raise"))
        _set(
            self,
            column=_name(self.column),
            boundaries=bounds,
            quantiles=_at_least("bucketized(quantiles=)", self.quantiles, 2),
            name=_name(self.name or f"{self.column}_bucket"),
        )


@dataclass(frozen=True, slots=True)
class Categorical:
    """Strings or whole numbers by their place in a vocabulary: the given one, or that of the data by frequency.

    Of the data, values that occur `min_count` times or more are kept, at most
    `max_size` of them, the most frequent first. Any other value falls, by its
    hash, into one of `num_unknown` ids behind them; with `num_unknown=0` it
    is refused. An empty string, NaN and `missing_value` are missing: an id
    of their own, one of the unknown, or "raise".

        categorical("city", max_size=1000, min_count=5)
    """

    column: str
    _: KW_ONLY
    vocabulary: Sequence[Token] | None = None
    max_size: int | None = None
    min_count: int = 1
    num_unknown: int = 1
    missing: Literal["own", "unknown", "raise"] = "unknown"
    missing_value: Token | None = None
    name: str = ""

    def __post_init__(self) -> None:
        known = None if self.vocabulary is None else tuple(self.vocabulary)
        if known is not None:
            kinds = {type(token) for token in known}
            if not known or not kinds <= {str, int} or len(kinds) > 1 or len(set(known)) < len(known):
                raise ConfigError(
                    f"categorical('{self.column}', vocabulary=) takes strings, or whole numbers, each once; got "
                    f"{list(known)[:8]}"
                )
        num_unknown = whole_number("categorical(num_unknown=)", self.num_unknown, at_least=0)
        missing = _choice("categorical(missing=)", self.missing, ("own", "unknown", "raise"))
        _set(
            self,
            column=_name(self.column),
            vocabulary=known,
            max_size=_at_least("categorical(max_size=)", self.max_size, 1),
            min_count=whole_number("categorical(min_count=)", self.min_count, at_least=1),
            num_unknown=num_unknown,
            missing="raise" if missing == "unknown" and num_unknown == 0 else missing,
            name=_name(self.name or self.column),
        )


@dataclass(frozen=True, slots=True)
class Hashed:
    """Strings or whole numbers by a hash that is the same everywhere, for ever; no vocabulary, no statistics.

    With `buckets` they share so many ids. Without, an id is 64 bits of hash,
    and its table is a `shoal.nn.HashEmbedding`, which has a row for any.

        hashed("user", buckets=100_000)
    """

    column: str
    buckets: int | None = None
    _: KW_ONLY
    seed: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        _set(
            self,
            column=_name(self.column),
            buckets=_at_least("hashed(buckets=)", self.buckets, 1),
            seed=whole_number("hashed(seed=)", self.seed, at_least=0),
            name=_name(self.name or self.column),
        )


@dataclass(frozen=True, slots=True)
class Crossed:
    """Combinations of columns, hashed together into `buckets` ids.

    Of columns with numbers that are no ids, cross their buckets: give a
    `bucketized` feature, or the name of one.

        crossed(["city", "hour"], buckets=10_000)
        crossed(["city", bucketized("age", [18, 30, 50])], buckets=10_000)
    """

    of: Sequence[str | Bucketized]
    buckets: int
    _: KW_ONLY
    seed: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        parts = tuple(self.of)
        names: list[Any] = [getattr(part, "name", part) for part in parts]
        if len(parts) < 2 or not all(isinstance(part, (str, Bucketized)) for part in parts):
            raise ConfigError(f"crossed takes two or more columns or bucketized features, got {names}")
        _set(
            self,
            of=parts,
            buckets=whole_number("crossed(buckets=)", self.buckets, at_least=1),
            seed=whole_number("crossed(seed=)", self.seed, at_least=0),
            name=_name(self.name or "_x_".join(names)),
        )


IdFeature: TypeAlias = Bucketized | Categorical | Hashed | Crossed


@dataclass(frozen=True, slots=True)
class Embedding:
    """Rows of `dim` numbers for the ids of a feature: one declared beside it, by its name, or one given here.

    `table` is "embedding" for nn.Embedding or "hash" for
    `shoal.nn.HashEmbedding`, whose rows come to be when they are first
    trained on (and which --strategy ddp does not train). `sparse=True` makes
    gradients sparse, for optimizers that take them.

        categorical("city"), embedding("city", dim=8)
        embedding(hashed("user"), dim=16)
    """

    of: str | IdFeature
    dim: int
    _: KW_ONLY
    table: TableKind = "auto"
    sparse: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.of, (str, Bucketized, Categorical, Hashed, Crossed)):
            raise ConfigError(
                f"embedding takes the name of a feature that gives ids, or such a feature, got a {type(self.of).__name__}: "
                "categorical, hashed, bucketized and crossed do."
            )
        _choice("embedding(table=)", self.table, ("auto", "embedding", "hash"))
        _set(
            self,
            dim=whole_number("embedding(dim=)", self.dim, at_least=1),
            sparse=bool(self.sparse),
            name=_name(self.name or (self.of if isinstance(self.of, str) else self.of.name)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bag:
    """A weighted sum of rows for several ids; see `bag`."""

    name: str
    column: str
    weights: str | None
    dim: int
    combine: Literal["mean", "sum", "sqrtn"]
    ids: Categorical | Hashed
    table: TableKind
    sparse: bool


Feature: TypeAlias = Numeric | Bucketized | Categorical | Hashed | Crossed | Embedding | Bag

numeric, bucketized, categorical, hashed = Numeric, Bucketized, Categorical, Hashed
crossed, embedding = Crossed, Embedding


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
    table: TableKind = "auto",
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
    own = _name(name or column)
    ids: Categorical | Hashed
    if buckets is None and table != "hash":
        ids = Categorical(
            column,
            vocabulary=vocabulary,
            max_size=max_size,
            min_count=min_count,
            num_unknown=num_unknown,
            name=own,
        )
    elif vocabulary is not None or max_size is not None or min_count != 1:
        raise ConfigError(
            f"bag('{column}') has hashed ids by buckets= or table='hash', and then no vocabulary: leave out vocabulary=, "
            "max_size= and min_count=, or the other."
        )
    else:
        ids = Hashed(column, buckets, seed=seed, name=own)
    return Bag(
        name=own,
        column=ids.column,
        weights=None if weights is None else _name(weights),
        dim=whole_number("bag(dim=)", dim, at_least=1),
        combine=_choice("bag(combine=)", combine, ("mean", "sum", "sqrtn")),
        ids=ids,
        table=_choice("bag(table=)", table, ("auto", "embedding", "hash")),
        sparse=bool(sparse),
    )


def _set(feature: Any, **fields: Any) -> None:
    for name, value in fields.items():
        object.__setattr__(feature, name, value)


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"features and columns are named by a text, got {name!r}")
    return name


def _at_least(what: str, value: int | None, least: int) -> int | None:
    return None if value is None else whole_number(what, value, at_least=least)


def _choice(what: str, value: Any, known: tuple[Any, ...]) -> Any:
    if value not in known:
        raise ConfigError(f"{what} is one of {', '.join(map(repr, known))}, got {value!r}")
    return value
