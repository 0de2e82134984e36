"""Gradient buckets, summed over the ranks in overlap with backward.

Each gradient is copied into its bucket as soon as autograd has finished it, and a bucket is sent as
soon as it and those before it are full. The rank's own gradients stay in place, so a broken
exchange can be retried from them.

The layout is a function of the model and the bucket size alone, never of timing: a group that is
formed again after a death sums in the same order, so the bits stay equal. (torch's
DistributedDataParallel lays its buckets out anew after the first backward.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.collectives.compression import Compressor, Gradient, Traffic
from shoal.collectives.reducer import Reducer
from shoal.collectives.sparse_rows import Rows, TableExchange, no_rows, rows_of
from shoal.errors import PeerLost, TrainingError

BUCKET_BYTES = 25 << 20
FIRST_BUCKET_BYTES = 1 << 20  # the first gradients should be sent early
BETWEEN_HOSTS_BYTES = 4 << 20
"""Bucket size between hosts: on a network the bytes take longer than one more exchange, so smaller
buckets overlap better.
"""


@dataclass(frozen=True, slots=True)
class Item:
    """One gradient to lay out."""

    index: int
    """Position among the model's trainable parameters."""

    numel: int
    itemsize: int
    kind: str
    """Gradients of different dtype or device never share a bucket."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A flat buffer: gradients side by side, then one flag per gradient, set where this rank used the parameter."""

    kind: str
    indices: tuple[int, ...]
    offsets: tuple[int, ...]
    numel: int
    """Elements of all gradients; the flags follow after."""

    @property
    def length(self) -> int:
        return self.numel + len(self.indices)


def lay_out(
    items: Sequence[Item], *, bucket_bytes: int = BUCKET_BYTES, first_bucket_bytes: int = FIRST_BUCKET_BYTES
) -> list[Bucket]:
    """Buckets in sending order: last parameters first, as backward produces them."""
    buckets: list[Bucket] = []
    open_items: dict[str, list[Item]] = {}
    for item in reversed(items):
        waiting = open_items.setdefault(item.kind, [])
        limit = bucket_bytes if buckets else first_bucket_bytes
        if waiting and sum(other.numel * other.itemsize for other in [*waiting, item]) > limit:
            buckets.append(_close(waiting))
            waiting.clear()
        waiting.append(item)
    buckets.extend(_close(waiting) for waiting in open_items.values() if waiting)
    return buckets


def _close(items: Sequence[Item]) -> Bucket:
    offsets, at = [], 0
    for item in items:
        offsets.append(at)
        at += item.numel
    return Bucket(
        kind=items[0].kind, indices=tuple(item.index for item in items), offsets=tuple(offsets), numel=at
    )


class _Compressed(NamedTuple):
    """Work that the compressor finishes."""

    work: Any


class GradientExchange:
    """The buckets of one model, and their progress within the current step.

    Every rank starts its buckets in the order of the layout, whatever order
    its gradients come in: the collectives of a group are matched by order.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        *,
        sparse: frozenset[str],
        compressor: Compressor | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.compressor = compressor
        self.traffic = Traffic() if compressor is None else compressor.traffic
        self._group: Reducer | None = None
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._sparse = [index for index, name in enumerate(self._names) if name in sparse]
        dense = [
            Item(index, parameter.numel(), parameter.element_size(), f"{parameter.dtype}/{parameter.device}")
            for index, (name, parameter) in enumerate(named)
            if name not in sparse
        ]
        self.layout = lay_out(dense, bucket_bytes=bucket_bytes)
        self._memory = [
            torch.zeros(bucket.length, dtype=like.dtype, device=like.device)
            for bucket in self.layout
            for like in [self._parameters[bucket.indices[0]]]
        ]
        self._place: dict[int, tuple[int, int, int]] = {}
        self._views: dict[int, Tensor] = {}
        for number, bucket in enumerate(self.layout):
            for position, (index, offset) in enumerate(zip(bucket.indices, bucket.offsets, strict=True)):
                parameter = self._parameters[index]
                self._place[index] = number, offset, position
                self._views[index] = self._memory[number][offset : offset + parameter.numel()].view(
                    parameter.shape
                )
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(self._parameters)
        ]
        self.abandon()

    def arm(self, group: Reducer) -> None:
        """Send gradients through `group` as the next backward makes them: it is the step's last."""
        self._group = group

    def send_rest(self) -> None:
        """Start every bucket not sent yet: after this, other collectives may follow in the same order on all ranks."""
        group = self._group
        assert group is not None
        if self._is_broken:
            raise PeerLost(rank=group.rank, operation="the exchange of gradients", reason="a peer went away")
        for index in self._place:
            if index not in self._filled:
                self._fill(index)
        self._filled.update(self._sparse)
        self._send_full(group)

    def finish(self) -> None:
        """Send the rest, wait for all, and put the sums in place of the gradients.

        A parameter that no rank used keeps `grad=None` on all of them. Until the very last sum has
        arrived, every gradient is this rank's own.
        """
        self.send_rest()
        group = self._group
        assert group is not None
        for work in self._works:
            if isinstance(work, _Compressed):
                assert self.compressor is not None
                self.compressor.finish(work.work, group, "the exchange of compressed gradients")
            else:
                group.finish(work, "the exchange of gradients")
        tables = self._rows.finish() if self._rows is not None else []
        if self.compressor is not None:
            self.compressor.commit()
        self.traffic.num_sums += 1
        for number, bucket in enumerate(self.layout):
            used = self._memory[number][bucket.numel :].tolist()
            for position, index in enumerate(bucket.indices):
                self._parameters[index].grad = self._views[index] if used[position] else None
        for index, rows in zip(self._sparse, tables, strict=True):
            table = self._parameters[index]
            table.grad = rows.gradient(len(table)).to(table.device) if len(rows.keys) else None
        self.abandon()

    def abandon(self) -> None:
        """Forget the buckets in progress and the group. The gradients stay, so the exchange can be retried."""
        self._group = None
        self._is_broken = False
        if self.compressor is not None:
            self.compressor.abandon()
        self._filled: set[int] = set()
        self._missing = [len(bucket.indices) for bucket in self.layout]
        self._used = [[False] * len(bucket.indices) for bucket in self.layout]
        self._next = 0
        self._works: list[Any] = []
        self._rows: TableExchange | None = None

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _hook(self, index: int) -> Any:
        def ready(parameter: Tensor) -> None:
            if self._group is not None and not self._is_broken:
                self._fill(index)
                try:
                    self._send_full(self._group)
                except PeerLost:
                    # Backward goes on: this rank's contribution must be complete before it can be sent
                    # again.
                    self._is_broken = True

        return ready

    def _fill(self, index: int) -> None:
        if index not in self._place:  # a table: its rows are taken when they leave
            self._filled.add(index)
            return
        number, _, position = self._place[index]
        if index in self._filled:
            raise TrainingError(
                f"the gradient of '{self._names[index]}' was finished twice in one backward, after it had been sent. "
                "Nothing was applied; use activation checkpointing with use_reentrant=False."
            )
        self._filled.add(index)
        self._missing[number] -= 1
        gradient = self._parameters[index].grad
        self._used[number][position] = gradient is not None
        if gradient is None:
            self._views[index].zero_()
        elif gradient.layout is torch.strided:
            self._views[index].copy_(gradient)
        else:
            raise TrainingError(
                f"the gradient of '{self._names[index]}' is sparse, but no embedding layer with sparse=True owns that "
                "parameter, so its exchange was laid out as dense. Nothing was applied; use nn.Embedding or "
                "nn.EmbeddingBag with sparse=True, or a dense gradient."
            )

    def _send_full(self, group: Reducer) -> None:
        """Start full buckets in layout order, then the rows of all tables."""
        while self._next < len(self.layout) and self._missing[self._next] == 0:
            self._works += self._start(self._next, group)
            self._next += 1
        if (
            self._sparse
            and self._rows is None
            and self._next == len(self.layout)
            and self._filled.issuperset(self._sparse)
        ):
            tables = [self._own_rows(index) for index in self._sparse]
            self.traffic.count_uncompressed(*(tensor for rows in tables for tensor in rows))
            self._rows = TableExchange(tables, group)

    def _start(self, number: int, group: Reducer) -> list[Any]:
        bucket, memory = self.layout[number], self._memory[number]
        used = self._used[number]
        # All at once: a write for each parameter would be a device kernel for each.
        flags = memory[bucket.numel :]
        if all(used):
            flags.fill_(1.0)
        else:
            flags.copy_(torch.tensor(used, dtype=flags.dtype))
        if self.compressor is None or not memory.is_floating_point():
            self.traffic.count_uncompressed(memory)
            return [group.start_all_reduce(memory)]
        layout = [
            Gradient(offset, tuple(self._parameters[index].shape))
            for index, offset in zip(bucket.indices, bucket.offsets, strict=True)
        ]
        started = self.compressor.start(number, memory[: bucket.numel], layout, group)
        # Whether a gradient was used must not depend on rounding.
        return [_Compressed(started), group.start_all_reduce(flags)]

    def _own_rows(self, index: int) -> Rows:
        """This rank's rows of a sparse gradient, duplicates merged before sending; none where the table was not used."""
        parameter = self._parameters[index]
        gradient = parameter.grad
        if gradient is None:
            return no_rows(parameter)
        if gradient.layout is not torch.sparse_coo:
            raise TrainingError(
                f"'{self._names[index]}' is the weight of an embedding with sparse=True, but its gradient is dense "
                "(the weight is also used elsewhere). Nothing was applied; build the layer with sparse=False."
            )
        return rows_of(gradient)
