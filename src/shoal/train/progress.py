"""Training progress: the position in the data, the values of each epoch, and the anchors of a fit.

An anchor is the Trainer's own state, from which a replaced worker replays. It is recorded before
every step and before an epoch's end, so it must be cheap: small copies now, everything else when a
replacement asks. Weights and optimizer state are not in it; the strategy transfers those.
"""

from __future__ import annotations

import dataclasses
import operator
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shoal.cluster.worker import session
from shoal.errors import TrainingError
from shoal.parallel.loss_scale import LossScale
from shoal.runtime.serialization import from_plain, to_plain

if TYPE_CHECKING:
    from shoal.train.trainer import Trainer


@dataclass(slots=True)
class Position:
    """A position in the data, and the counts up to there."""

    epoch: int = 0
    next_index: int = 0
    """Position within the epoch of the first sample not trained yet."""

    step: int = 0
    samples: int = 0
    loss_total: float = 0.0
    """Sum and count of the running epoch's loss."""

    loss_count: float = 0.0
    measured_at: int = -1
    """Step up to which the running epoch, complete or not, is in the history."""

    weights: list[float] = field(default_factory=list)
    """Shares by measured speed, and the step before which they were agreed on. Replaced, never changed in place."""

    weights_at: int = -1
    stretch: dict[str, Any] | None = None
    """Each worker's share of the epoch since it, or this launch, began: start, samples and batches by rank."""


_VALUES = operator.attrgetter(*(each.name for each in dataclasses.fields(Position)))


class History(Mapping[str, list[float]]):
    """Loss and metrics of every epoch, equal on every rank: `history["val_loss"][-1]`."""

    def __init__(self, epochs: list[dict[str, float]] | None = None) -> None:
        self.epochs: list[dict[str, float]] = list(epochs or [])

    def append(self, logs: dict[str, float]) -> None:
        self.epochs.append(dict(logs))

    def __getitem__(self, name: str) -> list[float]:
        values = [logs[name] for logs in self.epochs if name in logs]
        if not values:
            raise KeyError(name)
        return values

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for logs in self.epochs for name in logs))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        return f"History({dict(self)!r})"


@dataclass(frozen=True, slots=True)
class LoopPlace:
    """The place of an anchor in the loop: before a step, unless it says otherwise."""

    is_epoch_end: bool = False
    halfway: bool = False
    """The epoch ends early."""

    over: bool = False
    """The fit ends with this epoch."""


BEFORE_A_STEP = LoopPlace()


@dataclass(frozen=True, slots=True, kw_only=True)
class FitStart:
    """Start of a fit: from the beginning, from a checkpoint, or at the other workers' position."""

    history: History
    first: tuple[int, int]
    """Epoch and step at which the fit began, from which its limits count."""

    began_s: float
    """Begin by the monotonic clock of this process."""

    began_samples: int
    place: LoopPlace = BEFORE_A_STEP
    is_inherited: bool = False
    """The others are inside the fit, and this worker replaces one of them."""

    leases: dict[str, Any] | None = None
    """Leases of a checkpoint of a relaxed strategy; see `leasing.py`."""

    is_finished: bool = False
    """The checkpoint is of a later fit of the script: this one is over, with this history."""


@dataclass(slots=True)
class TrainingProgress:
    """All counts of a Trainer. The loop, checkpoints and anchors write here and nowhere else in the Trainer."""

    position: Position = field(default_factory=Position)
    histories: list[History] = field(default_factory=list)
    """One per fit of the script, the running one last."""

    results: list[tuple[int, str, dict[str, Any]]] = field(default_factory=list)
    """Results of evaluate and predict(out=): number of fits before it, the call with its data, and its result."""

    passed_results: list[tuple[int, str, dict[str, Any]]] | None = None
    """While fits are skipped, because the checkpoint is of a later one: results of the calls before it."""

    firsts: list[tuple[int, int]] = field(default_factory=list)
    """Epoch and step at which each fit of `histories` began; it may have been before a resume."""

    origin: tuple[int, int] | None = None
    """Epoch and step of the checkpoint that the script named to begin with; its first fit may have begun in an earlier job."""

    fit_began_s: float = 0.0
    fit_began_samples: int = 0
    num_skipped_steps: int = 0
    """Steps left out because their loss or gradient was not finite."""

    newest_checkpoint: str | None = None
    last_line: dict[str, Any] | None = None
    """Newest line of metrics.jsonl: rank 0 may die before it is written."""

    data_description: dict[str, Any] = field(default_factory=dict)
    snapshot_steps: int | None = None
    """Interval between snapshots, as chosen by an earlier fit."""

    def keep_result(self, call: str, result: dict[str, Any]) -> None:
        self.results.append((len(self.histories), call, result))

    def passed_result(self, call: str) -> dict[str, Any] | None:
        """Result of a call made before the checkpoint of a later fit; None: make the call now.

        Its weights are gone: the present ones are initial, and the checkpoint's are later.
        """
        if self.passed_results is None:
            return None

        if (kept := self.kept_result(call)) is not None:
            return kept
        raise TrainingError(
            f"{call}, after fit {len(self.histories)} of the script, comes before the checkpoint that this job goes on from, which is of a "
            "later fit: the weights it is made with are gone, and no result of it was kept. Nothing was trained or written; what the checkpoint "
            "holds is safe. Leave the call out to go on, or call it after the last fit; predict(out=...) keeps its files."
        )

    def kept_result(self, call: str) -> dict[str, Any] | None:
        """Result of a call made before the checkpoint of a later fit, if one was kept."""

        def same(results: list[tuple[int, str, dict[str, Any]]]) -> list[tuple[int, str, dict[str, Any]]]:
            return [each for each in results if each[:2] == (len(self.histories), call)]

        # The same call may be made several times, with data that differ in undescribed ways.
        left = same(self.passed_results or [])[len(same(self.results)) :]
        if not left:
            return None
        self.results.append(left[0])
        return dict(left[0][2])

    def begin_fit(self, start: FitStart) -> None:
        self.firsts[len(self.histories) :] = [start.first]
        self.histories.append(start.history)
        self.fit_began_s, self.fit_began_samples = start.began_s, start.began_samples


# ---- replay anchors --------------------------------------------------------------------------------


def note_anchor(trainer: Trainer, place: LoopPlace) -> None:
    """Record an anchor, if the strategy keeps a replay log."""
    if (replay_log := trainer.strategy.replay_log) is not None:
        replay_log.anchor(snapshot(trainer, place))


def snapshot(trainer: Trainer, place: LoopPlace = BEFORE_A_STEP) -> Callable[[], dict[str, Any]]:
    """All of the trainer's own state at this moment, converted to plain values on demand."""
    progress, optimizer, scheduler = trainer.progress, trainer.strategy.optimizer, trainer.scheduler
    position = Position(
        *_VALUES(progress.position)
    )  # at every step: dataclasses.replace takes five times as long
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in (optimizer.param_groups if optimizer is not None else ())
    ]
    schedule = scheduler.state_dict() if scheduler is not None else None
    scale = dataclasses.asdict(trainer.train_job.loss_scale) if trainer.train_job.loss_scale else None
    callbacks = [callback.state() for callback in trainer.callbacks]
    lengths = [len(history.epochs) for history in progress.histories]
    results, passed, firsts = list(progress.results), progress.passed_results, list(progress.firsts)
    origin = progress.origin
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
            "loss_scale": scale,
            "callbacks": callbacks,
            "histories": histories,
            "results": results,
            "passed_results": passed,
            "firsts": firsts,
            "origin": origin,
            "began_samples": progress.fit_began_samples,
            "elapsed_s": time.monotonic() - progress.fit_began_s,
            "skipped_steps": skipped,
            "newest_checkpoint": newest,
            "last_line": line,
        }

    return state


def inherit(trainer: Trainer) -> FitStart | None:
    """In a replaced worker: restore the anchor of the others' fit. None in all others."""
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
        session.say_when_live(
            f"note: the training metrics of epoch {trainer.epoch + 1} lack what rank {trainer.rank} had seen of it "
            "before it was replaced; its loss is whole"
        )
    return FitStart(
        history=running,
        first=progress.firsts[-1],
        place=LoopPlace(**given["place"]),
        began_s=time.monotonic() - given["elapsed_s"],
        began_samples=given["began_samples"],
        is_inherited=True,
    )


def restore(trainer: Trainer, given: dict[str, Any]) -> None:
    """Bring the trainer to the state of another rank's snapshot."""
    progress = trainer.progress
    for name, value in given["position"].items():
        setattr(progress.position, name, value)
    optimizer = trainer.strategy.optimizer
    for group, saved in zip(optimizer.param_groups if optimizer else (), given["groups"], strict=True):
        group.update(saved)
    if trainer.scheduler is not None and given["scheduler"] is not None:
        trainer.scheduler.load_state_dict(from_plain(given["scheduler"]))
    if given["loss_scale"] is not None:
        trainer.train_job.loss_scale = LossScale(**given["loss_scale"])
    for callback, state in zip(trainer.callbacks, given["callbacks"], strict=True):
        callback.load_state(state)
    progress.histories[:] = [History(epochs) for epochs in given["histories"]]
    progress.firsts[:] = map(tuple, given["firsts"])
    progress.origin = given["origin"]
    progress.results[:] = map(tuple, given["results"])
    progress.passed_results = given["passed_results"]
    progress.num_skipped_steps = given["skipped_steps"]
    progress.newest_checkpoint = given["newest_checkpoint"]
