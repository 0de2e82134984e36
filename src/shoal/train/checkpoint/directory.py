"""Which checkpoints a directory holds, which of them is to be used, and which may go.

Steps are in the names (`step-000000500`), so that nothing needs to be read to
put them in order. Decides what to keep; what makes a checkpoint valid is
`checkpoint.py`'s business.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from itertools import count

from shoal.errors import CheckpointDamaged, ConfigError, NoCheckpoint
from shoal.train.checkpoint import manifest
from shoal.train.checkpoint.checkpoint import Checkpoint, open_checkpoint
from shoal.train.checkpoint.storage import Place, remove, step_name, step_of


def step_path(directory: str | os.PathLike[str], step: int) -> str:
    """Where the checkpoint of a step belongs."""
    return Place.at(directory).child(step_name(step)).url


def list_checkpoints(directory: str | os.PathLike[str]) -> list[str]:
    """The paths of the finished ones, oldest step first."""
    return [place.url for place in _steps(directory) if place.has(manifest.NAME)]


def newest_checkpoint(
    directory: str | os.PathLike[str], on_damaged: Callable[[CheckpointDamaged], None]
) -> Checkpoint | None:
    """The newest that is whole; every newer one that is not is told to `on_damaged`. None when there is none."""
    for place in reversed(_steps(directory)):
        try:
            return open_checkpoint(place.url)
        except CheckpointDamaged as damage:
            on_damaged(damage)
        except NoCheckpoint as error:
            on_damaged(CheckpointDamaged(path=place.url, problem=error.reason))
    return None


def prune(directory: str | os.PathLike[str], keep_last: int, protect: Iterable[str] = ()) -> list[str]:
    """Remove all but the last `keep_last` and those in `protect`; return what went.

    The newest that is whole always stays: the one before is given up only
    once a newer one has been read back and verified.
    """
    if keep_last < 1:
        raise ConfigError(
            f"keep_last must be at least 1, got {keep_last}: a run without a checkpoint cannot go on."
        )
    kept = {os.fspath(path).rstrip("/").rpartition("/")[2] for path in protect}
    places = [place for place in _steps(directory)[:-keep_last] if _name(place) not in kept]
    if not places:
        return []
    newest = newest_checkpoint(directory, on_damaged=lambda damage: None)
    if newest is None:
        return []  # nothing is whole, so nothing is spare
    going = [place for place in places if place.url != newest.path]
    for place in going:
        remove(place)
    return [place.url for place in going]


def set_aside(directory: str | os.PathLike[str], *, after_step: int) -> str | None:
    """Move checkpoints of later steps into a folder `before-<n>` of their own; return it, None when there are none.

    Whoever has just saved a step cannot have written a later one: those are
    of a run that began here earlier. Left in place, they would be the newest.
    """
    place = Place.at(directory)
    names = place.names()
    later = [name for name in names if (step := step_of(name)) is not None and step > after_step]
    if not later:
        return None
    aside = place.child(next(name for n in count(1) if (name := f"before-{n}") not in names))
    place.fs.makedirs(aside.path, exist_ok=True)
    for name in later:
        place.fs.mv(place.child(name).path, aside.child(name).path, recursive=True)
    return aside.url


def _steps(directory: str | os.PathLike[str]) -> list[Place]:
    place = Place.at(directory)
    found = [(step, name) for name in place.names() if (step := step_of(name)) is not None]
    return [place.child(name) for _, name in sorted(found)]


def _name(place: Place) -> str:
    return place.url.rpartition("/")[2]
