"""Samples that are left out because they are bad and the user said to go on without them."""

from __future__ import annotations

from shoal.core.data_errors import BadSample


class SkipSamples(Exception):
    """Not an error: some of the samples that were asked for are bad and may be left out.

    The reader, and nobody else, catches it, and asks again for the others.
    """

    def __init__(self, bad: dict[int, BadSample], *, max_skips: int | None = None) -> None:
        """`bad` is by the index that was asked for; `max_skips` is the budget of the stage that says so."""
        self.bad, self.max_skips = bad, max_skips
        super().__init__(f"{len(bad)} bad samples")

    def __reduce__(self) -> tuple[object, ...]:
        return _revived, (self.bad, self.max_skips)


def _revived(bad: dict[int, BadSample], max_skips: int | None) -> SkipSamples:
    return SkipSamples(bad, max_skips=max_skips)
