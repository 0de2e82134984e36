"""Dynamic loss scale for fp16: gradients are computed larger by a factor, and divided by it at the commit.

Pure, and a function of the steps' results alone, which are equal on every rank: so all ranks skip a
step or none does, and a replacement that replays results arrives at the same scale.
"""

from __future__ import annotations

from dataclasses import dataclass

START = 65536.0

GROWS_AFTER = 2000
"""Steps without an overflow after which the scale doubles, as torch.amp.GradScaler's."""

LARGEST = 2.0**24
"""A loss of this many times its size is still far from the largest float32, in which it is scaled."""


@dataclass(slots=True)
class LossScale:
    """A power of two, so that scaling changes no digit of a gradient."""

    value: float = START
    num_good: int = 0
    """Steps since the scale was changed."""

    @property
    def can_fall(self) -> bool:
        """False at 1: a non-finite value then is no overflow of the scale's making."""
        return self.value > 1.0

    def after(self, *, applied: bool) -> None:
        """A step was committed, or left out because its loss or its gradient was not finite."""
        if not applied:
            self.value, self.num_good = max(self.value / 2, 1.0), 0
            return
        self.num_good += 1
        if self.num_good == GROWS_AFTER:
            self.value, self.num_good = min(self.value * 2, LARGEST), 0
