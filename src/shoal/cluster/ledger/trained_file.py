"""Trained batches of one worker under a relaxed strategy: a small file of its own in the run directory.

The journal has the finished ranges. Only the workers know who computed which of their batches, and
which of those counted; and any worker, or all together, may be killed at any moment. So each worker
records it in a file that survives a kill: before its push may count, and when it has the servers'
answer. Neighbouring batches share an entry, so there are about as many entries as leases; a batch
costs two small writes.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from shoal.config.job import Job

FOLDER = "trained"
_NAME = "[0-9]*-[0-9]*-[0-9]*"  # launch, rank, incarnation
# 32 bytes: no entry crosses a page, so each is written completely or not at all.
_ENTRY = struct.Struct("<IIQQIxxxx")


class PushOutcome(IntEnum):
    """Result of a push."""

    COUNTED = 1
    KNOWN = 2  # another worker's push had been applied
    PUSHED = 3  # may have counted or not: the push was not acknowledged, or was sent twice


class Trained(NamedTuple):
    """A worker has computed these batches of an epoch, in one call of its script, with this outcome."""

    launch: int
    rank: int
    incarnation: int
    call: int
    epoch: int
    start: int
    stop: int
    outcome: PushOutcome


class TrainedFile:
    """One worker's file. A full disk does not end a job: missing batches are attributed to the range's finisher."""

    def __init__(self, job: Job) -> None:
        path = job.run_dir / FOLDER / f"{job.launch}-{job.rank}-{job.incarnation}"
        self._fd = self._num = -1
        with contextlib.suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            self._fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
            self._num = os.fstat(self._fd).st_size // _ENTRY.size  # whole ones
        self._last: tuple[int, int, int, int, PushOutcome] | None = None
        self._now: tuple[int, int, int, int] | None = None

    def pushing(self, *, call: int, epoch: int, start: int, stop: int) -> None:
        """Record a push that may count from now on."""
        self._now = (call, epoch, start, stop)
        self._write(self._num, (*self._now, PushOutcome.PUSHED))

    def heard(self, outcome: PushOutcome) -> None:
        """Record the servers' answer to it."""
        assert self._now is not None
        (call, epoch, start, stop), self._now = self._now, None
        last = self._last
        if (
            last is not None
            and (last[0], last[1], last[3], last[4]) == (call, epoch, start, outcome)
            and outcome is not PushOutcome.PUSHED
        ):
            # The merged entry first: a kill in between leaves the same batch in both, which is harmless.
            # The stale entry behind it is overwritten by the next.
            self._last = (*last[:3], stop, outcome)
            self._write(self._num - 1, self._last)
            return
        self._last = (call, epoch, start, stop, outcome)
        self._write(self._num, self._last)
        self._num += 1

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def _write(self, number: int, entry: tuple[int, int, int, int, PushOutcome]) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.pwrite(self._fd, _ENTRY.pack(*entry), number * _ENTRY.size)


def forget_from(run: Path, launch: int) -> None:
    """Delete the files of this launch and later ones: a new journal begins."""
    for path in (run / FOLDER).glob(_NAME):
        if int(path.name.partition("-")[0]) >= launch:
            path.unlink(missing_ok=True)


def read(run: Path) -> list[Trained]:
    """Entries of all workers of a run, over all of its launches."""
    return [each for path in sorted((run / FOLDER).glob(_NAME)) for each in _entries(path)]


def _entries(path: Path) -> Iterator[Trained]:
    try:
        launch, rank, incarnation = map(int, path.name.split("-"))
        raw = path.read_bytes()
    except (OSError, ValueError):
        return
    last: Trained | None = None
    for call, epoch, start, stop, outcome in _ENTRY.iter_unpack(raw[: len(raw) // _ENTRY.size * _ENTRY.size]):
        try:
            entry = Trained(launch, rank, incarnation, call, epoch, start, stop, PushOutcome(outcome))
        except ValueError:
            return
        is_same = (
            last is not None and (last.call, last.epoch) == (call, epoch) and last.start <= start < last.stop
        )
        if not (is_same and entry.outcome is PushOutcome.PUSHED):
            yield entry
        last = entry
