"""`FeatureSet`: a declared list of features that becomes a map stage and an input layer.

The input layer holds only modules that every strategy knows: under `ps`, rows
of its embeddings and bags become rows on the servers, as those of any model.
The feature set itself, with all that fit found out, is a tensor of bytes (JSON)
in the layer's state_dict: it is saved and loaded with the weights.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from shoal.data.batches import Batches
from shoal.data.dataset import Dataset
from shoal.embedding import HashEmbedding
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
    TableKind,
)
from shoal.features.statistics import Collect, Scale, Statistics, conclude, merge, needs_fit, parts_of
from shoal.features.transform import DENSE, WEIGHTS, Transform

STATE = "feature_set"
"""Name of the bytes in the state_dict."""


class InputLayer(nn.Module):
    """Takes what a FeatureSet makes of a batch, gives [rows, out_features]."""

    feature_set: Tensor
    _like: Tensor

    def __init__(self, state: bytes, parts: Mapping[str, InputPart]) -> None:
        super().__init__()
        self.register_buffer(STATE, torch.frombuffer(bytearray(state), dtype=torch.uint8).clone())
        self.register_buffer("_like", torch.zeros(0), persistent=False)
        # A prefix, because a dict of modules has methods that columns may be called like.
        modules = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
        self.tables = nn.ModuleDict({f"of_{name.replace('.', '_')}": part for name, part in modules.items()})
        self._parts = dict(parts)
        self.out_features = sum(part.width for part in parts.values())

    def forward(self, inputs: Any) -> Tensor:
        """The input of the next layer, the features' columns in the order of their declaration."""
        if isinstance(inputs, Tensor) and list(self._parts) in (["input"], ["inputs"]):
            # A lone column of that name was taken for an argument's.
            inputs = dict.fromkeys(self._parts, inputs)
        if not isinstance(inputs, Mapping):
            raise DataError(
                f"the input layer takes what its features make of a batch, a dict of tensors, but got a "
                f"{type(inputs).__name__}. Nothing was computed; put the features in front: data.batch(1024).map(features)."
            )
        columns = []
        for name, part in self._parts.items():
            try:
                columns.append(part(inputs, self._like))
            except KeyError as error:
                raise DataError(
                    f"the input layer misses {error} for its feature '{name}'; the batch has {', '.join(map(str, inputs))}. "
                    "Nothing was computed; put the features in front: data.batch(1024).map(features)."
                ) from None
        return torch.cat(columns, dim=1)

    def extra_repr(self) -> str:
        """Line of print(model)."""
        columns = ", ".join(f"{name}: {part.width}" for name, part in self._parts.items())
        return f"out_features={self.out_features}, {columns}"


class Dense(NamedTuple):
    """The numbers, as they are."""

    name: str
    width: int

    def __call__(self, inputs: Mapping[str, Tensor], like: Tensor) -> Tensor:
        return inputs[self.name].to(like.dtype)


class OneHot(NamedTuple):
    """A column per id."""

    name: str
    width: int

    def __call__(self, inputs: Mapping[str, Tensor], like: Tensor) -> Tensor:
        return F.one_hot(inputs[self.name], self.width).to(like.dtype)


class EmbeddingRows(nn.Module):
    """A row of a table per id."""

    def __init__(self, name: str, num_ids: int | None, dim: int, *, sparse: bool) -> None:
        super().__init__()
        self._name, self.width = name, dim
        if num_ids is None:
            self.rows: nn.Module = _hash_rows(name, dim)
        else:
            self.rows = nn.Embedding(num_ids, dim, sparse=sparse)
            _start(self.rows.weight)

    def forward(self, inputs: Mapping[str, Tensor], like: Tensor) -> Tensor:
        found: Tensor = self.rows(inputs[self._name])
        return found


class BagOfRows(nn.Module):
    """A weighted sum of rows per list of ids."""

    def __init__(self, name: str, num_ids: int | None, dim: int, *, sparse: bool) -> None:
        super().__init__()
        self._name, self.width = name, dim
        if num_ids is None:
            self.rows: nn.Module = _hash_rows(name, dim)
        else:
            self.rows = nn.EmbeddingBag(num_ids + 1, dim, mode="sum", sparse=sparse, padding_idx=num_ids)
            _start(self.rows.weight, padding=num_ids)

    def forward(self, inputs: Mapping[str, Tensor], like: Tensor) -> Tensor:
        ids, weights = inputs[self._name], inputs[self._name + WEIGHTS].to(like.dtype)
        found: Tensor
        if isinstance(self.rows, HashEmbedding):
            found = (self.rows(ids) * weights.unsqueeze(-1)).sum(1)
        else:
            found = self.rows(ids, per_sample_weights=weights)
        return found


InputPart: TypeAlias = Dense | OneHot | EmbeddingRows | BagOfRows
"""Makes columns [rows, width] of some of the tensors of a batch; `like` has the dtype and device of the layer."""


def _hash_rows(name: str, dim: int) -> HashEmbedding:
    return HashEmbedding(dim, scale=dim**-0.5, seed=zlib.crc32(name.encode()), name=name)


def _start(weight: Any, padding: int | None = None) -> None:
    """Rows of length about 1, whatever their width."""
    with torch.no_grad():
        weight.normal_(std=weight.shape[1] ** -0.5)
        if padding is not None:
            weight[padding] = 0


_FORMAT = 1
_KINDS = {
    kind.__name__: kind for kind in (Numeric, Bucketized, Categorical, Hashed, Crossed, Embedding, Bag, Scale)
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
                case Embedding(dim=dim, table=table, sparse=sparse):
                    name, by = _free(feature.name, parts), f"embedding('{feature.name}')"
                    parts[name] = self._rows(self._ids_of(feature), dim, table, sparse=sparse, by=by)
                case Bag(name=name, dim=dim, table=table, sparse=sparse):
                    num_ids = _table_size(transform.num_ids(feature.ids), table, f"bag('{name}')")
                    parts[name] = BagOfRows(name, num_ids, dim, sparse=sparse)
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

    def _rows(self, ids: IdFeature, dim: int, table: TableKind, *, sparse: bool, by: str) -> InputPart:
        num_ids = _table_size(self._fitted(by).num_ids(ids), table, by)
        return EmbeddingRows(ids.name, num_ids, dim, sparse=sparse)

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


def _table_size(num_ids: int | None, table: TableKind, by: str) -> int | None:
    if table == "hash":
        return None
    if num_ids is None and table == "embedding":
        raise ConfigError(
            f"{by} cannot have an nn.Embedding: its ids are 64 bits of hash, and there are as many rows as values. Give the "
            "hash buckets=, or leave table= out."
        )
    return num_ids


def _free(name: str, taken: dict[str, InputPart]) -> str:
    names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
    return next(each for each in names if each not in taken)


def _length(data: Dataset) -> int:
    try:
        return len(data)
    except (TypeError, DataError):  # a stream
        return 0
