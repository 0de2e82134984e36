"""TCP connections of this host, as the kernel lists them: whose process is at the other end.

Between hosts that question has no answer; there certificates prove it (`tls.py`).
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias

from shoal import system

Address: TypeAlias = tuple[str, int]

_ESTABLISHED = "01"


class Connection(NamedTuple):
    """An established connection on this host, seen from the end that made it."""

    maker: Address
    to: Address
    uid: int
    inode: int


def connections_to(addresses: Iterable[Address]) -> Iterator[Connection]:
    """Connections of this host's processes to these addresses, of one family, and whose they are."""
    wanted = {_as_proc_writes_it(*address): address for address in addresses}
    if not wanted or not system.IS_LINUX:  # elsewhere the kernel tells only root
        return
    table = "tcp" if len(next(iter(wanted))) == len("0100007F:0000") else "tcp6"
    for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
        fields = line.split()  # sl local remote st queues timer retransmits uid timeout inode ...
        if fields[2] in wanted and fields[3] == _ESTABLISHED:
            yield Connection(_from_proc(fields[1]), wanted[fields[2]], int(fields[7]), int(fields[9]))


def owner_of_ends(ours: Address, theirs: Address) -> int | None:
    """The user whose process is at the other end of a connection on this host; None where it has closed its end."""
    maker = _from_proc(_as_proc_writes_it(*theirs))
    return next((each.uid for each in connections_to([ours]) if each.maker == maker), None)


def _as_proc_writes_it(host: str, port: int) -> str:
    """An end of a connection as /proc/net/tcp has it: each 32 bits of the address as a number of this machine."""
    packed = ipaddress.ip_address(host.partition("%")[0]).packed
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"


def _from_proc(written: str) -> Address:
    host, _, port = written.partition(":")
    words = [int(host[at : at + 8], 16) for at in range(0, len(host), 8)]
    return str(ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))), int(port, 16)
