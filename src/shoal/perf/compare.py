"""How far two runs of one script came apart, tensor by tensor.

Pure: arrays in, differences out. It decides what counts as equal; it reads no
file, runs nothing, and knows numpy but not torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The largest difference within one tensor."""

    name: str
    absolute: float
    """Largest |a - b|; infinite where one side has no such tensor, another shape, or a NaN the other has not."""

    largest: float
    """Largest finite |value| of either side: what `absolute` is set against."""

    num_nonfinite: int = 0
    """Values that are not finite, and the same on both sides. They count as equal, and ought to be named."""

    note: str = ""
    """Why the two cannot be compared; empty where they can."""

    @property
    def relative(self) -> float:
        """The difference as a part of the tensor's largest value."""
        if self.absolute == 0:
            return 0.0
        return self.absolute / self.largest if self.largest > 0 else float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two runs set against each other: every tensor, and the losses of the steps.

    A tensor that training left at rounding noise around zero (a bias before a
    BatchNorm, say) would always differ from itself by 100 %. So a difference
    counts only where it is also large against a typical tensor of the model.
    """

    tensors: tuple[Difference, ...]
    """From the largest relative difference to the smallest."""

    losses: Difference

    @property
    def worst(self) -> float:
        """The largest relative difference of all that is more than rounding noise around zero."""
        floor = self.typical
        return max(
            (
                difference.absolute / max(difference.largest, floor)
                for difference in (*self.tensors, self.losses)
                if difference.absolute > 0
            ),
            default=0.0,
        )

    @property
    def typical(self) -> float:
        """The median of the tensors' largest values."""
        return median([tensor.largest for tensor in self.tensors] or [0.0])

    def beyond(self, tolerance: float) -> list[Difference]:
        """What differs by more than `tolerance`, losses last. Empty: the runs are equal."""
        floor = self.typical
        return [
            difference
            for difference in (*self.tensors, self.losses)
            if not difference.absolute <= tolerance * max(difference.largest, floor)
        ]

    @property
    def nonfinite(self) -> list[Difference]:
        """What holds values that are not finite, the same on both sides."""
        return [difference for difference in (*self.tensors, self.losses) if difference.num_nonfinite]


def compare(
    state: Mapping[str, Array],
    reference: Mapping[str, Array],
    *,
    losses: Sequence[float] = (),
    reference_losses: Sequence[float] = (),
) -> Comparison:
    """Set one run's tensors and losses against another's."""
    tensors = []
    for name in sorted(state.keys() | reference.keys()):
        if name in state and name in reference:
            tensors.append(difference(name, state[name], reference[name]))
        else:
            side = "in the workers" if name in state else "in one process"
            tensors.append(_incomparable(name, f"only {side}"))
    tensors.sort(key=lambda tensor: (-tensor.relative, -tensor.absolute, tensor.name))
    if len(losses) == len(reference_losses):
        loss = difference("loss", np.asarray(losses, np.float64), np.asarray(reference_losses, np.float64))
    else:
        loss = _incomparable("loss", f"{len(losses)} steps against {len(reference_losses)}")
    return Comparison(tensors=tuple(tensors), losses=loss)


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
        largest=float(finite.max(initial=0.0)),
        num_nonfinite=int((same & ~np.isfinite(wide_a)).sum()),
    )


def _wide(array: Array) -> Array:
    """Wide enough that a difference of float32 values is not itself rounded."""
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _incomparable(name: str, note: str) -> Difference:
    return Difference(name=name, absolute=float("inf"), largest=0.0, note=note)
