"""Anonymous files in memory and on disk, shared by the processes of a host.

They have no name: when the last process that has one open ends, by whatever
means, the file is gone. Processes of one user open each other's through
/proc/PID/fd. The first process that needs some rows makes the files and writes
its pid and descriptors down in a directory that all of them see; the next ones
open them through it and register too.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import socket
import tempfile
from collections.abc import Callable
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


def share(
    directory: Path, identity: Any, make: Callable[[], tuple[list[int], dict[str, Any]]]
) -> tuple[list[int], dict[str, Any], bool]:
    """The descriptors and facts that the first process made of `identity`; and whether that was this one.

    `identity` and facts are fit for JSON.
    """
    text = json.dumps(identity, sort_keys=True)
    name = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    # A run directory may be shared by hosts, and a process number means nothing on another.
    path = directory / f"{name}-{socket.gethostname()}.json"
    with open(path, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        known = _read(file.read(), text)
        fds = _open_any(known["holders"])
        is_first = fds is None
        if fds is None:
            fds, known["facts"] = make()
            known["holders"] = []
        inodes = [os.fstat(fd).st_ino for fd in fds]
        known["holders"].append({"pid": os.getpid(), "fds": fds, "inodes": inodes})
        file.seek(0)
        file.truncate()
        json.dump({**known, "identity": text}, file)
    return fds, known["facts"], is_first


def _read(text: str, identity: str) -> dict[str, Any]:
    try:
        known: dict[str, Any] = json.loads(text)
    except ValueError:  # empty, or left half written by a process that was killed
        return {"holders": [], "facts": {}}
    return known if known["identity"] == identity else {"holders": [], "facts": {}}


def _open_any(holders: list[dict[str, Any]]) -> list[int] | None:
    for holder in reversed(holders):
        opened: list[int] = []
        for fd, inode in zip(holder["fds"], holder["inodes"], strict=True):
            found = open_of(holder["pid"], fd, inode)
            if found is None:
                break
            opened.append(found)
        if len(opened) == len(holder["fds"]):
            return opened
        close_all(opened)
    return None
