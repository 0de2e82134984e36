"""Sources of an embedding's rows, and nn.Embedding and nn.EmbeddingBag over them: pull rows, push their gradients.

Equal to torch's modules with `sparse=True`: only requested rows get a gradient, and the padding's
row gets none. Loops are numba's on the CPU; elsewhere torch's own operators work on the pulled
rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.embedding.kernels import bag, bag_back, expand, sum_back, unique, weights_back
from shoal.embedding.row_table import RowTable
from shoal.errors import TrainingError
from shoal.runtime.transport.messages.client_server import TableSpec


class RowSource(Protocol):
    """Rows by key: from this process (`LocalRows`) or from servers.

    `pull` is called once per forward of the module, `push` once per backward
    of that forward, with the keys that got a gradient, each once, increasing.
    The provider decides how and when the gradients are applied.
    """

    def uniques(self, ids: Tensor) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """The distinct ids in increasing order, and the place among them of every id."""
        ...

    def pull(self, keys: NDArray[np.int64]) -> Tensor:
        """A row per key, on the CPU or the model's device. Unchanged until the backward that belongs to it is over."""
        ...

    def push(self, keys: NDArray[np.int64], gradients: Any) -> None:
        """Gradients of these keys, one row each: an array, or a tensor of the device that rows were pulled to."""
        ...

    def everything(self) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """All rows that there are, by increasing key: copies."""
        ...


def uniques_of(ids: Tensor) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """`uniques` without a prefetch."""
    return unique(ids.detach().reshape(-1).cpu().numpy())


def merged(gradients: list[tuple[NDArray[np.int64], NDArray[Any]]]) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Several pushes as one, rows of one key added in the order of the pushes. At least one is given."""
    if len(gradients) == 1:
        return gradients[0]
    keys, inverse = unique(np.concatenate([keys for keys, _ in gradients]))
    rows = np.zeros((len(keys), gradients[0][1].shape[1]), gradients[0][1].dtype)
    start = 0
    for part, values in gradients:
        rows[inverse[start : start + len(part)]] += values  # no key twice within one push
        start += len(part)
    return keys, rows


class LocalRows:
    """A table, and the gradients for its next update.

    Gradients accumulate until `apply` or `drop_gradients`, like a parameter's `grad`. Rows are
    created by their first update.
    """

    def __init__(self, spec: TableSpec) -> None:
        self.table = RowTable(spec)
        self._gradients: list[tuple[NDArray[np.int64], NDArray[Any]]] = []
        self.has_rule = False

    def uniques(self, ids: Tensor) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        return uniques_of(ids)

    def pull(self, keys: NDArray[np.int64]) -> Tensor:
        out = np.empty((len(keys), self.table.dim), self.table.dtype)
        self.table.pull(keys, out)
        return torch.from_numpy(out)

    def push(self, keys: NDArray[np.int64], gradients: NDArray[Any]) -> None:
        if not self.has_rule:
            raise TrainingError(
                f"the rows of '{self.table.spec.name}' got gradients, but nobody updates them: they are no parameters, so "
                "no optimizer knows them. Nothing was changed; train with shoal.Trainer, or call "
                "`embedding.follow(optimizer)` once before the first step."
            )
        self._gradients.append((keys, gradients))

    def everything(self) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """All rows; not ids that are only counted."""
        return self.table.read_rows(np.arange(self.table.num_rows))[:2]

    # ---- for the strategy that trains them ----

    def train_by(self, rule: str, settings: Mapping[str, float]) -> None:
        """Update rows by this rule from now on. With another rule than before, its state begins anew."""
        self.has_rule = True
        if rule == self.table.spec.rule:
            self.table.settings = dict(settings)
            return
        keys, values = self.everything()
        self.table = RowTable(msgspec.structs.replace(self.table.spec, rule=rule, settings=dict(settings)))
        self.table.set(keys, values, None, 0)

    def renumber(self, number: int) -> None:
        """Set the table's number; existing rows change their slots."""
        old = self.table
        if number != old.spec.number:
            self.table = RowTable(msgspec.structs.replace(old.spec, number=number))
            self.table.settings = old.settings
            self.table.set(*old.read_all(), old.step)
            self.table.evicted[0] = old.num_evicted

    def replace(
        self,
        keys: NDArray[np.int64],
        values: NDArray[Any],
        state: NDArray[Any] | None,
        step: int,
        num_evicted: int = 0,
    ) -> None:
        """These rows and no others, after `step` updates; without state they have that of new rows."""
        settings = self.table.settings
        self.table = RowTable(self.table.spec)
        self.table.settings = settings
        self.table.set(keys, values, state, step)
        self.table.evicted[0] = num_evicted

    def replace_values(self, keys: NDArray[np.int64], values: NDArray[Any]) -> None:
        """These rows and no others; the state of those that were there before stays, and so does the number of updates."""
        had, _, state = self.table.read_rows(np.arange(self.table.num_rows))
        step = self.table.step
        self.replace(keys, values, None, step, self.table.num_evicted)
        both, new, old = np.intersect1d(keys, had, assume_unique=True, return_indices=True)
        self.table.set(both, values[new], state[old], step)

    def gradients(self) -> tuple[NDArray[np.int64], NDArray[Any]] | None:
        """Gradients of the next update, each key once; None where backward never came here."""
        if not self._gradients:
            return None
        self._gradients = [merged(self._gradients)]
        return self._gradients[0]

    def sum_of_squares(self) -> float:
        waiting = self.gradients()
        return 0.0 if waiting is None else float(np.sum(np.square(waiting[1], dtype=np.float64)))

    def apply(self, factor: float = 1.0) -> None:
        """One update with the gradients that wait, times `factor`; none where nothing waits, as with `grad=None`."""
        waiting = self.gradients()
        self._gradients = []
        if waiting is not None:
            self.table.apply(waiting[0], np.ascontiguousarray(waiting[1], self.table.dtype), factor)
            self.table.sweep()

    def drop_gradients(self) -> None:
        self._gradients = []

    def to(self, dtype: Literal["float32", "float64"]) -> LocalRows:
        copied = LocalRows(msgspec.structs.replace(self.table.spec, dtype=dtype))
        copied.table.settings, copied.has_rule = self.table.settings, self.has_rule
        keys, values, state = self.table.read_all()
        copied.table.set(keys, values.astype(dtype), state.astype(dtype), self.table.step)
        copied.table.evicted[:] = self.table.evicted
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalRows:
        copied = LocalRows(self.table.spec)
        copied.table.settings = self.table.settings
        copied.table.set(*self.table.read_all(), self.table.step)
        copied.table.evicted[:] = self.table.evicted
        copied.has_rule = self.has_rule
        return copied


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
    gradients = grad.detach().contiguous()
    if gradients.device.type != "cpu":  # of rows that were pulled to there
        if padding >= 0:
            keys = np.delete(keys, padding)
            gradients = torch.cat([gradients[:padding], gradients[padding + 1 :]])
        if len(keys):
            source.push(keys, gradients)
        return
    rows = gradients.numpy()
    if padding >= 0:
        keys, rows = np.delete(keys, padding), np.delete(rows, padding, axis=0)
    if len(keys):
        source.push(keys, rows)


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
        ctx.inverse, ctx.num_rows = inverse, len(rows)
        out = rows.new_empty(len(inverse), rows.shape[1])
        expand(_numpy(rows), inverse.numpy(), out.numpy())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
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
