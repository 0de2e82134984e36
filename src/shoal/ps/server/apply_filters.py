"""Filters of a push: the factor of its gradients in the strategies where a push is an update of its own.

Decided once, by the primary; replicas are shipped the factor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from shoal.ps.server.contents import Contents
from shoal.ps.server.steps import Staged


@dataclass(frozen=True, slots=True, kw_only=True)
class PushFilters:
    """Options of ssp, async and hybrid: see `shoal.config.parallel_options`."""

    norm_bound: float | None = None
    """Longer gradients are scaled down to this norm, as far as they lie on this server; None: no bound."""

    divides_by_staleness: bool = False
    """The learning rate is divided by 1 + staleness, the updates of others since the worker's last pull."""

    def factor(self, staged: Staged, contents: Contents, *, factor: float, staleness: int) -> float:
        """The factor of a push whose own is `factor`; 0.0 leaves it out, where its norm is not finite."""
        if not all(contents.table(number).rule.takes_gradients for number in staged.rows):
            return factor
        if self.norm_bound is not None:
            norm = abs(factor) * _norm(staged, contents)
            if not math.isfinite(norm):
                return 0.0
            if norm > self.norm_bound:
                factor *= self.norm_bound / norm
        return factor / (1 + staleness) if self.divides_by_staleness else factor


def _norm(staged: Staged, contents: Contents) -> float:
    squares = [float(np.square(values, dtype=np.float64).sum()) for _, values in staged.rows.values()]
    squares += [
        contents.dense.sum_of_squares(chunk, gradient) for chunk, (gradient, _) in staged.dense.items()
    ]
    return math.sqrt(sum(squares))
