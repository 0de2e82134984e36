"""One copy of the same rows for all processes of a host that read them.

Whoever comes first makes the files; it writes down, in a directory that all
of them see, who it is and under which descriptors it has them. The next ones
open them through it, and write themselves down too, so that the files can be
found as long as anybody lives who has them. The files have no name: when the
last process ends, by whatever means, they are gone.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.data.cache import anon_file as nameless


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
            found = nameless.open_of(holder["pid"], fd, inode)
            if found is None:
                break
            opened.append(found)
        if len(opened) == len(holder["fds"]):
            return opened
        nameless.close_all(opened)
    return None
