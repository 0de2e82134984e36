"""Which orders of a pipeline's forwards and backwards there are by name. Names only; `shoal.parallel` runs them."""

from __future__ import annotations

from difflib import get_close_matches

from shoal.errors import ConfigError

SCHEDULES = {
    "1f1b": "forwards and backwards by turns: keeps at most as many micro-batches as there are stages",
    "gpipe": "all forwards, then all backwards: the simplest, and the one that needs most memory",
    "interleaved": "1f1b with two stages on every worker: smaller bubbles, more to send",
    "zero-bubble": "interleaved, and gradients of weights are computed where a worker would have waited",
}

DEFAULT = "1f1b"


def stages_per_worker(schedule: str) -> int:
    """How many stages each worker holds."""
    return 2 if schedule in ("interleaved", "zero-bubble") else 1


def check(schedule: str) -> None:
    """Refuse a name that means nothing."""
    if schedule not in SCHEDULES:
        guess = get_close_matches(schedule, SCHEDULES, n=1)
        hint = f"Did you mean '{guess[0]}'? " if guess else ""
        raise ConfigError(
            f"there is no schedule '{schedule}'. {hint}Nothing was started; there are {', '.join(SCHEDULES)}."
        )
