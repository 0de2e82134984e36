"""What the stages of a pipeline cannot do in the midst of training.

Part of the tree of `core/errors.py`, under TrainingError. Which checkpoint is
safe is added by the supervisor, who knows the newest.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.core.errors import TrainingError


class StageCannotRun(TrainingError):
    """A batch that no stage was cut for. Its step was not applied."""


class ShapeDecides(StageCannotRun):
    """The model's forward takes another way for this batch than for the one by which it was cut."""

    def __init__(self, *, seen: object, value: object, line: str) -> None:
        self.seen, self.value, self.line = repr(seen), repr(value), line
        super().__init__(
            f"the model's forward decides by the shape of a batch{line}: what it asks for was {seen} when the model was cut into "
            f"stages and is {value} for this batch, and what it would do then is in no stage. The step was not applied. Give "
            "batches whose tensors have one shape but for the number of samples (pad or cut sequences to one length), let forward "
            "do the same for every length, or go on with --strategy fsdp or tp, which run forward as it is."
        )


class ShapeLeadsElsewhere(StageCannotRun):
    """The model's forward takes a way for this batch on which the stages cannot run one after the other."""

    def __init__(self, *, shapes: Sequence[tuple[int, ...]], why: str) -> None:
        self.shapes, self.why = list(shapes), why
        super().__init__(
            f"the model's forward decides by the shape of a batch, and for inputs of {' and '.join(map(str, shapes))} it takes another "
            f"way than for those by which the model was cut into stages: {why}. The step was not applied. Give batches whose tensors "
            "have one shape but for the number of samples (pad or cut sequences to one length), name cuts with pipeline_cut= that "
            "keep the layers of all ways in one stage, or go on with --strategy fsdp or tp, which run forward as it is."
        )
