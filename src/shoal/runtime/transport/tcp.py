"""TCP between processes: the same messages and limits as over Unix sockets.

Who may speak is decided here, before a byte is decoded. On loopback the
kernel is asked whose process is at the other end, and another user's is
refused. Anywhere else nobody can be asked, so a `Secure` has to prove it
(TLS with the job's own certificates), and without one nothing outside of
loopback is bound or connected to: there is no flag to turn that off.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from shoal.errors import ConfigError, WireError

LOOPBACK = "127.0.0.1"

Secure: TypeAlias = Callable[[socket.socket], socket.socket]
"""Takes a fresh connection, proves both ends to each other within the time the socket waits, and returns the socket
to speak over; raises where the other end is not what it says."""

_ESTABLISHED = "01"


def listen(host: str = LOOPBACK, port: int = 0, *, secure: Secure | None = None) -> socket.socket:
    """A socket that listens at `host` (an address, or a name that has one) and `port`; 0 is a free one.

    `secure` is what its connections will be accepted with.
    """
    family, address = _resolve(host, port, "listen at", is_proven=secure is not None)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(128)
    except (OSError, OverflowError) as error:
        sock.close()
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"cannot listen at {host} port {port}: {reason}. Nothing was started; choose another port, or 0 for any."
        ) from None
    return sock


def accept(listener: socket.socket, *, timeout_s: float, secure: Secure | None = None) -> socket.socket:
    """The next connection, from somebody who may speak; WireError (and it is closed) where it is a stranger's.

    `timeout_s` is what a proof may take, and how long the socket waits until it is told otherwise.
    """
    sock, _ = listener.accept()
    return _introduced(sock, timeout_s, secure)


def connect(host: str, port: int, *, timeout_s: float, secure: Secure | None = None) -> socket.socket:
    """Connect to whoever listens there; OSError where nobody does, WireError where a stranger does."""
    family, address = _resolve(host, port, "connect to", is_proven=secure is not None)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(address)
    except BaseException:
        sock.close()
        raise
    return _introduced(sock, timeout_s, secure)


def owner_of(sock: socket.socket) -> int | None:
    """The user whose process is at the other end of a loopback connection; None where it has closed its end."""
    ours, theirs = (_as_proc_writes_it(*end[:2]) for end in (sock.getsockname(), sock.getpeername()))
    table = "tcp" if sock.family == socket.AF_INET else "tcp6"
    for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
        fields = line.split()  # sl local remote st queues timer retransmits uid ...
        if fields[1:4] == [theirs, ours, _ESTABLISHED]:
            return int(fields[7])
    return None


def _introduced(sock: socket.socket, timeout_s: float, secure: Secure | None) -> socket.socket:
    """The connection, once it is known who is at its other end; else it is closed."""
    try:
        sock.settimeout(timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if secure is not None:
            return secure(sock)
        peer = sock.getpeername()[0]
        if not ipaddress.ip_address(peer).is_loopback:
            raise WireError(f"{peer} is another host, and nothing proves who that is")
        owner = owner_of(sock)
        if owner is None:
            raise WireError(f"{peer} closed its end at once")
        if owner != os.getuid():
            raise WireError(f"the process at {peer} belongs to user {owner}, this one to user {os.getuid()}")
    except BaseException as error:
        sock.close()
        # What a peer that is gone already leaves behind.
        if isinstance(error, OSError) and error.errno in (errno.ENOTCONN, errno.EINVAL):
            raise WireError("the other end was closed at once") from None
        raise
    return sock


def _resolve(
    host: str, port: int, purpose: str, *, is_proven: bool
) -> tuple[socket.AddressFamily, tuple[str, int]]:
    try:
        # Without the port: it would take -1 for 65535.
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"cannot {purpose} {host!r} port {port}: {error}. Nothing was started; name a host that this one knows."
        ) from None
    family, address = found[0][0], found[0][4]
    name = str(address[0])
    if not is_proven and not ipaddress.ip_address(name.partition("%")[0]).is_loopback:
        raise ConfigError(
            f"shoal does not {purpose} {host} ({name}) without certificates: anybody could speak there. Nothing was "
            f"started; use {LOOPBACK} on one host."
        )
    return family, (name, port)


def _as_proc_writes_it(host: str, port: int) -> str:
    """An end of a connection as /proc/net/tcp has it: each 32 bits of the address as a number of this machine."""
    packed = ipaddress.ip_address(host).packed
    words = struct.unpack(f"{'<' if sys.byteorder == 'little' else '>'}{len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"
