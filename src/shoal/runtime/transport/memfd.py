"""Memory that two processes share, passed over a Unix socket as a descriptor.

The sender is not trusted: memory is sealed against shrinking before it is measured and mapped, so a
peer can scribble in it but never make a read here fault (macOS has no seals: there processes of one
job trust each other in this). The owner of the layout validates the contents.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Iterable

from shoal import system
from shoal.errors import ConfigError, WireError

MAX_FDS = 253
"""The kernel passes no more at once (SCM_MAX_FD)."""


def create(num_bytes: int, name: str) -> int:
    """Memory of exactly `num_bytes` zeros, sealed to that size; `name` is shown by /proc/PID/maps."""
    if num_bytes <= 0:
        raise ConfigError(f"shared memory '{name}' must have at least 1 byte, got {num_bytes}.")
    fd = system.anonymous_file(name, can_seal=True)
    try:
        os.ftruncate(fd, num_bytes)
        if system.IS_LINUX:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except (OSError, OverflowError) as error:
        os.close(fd)
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"no shared memory of {num_bytes:,} bytes for '{name}': {reason}. Nothing was shared yet; ask for less, or "
            "raise the limit on file sizes (ulimit -f)."
        ) from None
    return fd


def map_shared(fd: int, num_bytes: int) -> mmap.mmap:
    """All of the memory behind `fd`, to read and write; WireError unless it is `num_bytes` for ever.

    The mapping outlives `fd`, which stays the caller's to close.
    """
    if system.IS_LINUX:
        _seal(fd)  # first, lest it shrinks between the check and the mapping
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size != num_bytes or num_bytes <= 0:
        raise WireError(f"shared memory of {status.st_size:,} bytes, where {num_bytes:,} were announced")
    try:
        return mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        raise WireError(f"shared memory that cannot be mapped ({error.strerror})") from None


def _seal(fd: int) -> None:
    try:
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    except OSError as error:
        is_memory = error.errno != errno.EINVAL
        raise WireError(
            "shared memory that may shrink and cannot be sealed"
            if is_memory
            else "a descriptor that is no memfd"
        ) from None


def duplicate(fds: Iterable[int]) -> list[int]:
    """Copies of `fds`, the caller's to close; not inherited by children."""
    return [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for fd in fds]


def close(fds: Iterable[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
