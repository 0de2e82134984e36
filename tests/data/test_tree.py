"""Containers of batches and outputs keep their class, whatever is done to the tensors inside."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.data.tree import concatenate, leaves, map_tensors


class Named(NamedTuple):
    x: Tensor
    note: str


@dataclasses.dataclass(frozen=True)
class Fields:
    x: Tensor
    y: Tensor | None = None
    made: str = dataclasses.field(default="here", init=False)


class Encoding(UserDict[str, Any]):
    """As a tokenizer gives: a mapping that is no dict, with a constructor of its own."""

    def __init__(self, data: dict[str, Any], *, encodings: str) -> None:
        super().__init__(data)
        self.encodings = encodings


class Sub(dict[str, Any]):
    pass


@dataclasses.dataclass
class Registered(OrderedDict[str, Any]):
    """As transformers has them: a dataclass and a mapping of the fields that are not None, known to pytree."""

    loss: Tensor | None = None
    logits: Tensor | None = None

    def __post_init__(self) -> None:
        super().update({key: value for key, value in vars(self).items() if value is not None})


pytree.register_pytree_node(
    Registered,
    lambda output: (list(output.values()), list(output)),
    lambda values, names: Registered(**dict(zip(names, values, strict=True))),
)

X = torch.arange(6.0).reshape(3, 2)


@pytest.mark.parametrize(
    "tree",
    [
        Named(X, "kept"),
        Fields(X, X + 1),
        Encoding({"x": X}, encodings="kept"),
        Sub(x=X, inner=[X, (X,)]),
        Registered(logits=X),
        OrderedDict(x=X),
        torch.return_types.max((X, X.long())),
    ],
    ids=lambda tree: type(tree).__name__,
)
def test_a_container_keeps_its_class_and_what_else_it_holds(tree: Any) -> None:
    doubled = map_tensors(lambda tensor: tensor * 2, tree)
    joined = concatenate([tree, tree])
    assert type(doubled) is type(tree) is type(joined)
    for before, twice, both in zip(leaves(tree), leaves(doubled), leaves(joined), strict=True):
        if isinstance(before, Tensor):
            assert torch.equal(twice, before * 2)
            assert torch.equal(both, torch.cat([before, before]))
        else:
            assert twice is before is both
    if isinstance(tree, Encoding):
        assert doubled.encodings == joined.encodings == "kept"
    if isinstance(tree, Registered):
        assert doubled.loss is None
        assert torch.equal(doubled.logits, X * 2)
