"""`FeatureSet`: a declared list of features that becomes a map stage and an input layer.

Its declaration and statistics are also bytes (JSON), to lie among the tensors
of a model.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn

from shoal.data.batches import Batches
from shoal.data.dataset import Dataset
from shoal.errors import CheckpointError, ConfigError, DataError, EmptyDataset, NoCheckpoint
from shoal.features.columns import columns_of
from shoal.features.declared import (
    Bag,
    Bucketized,
    Categorical,
    Crossed,
    Embedding,
    Feature,
    Hashed,
    IdFeature,
    Numeric,
    Table,
)
from shoal.features.input_layer import STATE, BagOfRows, Dense, EmbeddingRows, InputLayer, InputPart, OneHot
from shoal.features.statistics import Collect, Scale, Statistics, conclude, merge, needs_fit, parts_of
from shoal.features.transform import DENSE, WEIGHTS, Transform

_FORMAT = 1
_KINDS = {
    kind.__name__: kind
    for kind in (
        Numeric,
        Bucketized,
        Categorical,
        Hashed,
        Crossed,
        Embedding,
        Bag,
        Scale,
    )
}


def encode(features: tuple[Feature, ...], statistics: Statistics | None) -> bytes:
    known = statistics or Statistics()
    content = {
        "format": _FORMAT,
        "features": _plain(features),
        "is_fitted": statistics is not None,
        "num_samples": known.num_samples,
        # Pairs, because a feature may be called anything.
        "scales": _plain(tuple(known.scales.items())),
        "quantiles": _plain(tuple(known.quantiles.items())),
        "vocabularies": _plain(tuple(known.vocabularies.items())),
    }
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")


def decode(data: bytes, where: str) -> tuple[tuple[Feature, ...], Statistics | None]:
    """The features and statistics behind such bytes; refused where they are something else."""
    try:
        content = json.loads(data.decode("utf-8", "surrogatepass"))
        if content["format"] != _FORMAT:
            raise ValueError(f"it has the format {content['format']}, and this version reads {_FORMAT}")
        features = _revived(content["features"])
        statistics = Statistics(
            **{name: dict(_revived(content[name])) for name in ("scales", "quantiles", "vocabularies")},
            num_samples=content["num_samples"],
        )
        return features, statistics if content["is_fitted"] else None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"the feature set in {where} cannot be understood: {error}. Nothing was loaded; use a model that this version of "
            "shoal has saved."
        ) from error


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    if dataclasses.is_dataclass(value):
        fields = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"kind": type(value).__name__, **fields}
    return value


def _revived(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_revived(part) for part in value)
    if isinstance(value, dict):
        fields = {name: _revived(part) for name, part in value.items() if name != "kind"}
        return _KINDS[value["kind"]](**fields)
    return value


_MAX_ONE_HOT = 32
_ID_KINDS = (Bucketized, Categorical, Hashed, Crossed)


class FeatureSet:
    """Columns of a table as a model sees them.

    Call it with a batch, and it makes the tensors of the input layer of it.
    Ids that no `embedding` refers to become a one-hot where they are 32 or
    fewer, and rows of (number of ids)^0.25 numbers where they are more.

        features = FeatureSet([
            numeric("age"), categorical("city", max_size=1000), embedding("city", dim=8),
            crossed(["city", "hour"], buckets=10_000), bag("clicked", dim=16, weights="seconds"),
        ])
        features.fit(train)
        layer = features.input_layer()
        model = nn.Sequential(layer, nn.Linear(layer.out_features, 1))
        trainer.fit(train.shuffle(seed=0).batch(1024).map(features))
    """

    def __init__(self, features: Iterable[Feature]) -> None:
        self.features = tuple(features)
        self.statistics: Statistics | None = None
        """Statistics of the data, from fit."""
        _check(self.features)
        parts = parts_of(self.features)
        self._parts: dict[str, IdFeature] = {part.name: part for part in parts if isinstance(part, _ID_KINDS)}
        bag_ids = {feature.ids.name for feature in self.features if isinstance(feature, Bag)}
        self._collected = tuple(parts)
        self._needs_fit = any(map(needs_fit, parts))
        self._numerics = [feature for feature in self.features if isinstance(feature, Numeric)]
        self._bags = [feature for feature in self.features if isinstance(feature, Bag)]
        wanted = [
            self._ids_of(feature) for feature in self.features if isinstance(feature, (*_ID_KINDS, Embedding))
        ]
        self._ids = list({feature.name: feature for feature in wanted}.values())
        self._parts = {name: part for name, part in self._parts.items() if name not in bag_ids}
        self._transform: Transform | None = None
        if not self._needs_fit:
            self._learn(Statistics())
            self.statistics = None

    def fit(
        self,
        data: Any,
        *,
        batch_size: int = 8192,
        workers: int = 1,
        key: str | None = None,
        directory: str | os.PathLike[str] | None = None,
    ) -> FeatureSet:
        """Find out what the features have to know, in one pass over `data`; returns itself.

        The workers of a job share the pass, as do `workers` processes of this
        one, and the result is the same for any number of them. It is kept
        and found again as `Dataset.map_reduce` says; `key` and `directory`
        are handed to it.

            features.fit(train)
        """
        if not isinstance(data, Dataset):
            what = "batches" if isinstance(data, Batches) else f"a {type(data).__name__}"
            raise ConfigError(
                f"fit takes a Dataset, the one that is trained on, but got {what}. Nothing was computed; call "
                "features.fit(train) before train.batch(...)."
            )
        if not self._needs_fit:
            return self
        found = data.map_reduce(
            Collect(self._collected), merge, batched=batch_size, workers=workers, key=key, directory=directory
        )
        if not len(found):
            raise EmptyDataset(what="FeatureSet.fit")
        self._learn(conclude(self._collected, found.items(), _length(data)))
        return self

    def __call__(self, batch: Any) -> Any:
        """The batch with its columns made into the tensors of the input layer; a label stays as it is."""
        columns, put_back = columns_of(batch)
        return put_back(self._fitted("a batch")(columns))

    def input_layer(self) -> InputLayer:
        """A new layer that takes what this makes of a batch. Its `out_features` are what the next layer takes."""
        transform = self._fitted("input_layer()")
        parts: dict[str, InputPart] = {}
        if self._numerics:
            parts[DENSE] = Dense(DENSE, sum(map(transform.width, self._numerics)))
        embedded = {self._ids_of(one).name for one in self.features if isinstance(one, Embedding)}
        for feature in self.features:
            match feature:
                case Embedding():
                    ids = self._ids_of(feature)
                    parts[_free(feature.name, parts)] = self._rows(
                        ids,
                        feature.dim,
                        feature.table,
                        sparse=feature.sparse,
                        by=f"embedding('{feature.name}')",
                    )
                case Bag():
                    num_ids = _table_size(
                        transform.num_ids(feature.ids), feature.table, f"bag('{feature.name}')"
                    )
                    parts[feature.name] = BagOfRows(
                        feature.name,
                        feature.name + WEIGHTS,
                        num_ids,
                        feature.dim,
                        sparse=feature.sparse,
                        seed=_seed(feature.name),
                    )
                case Numeric():
                    continue
                case _ if feature.name not in embedded:
                    parts[feature.name] = self._by_default(feature)
        return InputLayer(encode(self.features, self.statistics), parts)

    @classmethod
    def from_layer(cls, model: nn.Module) -> FeatureSet:
        """The features of an input layer, or of the model that has one: as they were saved with its weights."""
        layers = {name: module for name, module in model.named_modules() if isinstance(module, InputLayer)}
        if len(layers) != 1:
            raise ConfigError(
                f"from_layer takes an input layer, or a model with one; this model has {len(layers)}"
                f"{': ' + ', '.join(layers) if layers else ''}."
            )
        [(name, layer)] = layers.items()
        return cls._of(bytes(layer.feature_set.cpu().numpy().tobytes()), name or "the layer")

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, name: str | None = None) -> FeatureSet:
        """The features of a model that `Trainer.save` or a checkpoint has written; `name` chooses among several.

        features = FeatureSet.load("out/model")
        model = nn.Sequential(features.input_layer(), ...)      # as it was built for training
        """
        place = Path(path)
        file = place / "model.safetensors" if place.is_dir() else place
        if not file.exists():
            raise NoCheckpoint(path=str(path), reason="it has no model.safetensors")
        try:
            with safe_open(file, "pt") as tensors:
                there = [key for key in tensors.keys() if key.rpartition(".")[2] == STATE]  # noqa: SIM118  no mapping
                found = [key for key in there if name is None or key in (name, f"{name}.{STATE}")]
                if len(found) != 1:
                    raise CheckpointError(
                        f"{file} holds {len(there)} feature sets{': ' + ', '.join(there) if there else ''}, and "
                        f"{'name= chooses one of several' if name is None else f'none is called {name!r}'}. Nothing was loaded."
                    )
                data = tensors.get_tensor(found[0]).numpy().tobytes()
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}. Nothing was loaded.") from error
        return cls._of(data, str(file))

    def __repr__(self) -> str:
        state = "fitted" if self._transform is not None else "not fitted"
        return f"FeatureSet({', '.join(feature.name for feature in self.features)}; {state})"

    @classmethod
    def _of(cls, data: bytes, where: str) -> FeatureSet:
        features, statistics = decode(data, where)
        found = cls(features)
        if statistics is not None:
            found._learn(statistics)
        return found

    def _learn(self, statistics: Statistics) -> None:
        self.statistics = statistics
        self._transform = Transform(
            statistics, numerics=self._numerics, ids=self._ids, bags=self._bags, parts=self._parts
        )

    def _fitted(self, what: str) -> Transform:
        if self._transform is None:
            needed = ", ".join(f"'{feature.name}'" for feature in self._collected if needs_fit(feature))
            raise ConfigError(
                f"{what} needs statistics of the data that nobody has computed yet, for {needed}. Call features.fit(train) "
                "first, with the data that is trained on; or take them from a saved model, with FeatureSet.load(directory)."
            )
        return self._transform

    def _ids_of(self, feature: IdFeature | Embedding) -> IdFeature:
        if not isinstance(feature, Embedding):
            return feature
        return self._parts[feature.of] if isinstance(feature.of, str) else feature.of

    def _rows(self, ids: IdFeature, dim: int, table: Table, *, sparse: bool, by: str) -> InputPart:
        num_ids = _table_size(self._fitted(by).num_ids(ids), table, by)
        return EmbeddingRows(ids.name, num_ids, dim, sparse=sparse, seed=_seed(ids.name))

    def _by_default(self, feature: IdFeature) -> InputPart:
        num_ids = self._fitted("input_layer()").num_ids(feature)
        if num_ids is None:
            raise ConfigError(
                f"hashed('{feature.name}') without buckets= has as many ids as there are values, so nobody can tell how wide "
                f"its rows should be. Add embedding('{feature.name}', dim=16), or give it buckets."
            )
        if num_ids <= _MAX_ONE_HOT:
            return OneHot(feature.name, num_ids)
        return self._rows(feature, math.ceil(num_ids**0.25), "auto", sparse=False, by=f"'{feature.name}'")


def _check(features: tuple[Feature, ...]) -> None:
    """Refuse what cannot be meant, by name."""
    for feature in features:
        if not isinstance(feature, (Numeric, *_ID_KINDS, Embedding, Bag)):
            raise ConfigError(
                f"a FeatureSet takes features, as numeric('age') or categorical('city'), but got a {type(feature).__name__}."
            )
    if not features:
        raise ConfigError(
            "a FeatureSet without features makes no input: declare one, for instance numeric('age')."
        )
    # Numbers are told apart from ids; an embedding is called like its ids on purpose.
    bags = [feature for feature in features if isinstance(feature, Bag)]
    inner = [
        part for part in parts_of([one for one in features if one not in bags]) if isinstance(part, _ID_KINDS)
    ]
    ids = list(dict.fromkeys(part.name for part in inner))
    for names in (
        [feature.name for feature in features if isinstance(feature, Numeric)],
        [part.name for part in inner] + [feature.name for feature in bags],
    ):
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(
                f"two features are called '{twice}'. Give one of them another name, with name='{twice}_2'."
            )
    if DENSE in (*ids, *(feature.name for feature in bags)):
        raise ConfigError(
            f"'{DENSE}' is what the numeric features are called together: give that feature another name=."
        )
    for feature in features:
        if isinstance(feature, Embedding) and isinstance(feature.of, str) and feature.of not in ids:
            raise ConfigError(
                f"embedding('{feature.of}') has no ids to look up: no feature of that name gives any. Declare "
                f"categorical('{feature.of}') or hashed('{feature.of}', buckets=...) beside it, or write "
                f"embedding(categorical('{feature.of}'), dim={feature.dim}). There are: {', '.join(ids) or 'none'}."
            )


def _table_size(num_ids: int | None, table: Table, by: str) -> int | None:
    if table == "hash":
        return None
    if num_ids is None and table == "embedding":
        raise ConfigError(
            f"{by} cannot have an nn.Embedding: its ids are 64 bits of hash, and there are as many rows as values. Give the "
            "hash buckets=, or leave table= out."
        )
    return num_ids


def _free(name: str, taken: dict[str, InputPart]) -> str:
    return (
        name
        if name not in taken
        else next(f"{name}_{n}" for n in range(2, 1 << 20) if f"{name}_{n}" not in taken)
    )


def _seed(name: str) -> int:
    return zlib.crc32(name.encode())


def _length(data: Dataset) -> int:
    try:
        return len(data)
    except TypeError:
        return 0  # a stream
    except DataError:
        return 0
