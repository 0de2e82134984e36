"""Memory that two processes share, handed over a Unix socket as a descriptor.

Nothing here trusts the sender: what is mapped has been sealed against
shrinking first and measured after that, so a peer can scribble in it but
never make a read of ours fault. What it writes there is for the owner of the
layout to judge. Descriptors travel beside a record of four bytes that counts
them, at a place of the conversation both sides know: a reader that takes
bytes as they come would take the record for a message, and lose them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import socket
import stat
import struct
from array import array
from collections.abc import Iterable, Sequence

from shoal.errors import ConfigError, WireError

MAX_FDS = 253
"""The kernel passes no more at once (SCM_MAX_FD)."""

_RECORD = struct.Struct("<2sH")
_MAGIC = b"FD"


def create(num_bytes: int, name: str) -> int:
    """Memory of exactly `num_bytes` zeros, of a size nobody can change; `name` is what /proc/PID/maps shows."""
    if num_bytes <= 0:
        raise ConfigError(f"shared memory '{name}' must have at least 1 byte, got {num_bytes}.")
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except (OSError, OverflowError) as error:
        os.close(fd)
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"no shared memory of {num_bytes:,} bytes for '{name}': {reason}. Nothing was shared yet; ask for less, or "
            "raise the limit on file sizes (ulimit -f)."
        ) from None
    return fd


def send_fds(sock: socket.socket, fds: Sequence[int]) -> None:
    """Hand over copies of `fds`; the caller's stay open, and theirs to close."""
    if len(fds) > MAX_FDS:
        raise WireError(f"{len(fds)} descriptors at once, where at most {MAX_FDS} are allowed")
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
    record = _RECORD.pack(_MAGIC, len(fds))
    num_sent = sock.sendmsg([record], rights)
    sock.sendall(record[num_sent:])


def recv_fds(sock: socket.socket, max_fds: int) -> list[int]:
    """The descriptors that the other side sent, the caller's to close; none stays open where this raises.

    EOFError where the other side closed the connection instead.
    """
    # Not socket.recv_fds: in Python 3.11 it drops the flag that keeps descriptors from children.
    room = socket.CMSG_SPACE(min(max_fds, MAX_FDS) * array("i").itemsize)
    record, fds, is_cut = b"", array("i"), False
    try:
        while len(record) < _RECORD.size:
            part, ancillary, flags, _ = sock.recvmsg(
                _RECORD.size - len(record), room, socket.MSG_CMSG_CLOEXEC
            )
            for level, kind, data in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
            is_cut = is_cut or bool(flags & socket.MSG_CTRUNC)
            if not part:
                if record:
                    raise WireError("the connection ended in the middle of a record of descriptors")
                raise EOFError("the connection was closed")
            record += part
        _check(record, len(fds), max_fds, is_cut=is_cut)
    except BaseException:
        close(fds)
        raise
    return fds.tolist()


def map_shared(fd: int, num_bytes: int) -> mmap.mmap:
    """All of the memory behind `fd`, to read and write; WireError unless it is `num_bytes` for ever.

    The mapping outlives `fd`, which stays the caller's to close.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        # First of all, lest it shrinks between the look and the mapping.
        if not seals & fcntl.F_SEAL_SHRINK:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    except OSError as error:
        is_memory = error.errno != errno.EINVAL
        raise WireError(
            "shared memory that may shrink and cannot be sealed"
            if is_memory
            else "a descriptor that is no memfd"
        ) from None
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size != num_bytes or num_bytes <= 0:
        raise WireError(f"shared memory of {status.st_size:,} bytes, where {num_bytes:,} were announced")
    try:
        return mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        raise WireError(f"shared memory that cannot be mapped ({error.strerror})") from None


def duplicate(fds: Iterable[int]) -> list[int]:
    """Copies of `fds`, the caller's to close; not inherited by children."""
    return [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for fd in fds]


def close(fds: Iterable[int]) -> None:
    """Close all of them."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def _check(record: bytes, num_fds: int, max_fds: int, *, is_cut: bool) -> None:
    magic, announced = _RECORD.unpack(record)
    if magic != _MAGIC:
        raise WireError(f"{record!r} where a record of descriptors belongs")
    if announced > max_fds or num_fds > max_fds:
        raise WireError(f"{max(announced, num_fds)} descriptors, where at most {max_fds} are allowed")
    if is_cut or announced != num_fds:
        raise WireError(f"{announced} descriptors were announced and {num_fds} arrived")
