"""Files without a name, in memory and on disk: gone with the last process that has them open, however it ends.

Processes of one user hand them to each other through /proc: whoever knows a
process and a descriptor of it can open the file behind, as long as that
process lives.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any


def in_memory(name: str, num_bytes: int) -> int:
    """A file in RAM, of zeros that take no memory until they are written. Its pages are counted as this process's."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    return _sized(fd, num_bytes)


def on_disk(directory: str | os.PathLike[str], num_bytes: int) -> int:
    """A file on the disk of a directory, of zeros that take no room until they are written."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    try:
        fd = os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError:  # some file systems have no such thing
        fd, path = tempfile.mkstemp(dir=directory)
        os.unlink(path)
    return _sized(fd, num_bytes)


def open_of(pid: int, fd: int, inode: int) -> int | None:
    """The file that another process has open as `fd`, opened here; None where it is not there any more."""
    try:
        opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    if os.fstat(opened).st_ino == inode:
        return opened
    os.close(opened)  # the number is somebody else's by now
    return None


def write_at(fd: int, offset: int, data: Any) -> None:
    """All of `data` at an offset; OSError where the disk is full."""
    view = memoryview(data).cast("B")
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def read_at(fd: int, offset: int, into: Any) -> None:
    """Fill `into` from an offset on."""
    view = memoryview(into).cast("B")
    while view:
        length = os.preadv(fd, [view], offset)
        if not length:
            raise OSError(f"a file ends at byte {offset}, where {len(view)} more were expected")
        view, offset = view[length:], offset + length


def bytes_on_disk(fd: int) -> int:
    """What a file really takes."""
    return os.fstat(fd).st_blocks * 512


def close_all(fds: list[int]) -> None:
    """Close descriptors; those that are closed already are left alone."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def _sized(fd: int, num_bytes: int) -> int:
    try:
        os.ftruncate(fd, num_bytes)
    except BaseException:
        os.close(fd)
        raise
    return fd
