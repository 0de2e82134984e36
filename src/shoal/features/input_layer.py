"""The input layer of a model on features: dense numbers, one-hots, embeddings and bags, side by side.

Only modules that every strategy knows: under `ps`, rows of the embeddings and
bags become rows on the servers, as those of any model. The feature set itself,
with all that fit found out, is a tensor of bytes in the layer's state_dict: it
is saved and loaded with the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.embedding import HashEmbedding
from shoal.errors import DataError

STATE = "feature_set"
"""Name of the bytes in the state_dict."""


class InputPart(Protocol):
    """Columns of the input, made of some of the tensors of a batch."""

    width: int

    def __call__(self, inputs: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """Columns [rows, width]; `like` has the dtype and device of the layer."""


class InputLayer(nn.Module):
    """Takes what a FeatureSet makes of a batch, gives [rows, out_features]."""

    feature_set: Tensor
    _like: Tensor

    def __init__(self, state: bytes, parts: Mapping[str, InputPart]) -> None:
        super().__init__()
        self.register_buffer(STATE, torch.frombuffer(bytearray(state), dtype=torch.uint8).clone())
        self.register_buffer("_like", torch.zeros(0), persistent=False)
        # A prefix, because a dict of modules has methods that columns may be called like.
        self.tables = nn.ModuleDict(
            {
                f"of_{name.replace('.', '_')}": part
                for name, part in parts.items()
                if isinstance(part, nn.Module)
            }
        )
        self._parts = dict(parts)
        self.out_features = sum(part.width for part in parts.values())

    def forward(self, inputs: Any) -> Tensor:
        """The input of the next layer, the features' columns in the order of their declaration."""
        if isinstance(inputs, Tensor) and list(self._parts) in (["input"], ["inputs"]):
            inputs = {
                next(iter(self._parts)): inputs
            }  # a lone column of that name was taken for an argument's
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
        """For print(model)."""
        columns = ", ".join(f"{name}: {part.width}" for name, part in self._parts.items())
        return f"out_features={self.out_features}, {columns}"


class Dense:
    """The numbers, as they are."""

    def __init__(self, name: str, width: int) -> None:
        self._name, self.width = name, width

    def __call__(self, inputs: Mapping[str, Tensor], like: Tensor) -> Tensor:
        return inputs[self._name].to(like.dtype)


class OneHot:
    """A column per id."""

    def __init__(self, name: str, num_ids: int) -> None:
        self._name, self.width = name, num_ids

    def __call__(self, inputs: Mapping[str, Tensor], like: Tensor) -> Tensor:
        return F.one_hot(inputs[self._name], self.width).to(like.dtype)


class EmbeddingRows(nn.Module):
    """A row of a table per id."""

    def __init__(self, name: str, num_ids: int | None, dim: int, *, sparse: bool, seed: int) -> None:
        super().__init__()
        self._name, self.width = name, dim
        self.rows = _table(num_ids, dim, sparse=sparse, seed=seed, name=name)

    def forward(self, inputs: Mapping[str, Tensor], like: Tensor) -> Tensor:
        found: Tensor = self.rows(inputs[self._name])
        return found


class BagOfRows(nn.Module):
    """A weighted sum of rows per list of ids."""

    def __init__(
        self, name: str, weights: str, num_ids: int | None, dim: int, *, sparse: bool, seed: int
    ) -> None:
        super().__init__()
        self._name, self._weights, self.width = name, weights, dim
        self.rows: nn.Module
        if num_ids is None:
            self.rows = HashEmbedding(dim, scale=dim**-0.5, seed=seed, name=name)
        else:
            self.rows = nn.EmbeddingBag(num_ids + 1, dim, mode="sum", sparse=sparse, padding_idx=num_ids)
            _start(self.rows.weight, padding=num_ids)

    def forward(self, inputs: Mapping[str, Tensor], like: Tensor) -> Tensor:
        ids, weights = inputs[self._name], inputs[self._weights].to(like.dtype)
        found: Tensor
        if isinstance(self.rows, HashEmbedding):
            found = (self.rows(ids) * weights.unsqueeze(-1)).sum(1)
        else:
            found = self.rows(ids, per_sample_weights=weights)
        return found


def _table(num_ids: int | None, dim: int, *, sparse: bool, seed: int, name: str) -> nn.Module:
    if num_ids is None:
        return HashEmbedding(dim, scale=dim**-0.5, seed=seed, name=name)
    table = nn.Embedding(num_ids, dim, sparse=sparse)
    _start(table.weight)
    return table


def _start(weight: Any, padding: int | None = None) -> None:
    """Rows of length about 1, whatever their width."""
    with torch.no_grad():
        weight.normal_(std=weight.shape[1] ** -0.5)
        if padding is not None:
            weight[padding] = 0
