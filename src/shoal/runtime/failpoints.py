"""Failpoints: named places at which a fault can be injected deterministically.

Free while nothing is armed: one lookup of a name. Faults come with a process's job, as plain
values; see `shoal.config.faults` for the user's syntax. Reactions to a fault are decided elsewhere.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable

from shoal.config.faults import Fault


class _MadeToFail(Exception):
    """Exception of a fault of kind "raise": treated as the user's own."""


class _Armed:
    """Faults of this process that have not been injected yet."""

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
        return self._step >= fault.step  # a worker with batches of its own does not reach every step number


_armed: _Armed | None = None


def arm(faults: Iterable[Fault], *, process: str, incarnation: int) -> None:
    """Arm those of `faults` that are meant for this incarnation of this process."""
    global _armed
    mine = [
        fault
        for fault in faults
        if fault.process == process and fault.incarnation in (-1, incarnation) and fault.after_s is None
    ]
    _armed = _Armed(mine) if mine else None


def failpoint(name: str, step: int | None = None) -> None:
    """Mark that this process is at the failpoint `name`; `step` sets its current step."""
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
