"""Waiting for a condition instead of sleeping for a time."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], timeout_s: float = 180.0) -> bool:
    """Whether `condition` became true in time: by default long, since only what fails waits so long, or a busy machine."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
