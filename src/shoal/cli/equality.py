"""Equality of a run over many workers and a run in one process.

`check` decides which runs are needed and against which reference; the caller runs the script and
shows the outcome. Comparing is pure: arrays in, differences out. Uses numpy but not torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

ENLARGED = 1e-5
"""Relative difference in float32 that rounding alone, at 6e-8 an operation, does not explain."""

ROUNDED = 1e-3
"""Relative difference in float32 after a few steps that may still be rounding: the tolerance where float64 cannot be used."""

SHRUNK = 1e-4
"""From float32 to float64 rounding shrinks by 2e-9, or by 1e-5 where an optimizer's epsilon bounded it in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The largest difference within one tensor."""

    name: str
    absolute: float
    """Largest |a - b|; infinite where one side has no such tensor, another shape, or a NaN the other has not."""

    scale: float
    """Reference of `absolute`: the tensor's largest finite |value| on either side, or more; see `compare`."""

    num_nonfinite: int = 0
    """Values that are not finite, and the same on both sides. They count as equal, and ought to be named."""

    note: str = ""
    """Why the two cannot be compared; empty where they can."""

    @property
    def relative(self) -> float:
        return self.absolute / self.scale if self.absolute > 0 and self.scale > 0 else self.absolute


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two runs set against each other."""

    tensors: tuple[Difference, ...]
    """Differences of tensors, the largest relative one first."""

    losses: Difference
    """Difference of the losses of all steps."""

    @property
    def all(self) -> tuple[Difference, ...]:
        return (*self.tensors, self.losses)

    def worst(self, *, leaving_out: Collection[str] = ()) -> Difference:
        """The largest difference, of all or of all but those named."""
        return max(
            (difference for difference in self.all if difference.name not in leaving_out),
            key=lambda difference: difference.relative,
            default=self.losses,
        )

    def beyond(self, tolerance: float) -> list[Difference]:
        """Differences above `tolerance`. Empty: the runs are equal."""
        return [difference for difference in self.all if not difference.relative <= tolerance]

    @property
    def nonfinite(self) -> list[Difference]:
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
    """True where a tensor's difference is rounding that training enlarged: it shrinks with the precision.

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


THE_MODEL = "the model"
"""How a report names a layer that is the model itself."""

RESTING_STEPS = 5
"""Steps with layers in evaluation mode: a model without its normalisation may diverge, and then rounding grows."""


@dataclass(frozen=True, slots=True)
class Mix:
    """A layer for which the slices of a batch are not equivalent to the batch."""

    layer: str
    kind: str
    why: str
    """"mixes the batch" or "draws random numbers"."""

    @property
    def module(self) -> str:
        return "" if self.layer == THE_MODEL else self.layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """Weights, losses and layers that a run under a VerifyPlan writes."""

    state: Mapping[str, Array]
    """Parameters and buffers by name."""

    losses: tuple[float, ...]
    mixes: tuple[Mix, ...]
    num_steps: int
    num_micro: int | None = None
    """Micro-batches in which a pipeline ran each slice; None where it was none."""

    suspects: tuple[Mix, ...] = ()
    """Layers that a trial found to mix the batch, beyond the known types."""

    rank_asked_at: tuple[str, ...] = ()
    """Lines of the script that asked for shoal.rank()."""

    is_own_loop: bool = False
    """The loop is the script's own: one process runs it as it is, and cannot run slices in turn."""


def read_dump(directory: Path) -> Dump | None:
    """The dump in `directory`; None where the script never came to train."""
    from safetensors.numpy import load_file

    try:
        report = json.loads((directory / "report.json").read_text())
    except FileNotFoundError:
        return None
    return Dump(
        state=load_file(directory / "state.safetensors"),
        losses=tuple(report["losses"]),
        mixes=tuple(Mix(**mix) for mix in report["mixes"]),
        suspects=tuple(Mix(**mix) for mix in report.get("suspects", ())),
        rank_asked_at=tuple(report.get("rank_asked_at", ())),
        num_steps=report["steps"],
        num_micro=report.get("micro_batches"),
        is_own_loop=report["own_loop"],
    )


class CannotCast(Exception):
    """Internal: the script fails in float64. If it fails in float32 too, `leave()` shows why."""

    def __init__(self, leave: Callable[[], Any]) -> None:
        super().__init__()
        self.leave = leave


ScriptRun = Callable[..., Dump]
"""Runs the script's first steps once and reads what it left: `verify.VerifyRuns`, by dtype, spread, num_slices, num_micro, at_rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The spread run set against one reference."""

    float64: Comparison
    """Decisive: a difference that remains in float64 is not rounding."""

    float32: Comparison
    """Shown beside it, for the effect of rounding."""

    differing: tuple[Difference, ...]
    """Differences beyond the tolerance in float64. Empty: equal."""

    rounding: tuple[Difference, ...]
    """Differences that are rounding enlarged by training; see `compare.hangs_on_rounding`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOutcome:
    """The answer, and everything it rests on."""

    judged: Judged
    """Against the reference that counts."""

    sliced: bool
    """That reference ran the workers' slices in turn with the workers' seeds."""

    mixes: tuple[Mix, ...]
    """Why it did: the layers that were named."""

    depends_on_cut: bool
    """Whole batches give another result, and no named layer explains it: divided in one process, the
    result is the workers'.
    """

    rested: Judged | None
    """With named layers: the workers against whole batches, these layers in evaluation mode."""

    still_drawing: tuple[Mix, ...]
    """Layers that draw random numbers in evaluation mode too, so that nothing could be compared with them at rest."""

    is_own_loop: bool
    num_steps: int
    suspects: tuple[Mix, ...] = ()
    rank_asked_at: tuple[str, ...] = ()
    """As the spread run's dump has them: what a difference likely comes from."""

    is_float32: bool = False
    """The script fails in float64, to which verify casts it, and was compared in float32."""

    @property
    def equal(self) -> bool:
        return not self.judged.differing and not (self.rested and self.rested.differing)


def check(run: ScriptRun, *, num_workers: int, tolerance: float) -> VerifyOutcome:
    """Run the script distributed and in one process, in float64 and float32, and compare.

    Layers that see a slice and not the batch are compared with one process that runs the slices in
    turn, which would hide everything else that depends on the division. So they are also compared
    with whole batches, with these layers in evaluation mode.
    """
    try:
        spread64 = run("float64", spread=True)
    except CannotCast as failed:
        return _check_float32(run, failed, num_workers=num_workers, tolerance=max(tolerance, ROUNDED))
    spread32: Dump | None = None

    def against(num_slices: int, num_micro: int | None = None) -> Judged:
        nonlocal spread32
        reference = run("float64", spread=False, num_slices=num_slices, num_micro=num_micro)
        spread32 = spread32 or run("float32", spread=True)
        return judge(
            _compare(spread64, reference),
            _compare(spread32, run("float32", spread=False, num_slices=num_slices, num_micro=num_micro)),
            tolerance=tolerance,
        )

    in_parts, own_loop = spread64.num_micro, spread64.is_own_loop
    is_cut = num_workers > 1 or in_parts is not None
    sliced = bool(spread64.mixes) and not own_loop
    depends_on_cut, rested = False, None
    still_drawing: tuple[Mix, ...] = ()
    if spread64.mixes and own_loop and is_cut:
        rested, still_drawing = _at_rest(run, spread64.mixes, tolerance)
        judged = rested or against(1)
    else:
        judged = against(num_workers, in_parts) if sliced else against(1)
    if judged.differing and not spread64.mixes and is_cut and not own_loop:
        depends_on_cut = not against(num_workers, in_parts).differing
    if sliced and is_cut and not judged.differing:
        rested, still_drawing = _at_rest(run, spread64.mixes, tolerance)
    return VerifyOutcome(
        judged=judged,
        sliced=sliced,
        mixes=spread64.mixes,
        depends_on_cut=depends_on_cut,
        rested=rested,
        still_drawing=still_drawing,
        is_own_loop=own_loop,
        num_steps=spread64.num_steps,
        suspects=spread64.suspects,
        rank_asked_at=spread64.rank_asked_at,
    )


def _check_float32(
    run: ScriptRun, failed: CannotCast, *, num_workers: int, tolerance: float
) -> VerifyOutcome:
    """Compare in float32 alone, if the script cannot be cast."""
    try:
        spread = run("float32", spread=True)
    except CannotCast:
        failed.leave()
        raise
    sliced = bool(spread.mixes) and not spread.is_own_loop
    num_slices = num_workers if sliced else 1
    compared = _compare(
        spread,
        run("float32", spread=False, num_slices=num_slices, num_micro=spread.num_micro if sliced else None),
    )
    judged, rested = _in_float32(compared, tolerance), None
    still_drawing: tuple[Mix, ...] = ()
    if spread.mixes and (num_workers > 1 or spread.num_micro is not None) and not judged.differing:
        names = tuple(mix.module for mix in spread.mixes)
        at_rest = run("float32", spread=True, at_rest=names)
        still_drawing = at_rest.mixes
        if not still_drawing:
            rested = _in_float32(_compare(at_rest, run("float32", spread=False, at_rest=names)), tolerance)
    return VerifyOutcome(
        judged=judged,
        sliced=sliced,
        mixes=spread.mixes,
        depends_on_cut=False,
        rested=rested,
        still_drawing=still_drawing,
        is_own_loop=spread.is_own_loop,
        num_steps=spread.num_steps,
        suspects=spread.suspects,
        rank_asked_at=spread.rank_asked_at,
        is_float32=True,
    )


def _in_float32(compared: Comparison, tolerance: float) -> Judged:
    return Judged(
        float64=compared, float32=compared, differing=tuple(compared.beyond(tolerance)), rounding=()
    )


def _at_rest(
    run: ScriptRun, mixes: tuple[Mix, ...], tolerance: float
) -> tuple[Judged | None, tuple[Mix, ...]]:
    names = tuple(mix.module for mix in mixes)
    spread = run("float64", spread=True, at_rest=names)
    if spread.mixes:
        return None, spread.mixes
    float64 = _compare(spread, run("float64", spread=False, at_rest=names))
    if not float64.beyond(tolerance):
        return judge(float64, float64, tolerance=tolerance), ()
    float32 = _compare(
        run("float32", spread=True, at_rest=names), run("float32", spread=False, at_rest=names)
    )
    return judge(float64, float32, tolerance=tolerance), ()


def judge(float64: Comparison, float32: Comparison, *, tolerance: float) -> Judged:
    """Separate differences in float64 from those that are rounding only."""
    beside = {difference.name: difference for difference in float32.all}
    beyond = float64.beyond(tolerance)
    rounding = [
        found for found in beyond if found.name in beside and hangs_on_rounding(found, beside[found.name])
    ]
    return Judged(
        float64=float64,
        float32=float32,
        differing=tuple(found for found in beyond if found not in rounding),
        rounding=tuple(rounding),
    )


def _compare(spread: Dump, reference: Dump) -> Comparison:
    return compare(spread.state, reference.state, losses=spread.losses, reference_losses=reference.losses)
