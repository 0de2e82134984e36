"""Which value is better: shared by the callbacks that watch one."""

from __future__ import annotations

import math
from typing import Any, Literal

from shoal.errors import ConfigError

Mode = Literal["min", "max", "auto"]

_FALLS = ("loss", "error", "mse", "mae", "perplexity", "deviance", "distance")
_RISES = (
    "accuracy",
    "auroc",
    "top",
    "f1",
    "fbeta",
    "precision",
    "recall",
    "score",
    "auc",
    "iou",
    "kappa",
    "r2",
    "jaccard",
)


class Monitor:
    """Watches one value of the epochs' logs and knows the best so far."""

    def __init__(self, name: str, *, mode: Mode = "auto", min_delta: float = 0.0) -> None:
        if mode not in ("min", "max", "auto"):
            raise ConfigError(f"mode must be 'min', 'max' or 'auto', got {mode!r}.")
        if not min_delta >= 0 or math.isinf(min_delta):
            raise ConfigError(f"min_delta must be a number of at least 0, got {min_delta!r}.")
        self.name = name
        self.best = math.nan
        """The best value so far; nan before the first."""

        self._rises = _rises(name) if mode == "auto" else mode == "max"
        self._min_delta = min_delta
        self._seen = False

    def improved(self, logs: dict[str, float]) -> bool | None:
        """Whether this epoch is the best so far, by more than `min_delta`; None when it was not measured."""
        value = logs.get(self.name)
        if value is None:
            if not self._seen:
                raise ConfigError(
                    f"'{self.name}' is to be watched, but the epoch's values are {', '.join(sorted(logs))}. A name with "
                    "val_ needs validation_data= in fit, a metric needs metrics= in the Trainer."
                )
            return None
        self._seen = True
        ahead = value - self.best if self._rises else self.best - value
        if math.isnan(value) or ahead <= self._min_delta:  # a comparison with nan, before the first, is False
            return False
        self.best = value
        return True

    def state(self) -> dict[str, Any]:
        """The best so far."""
        return {"name": self.name, "best": self.best, "seen": self._seen}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from `state`, if the same value was watched."""
        if state["name"] == self.name:
            self.best, self._seen = state["best"], state["seen"]


def _rises(name: str) -> bool:
    words = name.removeprefix("val_")
    if any(word in words for word in _FALLS):
        return False
    if any(word in words for word in _RISES):
        return True
    raise ConfigError(
        f"shoal cannot tell whether '{name}' is better when it falls or when it rises. Say mode='min' or mode='max'."
    )
