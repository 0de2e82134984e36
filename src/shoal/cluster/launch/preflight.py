"""Preflight checks before anything starts: the machine's cores, memory and open files."""

from __future__ import annotations

import resource

from shoal import system
from shoal.cluster.supervisor.servers import max_servers
from shoal.config.launch import LaunchConfig
from shoal.errors import ConfigError
from shoal.runtime.memory import available_bytes
from shoal.runtime.transport.shared_server import SPARE_FILES as SERVER_SPARE_FILES

FILES_PER_WORKER = 5
"""A worker's stdout, stderr, status and log, and a replacement's silent output."""

FILES_PER_SERVER = 3
"""A server's stdout, stderr and log."""

FILES_PER_SERVER_ADDRESS = 2
"""A listening socket and a descriptor that leads to it, for every possible server."""

FILES_PER_PEER = 3
"""A server's connection to a worker or another server, a descriptor that leads to it, and messages in flight."""

SPARE_FILES = 32
"""Descriptors for everything that does not grow with the workers, and the far ends while one is started."""

MAX_PROCESSES_PER_CORE = 32
"""Trying a large job on a small machine is fine; beyond this, workers mostly wait for a core and meet late."""

PROCESS_BYTES = 50 << 20
"""Memory of a worker without a model, measured with 16 of them; pages shared with their parent are not in it."""


def refuse_too_large(
    *, num_workers: int, num_servers: int, cores: int, free_bytes: int, is_mesh: bool
) -> None:
    """Refuse more processes than cores or memory can carry."""
    num_processes = num_workers + num_servers
    what = _processes(num_workers, num_servers)
    most_by_cores = MAX_PROCESSES_PER_CORE * cores
    most_by_memory = max(1, free_bytes // PROCESS_BYTES)
    most = min(most_by_cores, most_by_memory)
    if num_processes <= most:
        return
    if most_by_cores <= most_by_memory:
        why = (
            f"{what} are more than this machine can carry: it has {cores} core{'s' if cores > 1 else ''}, and beyond "
            f"{MAX_PROCESSES_PER_CORE} processes for each of them they would only wait for their turn"
        )
    else:
        why = (
            f"{what} take about {num_processes * PROCESS_BYTES / 1e9:.1f} GB before any of them has a model, and this machine has "
            f"{free_bytes / 1e9:.1f} GB free"
        )
    cure = f"use -n {most - num_servers} or less" if most > num_servers else "use fewer of both"
    degrees = ", with degrees that multiply to it" if is_mesh else ""
    raise ConfigError(
        f"{why}. Nothing was started; {cure}{degrees}, or give --oversubscribe to `shoal run` or `shoal resume` if it is meant."
    )


def refuse_more_than_can_be_opened(num_workers: int, num_servers: int) -> None:
    """Refuse a job that would run out of open files while it starts."""
    needed = len(system.open_descriptors()) + FILES_PER_WORKER * num_workers + SPARE_FILES
    needed += (FILES_PER_SERVER + FILES_PER_SERVER_ADDRESS) * max_servers(num_servers)
    in_server = (
        FILES_PER_PEER * (num_workers + max_servers(num_servers)) + SPARE_FILES + SERVER_SPARE_FILES
        if num_servers
        else 0
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A server raises its own limit as far as it may.
    for count, allowed in ((needed, soft), (in_server, hard)):
        if allowed != resource.RLIM_INFINITY and count > allowed:
            enough = max(needed, in_server)
            raise ConfigError(
                f"{_processes(num_workers, num_servers)} take {count} open files in one process, and a process may have {allowed}. "
                f"Nothing was started; raise the limit with `ulimit -n {enough}`, or use fewer."
            )


def refuse_without_room(config: LaunchConfig, cores: int) -> None:
    """Refuse a job that is larger than this machine."""
    if not config.oversubscribe and not config.cores_per_host:  # else the engine states the capacity
        refuse_too_large(
            num_workers=config.workers,
            num_servers=config.num_servers,
            cores=cores,
            free_bytes=available_bytes(),
            is_mesh=config.is_mesh,
        )
    refuse_more_than_can_be_opened(config.workers, config.num_servers)


def _processes(num_workers: int, num_servers: int) -> str:
    return f"{num_workers} workers" + (f" and {num_servers} servers" if num_servers else "")
