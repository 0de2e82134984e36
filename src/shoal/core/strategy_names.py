"""Which strategies there are by name, and which one a launch means.

Names only, so that the command line can refuse a misspelt one without
importing torch; `shoal.strategies` holds what they stand for.
"""

from __future__ import annotations

from difflib import get_close_matches

from shoal.core.errors import ConfigError, UnknownStrategy

STRATEGIES = {
    "single": "one process",
    "ddp": "data parallel: every worker holds the model, gradients are summed by all-reduce",
}


def choose(strategy: str | None, num_workers: int) -> str:
    """The strategy meant by `strategy` at so many workers; None chooses by their number."""
    if strategy is None:
        return "single" if num_workers == 1 else "ddp"
    if strategy not in STRATEGIES:
        guesses = get_close_matches(strategy, STRATEGIES, n=1)
        raise UnknownStrategy(
            strategy=strategy, known=list(STRATEGIES), guess=guesses[0] if guesses else None
        )
    if strategy == "single" and num_workers > 1:
        raise ConfigError(
            f"the strategy 'single' is one process, and {num_workers} workers were asked for. Nothing was started; "
            f"use --strategy ddp with -n {num_workers}, or -n 1."
        )
    return strategy
