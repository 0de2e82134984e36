"""Roles of a job's processes: the entry point of each, the modules preloaded for it, and the spec a server is given.

An entry point is `main(spec: bytes, fds: dict[str, int]) -> int`: its spec, its
open descriptors by name (stdout and stderr are already in place), and the exit
code it returns. A server's descriptors are

    listener        its own listening Unix socket, which outlives every incarnation
    tcp_listener    its socket for other hosts, where the job has any
    coordinator     the way to the coordinator's socket: see `system.path_of_way`
    server-0, ...   the socket of each server there may be, this one included

and whatever is on another host has an address in the spec instead.

`protocol_version` tells whether two processes have imported the same messages
and specs. The supervisor and its fork server import shoal one after the other;
where its files are replaced in between, neither would understand the other.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable

import msgspec

from shoal.cluster.coordinator.process import CoordinatorSpec
from shoal.cluster.worker.process import WorkerSpec
from shoal.config.faults import Fault
from shoal.config.job import Job
from shoal.config.liveness import LivenessConfig
from shoal.runtime.transport.messages import MESSAGES
from shoal.runtime.transport.tls import Credentials

Entry = Callable[[bytes, dict[str, int]], int]

ROLES = {
    "worker": "shoal.cluster.worker.process:main",
    "coordinator": "shoal.cluster.coordinator.process:main",
    "server": "shoal.ps.server.process:main",
}

PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "safetensors.torch",
    "numpy",
    "shoal.cluster.worker.process",
    "shoal.cluster.coordinator.process",
    "shoal.recovery.rendezvous",
    "shoal.callbacks",
    "shoal.parallel.ddp",
    "shoal.train.trainer",
    "shoal.train.custom.loop",
)
"""Modules that the warm parent imports before it forks: those that would cost a worker time at its first step."""

PRELOAD_WHERE_NAMED = {"metrics": "shoal.train.metrics", "HashEmbedding": "numba", "shoal.features": "numba"}
"""Word in the script -> modules it will probably need. torchmetrics takes up to seconds to import, and
not every script uses it.

numba stands for all compiled loops.
"""


PRELOAD_WITH_SERVERS = ("numba", "shoal.ps.server.process", "shoal.ps.server.core", "shoal.parallel.ps.exact")
"""Modules that servers need, and workers that have servers."""


PRELOAD_WITH_MESH = "shoal.parallel.mesh"
"""With torch's own sharding, which takes each worker almost two seconds to import (measured)."""


def preload_for(script: str, *, with_servers: bool = False, with_mesh: bool = False) -> tuple[str, ...]:
    """Additional modules to import before forking for this script. A wrong guess only costs time."""
    modules: tuple[str, ...] = PRELOAD_WITH_SERVERS if with_servers else ()
    modules += (PRELOAD_WITH_MESH,) if with_mesh else ()
    try:
        with open(script, encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError:
        return modules
    return (*modules, *(module for word, module in PRELOAD_WHERE_NAMED.items() if word in text))


def entry(role: str) -> Entry:
    module, _, function = ROLES[role].partition(":")
    found: Entry = getattr(importlib.import_module(module), function)
    return found


MAX_SERVERS = 16
"""How many servers a group can be scaled to, unless it was launched with more."""


class ServerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a server is started with."""

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
    server_memory_bytes: int = 0  # own memory; 0: 80 % of what is available at its start
    table_memory: str | None = None  # of ParallelOptions, as the next four
    table_dir: str | None = None
    server_device: str = "cpu"
    table_keep: str | None = None
    staleness_lr: bool = False
    push_norm: float | None = None
    liveness: LivenessConfig = LivenessConfig()
    faults: tuple[Fault, ...] = ()  # of all processes; arm with process=f"server-{number}"
    credentials: Credentials | None = None  # with other hosts
    coordinator: str = ""  # its address, where no descriptor leads to it
    address: str = ""  # of this server, for other hosts
    interfaces: str = ""  # of its host for connections between hosts, with commas


def encode_spec(spec: ServerSpec) -> bytes:
    return msgspec.msgpack.encode(spec)


def decode_spec(spec: bytes) -> ServerSpec:
    return msgspec.msgpack.decode(spec, type=ServerSpec)


def way_in(number: int) -> str:
    """Name of the descriptor that leads to a server."""
    return f"server-{number}"


_SPECS: tuple[type, ...] = (WorkerSpec, CoordinatorSpec, ServerSpec, Job)


def protocol_version() -> int:
    """Hash of the fields of all messages and child specs: equal in processes that understand each other."""
    fields = [
        (each.__name__, getattr(each, "__annotations__", {}))
        for kind in (*MESSAGES, *_SPECS)
        for each in kind.__mro__
    ]
    return zlib.crc32(repr(fields).encode())
