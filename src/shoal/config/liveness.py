"""Liveness of a job's processes: the heartbeat, and the silence after which a process is suspected or given up.

Every time-out that means "this process may be dead" is here and is carried from the launch to the supervisor, the
coordinator, the servers and the workers. Polling intervals and time-outs of single operations stay beside their owner.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from shoal.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessConfig:
    """Heartbeat interval, and how long each silence is tolerated.

    A worker sends no heartbeats of its own: its supervisor sees it die, and one that lives in silence is noticed by
    those that wait for it.
    """

    heartbeat_interval_s: float = 2.0
    """Between two heartbeats: supervisor to coordinator, coordinator to every server."""

    step_timeout_s: float = 300.0
    """Silence of a rank within a step, or of a server, that makes it suspect: it is killed and replaced."""

    join_timeout_s: float = 120.0
    """The same for a rank that is missed at a call into shoal, and for a server that never joined."""

    coordinator_dead_after_s: float = 15.0
    """Silence of the coordinator after which the supervisor kills and restarts it. Starting it again costs nobody anything."""

    coordinator_grace_s: float = 5.0
    """After its own restart the coordinator suspects nobody for so long: it has not heard anybody yet."""

    reconnect_timeout_s: float = 30.0
    """A worker or server that cannot reach the coordinator for so long gives up. A restarted one is back within a second."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 < getattr(self, field.name) < 1e9:
                raise ConfigError(
                    f"{field.name} must be a positive number of seconds, got {getattr(self, field.name)}."
                )
        if self.heartbeat_interval_s >= self.coordinator_dead_after_s:
            raise ConfigError(
                "coordinator_dead_after_s must be several heartbeats long, or a pause looks like death; got "
                f"{self.coordinator_dead_after_s} with a heartbeat every {self.heartbeat_interval_s} s."
            )

    @property
    def server_heartbeat_s(self) -> float:
        """Interval of the heartbeats to servers: four fit into the silence that is tolerated."""
        return min(self.heartbeat_interval_s, self.step_timeout_s / 4)
