"""Named moments in the code at which a fault can be made to happen, exactly and on purpose.

Free while nothing is armed: one look at a name. What is to happen where comes
with a process's job, as plain values; see `shoal.cluster.faults` for how a
user writes it. Nothing here decides what is done about a fault.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass

POINTS = {
    "worker: not joined": "it is there, and the coordinator has not heard of it",
    "worker: before forward": "a step begins",
    "worker: before commit": "forward and backward are done, nothing is updated",
    "worker: exchange begun": "an exchange is about to be finished",
    "worker: exchange finished, not committed": "all sums are there, the weights are the old ones",
    "worker: committed, not counted": "the weights are new, the exchange is not in the log",
    "worker: committed": "a step is over but for what the loop counts and writes",
    "worker: view left": "the group is left, the next view not entered",
    "worker: before taking state": "a donor is about to send",
    "worker: after taking state": "everything was received, nothing is confirmed",
    "worker: a call begins": "before the other ranks are asked",
    "worker: a call ended": "its result is kept",
    "worker: evaluating": "after a batch of evaluate, or of a validation",
    "worker: predicting": "after a batch of predict",
    "worker: epoch ended": "all steps are done, nothing is measured",
    "worker: checkpoint not written": "decided, on all ranks",
    "worker: checkpoint written": "whole on disk, nobody was told",
    "worker: script ended": "before the other ranks are asked",
    "coordinator: before writing a call": "agreed, not in the journal",
    "coordinator: after writing a call": "in the journal, not answered",
    "coordinator: before writing a view": "formed, not in the journal",
    "coordinator: after writing a view": "in the journal, not answered",
}
"""Every failpoint there is, and what holds at it."""

BEFORE_FORWARD = "worker: before forward"


class _MadeToFail(Exception):
    """What a fault of kind "raise" raises: to shoal it is the user's own exception."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that is to go wrong, once."""

    act: str
    """"kill" (SIGKILL), "pause" (SIGSTOP), "slow", "exit" or "raise"."""

    process: str
    """"worker-1", "server-0", or "coordinator"."""

    at: str = BEFORE_FORWARD
    """The failpoint. Not looked at where `after_s` is set."""

    step: int | None = None
    """The first step in which the failpoint counts, from 1; None for the first time it is reached."""

    after_s: float | None = None
    """Instead of a failpoint: so long after the first worker was started, by the supervisor's hand."""

    for_s: float = 0.0
    """How long a pause or a slowness lasts; 0 for ever."""

    by_s: float = 0.0
    """Of a slowness: how much longer every pass of the failpoint takes."""

    incarnation: int = 0
    """Which life of the process: 0 the first, 1 its first replacement; -1 every one."""

    def __str__(self) -> str:
        when = f"at step {self.step}" if self.step is not None else ""
        if self.after_s is not None:
            when = f"after {self.after_s:g} s"
        elif self.at != BEFORE_FORWARD or not when:
            when = f"{when} at '{self.at}'".strip()
        much = f" by {self.by_s:g} s" if self.by_s else ""
        lasting = f" for {self.for_s:g} s" if self.for_s else ""
        return f"{self.act} {self.process} {when}{much}{lasting}"


class _Armed:
    """The faults of this process that have not happened yet."""

    def __init__(self, faults: list[Fault]) -> None:
        self._faults = faults
        self._slow: list[tuple[Fault, float]] = []  # since when
        self._step = 0

    def reached(self, name: str, step: int | None) -> None:
        if step is not None:
            self._step = step
        for fault in self._faults:
            if fault.at == name and self._is_due(fault):
                self._faults.remove(fault)
                if fault.act != "slow":
                    _happen(fault)
                    return
                self._slow.append((fault, time.monotonic()))
                break
        for fault, since in self._slow:
            if fault.at == name and (not fault.for_s or time.monotonic() < since + fault.for_s):
                time.sleep(fault.by_s)

    def _is_due(self, fault: Fault) -> bool:
        if fault.step is None or fault.incarnation < 0:
            return fault.step in (None, self._step)
        return (
            self._step >= fault.step
        )  # a worker that trains batches of its own does not come by every number


_armed: _Armed | None = None


def arm(faults: Iterable[Fault], *, process: str, incarnation: int) -> None:
    """Let those of `faults` happen that are meant for this process, in this life of it."""
    global _armed
    mine = [
        fault
        for fault in faults
        if fault.process == process and fault.incarnation in (-1, incarnation) and fault.after_s is None
    ]
    _armed = _Armed(mine) if mine else None


def failpoint(name: str, step: int | None = None) -> None:
    """This process is at the failpoint `name`; `step` says which step it is in from here on."""
    if _armed is not None:
        _armed.reached(name, step)


def _happen(fault: Fault) -> None:
    match fault.act:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "pause":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exit":
            os._exit(70)
        case _:
            raise _MadeToFail(f"made to fail: {fault}")
