"""Which parameter's gradient travels in which bucket, and where in it.

Pure, and a function of the model and the bucket size alone: never of timing
or of the order in which gradients happened to arrive. A group that is formed
again after a death sums in the same order, so the bits stay equal. (torch's
own DistributedDataParallel lays its buckets out anew after the first
backward.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BUCKET_BYTES = 25 << 20
FIRST_BUCKET_BYTES = 1 << 20  # the gradients that are ready first should leave early


@dataclass(frozen=True, slots=True)
class Item:
    """One gradient to be laid out."""

    index: int
    """Position among the model's trainable parameters."""

    numel: int
    itemsize: int
    kind: str
    """Gradients of different dtype or device never share a bucket."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A flat piece of memory: its gradients side by side, then one flag per gradient that says whether it was used."""

    kind: str
    indices: tuple[int, ...]
    offsets: tuple[int, ...]
    numel: int
    """Elements of all gradients; the flags follow after."""

    @property
    def length(self) -> int:
        """Elements in all, flags included."""
        return self.numel + len(self.indices)


def lay_out(
    items: Sequence[Item], *, bucket_bytes: int = BUCKET_BYTES, first_bucket_bytes: int = FIRST_BUCKET_BYTES
) -> list[Bucket]:
    """Buckets in the order in which they travel: last parameters first, as backward produces them."""
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
