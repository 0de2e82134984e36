"""Forms of `--shard`: how batches are cut over the workers.

Torch-free, so that the command line refuses a misspelt one before torch is
imported; `shoal.data.sharding` implements them.
"""

from __future__ import annotations

import contextlib
import math
from typing import NamedTuple

from shoal.errors import ConfigError

FORMS = {
    "equal": "parts that differ by at most one sample",
    "balanced=COST": "the heaviest part as light as can be, by length, bytes or a column",
    "weighted=W,W,...": "by weights, a number for each worker",
    "weighted=measured": "by how fast the workers turn out to be",
    "dynamic": "relaxed strategies: handed out while the epoch runs",
    "dynamic=N": "the same, and a worker N times slower than the others is drained (8 unless said; none: nobody is)",
}

HOWS = tuple(dict.fromkeys(form.partition("=")[0] for form in FORMS))
"""The kinds of sharding."""

MEASURED = "measured"

DRAIN_SLOWER_THAN = 8.0
"""Times slower than the others that a worker may be before it is drained. One four times slower still does a quarter of a worker's work; one
eight times slower hardly helps, and its gradients are of weights that are long gone."""


class ShardForm(NamedTuple):
    """A parsed `--shard`."""

    how: str
    cost: str | None = None
    weights: tuple[float, ...] | str | None = None
    drain_slower_than: float | None = DRAIN_SLOWER_THAN


def parse(text: str) -> ShardForm:
    """The kind of sharding and its settings; ConfigError for an unknown form."""
    how, _, option = text.partition("=")
    match how:
        case "equal" | "dynamic" if not option:
            return ShardForm(how)
        case "dynamic" if option == "none":
            return ShardForm(how, drain_slower_than=None)
        case "dynamic":
            with contextlib.suppress(ValueError):
                if 1 < float(option) < math.inf:
                    return ShardForm(how, drain_slower_than=float(option))
        case "balanced" if option:
            return ShardForm(how, cost=option)
        case "weighted" if option == MEASURED:
            return ShardForm(how, weights=MEASURED)
        case "weighted" if option:
            with contextlib.suppress(ValueError):
                return ShardForm(how, weights=tuple(float(weight) for weight in option.split(",")))
    forms = ", ".join(FORMS)
    raise ConfigError(
        f"'{text}' is no way to cut batches over workers. Nothing was started; there are: {forms}."
    )


def check(text: str, *, num_workers: int, strategy: str, is_relaxed: bool) -> None:
    """Refuse a form that a job cannot run, before anything starts."""
    form = parse(text)
    if form.how == "dynamic" and not is_relaxed and num_workers > 1:
        raise ConfigError(
            f"--shard dynamic hands whole batches to whichever worker is free, and '{strategy}' computes every batch on all "
            f"{num_workers} workers together. Nothing was started; use a relaxed strategy (ps:async, ps:ssp=K), or --shard "
            "weighted=measured."
        )
    if isinstance(form.weights, tuple) and num_workers not in (1, len(form.weights)):
        raise ConfigError(
            f"--shard {text} has {len(form.weights)} weights, and there are {num_workers} workers. Nothing was started; give one "
            "for each, or --shard weighted=measured."
        )
