"""Files and directories of this user: opened without following links, their owner checked before a byte is read.

For places where other users may write too, such as /tmp or a shared run directory. A planted file
(a link, a FIFO, a device) is an OSError.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

MAX_BYTES = 16 << 20
"""Largest file that `read` takes."""


def open_file(path: str | Path, flags: int, *, dir_fd: int | None = None, any_owner: bool = False) -> int:
    """Open a regular file, of this user's unless `any_owner`; created with mode 0600 where `flags` has O_CREAT."""
    # Non-blocking: opening a FIFO would wait for its other end. A regular file is not affected.
    guarded = flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, guarded, 0o600, dir_fd=dir_fd)
    return _checked(fd, path, stat.S_ISREG, "regular file", any_owner=any_owner)


def open_directory(path: str | Path) -> int:
    """Open a directory of this user's."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    return _checked(os.open(path, flags), path, stat.S_ISDIR, "directory")


def make_directory(path: Path) -> None:
    """A directory that only this user can enter; one of this user's that is there already is closed to others."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        fd = open_directory(path)
        try:
            if stat.S_IMODE(os.fstat(fd).st_mode) & 0o077:
                os.fchmod(fd, 0o700)
        finally:
            os.close(fd)


def read(
    path: str | Path, *, dir_fd: int | None = None, any_owner: bool = False, max_bytes: int = MAX_BYTES
) -> bytes:
    with open(open_file(path, os.O_RDONLY, dir_fd=dir_fd, any_owner=any_owner), "rb") as file:
        # By its size: a buffer of `max_bytes` would be allocated for a file of a line.
        content = file.read(min(max_bytes + 1, os.fstat(file.fileno()).st_size))
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes", str(path))
    return content


def _checked(
    fd: int, path: str | Path, is_kind: Callable[[int], bool], kind: str, *, any_owner: bool = False
) -> int:
    found = os.fstat(fd)
    problem = None
    if not is_kind(found.st_mode):
        problem = f"it is no {kind}"
    elif found.st_uid != os.getuid() and not any_owner:
        problem = f"it belongs to user {found.st_uid}, this process to user {os.getuid()}"
    if problem is not None:
        os.close(fd)
        raise PermissionError(errno.EPERM, problem, str(path))
    return fd
