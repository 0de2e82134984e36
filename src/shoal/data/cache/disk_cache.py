"""Facts about files that take a pass to find: where lines end, how many rows a condition keeps.

Keyed by the identity of the files: kept in this process, and in a launched job
in its scratch directory too, where the first worker of a host finds them and
the others wait for it instead of reading the same files.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from shoal.config import job as jobs
from shoal.data.files import FileInfo
from shoal.runtime import scratch

_MOST_REMEMBERED = 256

_lock = threading.Lock()
_known: OrderedDict[str, Any] = OrderedDict()


def identity_of(files: Iterable[FileInfo], **options: Any) -> str:
    """A name that changes when the files do, or the way they are read."""
    said = json.dumps([[list(info) for info in files], options], sort_keys=True, default=str)
    return hashlib.blake2b(said.encode(), digest_size=16).hexdigest()


def remembered(identity: str, find_out: Callable[[], Any]) -> Any:
    """What `find_out` gives (fit for JSON), or gave before under this identity."""
    with _lock:
        if identity in _known:
            _known.move_to_end(identity)
            return _known[identity]
    found = _in_the_job(identity, find_out) if jobs.current().launched else find_out()
    with _lock:
        _known[identity] = found
        while len(_known) > _MOST_REMEMBERED:
            _known.popitem(last=False)
    return found


def _in_the_job(identity: str, find_out: Callable[[], Any]) -> Any:
    path = scratch.directory("tables") / f"{identity}.json"
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the process, however that ends
        if path.exists():
            return json.loads(path.read_text())
        found = find_out()
        unfinished = f"{path}.{os.getpid()}"
        with open(unfinished, "w") as file:
            json.dump(found, file)
        os.replace(unfinished, path)
        return found
