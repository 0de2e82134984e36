"""Anchors of a fit: the Trainer's own state, recorded so that a replaced worker can replay from there.

Recorded before every step and before an epoch's end, so it must be cheap: small
copies now, everything else when a replacement asks. Weights and optimizer state
are not in it; the strategy hands those over.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shoal.runtime.serialization import from_plain, to_plain
from shoal.train.progress import BEFORE_A_STEP, FitStart, History, LoopPlace

if TYPE_CHECKING:
    from shoal.train.trainer import Trainer


def note(trainer: Trainer, place: LoopPlace) -> None:
    """Record an anchor, where the strategy keeps a replay log."""
    if (replay_log := trainer.strategy.replay_log) is not None:
        replay_log.anchor(snapshot(trainer, place))


def snapshot(trainer: Trainer, place: LoopPlace = BEFORE_A_STEP) -> Callable[[], dict[str, Any]]:
    """All of the trainer's own state as it is now, put into plain values when it is asked for."""
    progress, optimizer, scheduler = trainer.progress, trainer.strategy.optimizer, trainer.scheduler
    position = dataclasses.replace(progress.position)
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in (optimizer.param_groups if optimizer is not None else ())
    ]
    schedule = scheduler.state_dict() if scheduler is not None else None
    callbacks = [callback.state() for callback in trainer.callbacks]
    lengths = [len(history.epochs) for history in progress.histories]
    skipped, newest, line = progress.num_skipped_steps, progress.newest_checkpoint, progress.last_line

    def state() -> dict[str, Any]:
        histories = [
            history.epochs[:length] for history, length in zip(progress.histories, lengths, strict=True)
        ]
        return {
            "place": dataclasses.asdict(place),
            "position": dataclasses.asdict(position),
            "groups": groups,
            "scheduler": to_plain(schedule, "the scheduler") if schedule is not None else None,
            "callbacks": callbacks,
            "histories": histories,
            "first": list(progress.fit_first),
            "began_samples": progress.fit_began_samples,
            "elapsed_s": time.monotonic() - progress.fit_began_s,
            "skipped_steps": skipped,
            "newest_checkpoint": newest,
            "last_line": line,
        }

    return state


def inherit(trainer: Trainer) -> FitStart | None:
    """In a replaced worker: restore the anchor of the others' fit. None in everybody else."""
    replay_log = trainer.strategy.replay_log
    given = replay_log.take_anchor() if replay_log is not None else None
    if given is None:
        return None
    restore(trainer, given)
    progress = trainer.progress
    running = progress.histories.pop()
    progress.last_line = given["last_line"]
    trainer.train_metrics.reset()
    if trainer.train_metrics and progress.position.next_index:
        print(
            f"note: the training metrics of epoch {trainer.epoch + 1} lack what rank {trainer.rank} had seen of it "
            "before it was replaced; its loss is whole",
            file=sys.stderr,
        )
    return FitStart(
        history=running,
        first=(given["first"][0], given["first"][1]),
        place=LoopPlace(**given["place"]),
        began_s=time.monotonic() - given["elapsed_s"],
        began_samples=given["began_samples"],
        is_inherited=True,
    )


def restore(trainer: Trainer, given: dict[str, Any]) -> None:
    """Bring the trainer to the state of another rank's at its snapshot."""
    progress = trainer.progress
    for name, value in given["position"].items():
        setattr(progress.position, name, value)
    optimizer = trainer.strategy.optimizer
    for group, saved in zip(optimizer.param_groups if optimizer else (), given["groups"], strict=True):
        group.update(saved)
    if trainer.scheduler is not None and given["scheduler"] is not None:
        trainer.scheduler.load_state_dict(from_plain(given["scheduler"]))
    for callback, state in zip(trainer.callbacks, given["callbacks"], strict=True):
        callback.load_state(state)
    progress.histories[:] = [History(epochs) for epochs in given["histories"]]
    progress.num_skipped_steps = given["skipped_steps"]
    progress.newest_checkpoint = given["newest_checkpoint"]
