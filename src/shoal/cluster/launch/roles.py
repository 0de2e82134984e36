"""The table of role entry points: what a forked child becomes.

Each is `main(spec: bytes, fds: dict[str, int]) -> int`: what it must know, its
open descriptors by name (stdout and stderr are already in place), and the
exit code it gives back. Names only: a role's module is imported in the child,
where the warm parent has not already done it.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable

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
    "shoal.train.custom",
)
"""What the warm parent imports before it forks: whatever costs a worker time at its first step."""

PRELOAD_WHERE_NAMED = {"metrics": "shoal.train.metrics.metrics"}
"""A word in the script -> what it will probably need. torchmetrics takes up to seconds to import; not all need it."""


PRELOAD_WITH_SERVERS = ("numba", "shoal.ps.server.process", "shoal.ps.server.core", "shoal.parallel.ps.exact")
"""What servers, and workers that have servers, need besides; as far as there is such a module."""


PRELOAD_WITH_MESH = "shoal.parallel.mesh"
"""With torch's own sharding, which takes each worker almost two seconds to import (measured)."""


def preload_for(script: str, *, with_servers: bool = False, with_mesh: bool = False) -> tuple[str, ...]:
    """What else to import before forking for this script. A wrong guess costs time, nothing else."""
    servers = tuple(name for name in PRELOAD_WITH_SERVERS if with_servers and _exists(name))
    servers += (PRELOAD_WITH_MESH,) if with_mesh else ()
    try:
        with open(script, encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError:
        return servers
    return (*servers, *(module for word, module in PRELOAD_WHERE_NAMED.items() if word in text))


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def entry(role: str) -> Entry:
    """The function a child of this role runs."""
    module, _, function = ROLES[role].partition(":")
    found: Entry = getattr(importlib.import_module(module), function)
    return found
