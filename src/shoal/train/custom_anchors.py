"""Where a loop of the user's own stands, so that a replaced worker can run on from there.

The script is the user's: its variables are its own affair. What shoal knows
of it (the place in the data, the optimizers' settings, schedulers built on
them) is noted before every step.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from shoal.data.slice import Slice
from shoal.parallel.protocol import Strategy
from shoal.runtime.serialization import from_plain, to_plain

_schedulers: dict[int, list[Any]] = {}


def note(
    data: int,
    part: Slice,
    strategy: Strategy,
    optimizers: Sequence[torch.optim.Optimizer],
    stretch: dict[str, Any] | None,
) -> None:
    """The loop over `data` is before a step; `stretch` is what each worker had of the epoch so far."""
    if strategy.timeline is None:
        return
    groups = [[_settings(group) for group in optimizer.param_groups] for optimizer in optimizers]
    schedules = [
        [scheduler.state_dict() for scheduler in _schedulers_of(optimizer)] for optimizer in optimizers
    ]
    strategy.timeline.anchor(
        lambda: {
            "data": data,
            "epoch": part.epoch,
            "next_index": part.start,
            "stretch": stretch,
            "groups": groups,
            "schedules": [[to_plain(state, "a scheduler") for state in states] for states in schedules],
        }
    )


def start_of(
    data: int, epoch: int, strategy: Strategy, optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[int, dict[str, Any] | None] | None:
    """Where an epoch begins, and what was had of it: at 0; in a replaced worker at the others' place, or None if they are past it."""
    waiting = strategy.timeline.waiting_anchor() if strategy.timeline is not None else None
    if strategy.timeline is None or waiting is None or "data" not in waiting:
        return 0, None
    if (data, epoch) != (waiting["data"], waiting["epoch"]):
        return None
    strategy.timeline.inherited_anchor()
    for optimizer, groups, states in zip(optimizers, waiting["groups"], waiting["schedules"], strict=True):
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            group.update(saved)
        for scheduler, state in zip(_schedulers_of(optimizer), states, strict=True):
            scheduler.load_state_dict(from_plain(state))
    return int(waiting["next_index"]), waiting["stretch"]


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _schedulers_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The schedulers that the script built on the optimizer. They know it, but it does not know them."""
    if id(optimizer) not in _schedulers:
        _schedulers[id(optimizer)] = [
            thing
            for thing in gc.get_objects()
            if isinstance(thing, LRScheduler) and thing.optimizer is optimizer
        ]
    return _schedulers[id(optimizer)]
