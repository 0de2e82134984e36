"""Does a script compute in many workers what it computes in one process?

Decides which runs answer that and against which reference; who runs them and
how is the caller's business (`run`), and so is showing the outcome.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shoal.cli.compare import Array, Comparison, Difference, compare, hangs_on_rounding

THE_MODEL = "the model"
"""How a report names a layer that is the model itself."""

RESTING_STEPS = 5
"""Steps with layers put to rest: a model without its normalisation may diverge, and then rounding grows."""


@dataclass(frozen=True, slots=True)
class Mix:
    """A layer for which the slices of a batch are not the batch."""

    layer: str
    kind: str
    why: str
    """"mixes the batch" or "draws random numbers"."""

    @property
    def module(self) -> str:
        """The layer as the model knows it."""
        return "" if self.layer == THE_MODEL else self.layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """What a run under a VerifyPlan leaves behind."""

    state: Mapping[str, Array]
    """Parameters and buffers by name."""

    losses: tuple[float, ...]
    mixes: tuple[Mix, ...]
    num_steps: int
    num_micro: int | None = None
    """Micro-batches in which a pipeline ran each slice; None where it was none."""

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
        mixes=tuple(Mix(mix["layer"], mix["kind"], mix["why"]) for mix in report["mixes"]),
        num_steps=report["steps"],
        num_micro=report.get("micro_batches"),
        is_own_loop=report["own_loop"],
    )


class Run(Protocol):
    """Runs the script's first steps once: spread over the workers, or in one process as so many slices in turn.

    `num_micro`: each slice in so many parts.
    """

    def __call__(
        self,
        dtype: str,
        *,
        spread: bool,
        num_slices: int = 1,
        num_micro: int | None = None,
        at_rest: tuple[str, ...] = (),
    ) -> Dump:
        """Run it and read what it left. `at_rest`: these modules stay in evaluation mode, for a few steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The spread run set against one reference."""

    float64: Comparison
    """Decides: what is left in float64 is not rounding."""

    float32: Comparison
    """Stands beside it, to show what rounding does."""

    differing: tuple[Difference, ...]
    """What is beyond the tolerance in float64. Empty: equal."""

    rounding: tuple[Difference, ...]
    """What is beyond it only because training enlarged rounding; see `compare.hangs_on_rounding`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The answer, and everything it rests on."""

    judged: Judged
    """Against the reference that counts."""

    sliced: bool
    """That reference ran the workers' slices in turn with the workers' seeds."""

    mixes: tuple[Mix, ...]
    """Why it did: the layers that were named."""

    depends_on_cut: bool
    """Whole batches give something else, and no named layer explains it: cut in one process, the result is the workers'."""

    rested: Judged | None
    """Where layers were named: the workers against whole batches, with these layers in evaluation mode."""

    still_drawing: tuple[Mix, ...]
    """Layers that draw random numbers in evaluation mode too, so that nothing could be compared with them at rest."""

    is_own_loop: bool
    num_steps: int

    @property
    def equal(self) -> bool:
        """Whether the workers compute what one process does."""
        return not self.judged.differing and not (self.rested and self.rested.differing)


def check(run: Run, *, num_workers: int, tolerance: float) -> Outcome:
    """Run the script spread and in one process, in float64 and float32, and compare.

    Layers that see a slice and not the batch are compared with one process
    that runs the slices in turn, and would hide everything else that depends
    on the cut. So they are put to rest and compared with whole batches too.
    """
    spread64 = run("float64", spread=True)
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
    return Outcome(
        judged=judged,
        sliced=sliced,
        mixes=spread64.mixes,
        depends_on_cut=depends_on_cut,
        rested=rested,
        still_drawing=still_drawing,
        is_own_loop=own_loop,
        num_steps=spread64.num_steps,
    )


def _at_rest(run: Run, mixes: tuple[Mix, ...], tolerance: float) -> tuple[Judged | None, tuple[Mix, ...]]:
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
    """Tell what differs in float64 from what only hangs on rounding."""
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
