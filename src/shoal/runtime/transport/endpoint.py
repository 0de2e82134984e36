"""Addresses of a job's processes: the path of a Unix socket on this host, or `tls://ip:port` on another."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Protocol

from shoal import system
from shoal.errors import WireError
from shoal.runtime.transport import tls, unix
from shoal.runtime.transport.messages.server_coordinator import ServerView


def of_servers(ways_in: Mapping[int, str], view: ServerView, own_host: str) -> dict[int, str]:
    """Addresses of a view's servers for a process on `own_host`: by `ways_in` on its own host, by TCP on others.

    A server that was started again may be on another host than before.
    """
    elsewhere = {
        number: address
        for number, address in view.addresses.items()
        if number not in ways_in or tls.split_address(address)[0] != own_host
    }
    return {**ways_in, **elsewhere}


def ways(fds: Mapping[str, int]) -> dict[str, str]:
    """Addresses of the coordinator and the servers of this host, by the descriptors that a process was given."""
    return {
        name: system.path_of_way(fd)
        for name, fd in fds.items()
        if name == "coordinator" or name.startswith("server-")
    }


def connect(address: str, *, expect: str, timeout_s: float) -> socket.socket:
    """Connect to the role `expect` at `address`. Raises OSError without an answer, WireError for a stranger."""
    if tls.is_remote(address):
        return tls.mine().connect(address, expect=expect, timeout_s=timeout_s)
    return unix.connect(address, timeout_s=timeout_s)


class AddressBook(Protocol):
    """Addresses that workers of a job publish for those of other hosts. For several threads."""

    def publish(self, name: str, address: str) -> None: ...

    def lookup(self, name: str) -> str | None: ...


_address_book: AddressBook | None = None


def use_address_book(book: AddressBook | None) -> None:
    """Make this the address book of this process. Called once, by the launcher of a job on several hosts."""
    global _address_book
    _address_book = book


def address_book() -> AddressBook:
    if _address_book is None:
        raise WireError("this process is in no job on several hosts, and another host was to be found")
    return _address_book
