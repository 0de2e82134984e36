"""Early sync of workers that train apart: where they average when they are asked to leave, before the round is over.

Nothing is sent while nobody asks. A worker that is asked writes to the
coordinator's store how many steps of the round it has made, and waits: once
all have, they sync where the furthest stands, and the others make the steps
that they lack. One value decides, written once, so that nobody syncs alone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from shoal.cluster.worker import session
from shoal.errors import ClusterError
from shoal.recovery import rendezvous

TIMEOUT_S = 10.0
"""For the others to come to the end of their step. Beyond it all finish their round: not every worker was asked."""

LOOK_EVERY_S = 0.02


class StepStore(Protocol):
    """The methods of a torch Store that are used."""

    def set(self, key: str, value: str) -> None:
        """Store a value."""

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of all keys."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key that is not there yet (expected: ""); returns the value it holds then."""


def agree(
    store: StepStore,
    *,
    where: str,
    rank: int,
    num_workers: int,
    num_steps: int,
    last_step: int,
    is_over: Callable[[float], bool],
) -> int:
    """The step of the round after which all sync; `last_step` where not every worker reports in time."""
    everybody = [f"{where}/{each}" for each in range(num_workers)]
    decision, began_at = f"{where}/decision", time.monotonic()
    store.set(everybody[rank], str(num_steps))
    while True:
        if store.check([decision]):
            return int(store.multi_get([decision])[0])
        if store.check(everybody):
            furthest = max(int(each) for each in store.multi_get(everybody))
            return int(store.compare_set(decision, "", str(furthest)))
        if is_over(time.monotonic() - began_at):
            return int(store.compare_set(decision, "", str(last_step)))
        time.sleep(LOOK_EVERY_S)


class EarlySync:
    """The early sync of one round of one worker. Also the timeout hook of the exchange in which it syncs."""

    def __init__(self, *, name: str, rank: int, num_workers: int, last_step: int) -> None:
        self._name, self._rank, self._num_workers, self._last_step = name, rank, num_workers, last_step
        self._num_steps = last_step
        self._has_reported = False
        self._sync_after: int | None = None

    def is_now(self, num_steps: int) -> bool:
        """Whether all sync after this step of the round. Waits for the others, once this worker is asked to leave."""
        self._num_steps = num_steps
        if self._sync_after is None and session.stop_requested() is not None and num_steps < self._last_step:
            kept = rendezvous.kept_for_view()
            if kept is not None:
                store, prefix = kept
                try:
                    self._sync_after = agree(
                        store,
                        where=f"{prefix}/{self._name}",
                        rank=self._rank,
                        num_workers=self._num_workers,
                        num_steps=num_steps,
                        last_step=self._last_step,
                        is_over=lambda waited_s: waited_s > TIMEOUT_S or rendezvous.is_broken(),
                    )
                except (ClusterError, RuntimeError):  # the view is over: who meets next will notice
                    self._sync_after = self._last_step
        return num_steps >= (self._last_step if self._sync_after is None else self._sync_after)

    def begin(self, number: int) -> None:
        pass  # the exchange waits for the others where they sync

    def look(self) -> None:
        """While the exchange waits: report this worker's step to workers that were asked within their round."""
        kept = rendezvous.kept_for_view()
        if session.stop_requested() is None or self._has_reported or kept is None:
            return
        self._has_reported = True
        store, prefix = kept
        with contextlib.suppress(ClusterError, RuntimeError):  # the view is over: who waits will notice
            store.set(f"{prefix}/{self._name}/{self._rank}", str(self._num_steps))
