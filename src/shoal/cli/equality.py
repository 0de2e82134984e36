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
    num_micro: int | None = None
    """Micro-batches in which a pipeline ran each slice; None where it was none."""


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
    )


class Run(Protocol):
    """Runs the script's first steps once: spread over the workers, or in one process as so many slices in turn.

    `num_micro`: each slice in so many parts.
    """

    def __call__(
        self, dtype: str, *, spread: bool, num_slices: int = 1, num_micro: int | None = None
    ) -> Dump:
        """Run it and read what it left."""


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

    whole: Judged | None
    """Against whole batches, where no layer was named and only the slices are equal: something mixes unnamed."""

    num_steps: int

    @property
    def equal(self) -> bool:
        """Whether the workers compute what one process does."""
        return not self.judged.differing


def check(run: Run, *, num_workers: int, tolerance: float) -> Outcome:
    """Run the script spread and in one process, in float64 and float32, and compare."""
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

    sliced = bool(spread64.mixes)
    in_parts = spread64.num_micro
    judged, whole = against(num_workers, in_parts) if sliced else against(1), None
    if judged.differing and not sliced and (num_workers > 1 or in_parts is not None):
        # A loss over pairs of the batch, a layer of the user's own: unnamed, but what the workers compute of their
        # slices may be what one process computes of them.
        by_slice = against(num_workers, in_parts)
        if not by_slice.differing:
            judged, whole, sliced = by_slice, judged, True
    return Outcome(
        judged=judged, sliced=sliced, mixes=spread64.mixes, whole=whole, num_steps=spread64.num_steps
    )


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
