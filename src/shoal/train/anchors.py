"""What a fit notes at an anchor, so that a replaced worker can run on from there.

Noted before every step and before an epoch's end, so it must be cheap: small
copies now, everything else when somebody asks. Weights and optimizer state
are not in it; those the strategy hands over.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.runtime.serialization import from_plain, to_plain
from shoal.train.progress import History

if TYPE_CHECKING:
    from shoal.train.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the loop an anchor lies: before a step, unless it says otherwise."""

    is_epoch_end: bool = False
    halfway: bool = False
    """The epoch ends early."""

    over: bool = False
    """The fit ends with this epoch."""


BEFORE_A_STEP = Place()


@dataclass(frozen=True, slots=True)
class Inherited:
    """Where a replaced worker's fit goes on."""

    history: History
    first: tuple[int, int]
    place: Place
    began_at: float
    began_samples: int


def note(trainer: Trainer, place: Place) -> None:
    """The loop is at an anchor."""
    if (together := trainer.strategy.timeline) is not None:
        together.anchor(snapshot(trainer, place))


def snapshot(trainer: Trainer, place: Place = BEFORE_A_STEP) -> Callable[[], dict[str, Any]]:
    """All of the trainer's own state as it is now, put into plain values when it is asked for."""
    optimizer, scheduler = trainer.strategy.optimizer, trainer.scheduler
    position = dataclasses.replace(trainer.position)
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in (optimizer.param_groups if optimizer is not None else ())
    ]
    schedule = scheduler.state_dict() if scheduler is not None else None
    callbacks = [callback.state() for callback in trainer.callbacks]
    lengths = [len(history.epochs) for history in trainer.histories]
    skipped, newest, line = trainer.num_skipped_steps, trainer.newest_checkpoint, trainer.last_line

    def state() -> dict[str, Any]:
        histories = [
            history.epochs[:length] for history, length in zip(trainer.histories, lengths, strict=True)
        ]
        return {
            "place": dataclasses.asdict(place),
            "position": dataclasses.asdict(position),
            "groups": groups,
            "scheduler": to_plain(schedule, "the scheduler") if schedule is not None else None,
            "callbacks": callbacks,
            "histories": histories,
            "first": list(trainer.fit_began_at),
            "began_samples": trainer.fit_began_samples,
            "elapsed_s": time.monotonic() - trainer.fit_began_s,
            "skipped_steps": skipped,
            "newest_checkpoint": newest,
            "last_line": line,
        }

    return state


def inherit(trainer: Trainer) -> Inherited | None:
    """In a replaced worker: stand at the anchor of the others' fit. None in everybody else."""
    together = trainer.strategy.timeline
    given = together.inherited_anchor() if together is not None else None
    if given is None:
        return None
    restore(trainer, given)
    running = trainer.histories.pop()
    trainer.last_line = given["last_line"]
    trainer.train_metrics.reset()
    if trainer.train_metrics and trainer.position.next_index:
        print(
            f"note: the training metrics of epoch {trainer.epoch + 1} lack what rank {trainer.rank} had seen of it "
            "before it was replaced; its loss is whole",
            file=sys.stderr,
        )
    return Inherited(
        history=running,
        first=(given["first"][0], given["first"][1]),
        place=Place(**given["place"]),
        began_at=time.monotonic() - given["elapsed_s"],
        began_samples=given["began_samples"],
    )


def restore(trainer: Trainer, given: dict[str, Any]) -> None:
    """Stand where another rank's trainer stood when the snapshot was made."""
    for name, value in given["position"].items():
        setattr(trainer.position, name, value)
    optimizer = trainer.strategy.optimizer
    for group, saved in zip(optimizer.param_groups if optimizer else (), given["groups"], strict=True):
        group.update(saved)
    if trainer.scheduler is not None and given["scheduler"] is not None:
        trainer.scheduler.load_state_dict(from_plain(given["scheduler"]))
    for callback, state in zip(trainer.callbacks, given["callbacks"], strict=True):
        callback.load_state(state)
    trainer.histories[:] = [History(epochs) for epochs in given["histories"]]
    trainer.num_skipped_steps, trainer.newest_checkpoint = given["skipped_steps"], given["newest_checkpoint"]
