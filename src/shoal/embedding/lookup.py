"""Forward and backward of nn.Embedding and nn.EmbeddingBag over a RowSource: pull rows, push their gradients.

Equal to torch's modules with `sparse=True`: a row is only heard of where an
id asked for it, and the padding's row gets no gradient. Loops are numba's on
the CPU; elsewhere torch's own operators work on the pulled rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.embedding.kernels import bag, bag_back, expand, sum_back, weights_back
from shoal.embedding.row_source import RowSource
from shoal.errors import TrainingError


def embedding_forward(source: RowSource, ids: Tensor, *, padding_idx: int | None = None) -> Tensor:
    """The rows of `ids`, in its shape with one dim more. What the padding's id gives gets no gradient."""
    keys, inverse = source.uniques(ids)
    padding = _place(keys, padding_idx)
    rows = _pulled(source, keys, padding, ids.device)
    out: Tensor
    if rows.device.type == "cpu":
        out = Lookup.apply(rows, torch.from_numpy(inverse))  # type: ignore[no-untyped-call]  # torch's
    else:
        out = rows.index_select(0, torch.from_numpy(inverse).to(rows.device))
    return out.view(*ids.shape, rows.shape[1])


def embedding_bag_forward(
    source: RowSource,
    ids: Tensor,
    offsets: Tensor | None = None,
    *,
    mode: str = "mean",
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """A row per bag: the sum, mean or weighted sum of the rows of its ids."""
    if mode not in ("sum", "mean") or (per_sample_weights is not None and mode != "sum"):
        weighted = " with per_sample_weights" if per_sample_weights is not None else ""
        raise TrainingError(
            f"an EmbeddingBag with mode='{mode}'{weighted} cannot have its rows elsewhere: 'sum', 'mean', and weights with "
            "'sum' can. Nothing was computed; use one of these."
        )
    bounds = _bounds(ids, offsets, include_last_offset)
    keys, inverse = source.uniques(ids)
    padding = _place(keys, padding_idx)
    rows = _pulled(source, keys, padding, ids.device)
    weights = None if per_sample_weights is None else per_sample_weights.reshape(-1)
    if rows.device.type == "cpu":
        return BagLookup.apply(rows, weights, torch.from_numpy(inverse), bounds, padding, mode == "mean")  # type: ignore[no-untyped-call, no-any-return]  # torch's
    return bag_elsewhere(rows, weights, torch.from_numpy(inverse), bounds, padding, mode == "mean")


def bag_elsewhere(
    rows: Tensor, weights: Tensor | None, inverse: Tensor, bounds: Tensor, padding: int, is_mean: bool
) -> Tensor:
    """The result of BagLookup, by torch's own operator on the device of `rows`."""
    return F.embedding_bag(
        inverse.to(rows.device, torch.int64), rows, bounds.to(rows.device), mode="mean" if is_mean else "sum",
        per_sample_weights=weights, include_last_offset=True, padding_idx=padding if padding >= 0 else None,
    )  # fmt: skip


def _pulled(source: RowSource, keys: NDArray[np.int64], padding: int, device: torch.device) -> Tensor:
    rows = source.pull(keys).detach()
    if torch.is_grad_enabled():
        rows.requires_grad_()
        # A leaf of its own per forward: its hook runs once, when all gradients of these rows are there.
        rows.register_hook(lambda grad: _push(source, keys, padding, grad))  # type: ignore[no-untyped-call]  # torch's
    return rows.to(device)


def _push(source: RowSource, keys: NDArray[np.int64], padding: int, grad: Tensor) -> None:
    gradients = grad.detach().contiguous().numpy()
    if padding >= 0:
        keys, gradients = np.delete(keys, padding), np.delete(gradients, padding, axis=0)
    if len(keys):
        source.push(keys, gradients)


def _place(keys: NDArray[np.int64], key: int | None) -> int:
    if key is None:
        return -1
    place = int(np.searchsorted(keys, key))
    return place if place < len(keys) and keys[place] == key else -1


def _bounds(ids: Tensor, offsets: Tensor | None, include_last: bool) -> Tensor:
    """Beginnings of the bags, and the end of the last one."""
    num_ids = ids.numel()
    if ids.dim() == 2 and offsets is None:
        return torch.arange(ids.shape[0] + 1) * ids.shape[1]
    if ids.dim() != 1 or offsets is None or offsets.dim() != 1:
        raise TrainingError(
            f"an EmbeddingBag takes ids of two dims, or ids of one dim with offsets; got ids of {ids.dim()} dims and "
            f"{'no offsets' if offsets is None else f'offsets of {offsets.dim()} dims'}. Nothing was computed."
        )
    bounds = offsets.detach().cpu().to(torch.int64)
    if not include_last:
        bounds = torch.cat([bounds, torch.tensor([num_ids])])
    inner = bounds.numpy()
    if not len(inner) or inner[0] != 0 or inner[-1] > num_ids or (np.diff(inner) < 0).any():
        raise TrainingError(
            f"the offsets of an EmbeddingBag begin with 0, do not decrease and end within the {num_ids} ids; got "
            f"{offsets.tolist()[:8]}{'...' if len(offsets) > 8 else ''}. Nothing was computed."
        )
    return bounds


class Lookup(torch.autograd.Function):
    """rows[inverse], on the CPU."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, inverse: Tensor) -> Tensor:
        """Give each id its row."""
        ctx.inverse, ctx.num_rows = inverse, len(rows)
        out = rows.new_empty(len(inverse), rows.shape[1])
        expand(_numpy(rows), inverse.numpy(), out.numpy())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Sum per row."""
        out = grad.new_empty(ctx.num_rows, grad.shape[1])
        sum_back(_numpy(grad), ctx.inverse.numpy(), out.numpy())
        return out, None


class BagLookup(torch.autograd.Function):
    """Sums or means of rows[inverse] over runs, on the CPU."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weights: Tensor | None,
        inverse: Tensor,
        bounds: Tensor,
        padding: int,
        is_mean: bool,
    ) -> Tensor:
        """Reduce each bag."""
        used = rows.new_empty(0) if weights is None else weights.detach().to(rows.dtype).contiguous()
        if weights is not None and len(used) != len(inverse):
            raise TrainingError(
                f"per_sample_weights has {len(used)} entries for {len(inverse)} ids. Nothing was computed; they go one by one."
            )
        # Rows are only needed again for the gradient of weights.
        ctx.save_for_backward(used, rows if weights is not None else None)
        ctx.inverse, ctx.bounds, ctx.padding, ctx.is_mean, ctx.num_rows = (
            inverse,
            bounds,
            padding,
            is_mean,
            len(rows),
        )
        out = rows.new_empty(len(bounds) - 1, rows.shape[1])
        bag(_numpy(rows), inverse.numpy(), bounds.numpy(), used.numpy(), padding, is_mean, out.numpy())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of rows, and of weights where they want one."""
        weights, rows = ctx.saved_tensors
        inverse, bounds, given = ctx.inverse.numpy(), ctx.bounds.numpy(), _numpy(grad)
        of_rows = of_weights = None
        if ctx.needs_input_grad[0]:
            of_rows = grad.new_empty(ctx.num_rows, grad.shape[1])
            bag_back(given, inverse, bounds, weights.numpy(), ctx.padding, ctx.is_mean, of_rows.numpy())
        if ctx.needs_input_grad[1]:
            of_weights = torch.empty_like(weights)
            weights_back(given, _numpy(rows), inverse, bounds, ctx.padding, of_weights.numpy())
        return of_rows, of_weights, None, None, None, None


def _numpy(tensor: Tensor) -> NDArray[Any]:
    return tensor.detach().contiguous().numpy()
