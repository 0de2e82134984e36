"""Liveness of a job's processes: the heartbeat, and the silence after which a process is suspected or given up.

Every time-out that means "this process may be dead" is here and is passed from the launch to the
supervisor, the coordinator, the servers and the workers. Polling intervals and time-outs of single
operations stay beside their owner.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from shoal.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessConfig:
    """Heartbeat interval, and the tolerated length of each silence.

    A worker sends no heartbeats of its own: its supervisor sees it die, and a live but silent one
    is noticed by the ranks that wait for it.
    """

    heartbeat_interval_s: float = 2.0
    """Interval of heartbeats: supervisor to coordinator, coordinator to every server."""

    step_timeout_s: float = 300.0
    """Silence of a rank within a step, or of a server, that makes it suspect: it is killed and replaced."""

    join_timeout_s: float = 120.0
    """The same for a rank that is missed at a call into shoal, and for a server that never joined."""

    coordinator_dead_after_s: float = 15.0
    """Silence of the coordinator after which the supervisor kills and restarts it. A restart costs the job nothing."""

    coordinator_grace_s: float = 5.0
    """Time after its own restart in which the coordinator suspects nobody: it has not heard from any process yet."""

    reconnect_timeout_s: float = 30.0
    """A worker or server that cannot reach the coordinator for so long gives up. A restarted one is back within a second."""

    host_heartbeat_s: float = 0.5
    """Interval of heartbeats of a host agent, and of the head to it."""

    host_dead_after_s: float = 3.0
    """Silence after which a host is lost: the head counts its processes as dead, and its agent kills them."""

    head_lease_s: float = 8.0
    """Lease of the head in etcd (--journal). A head that could not renew it for 3/4 of it ends its job: after all of it
    another host takes over."""

    loop_stalled_after_s: float = 30.0
    """Time since the last turn of a process's own loop after which `/healthz` reports it as stuck: far longer than any turn on a
    busy machine."""

    takeover_timeout_s: float = 60.0
    """How long a host that lost its head looks for another one in etcd, or tries to become it."""

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

        if self.head_lease_s < 2 * self.host_dead_after_s:
            raise ConfigError(
                "head_lease_s must be at least twice host_dead_after_s, or a head is followed before its hosts have ended its "
                f"processes; got {self.head_lease_s} and {self.host_dead_after_s}."
            )
        if self.host_heartbeat_s >= self.host_dead_after_s:
            raise ConfigError(
                "host_dead_after_s must be several heartbeats long, or a pause looks like death; got "
                f"{self.host_dead_after_s} with a heartbeat every {self.host_heartbeat_s} s."
            )

    @property
    def server_heartbeat_s(self) -> float:
        """Interval of the heartbeats to servers: four fit into the silence that is tolerated."""
        return min(self.heartbeat_interval_s, self.step_timeout_s / 4)
