"""Comparison of the ranks' models, before anything is exchanged."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from torch import Tensor, nn

from shoal.errors import ModelsDiffer
from shoal.parallel.hashed_rows import hash_embeddings, plain_tensors


def refuse_different_models(model: nn.Module, gather: Callable[[Tensor], list[Tensor]]) -> None:
    """Compare names, shapes and dtypes over the ranks; the first rank that differs from rank 0 is named."""
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    mine = {
        name: f"{tuple(t.shape)} {t.dtype}" + (", frozen" if name in frozen else "")
        for name, t in plain_tensors(model).items()
    }
    mine |= {
        name: f"rows of {hashed.extra_repr()} in {hashed.dtype}"
        for name, hashed in hash_embeddings(model).items()
    }
    raw = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
    described = [json.loads(bytes(part.tolist())) for part in gather(raw)]
    for rank, other in enumerate(described):
        differences = [
            f"'{name}' is {described[0].get(name, 'absent')} on rank 0 and {other.get(name, 'absent')} on rank {rank}"
            for name in dict.fromkeys([*described[0], *other])
            if described[0].get(name) != other.get(name)
        ]
        if not differences and list(other) != list(described[0]):
            differences = ["its parameters come in another order"]
        if differences:
            raise ModelsDiffer(rank=rank, differences=differences)
