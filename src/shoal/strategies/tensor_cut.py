"""Layers cut over the ranks of `tp` as a plan says, by torch's DTensor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from shoal.strategies.tensor_plan import Plan


def apply(plan: Plan, model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut `model` in place."""
    styles: dict[str, ParallelStyle] = {}
    for row in plan.rows.values():
        if row.style == "colwise":
            # Parts stay parts, as tensors that know it: a view into heads is then a view of this rank's heads.
            styles[row.layer] = ColwiseParallel(use_local_output=False)
        elif row.style == "rowwise":
            styles[row.layer] = RowwiseParallel()
        elif row.style == "colwise alone":
            styles[row.layer] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh, styles)
    # Its short cut for inference reads the weights of a layer past the layer.
    torch.backends.mha.set_fastpath_enabled(False)


@contextlib.contextmanager
def running() -> Iterator[None]:
    """While a model that is cut runs, forward and backward."""
    # A mask or a table that the user's forward brings along is the same on every rank. Of the ways to compute an
    # attention only the plain one knows tensors in parts (torch 2.13, on CPU).
    with implicit_replication(), sdpa_kernel(SDPBackend.MATH):
        yield
