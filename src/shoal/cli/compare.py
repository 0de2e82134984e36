"""How far two runs of one script came apart, tensor by tensor.

Pure: arrays in, differences out. It decides what counts as equal; it reads no
file, runs nothing, and knows numpy but not torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

ENLARGED = 1e-5
"""Relative difference in float32 that rounding alone, at 6e-8 an operation, does not explain."""

SHRUNK = 1e-4
"""From float32 to float64 rounding shrinks by 2e-9, or by 1e-5 where an optimizer's epsilon bounded it in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The largest difference within one tensor."""

    name: str
    absolute: float
    """Largest |a - b|; infinite where one side has no such tensor, another shape, or a NaN the other has not."""

    scale: float
    """What `absolute` is set against: the tensor's largest finite |value| on either side, or more; see `compare`."""

    num_nonfinite: int = 0
    """Values that are not finite, and the same on both sides. They count as equal, and ought to be named."""

    note: str = ""
    """Why the two cannot be compared; empty where they can."""

    @property
    def relative(self) -> float:
        """The difference as a part of `scale`."""
        return self.absolute / self.scale if self.absolute > 0 and self.scale > 0 else self.absolute


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two runs set against each other."""

    tensors: tuple[Difference, ...]
    """From the largest relative difference to the smallest."""

    losses: Difference
    """Of all steps."""

    @property
    def all(self) -> tuple[Difference, ...]:
        """Tensors first, losses last."""
        return (*self.tensors, self.losses)

    def worst(self, *, leaving_out: Collection[str] = ()) -> Difference:
        """What differs most, of all or of all but those named."""
        return max(
            (difference for difference in self.all if difference.name not in leaving_out),
            key=lambda difference: difference.relative,
            default=self.losses,
        )

    def beyond(self, tolerance: float) -> list[Difference]:
        """What differs by more than `tolerance`. Empty: the runs are equal."""
        return [difference for difference in self.all if not difference.relative <= tolerance]

    @property
    def nonfinite(self) -> list[Difference]:
        """What holds values that are not finite, the same on both sides."""
        return [difference for difference in self.all if difference.num_nonfinite]


def compare(
    state: Mapping[str, Array],
    reference: Mapping[str, Array],
    *,
    losses: Sequence[float] = (),
    reference_losses: Sequence[float] = (),
) -> Comparison:
    """Set one run's tensors and losses against another's.

    A tensor that training left at rounding noise around zero (a bias before a
    BatchNorm, say) would differ from itself by 100 %. So no difference is set
    against less than the largest value of a typical tensor: their median.
    """
    found = []
    for name in sorted(state.keys() | reference.keys()):
        if name in state and name in reference:
            found.append(difference(name, state[name], reference[name]))
        else:
            found.append(_incomparable(name, f"only in {'the workers' if name in state else 'one process'}"))
    if len(losses) == len(reference_losses):
        loss = difference("loss", np.asarray(losses, np.float64), np.asarray(reference_losses, np.float64))
    else:
        loss = _incomparable("loss", f"{len(losses)} steps against {len(reference_losses)}")
    typical = median([tensor.scale for tensor in found] or [0.0])
    *tensors, loss = (replace(each, scale=max(each.scale, typical)) for each in (*found, loss))
    tensors.sort(key=lambda tensor: (-tensor.relative, -tensor.absolute, tensor.name))
    return Comparison(tensors=tuple(tensors), losses=loss)


def hangs_on_rounding(float64: Difference, float32: Difference) -> bool:
    """Whether a tensor's difference is rounding that training enlarged, told by how it shrinks with the precision.

    Some gradients are zero but for rounding: those of a bias before a
    BatchNorm, of attention's key bias. An adaptive optimizer divides by their
    size and takes steps of full length along the noise. Such a tensor comes
    out different in float32 already, far beyond its rounding, and much closer
    in float64. A mistake is as large in float64 as in float32.
    """
    return float32.relative > ENLARGED and float64.absolute < SHRUNK * float32.absolute < float("inf")


def difference(name: str, a: Array, b: Array) -> Difference:
    """The largest difference of two arrays; the same NaN or infinity at the same place is none."""
    if a.shape != b.shape:
        return _incomparable(name, f"shapes {a.shape} and {b.shape}")
    if a.dtype != b.dtype:
        return _incomparable(name, f"types {a.dtype} and {b.dtype}")
    same = (a == b) | ((a != a) & (b != b))
    wide_a, wide_b = _wide(a), _wide(b)
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.where(same, 0.0, np.abs(wide_a - wide_b))
    # NaN here is a NaN on one side only. Integers past 2**53 may differ and yet be equal once widened.
    gap[np.isnan(gap)] = np.inf
    gap[~same & (gap == 0)] = 1.0
    sizes = np.abs(np.concatenate([wide_a.ravel(), wide_b.ravel()]))
    finite = sizes[np.isfinite(sizes)]
    return Difference(
        name=name,
        absolute=float(gap.max(initial=0.0)),
        scale=float(finite.max(initial=0.0)),
        num_nonfinite=int((same & ~np.isfinite(wide_a)).sum()),
    )


def _wide(array: Array) -> Array:
    """Wide enough that a difference of float32 values is not itself rounded."""
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _incomparable(name: str, note: str) -> Difference:
    return Difference(name=name, absolute=float("inf"), scale=0.0, note=note)
