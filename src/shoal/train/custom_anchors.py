"""Anchors of a loop of the user's own: its state at the beginning of a step, from which a replacement continues.

See docs/adr/0016-loops-of-ones-own.md. Noted are the place in the data, the
optimizers' settings, schedulers built on them, and the script's variables. A
loop that cannot be entered in the middle says so at its first step: there a
death takes all workers back to the script's beginning.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType, GeneratorType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from shoal.cluster.worker import session
from shoal.config import job as jobs
from shoal.errors import ClusterError
from shoal.recovery.replay_log import ReplayLog
from shoal.runtime.serialization import from_plain, to_plain
from shoal.train import loop_shape, script_state
from shoal.train.loop_shape import CannotEnter, RangeLoop, Shape
from shoal.train.script_state import Noted, OwnFile, Variables


@dataclass(slots=True)
class Place:
    """A place in the data from which a step's first batch is taken."""

    data: int
    """Number of the data."""

    epoch: int
    next_index: int
    index: int
    """Batches taken in this epoch before it."""

    stretch: dict[str, Any] | None
    """What each worker has had of the epoch so far."""

    epochs: dict[int, int]
    """By number of the data: how often the script has begun to go through it."""


@dataclass(slots=True)
class Recovery:
    """What is noted of the script for a replacement, and how a replacement takes it."""

    models: list[torch.nn.Module] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    set_up_at: list[tuple[CodeType, int]] = field(default_factory=list)
    _is_given_up: bool = False
    _shapes: dict[tuple[tuple[CodeType, int], ...], tuple[Shape, Variables]] = field(default_factory=dict)
    _asking: set[int] = field(default_factory=set)  # data that a `while` goes through
    _now: tuple[int, list[dict[str, Noted]]] | None = None
    _own: OwnFile | None = None
    _said_when_live: str = ""
    _schedulers: dict[int, list[Any]] = field(default_factory=dict)

    def set_up(self) -> None:
        """The script calls `shoal.setup`."""
        self.set_up_at += loop_shape.set_up_here()

    # ---- noting ---------------------------------------------------------------------------------

    def note(self, replay_log: ReplayLog | None, place: Place) -> None:
        """A step's first batch is about to be taken."""
        if replay_log is None:
            return
        if self._said_when_live and session.is_live():
            print(self._said_when_live, file=sys.stderr, flush=True)
            self._said_when_live = ""
        if self._is_given_up:
            replay_log.anchor(dict)
            return
        frames = loop_shape.script_frames()
        try:
            shape, variables = self._shape(frames, place.data)
            noted = variables.note(frames)
        except CannotEnter as reason:
            self.give_up(replay_log, str(reason))
            return
        noted.append(script_state.note_generators() if shape.draws else {})
        before, self._now = self._now, (replay_log.num_finished, noted)
        if self._own is None:
            self._own = OwnFile(_own_path())
            if not replay_log.was_given_state:
                self._own.clear()
        self._own.write(replay_log.num_finished, noted)
        groups = [[_settings(group) for group in optimizer.param_groups] for optimizer in self.optimizers]
        schedules = [[each.state_dict() for each in self._schedulers_of(opt)] for opt in self.optimizers]
        replay_log.anchor(
            lambda: {
                "data": place.data,
                "epoch": place.epoch,
                "next_index": place.next_index,
                "index": place.index,
                "stretch": place.stretch,
                "epochs": [list(pair) for pair in place.epochs.items()],
                "groups": groups,
                "schedules": [[to_plain(state, "a scheduler") for state in states] for states in schedules],
                "rank": jobs.rank(),
                "ranges": [list(loop) for loop in shape.ranges],
                "variables": script_state.plain(noted),
                "before": [before[0], script_state.plain(before[1])] if before is not None else None,
            }
        )

    def give_up(self, replay_log: ReplayLog | None, why: str) -> None:
        """From here on a worker that dies cannot be replaced alone; said once."""
        if replay_log is None or self._is_given_up:
            return
        self._is_given_up = True
        replay_log.let_go(
            f"note: {why}: a worker that dies takes all of them back to the beginning of the script. A loop over shoal's data "
            "itself, inside `while` or `for NAME in range(...)`, with one optimizer step after one or more batches, goes on "
            "with that worker replaced"
        )

    def _shape(self, frames: Sequence[Any], data: int) -> tuple[Shape, Variables]:
        key = tuple((frame.f_code, frame.f_lineno) for frame in frames)
        if key not in self._shapes:
            if self._asking - {data}:
                raise CannotEnter("a `while` goes through other data than this before it")
            _refuse_wrappers()
            shape = loop_shape.shape_of(frames, self.set_up_at)
            if shape.asks:
                self._asking.add(data)
            self._shapes[key] = shape, Variables(lambda: self.models, shape.carried)
        return self._shapes[key]

    # ---- in a replacement -----------------------------------------------------------------------

    def start_of(self, data: int, epoch: int, replay_log: ReplayLog | None) -> Place | None:
        """Where to begin: at an epoch's begin; in a replaced worker at the others' place, or None where they are past this data."""
        waiting = replay_log.pending_anchor() if replay_log is not None else None
        if replay_log is None or waiting is None or "data" not in waiting:
            return Place(data, epoch, 0, 0, None, {})
        if data != waiting["data"]:
            return None
        at = replay_log.anchored_at
        replay_log.take_anchor()
        for optimizer, groups, states in zip(
            self.optimizers, waiting["groups"], waiting["schedules"], strict=True
        ):
            for group, saved in zip(optimizer.param_groups, groups, strict=True):
                group.update(saved)
            for scheduler, state in zip(self._schedulers_of(optimizer), states, strict=True):
                scheduler.load_state_dict(from_plain(state))
        self._enter(replay_log, at, waiting)
        epochs = {int(number): count for number, count in waiting["epochs"]}
        return Place(
            data, waiting["epoch"], waiting["next_index"], waiting["index"], waiting["stretch"], epochs
        )

    def _enter(self, replay_log: ReplayLog, at: int, waiting: dict[str, Any]) -> None:
        frames = loop_shape.script_frames()
        noted = waiting["variables"]
        if len(noted) != len(frames) + 1:
            raise ClusterError(
                f"a replaced worker took its first batch {len(frames)} calls deep in the script, and the others {len(noted) - 1}. "
                "Weights and what was saved are safe; start the job again, and take batches at one place."
            )
        behind: list[str] = []
        if waiting["rank"] != jobs.rank():
            self._own = OwnFile(_own_path())
            before = tuple(waiting["before"]) if waiting["before"] is not None else None
            noted, behind = script_state.merged(self._own.read(), at, noted, before)
        script_state.restore(frames, noted[:-1])
        if noted[-1]:
            script_state.restore_generators(noted[-1])
        loop_shape.enter(frames, [RangeLoop(*loop) for loop in waiting["ranges"]])
        if behind:
            self._said_when_live = (
                f"note: worker {jobs.rank()} was replaced: what its script alone had added to {_names(behind)} in the step in "
                "which it died is missing there. Weights, and variables that all workers have alike, are exact"
            )
        elif replay_log.next_is_known:
            self._said_when_live = (
                f"note: worker {jobs.rank()} was replaced, and runs a step again that is committed: what its script adds up of "
                "the model's outputs in it is of the weights after that step. Weights are exact"
            )

    def _schedulers_of(self, optimizer: torch.optim.Optimizer) -> list[Any]:
        """The schedulers that the script built on the optimizer. They know it, but it does not know them."""
        if id(optimizer) not in self._schedulers:
            self._schedulers[id(optimizer)] = [
                thing
                for thing in gc.get_objects()
                # Not isinstance: it asks the object itself, and deprecated ones answer with a warning.
                if issubclass(type(thing), LRScheduler) and thing.optimizer is optimizer
            ]
        return self._schedulers[id(optimizer)]


def _refuse_wrappers() -> None:
    """An iterator of C around ours has a place of its own, and no frame."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "__iter__":
        frame = frame.f_back  # type: ignore[assignment]
    for generator in gc.get_referrers(frame) if frame is not None else ():
        for holder in gc.get_referrers(generator):
            kind = type(holder)
            is_c = issubclass(kind, Iterator) and kind.__module__ in ("builtins", "itertools")
            if is_c and kind not in (enumerate, GeneratorType):
                raise CannotEnter(f"the place of a {kind.__name__} around shoal's data cannot be handed over")


def _own_path() -> Any:
    job = jobs.current()
    return job.run_dir / "loop" / f"worker-{job.rank}"


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in dict.fromkeys(names))


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
