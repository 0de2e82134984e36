"""Checkpoint directories of a job on several hosts: every host must see what rank 0 writes there.

On resume each rank reads the checkpoint from its own host. Rank 0 writes a mark
before a call begins, the others look for it once all have begun: the call
itself is the barrier. The run directory needs no mark, its checkpoints are
copied to hosts that do not share it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable

from shoal.cluster.worker import session
from shoal.config.job import Job
from shoal.errors import ConfigError
from shoal.train.checkpoint.storage import Place

SEEN_WITHIN_S = 5.0
"""Time for a new file to appear on a network file system."""

AGAIN_S = 0.1


def directories_to_check(job: Job, directories: Iterable[str | None]) -> list[str]:
    """Directories outside of the run directory, for a job that has just started on several hosts."""
    if not job.launched or len(set(job.rank_hosts)) < 2 or job.incarnation > 0:
        return []
    own = str(job.run_dir / "checkpoints")
    return list(dict.fromkeys(each for each in directories if each and each.rstrip("/") != own))


def mark(job: Job, directories: Iterable[str]) -> None:
    """Write a mark into each, on rank 0, until the script ends. ConfigError if one cannot be written."""
    if job.rank != 0:
        return
    for directory in directories:
        place = Place.at(directory)
        path = place.file(_name(job))
        try:
            place.fs.makedirs(place.path, exist_ok=True)
            place.fs.pipe_file(path, _content(job))
        except Exception as error:  # libraries for remote storage raise any type of error
            raise ConfigError(
                f"checkpoints are to be written to {directory}, which cannot be done from the host of rank 0: {error}. Nothing "
                "was trained; give ModelCheckpoint another directory."
            ) from None
        session.at_end(lambda place=place, path=path: _remove(place, path))  # type: ignore[misc]


def check(job: Job, directories: Iterable[str]) -> None:
    """Look for rank 0's marks from another host. ConfigError if one is missing."""
    if job.rank_hosts[job.rank : job.rank + 1] == job.rank_hosts[:1]:
        return
    for directory in directories:
        if not _is_marked(job, Place.at(directory)):
            host = f"host {job.rank_hosts[job.rank]} ({job.host_address})"
            raise ConfigError(
                f"checkpoints are written to {directory} by rank 0, and {host} of rank {job.rank} does not see them there: it is "
                "not a shared file system, so the run could not go on from them. Nothing was trained; leave the directory of "
                "ModelCheckpoint out, and checkpoints go to the run directory, which shoal copies to every host; or give one "
                "that all hosts share, as a path or an fsspec URL."
            )


def _is_marked(job: Job, place: Place) -> bool:
    deadline = time.monotonic() + SEEN_WITHIN_S
    while True:
        with contextlib.suppress(Exception):  # libraries for remote storage raise any type of error
            place.fs.invalidate_cache()
            if place.fs.cat_file(place.file(_name(job))) == _content(job):
                return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(AGAIN_S)


def _name(job: Job) -> str:
    return f".shoal-{job.name}"


def _content(job: Job) -> bytes:
    return f"{job.name} {job.launch} {job.seed}\n".encode()


def _remove(place: Place, path: str) -> None:
    with contextlib.suppress(Exception):
        place.fs.rm_file(path)
