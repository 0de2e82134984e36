"""Lifetime of a table's rows: which ids get a row, and which rows are dropped again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from shoal.errors import ConfigError, RowPolicyRefused

SCORES = {"recent": {"age": -1.0}, "frequent": {"sightings": 1.0}}
"""Weights of a row's statistics that the named orders stand for: LRU and LFU."""

_STATISTICS = ("sightings", "age")
_MOST = 1 << 48
MOST_SIGHTINGS = (1 << 24) - 1
"""Largest count: float32 cannot tell larger integers apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPolicy:
    """Admission and eviction of rows. A sighting of an id is an update of the table that has a gradient for it.

    Decided by the updates alone (except `ttl_s`), slot by slot, so the same rows exist at any
    number of servers and after any death.
    """

    admit_after: int = 1
    """Sighting at which an id gets its row. The gradients of those before are dropped, and lookups give the initial value."""

    ttl_steps: int | None = None
    """Updates of the table without a sighting after which a row, or the count of an id without one, is dropped."""

    ttl_s: float | None = None
    """The same in seconds. Clocks are not the same twice, so only relaxed strategies take it."""

    max_rows: int | None = None
    """Rows that stay, those with the highest score; the limit of each of the 256 slots is its share of them."""

    keep: Literal["recent", "frequent"] | dict[str, float] = "frequent"
    """Score for `max_rows`: "frequent" (LFU), "recent" (LRU), or weights of "sightings" and "age" (steps since the last one)."""

    sweep_every: int = 100
    """Updates between two looks at all rows. Until the next one a row past its time, or beyond `max_rows`, is still there."""

    def __post_init__(self) -> None:
        for name, least in (("admit_after", 1), ("ttl_steps", 1), ("max_rows", 1), ("sweep_every", 1)):
            value = getattr(self, name)
            if value is None and name in ("ttl_steps", "max_rows"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value < _MOST:
                raise RowPolicyRefused(f"{name} is a whole number from {least} on, got {value!r}")
        if self.admit_after > MOST_SIGHTINGS:
            raise RowPolicyRefused(
                f"sightings are counted up to {MOST_SIGHTINGS}, so with admit_after={self.admit_after} no id would get a row"
            )
        ttl_s: Any = self.ttl_s
        if ttl_s is not None and (
            isinstance(ttl_s, bool) or not isinstance(ttl_s, (int, float)) or not 0 < ttl_s < _MOST
        ):
            raise RowPolicyRefused(f"ttl_s is a number of seconds above 0, got {ttl_s!r}")
        weights = SCORES.get(self.keep) if isinstance(self.keep, str) else self.keep
        if not isinstance(weights, dict) or not weights:
            raise RowPolicyRefused(
                f"keep is 'recent', 'frequent' or weights such as {{'sightings': 1.0, 'age': -0.1}}, got {self.keep!r}"
            )
        for name, weight in weights.items():
            if name not in _STATISTICS:
                raise RowPolicyRefused(
                    f"keep weighs {' and '.join(_STATISTICS)}, and a row has no statistic {name!r}"
                )
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
                raise RowPolicyRefused(f"the weight of {name!r} in keep is a finite number, got {weight!r}")

    @property
    def weights(self) -> dict[str, float]:
        return SCORES[self.keep] if isinstance(self.keep, str) else self.keep


def refuse_seconds(name: str, policy: RowPolicy | None, strategy: str) -> None:
    """Refuse `ttl_s` where the result must be the same twice."""
    if policy is not None and policy.ttl_s is not None:
        raise ConfigError(
            f"the rows of '{name}' are to be dropped after ttl_s={policy.ttl_s:g} seconds, and {strategy} the result must be the same "
            "to the bit, however fast a run was. Nothing was trained; use ttl_steps, or a relaxed strategy such as ps:async."
        )
