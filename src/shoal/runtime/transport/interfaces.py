"""Network interfaces of this machine, by the names under which a user binds a job to them."""

from __future__ import annotations

import ipaddress
import socket

import psutil

from shoal.errors import ConfigError


def addresses() -> dict[str, str]:
    """Address of each interface that has one: of IPv4, else of IPv6 beyond the link."""
    found = {}
    for name, all_of_it in psutil.net_if_addrs().items():
        of_v4 = [each.address for each in all_of_it if each.family == socket.AF_INET]
        of_v6 = [each.address.partition("%")[0] for each in all_of_it if each.family == socket.AF_INET6]
        usable = [*of_v4, *(each for each in of_v6 if not ipaddress.ip_address(each).is_link_local)]
        if usable:
            found[name] = usable[0]
    return found


def named(said: str) -> dict[str, str]:
    """Addresses of the interfaces in `eth0,eth1`, in this order; ConfigError where one is none, or has none."""
    there = addresses()
    names = [name.strip() for name in said.split(",")]
    known = ", ".join(f"{name} ({address})" for name, address in there.items())
    for name in names:
        if name not in there:
            problem = (
                "has no address"
                if name in psutil.net_if_addrs()
                else "is no network interface of this machine"
            )
            raise ConfigError(
                f"--interface {said}: {name!r} {problem}. Nothing was started; there are {known}."
            )
    if len(set(names)) < len(names):
        raise ConfigError(f"--interface {said} names one twice. Nothing was started.")
    return {name: there[name] for name in names}


def of_address(address: str) -> str | None:
    """Name of the interface with this address."""
    for name, all_of_it in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in all_of_it):
            return str(name)
    return None
