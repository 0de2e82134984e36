"""A feature set as bytes: its declaration and statistics as JSON, to lie among the tensors of a model."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from shoal.errors import CheckpointError
from shoal.features import declared
from shoal.features.declared import Feature
from shoal.features.statistics import Scale, Statistics

_FORMAT = 1
_KINDS = {
    kind.__name__: kind
    for kind in (
        declared.Numeric,
        declared.Bucketized,
        declared.Categorical,
        declared.Hashed,
        declared.Crossed,
        declared.Embedding,
        declared.Bag,
        Scale,
    )
}


def encode(features: tuple[Feature, ...], statistics: Statistics | None) -> bytes:
    """The bytes of both."""
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
    """What `encode` was given; refused where it is something else."""
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
