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

from shoal.perf.compare import Array, Comparison, compare


@dataclass(frozen=True, slots=True)
class Mix:
    """A layer for which the slices of a batch are not the batch."""

    layer: str
    kind: str
    why: str
    """"mixes the batch" or "draws random numbers"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """What a run under a VerifyPlan leaves behind."""

    state: Mapping[str, Array]
    """Parameters and buffers by name."""

    losses: tuple[float, ...]
    mixes: tuple[Mix, ...]
    num_steps: int


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
    )


class Run(Protocol):
    """Runs the script's first steps once: spread over the workers, or in one process as so many slices in turn."""

    def __call__(self, dtype: str, *, spread: bool, num_slices: int = 1) -> Dump:
        """Run it and read what it left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The answer, and everything it rests on."""

    equal: bool
    float64: Comparison
    """Decides: what is left in float64 is not rounding."""

    float32: Comparison
    """Stands beside it, to show what rounding does."""

    sliced: bool
    """The reference ran the workers' slices in turn with the workers' seeds."""

    mixes: tuple[Mix, ...]
    """Why it did: the layers that were named. Empty while `sliced`: something did that has no name."""

    whole: Comparison | None = None
    """Float64 against whole batches, where those were tried first and the slices explain the difference."""

    num_steps: int


def check(run: Run, *, num_workers: int, tolerance: float) -> Outcome:
    """Run the script spread and in one process, in float64 and float32, and compare."""
    spread = run("float64", spread=True)
    sliced = bool(spread.mixes)
    reference = run("float64", spread=False, num_slices=num_workers if sliced else 1)
    float64 = _compare(spread, reference)
    equal, whole = not float64.beyond(tolerance), None
    if not equal and not sliced and num_workers > 1:
        # A loss over pairs of the batch, a layer of the user's own: unnamed, but what it computes per slice is what
        # one process computes per slice.
        by_slice = _compare(spread, run("float64", spread=False, num_slices=num_workers))
        if not by_slice.beyond(tolerance):
            whole, float64, sliced, equal = float64, by_slice, True, True
    float32 = _compare(
        run("float32", spread=True), run("float32", spread=False, num_slices=num_workers if sliced else 1)
    )
    return Outcome(
        equal=equal,
        float64=float64,
        float32=float32,
        sliced=sliced,
        mixes=spread.mixes,
        whole=whole,
        num_steps=spread.num_steps,
    )


def _compare(spread: Dump, reference: Dump) -> Comparison:
    return compare(spread.state, reference.state, losses=spread.losses, reference_losses=reference.losses)
