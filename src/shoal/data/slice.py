"""Slices: a worker's part of one global batch, how a batch is cut, and the weights of its samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from shoal.data.tree import Tree, leaves, map_tensors
from shoal.errors import DataError, TrainingError


class Weighted(NamedTuple):
    """A sample or a batch with weights: unpacks as (inputs, target, weight).

    A type of its own, because a plain tuple of three is two inputs and a target.
    """

    inputs: Tree
    target: Tree
    weight: Any


def keep_weights(before: Any, after: Any) -> Any:
    """`after`, with the weights of `before` kept whatever kind of tuple the function made of it."""
    if not isinstance(before, Weighted) or isinstance(after, Weighted):
        return after
    if isinstance(after, (tuple, list)) and len(after) == 3:
        return Weighted(*after)
    what = f"a tuple of {len(after)}" if isinstance(after, (tuple, list)) else f"a {type(after).__name__}"
    raise DataError(
        f"a map after with_weights was given (inputs, target, weight) and returned {what}: the weights would be lost. "
        "Let it return all three, or map first and call with_weights last."
    )


def bounds(num_samples: int, part: int, num_parts: int) -> tuple[int, int]:
    """The contiguous range of samples that is `part` of `num_parts`; sizes differ by at most one."""
    return num_samples * part // num_parts, num_samples * (part + 1) // num_parts


@dataclass(frozen=True, slots=True)
class Slice:
    """One worker's part of one step.

    `batch` always holds at least one sample, so that every worker runs the same code: if
    `num_local` is 0 the sample is borrowed, and its results must be weighted by zero.
    """

    batch: Tree
    """The samples as the dataset gave them."""

    num_local: int
    """Samples of the global batch that are this worker's own; 0 when borrowed."""

    num_global: int
    """Samples in the global batch."""

    epoch: int = 0
    """Pass over the data, from 0."""

    start: int = 0
    """Position, within the epoch, of the global batch's first sample. `start + num_global` is the next position."""

    first: int = 0
    """Position, within the global batch, of this worker's first sample."""

    indices: Sequence[int] = ()
    """The dataset's own indices of the local samples, for reports; empty where the source has none."""

    cuts: tuple[int, ...] = ()
    """Begin of each worker's part of the global batch, and the end of the last; empty if it was not divided."""

    num_asked: int | None = None
    """This worker's samples before bad ones were left out; None where none was."""

    counted_share: float = 1.0
    """Share of the targets of this slice that the loss of a script's own loop counts; ignored labels and masks leave some out."""

    run_back: tuple[int, int] | None = None
    """Batches that a script's own loop took since its last step, and how many it ran back; None where that may differ between workers."""

    places: tuple[int, ...] | None = None
    """Position of each local sample within the global batch, where bad ones between them were left out; else they follow `first`."""

    @property
    def share(self) -> float:
        return (self.num_local if self.num_asked is None else self.num_asked) / self.num_global

    @property
    def borrowed(self) -> bool:
        return self.num_local == 0

    @property
    def num_counted(self) -> float:
        """Samples, as far as the loss counts their targets."""
        return self.num_local * self.counted_share

    @property
    def inputs(self) -> Tree:
        """The model's arguments: everything but the target."""
        return split_target(self.batch)[0]

    @property
    def target(self) -> Tree | None:
        """The loss's target; None in a batch without one."""
        return split_target(self.batch)[1]

    @property
    def weight(self) -> torch.Tensor | None:
        """Weight of each sample in the loss; None where all count alike."""
        return weight_of(self.batch)

    def by_worker(self, num_workers: int) -> list[Slice]:
        """A whole batch as the slices of this many workers, divided as they would."""
        if len(self.cuts) != num_workers + 1 or self.num_local != self.num_global:
            return self.cut(num_workers)
        return self.cut(num_workers, self.cuts)

    def cut(self, num_parts: int, cuts: Sequence[int] = ()) -> list[Slice]:
        """The slice in contiguous parts, each at least one sample long or borrowed: accumulation, or many workers in one."""
        if num_parts == 1:
            return [self]
        parts = []
        for part in range(num_parts):
            begin, end = cuts[part : part + 2] if cuts else bounds(self.num_local, part, num_parts)
            length = end - begin
            at = min(begin, max(self.num_local - 1, 0))
            size = max(length, 1)
            asked = None
            if self.num_asked is not None:
                first, last = bounds(self.num_asked, part, num_parts)
                asked = last - first
            parts.append(
                replace(
                    self,
                    batch=_narrow(self.batch, at, size, max(self.num_local, 1)),
                    num_local=length,
                    first=self.first + begin,
                    indices=self.indices[begin:end],
                    num_asked=asked,
                    places=None if self.places is None else self.places[begin:end],
                )
            )
        return parts


LABELS = ("labels", "targets", "label", "target")
"""Keys under which a batch that is a mapping has its target."""


def split_target(batch: Tree) -> tuple[Tree, Any]:
    """(inputs, target) of a batch.

    A pair is (inputs, target); a longer tuple gives all but its last as
    positional inputs; a mapping has its target under one of `LABELS`, which
    stays with the inputs; a tensor or a tuple of one has no target.
    Weights (see `Dataset.with_weights`) are neither.
    """
    if isinstance(batch, Weighted):
        return batch.inputs, batch.target
    if isinstance(batch, (tuple, list)):
        if len(batch) == 1:
            return batch[0], None
        if len(batch) == 2:
            return batch[0], batch[1]
        return tuple(batch[:-1]), batch[-1]
    if isinstance(batch, Mapping):
        return batch, next((batch[key] for key in LABELS if key in batch), None)
    return batch, None


def weight_of(batch: Tree) -> torch.Tensor | None:
    return batch.weight if isinstance(batch, Weighted) else None


def _narrow(batch: Tree, begin: int, length: int, expected: int) -> Tree:
    for leaf in leaves(batch):
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or leaf.shape[0] != expected:
            what = (
                f"a tensor of shape {tuple(leaf.shape)}"
                if isinstance(leaf, torch.Tensor)
                else f"a {type(leaf).__name__}"
            )
            raise TrainingError(
                f"a batch of {expected} samples holds {what}, which cannot be cut by samples. Accumulation needs batches "
                "whose tensors all have the samples as first dimension; leave accumulate=1, or change the collate function."
            )
    return map_tensors(lambda tensor: tensor.narrow(0, begin, length), batch)
