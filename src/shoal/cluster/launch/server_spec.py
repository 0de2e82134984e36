"""What a server is told at birth; beside it come descriptors, by name.

    listener        this server's own listening Unix socket; it outlives every incarnation
    coordinator     way in to the coordinator (O_PATH): connect to /proc/self/fd/N
    server-0, ...   way in to each server there may be, this one included

Its conversation with the coordinator is in `runtime/transport/messages/server_coordinator.py`.
"""

from __future__ import annotations

import msgspec

from shoal.config.faults import Fault

MAX_SERVERS = 16
"""How many servers a group can be scaled to, unless it was launched with more."""


class ServerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All a server is told."""

    job: str  # the run's name
    number: int
    incarnation: int = 0
    num_workers: int
    num_servers: int  # at launch
    num_replicas: int  # copies of every slot, the primary's among them
    strategy: str
    run_dir: str
    env: dict[bytes, bytes] = msgspec.field(default_factory=dict)
    num_threads: int = 1
    server_memory_bytes: int = (
        0  # of its own, clients' shared memory aside; 0: 80 % of what is available at its start
    )
    staleness_lr: bool = False  # of ParallelOptions
    push_norm: float | None = None
    step_timeout_s: float = 300.0
    join_timeout_s: float = 120.0
    faults: tuple[Fault, ...] = ()  # of all processes; arm with process=f"server-{number}"


def encode_spec(spec: ServerSpec) -> bytes:
    """A spec as bytes, for the fork."""
    return msgspec.msgpack.encode(spec)


def decode_spec(spec: bytes) -> ServerSpec:
    """What `encode_spec` made."""
    return msgspec.msgpack.decode(spec, type=ServerSpec)


def way_in(number: int) -> str:
    """Name of the descriptor that leads to a server."""
    return f"server-{number}"
