"""Names of signals, those included that Python has no constant for."""

from __future__ import annotations

import signal


def signal_name(number: int) -> str:
    """SIGKILL, SIGRTMIN+6; or the bare number where the system knows no such signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        if not hasattr(signal, "SIGRTMIN"):
            return f"signal {number}"
        after_first = number - signal.SIGRTMIN
        return (
            f"SIGRTMIN+{after_first}" if after_first > 0 and number < signal.SIGRTMAX else f"signal {number}"
        )
