"""Where tasks work and results lie, and when they go.

An aggregate whose inputs are known by a key lies in the host's cache,
`~/.cache/shoal/map_reduce/<key>/` (or under XDG_CACHE_HOME): whoever wants the
same finds it, also while it is being computed. It is removed when it was not
used for 30 days, or as the least recently used when the cache has grown past
8 GiB; the whole directory may be deleted at any time. Any other aggregate
lies in the scratch directory of the job or process and goes with it.
"""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections import Counter
from pathlib import Path

from shoal.config import job as jobs
from shoal.runtime import scratch

_MAX_BYTES = 8 << 30
_MAX_IDLE_S = 30 * 86400.0
_IN_USE_S = 3600.0
_USED = "used"

_num_calls: Counter[str] = Counter()


def cache_root() -> Path | None:
    """This host's cache of aggregates; None where there can be none."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    job = jobs.current()
    host = f"-host-{job.host}" if job.num_hosts > 1 else ""  # one machine may be treated as several hosts
    root = Path(home) / "shoal" / f"map_reduce{host}"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return None
    return root if os.access(root, os.W_OK) else None


def cached(key: str, root: Path | None) -> Path | None:
    """The directory of an aggregate in the host's cache, made where it is missing; None where there can be none."""
    root = root or cache_root()
    if root is None:
        return None
    entry = root / key
    entry.mkdir(mode=0o700, parents=True, exist_ok=True)
    (entry / _USED).touch()
    return entry


def in_scratch(name: str) -> Path:
    """A directory that all workers of the job see, and that goes with it."""
    return scratch.directory("map_reduce", name)


def numbered(description: str) -> Path:
    """The same, for a call of the script that has no key: every rank finds the one of its own call.

    Calls that look alike are numbered; so a rank that makes calls of its own
    besides does not come upon another's.
    """
    _num_calls[description] += 1
    return in_scratch(f"{description}-{_num_calls[description]}")


def sweep(root: Path, *, keep: Path, max_bytes: int = _MAX_BYTES, max_idle_s: float = _MAX_IDLE_S) -> None:
    """Remove what was not used for long, and the least recently used of what is too much."""
    now = time.time()
    entries = sorted(((_last_used(entry), entry) for entry in root.iterdir() if entry.is_dir()), reverse=True)
    total = 0
    for last_used, entry in entries:
        total += _num_bytes(entry)
        idle_s = now - last_used
        if entry != keep and idle_s > _IN_USE_S and (idle_s > max_idle_s or total > max_bytes):
            shutil.rmtree(entry, ignore_errors=True)


def _last_used(entry: Path) -> float:
    files = itertools.chain([entry / _USED], (entry / "claims").glob("*"))
    return max((file.stat().st_mtime for file in files if file.exists()), default=entry.stat().st_mtime)


def _num_bytes(entry: Path) -> int:
    return sum(file.stat().st_size for file in entry.iterdir() if file.is_file())


def is_complete(directory: Path, num_partitions: int) -> bool:
    """Is the whole result there?"""
    return all((directory / f"part-{number:05d}").exists() for number in range(num_partitions))
