"""Sockets of gloo's groups: found among this process's descriptors, checked against the other ranks', filtered.

Gloo listens for as long as a group lives, accepts anybody, keeps every connection, aborts the
process when descriptors run out, and takes 8 bytes as proof of which rank connects. So a listener
drops every packet once its group is formed, and a group counts as formed only when both ends of
each of its connections are ranks: every rank publishes its ends through the coordinator, which
authenticates its clients.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import resource
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import msgspec

from shoal import system
from shoal.runtime.transport import tcp
from shoal.runtime.transport.tcp import Address

End: TypeAlias = tuple[Address, Address]
"""One end of a connection: its own address, and the other's."""

_SO_ATTACH_FILTER, _SO_LOCK_FILTER = 26, 44


class GroupEnds(msgspec.Struct, frozen=True):
    """Listeners and connections of one rank, as it publishes them."""

    listeners: list[Address]
    connections: list[End]


class SocketsBefore:
    """Sockets that this process had before groups were formed; later ones are the groups'."""

    def __init__(self, *, on_loopback: bool) -> None:
        self._before, self._on_loopback = system.open_sockets(), on_loopback

    def connections(self) -> dict[int, str]:
        """New connections over the group's interface: descriptor -> identity of its socket."""
        found = {}
        for fd, which in self._new():
            end = _end_of(fd)
            if end is not None and self._is_over_interface(end[1][0]):
                found[fd] = which
        return found

    def listeners(self, published: Sequence[bytes]) -> dict[int, Address]:
        """New listeners whose address gloo wrote into the store: descriptor -> address."""
        found = {}
        for fd, _ in self._new():
            address = _listens_at(fd)
            if address is not None and any(_as_gloo_writes_it(address) in value for value in published):
                found[fd] = address
        return found

    def _new(self) -> list[tuple[int, str]]:
        return [(fd, which) for fd, which in system.open_sockets().items() if self._before.get(fd) != which]

    def _is_over_interface(self, peer: str) -> bool:
        # Another thread may have opened a connection at the same moment; its peer is no gloo listener.
        return ipaddress.ip_address(peer).is_loopback == self._on_loopback


def ends_of(listeners: Mapping[int, Address], connections: Mapping[int, str]) -> GroupEnds:
    """Listeners and these connections, in the form in which ranks publish them."""
    ends = (_end_of(fd) for fd in connections)
    return GroupEnds(list(listeners.values()), [end for end in ends if end is not None])


def find_stranger(ends: Mapping[int, GroupEnds], rank: int) -> str | None:
    """Description of a connection in this rank's groups whose other end is no rank; None if there is none."""
    others = _others(ends, rank)
    doors = {address for each in ends.values() for address in each.listeners}
    for end in ends[rank].connections:
        if (end[0] in doors or end[1] in doors) and end not in others:
            return (
                f"a connection to the group's port {end[0][1]} {_origin(end)}, and from no rank of this job"
            )
    return None


def peers(ends: Mapping[int, GroupEnds], rank: int) -> set[int]:
    """Ranks that this one is connected to."""
    others = _others(ends, rank)
    return {others[end] for end in ends[rank].connections if end in others}


def _others(ends: Mapping[int, GroupEnds], rank: int) -> dict[End, int]:
    """Expected ends of this rank's connections, each with the rank that published the opposite end."""
    return {
        (theirs, ours): other
        for other, each in ends.items()
        if other != rank
        for ours, theirs in each.connections
    }


def foreign_connection(listeners: Mapping[int, Address], pids: Sequence[int]) -> str | None:
    """Description of a local connection to one of these listeners that no rank made.

    `pids` are the ranks' processes; without them only the owner's user id is checked.
    """
    found = list(tcp.connections_to(listeners.values()))
    if not found:
        return None
    of_ranks = {inode for pid in pids for inode in _inodes(pid)}
    strange = [each for each in found if each.uid != os.getuid() or (pids and each.inode not in of_ranks)]
    # A rank may have closed a connection between the two listings; those are no strangers.
    there = {each.inode for each in tcp.connections_to(listeners.values())} if strange else ()
    for each in strange:
        if each.inode in there:
            return f"a connection to the group's port {each.to[1]} is from a process of user {each.uid}, and from no rank of this job"
    return None


def drop_packets(listeners: Mapping[int, Address]) -> None:
    """Make these listeners drop every packet from now on. Existing connections are not affected."""
    # The return instruction of a filter program: keep 0 bytes of the packet.
    drop = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0))
    program = struct.pack("@HP", 1, ctypes.addressof(drop))
    for fd in listeners if system.IS_LINUX else ():
        # A kernel without socket filters still detects strangers: `find_stranger` checks every connection.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
            sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
            sock.setsockopt(socket.SOL_SOCKET, _SO_LOCK_FILTER, 1)


@contextlib.contextmanager
def all_descriptors() -> Iterator[None]:
    """Raise the limit of open files as far as possible: gloo aborts if strangers use them up before the filter is on."""
    soft, hard = system.raise_open_files()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def shut(sockets: Mapping[int, str]) -> None:
    """Shut these connections down; their owners notice and close them."""
    for fd, which in sockets.items():
        with contextlib.suppress(OSError):
            if system.socket_identity(fd) != which:
                continue  # closed, and its number reused
            with socket.socket(fileno=os.dup(fd)) as sock:
                sock.shutdown(socket.SHUT_RDWR)


def _origin(end: End) -> str:
    ours, theirs = end
    if ipaddress.ip_address(theirs[0]).is_loopback:
        uid = tcp.owner_of_ends(ours, theirs)
        if uid is not None:
            return f"is from a process of user {uid}"
        return f"was from {theirs[0]} port {theirs[1]}, which has closed it"
    return f"is from {theirs[0]} port {theirs[1]}"


def _inodes(pid: int) -> set[int]:
    """Inodes of all sockets of a process."""
    found = set()
    with contextlib.suppress(OSError):  # the process is gone, or on another host
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                which = os.readlink(f"/proc/{pid}/fd/{fd}")
                if which.startswith("socket:["):
                    found.add(int(which[len("socket:[") : -1]))
    return found


def _end_of(fd: int) -> End | None:
    """Both addresses of a connection; None for other descriptors and closed ones."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            return _address(sock.getsockname()), _address(sock.getpeername())
    return None


def _listens_at(fd: int) -> Address | None:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
        if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getsockopt(
            socket.SOL_SOCKET, socket.SO_ACCEPTCONN
        ):
            return _address(sock.getsockname())
    return None


def _address(name: tuple[str, int]) -> Address:
    return name[0].partition("%")[0], name[1]


def _as_gloo_writes_it(address: Address) -> bytes:
    """First bytes of a struct sockaddr, through the address, as gloo stores them."""
    host = ipaddress.ip_address(address[0])
    port = struct.pack("!H", address[1])
    if host.version == 4:
        return struct.pack("=H", socket.AF_INET) + port + host.packed
    return struct.pack("=H", socket.AF_INET6) + port + bytes(4) + host.packed
