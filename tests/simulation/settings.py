"""Durations and time-outs of a simulated cluster."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Virtual seconds. The proportions are those of the real thing, the waits shorter."""

    step_timeout_s: float = 2.0
    """A rank gives up an exchange after so long, and others a rank that does not follow into a view."""

    join_timeout_s: float = 6.0
    """How long ranks wait at a call before somebody is suspected."""

    dead_after_s: float = 1.0
    """After its restart the coordinator suspects nobody for so long."""

    compute_s: tuple[float, float] = (0.002, 0.03)
    """The work between two exchanges."""

    boot_s: tuple[float, float] = (0.02, 0.15)
    """From the fork to the first line of the script."""

    reap_s: tuple[float, float] = (0.001, 0.02)
    """From a death to the supervisor's knowledge of it."""

    coordinator_restart_s: tuple[float, float] = (0.02, 0.4)
    """From the coordinator's death to the next one's first accept."""

    network_s: tuple[float, float] = (0.0001, 0.003)
    """How long a message takes."""

    reconnect_s: float = 0.02
    """How long a client waits before it connects again."""

    settle_s: float = 10.0
    """Once the faults stop, the job is done after at most so long."""
