"""Hosts of a head without workers: slots given by an engine, or single-role services started by others."""

from __future__ import annotations

import socket
from typing import Any

import psutil

from shoal import system
from shoal.cluster.hosts.placement import spread
from shoal.config.hosts import (
    DEFAULT_PORT,
    SERVER,
    SERVER_RESOURCES,
    WORKER,
    HostsConfig,
    Resources,
    parse_bind,
    parse_resources,
)
from shoal.engines import registry
from shoal.errors import ConfigError

GB = 1 << 30


def engine_hosts(
    on: str,
    *,
    num_slots: int,
    num_workers: int,
    bind: str | None = None,
    resources: str = "",
    **options: Any,
) -> HostsConfig:
    """HostsConfig of a job on the engine `on`, as --on names it; `options` are its other fields."""
    if registry.parse(on)[0] == "torchrun":
        raise ConfigError(
            "torchrun gives no hosts: it starts the processes itself, each with `shoal run --on torchrun`. Nothing was started."
        )
    if not 1 <= num_slots <= num_workers:
        raise ConfigError(
            f"{num_workers} worker{'s' if num_workers > 1 else ''} cannot be on {num_slots} hosts of {on}: each host needs one. "
            f"Nothing was started; give -n {max(1, num_slots)} or more, or fewer hosts."
        )
    is_local = registry.is_local(on)
    said: dict[str, Any] = {"bind": "127.0.0.1" if is_local else own_address(), "port": 0}
    said |= parse_resources(resources)
    if bind is not None:
        said["bind"], said["port"] = parse_bind(bind)
    slots = dict.fromkeys(range(1, num_slots + 1), 1)
    return HostsConfig(
        on=on,
        num_hosts=num_slots + 1,
        head_takes_part=False,
        workers=spread(num_workers, slots, num_slots + 1),
        **said,
        **options,
    )


def refuse_too_much(config: HostsConfig, num_workers: int, num_servers: int) -> None:
    """Refuse what an engine that counts nothing would start on this machine alone, which lacks it."""
    on = config.on
    if not on or registry.ENGINES[registry.parse(on)[0]].counts_resources or not registry.is_local(on):
        return
    each = config.resources(num_workers, num_servers)
    total = each * config.num_places
    cores, memory_gb = len(system.cores()), psutil.virtual_memory().total / GB
    # By default more processes than cores may share them, as without an engine.
    asks_cores = (
        config.worker_resources.cpus > Resources().cpus
        or config.server_resources.cpus > SERVER_RESOURCES.cpus
    )
    if (asks_cores and total.cpus > cores) or total.memory_gb > memory_gb:
        raise ConfigError(
            f"{config.num_places} host{'s' if config.num_places > 1 else ''} of {each.cpus:g} cores and {each.memory_gb:g} GB each "
            f"were asked of {on}, which is this machine alone, with {cores} cores and {memory_gb:.0f} GB. Nothing was started; ask "
            "for less with --resources."
        )


def service_hosts(
    *,
    num_workers: int,
    num_servers: int,
    num_worker_services: int | None = None,
    bind: str | None = None,
    resources: str = "",
    **options: Any,
) -> HostsConfig:
    """HostsConfig of a coordinator whose workers and servers are services: one for each, or fewer for the workers."""
    num_services = num_workers if num_worker_services is None else num_worker_services
    if not 1 <= num_services <= num_workers:
        raise ConfigError(
            f"{num_workers} worker{'s' if num_workers > 1 else ''} cannot be in {num_services} services: each needs one. Nothing was "
            f"started; give -n {max(1, num_services)} or more, or fewer --worker-services."
        )
    address, port = parse_bind(bind) if bind is not None else (own_address(), DEFAULT_PORT)
    num_hosts = 1 + num_services + num_servers
    wanted: dict[str, Any] = parse_resources(resources)
    return HostsConfig(
        on="join",
        num_hosts=num_hosts,
        head_takes_part=False,
        roles=("coordinator", *(WORKER,) * num_services, *(SERVER,) * num_servers),
        workers=spread(num_workers, dict.fromkeys(range(1, num_services + 1), 1), num_hosts),
        servers=(*(0,) * (1 + num_services), *(1,) * num_servers),
        bind=address,
        port=port,
        **wanted,
        **options,
    )


def own_address() -> str:
    """Address of this machine on the network by which it reaches others."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: the kernel only chooses the interface
        except OSError:
            raise ConfigError(
                "this machine has no network by which an engine's hosts could reach it. Nothing was started; name an address with "
                "--bind."
            ) from None
        return str(probe.getsockname()[0])
