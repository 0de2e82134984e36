"""Which process is its host's keeper: whoever holds a lock that dies with it.

Nobody waits to become one. A process that needs the keeper and finds none
tries the lock; if somebody else has it, that one will be listening in a moment.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import time
from pathlib import Path

from shoal.data.remote.block_client import Line
from shoal.data.remote.block_server import Keeper
from shoal.data.remote.host_cache import HostCache
from shoal.data.remote.hosts import Hosts
from shoal.errors import DataError, WireError

_keepers: dict[
    Path, tuple[Keeper, int]
] = {}  # of this process, by their host's folder: the keeper and its lock


def line_to_keeper(hosts: Hosts, cache: HostCache, *, timeout_s: float) -> Line:
    """A line to my host's keeper, which may become this process."""
    deadline, pause_s = time.monotonic() + timeout_s, 0.001
    while True:
        address = hosts.address(hosts.mine)
        if address is not None:
            try:
                return Line(address)
            except (OSError, WireError):
                pass  # it died; its lock is free
        if not _become_keeper(hosts, cache):
            if time.monotonic() > deadline:
                raise DataError(
                    f"host {hosts.mine} has a keeper of its data that has not listened for {timeout_s:g} s, and nobody can "
                    "take its place while it lives. Nothing was lost; look for a worker of this job that is stopped or "
                    "very busy, and end it."
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.1)


def close_keepers() -> None:
    """End the keepers of this process. At exit, and in tests."""
    for folder in list(_keepers):
        close_keeper(folder)


def close_keeper(folder: Path) -> None:
    """End one of them, and let another process take its place."""
    keeper, lock = _keepers.pop(folder)
    keeper.close()
    os.close(lock)


def _become_keeper(hosts: Hosts, cache: HostCache) -> bool:
    folder = hosts.folder()
    if folder in _keepers:
        return False  # it is starting, or closing
    lock = os.open(folder / "keeper.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return False
    _keepers[folder] = Keeper(hosts, cache), lock
    return True


def _forget_in_child() -> None:
    # A lock that a child inherits would outlive its parent, and so would a socket nobody serves.
    for keeper, lock in _keepers.values():
        keeper.release_after_fork()
        os.close(lock)
    _keepers.clear()


os.register_at_fork(after_in_child=_forget_in_child)
atexit.register(close_keepers)
