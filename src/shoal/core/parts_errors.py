"""What goes wrong where each worker holds a part of the model and the others cannot do without it."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.core.errors import ClusterError


class CollectiveLeftOut(ClusterError):
    """Ranks wait within the model for one that went past them."""

    def __init__(self, *, waiting: Sequence[int], operation: str, past: Sequence[int]) -> None:
        self.waiting, self.operation, self.past = list(waiting), operation, list(past)
        ones, others = (
            f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" for ranks in (waiting, past)
        )
        super().__init__(
            f"{ones} waited in {operation} for {others}, which lived and went on without it: what the model exchanges there was "
            "left out, as by a forward that returns early, detaches or takes another way on some ranks. What those ranks hold "
            "is no longer one model, so the job ends here; checkpoints are whole. Have every rank run the same layers for "
            "every batch, and go on from the newest checkpoint with `shoal resume`."
        )
