"""A learning-rate scheduler's state as JSON and back.

torch's schedulers keep numbers, tuples, counters and infinities, all of which
`runtime/serialization.py` gives back exactly. Functions (the lambdas of LambdaLR) are not
state: the script that resumes builds the scheduler with them again.
"""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from shoal.errors import OptimizerMismatch
from shoal.runtime.serialization import from_plain, to_plain


def scheduler_state(scheduler: LRScheduler) -> dict[str, Any]:
    """What a fresh scheduler of the same kind needs to go on."""
    kind = type(scheduler).__name__
    return {"class": kind, "state": to_plain(scheduler.state_dict(), kind)}


def load_scheduler(scheduler: LRScheduler, saved: dict[str, Any], *, path: str = "") -> None:
    """Give a scheduler, built afresh, the state that was saved.

    It sets no learning rate: the optimizer's own state brings that. Load the
    optimizer after the scheduler was built, in either order with this.
    """
    kind = type(scheduler).__name__
    if saved["class"] != kind:
        raise OptimizerMismatch(
            path=path, problem=f"its scheduler is {saved['class']}, the script builds {kind}"
        )
    scheduler.load_state_dict(from_plain(saved["state"]))
