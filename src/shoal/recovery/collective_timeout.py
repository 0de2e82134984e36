"""Time-outs of collectives that the script asked for, naming the ranks that are missing.

A waiting rank registers with the coordinator; on timeout it reads who else
registered and reports the rest as missing. Free while no rank waits long.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

from shoal.errors import WaitTimedOut
from shoal.recovery import rendezvous

GRACE_S = 0.75
"""Between the deadline and the verdict: who came just before it has said so by then (it looks around four times a second)."""


class Waits(Protocol):
    """What is done while an exchange waits for the others."""

    def begin(self, number: int) -> None:
        """Exchange `number` begins, or begins again in another view."""

    def look(self) -> None:
        """Still waiting."""


class Patience:
    """The wait of one exchange: `begin` it in each view, and `look` while it lasts."""

    def __init__(self, operation: str, timeout_s: float) -> None:
        self._operation, self._timeout_s = operation, timeout_s
        self._where = ""
        self._began_at = 0.0
        self._has_told = False
        self._thread = 0

    def begin(self, number: int) -> None:
        """Exchange `number` begins, or begins again in another view."""
        self._where, self._began_at, self._has_told = f"exchange-{number}", time.monotonic(), False
        self._thread = threading.get_ident()

    def look(self) -> None:
        """Still waiting: WaitTimedOut where it is too long, with the ranks that are not here."""
        if threading.get_ident() != self._thread:
            return  # one that works for the exchange: whoever waits for it will say
        if not self._has_told:
            self._has_told = True
            rendezvous.tell_waiting(self._where)
        waited_s = time.monotonic() - self._began_at
        if waited_s < self._timeout_s + GRACE_S:
            return
        missing = rendezvous.not_waiting(self._where)
        if missing:
            raise WaitTimedOut(
                operation=self._operation,
                waited_s=waited_s,
                missing=[f"rank {rank}" for rank in missing],
                setting=f"its timeout_s (now {self._timeout_s:g} s)",
            )
