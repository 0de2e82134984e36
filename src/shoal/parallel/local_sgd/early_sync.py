"""Where workers that train apart meet when they are asked to leave: not a whole round later, but as soon as all know.

Nothing is said while nobody asks. Whoever is asked writes down, at the
coordinator, after how many steps of the round it stands, and waits: once all
have, they meet where the furthest stands, and the others make the steps that
they lack. One value decides, written once, so that nobody meets alone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from shoal.cluster.worker import session
from shoal.errors import ClusterError
from shoal.recovery import rendezvous

PATIENCE_S = 10.0
"""For the others to come to the end of their step. Beyond it all finish their round: not everybody was asked."""

LOOK_EVERY_S = 0.02


class Notes(Protocol):
    """What is needed of a torch Store."""

    def set(self, key: str, value: str) -> None:
        """Keep it."""

    def check(self, keys: Sequence[str]) -> bool:
        """Are all there?"""

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """What they hold."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set it where it is not there yet (expected: ""); what it holds then."""


def agree(
    notes: Notes,
    *,
    where: str,
    rank: int,
    num_workers: int,
    num_steps: int,
    last_step: int,
    is_over: Callable[[float], bool],
) -> int:
    """After how many steps of the round all meet; `last_step` where not everybody says in time how far it is."""
    everybody = [f"{where}/{each}" for each in range(num_workers)]
    decision, began_at = f"{where}/decision", time.monotonic()
    notes.set(everybody[rank], str(num_steps))
    while True:
        if notes.check([decision]):
            return int(notes.multi_get([decision])[0])
        if notes.check(everybody):
            furthest = max(int(each) for each in notes.multi_get(everybody))
            return int(notes.compare_set(decision, "", str(furthest)))
        if is_over(time.monotonic() - began_at):
            return int(notes.compare_set(decision, "", str(last_step)))
        time.sleep(LOOK_EVERY_S)


class EarlyMeeting:
    """Of one round of one worker. As the patience of the exchange in which it meets, it speaks for one who waits there."""

    def __init__(self, *, name: str, rank: int, num_workers: int, last_step: int) -> None:
        self._name, self._rank, self._num_workers, self._last_step = name, rank, num_workers, last_step
        self._num_steps = last_step
        self._has_told = False
        self._meets_after: int | None = None

    def is_now(self, num_steps: int) -> bool:
        """Whether all meet after this step of the round. Waits for the others, once this worker is asked to leave."""
        self._num_steps = num_steps
        if self._meets_after is None and session.stop_requested() is not None and num_steps < self._last_step:
            kept = rendezvous.kept_for_view()
            if kept is not None:
                store, prefix = kept
                try:
                    self._meets_after = agree(
                        store,
                        where=f"{prefix}/{self._name}",
                        rank=self._rank,
                        num_workers=self._num_workers,
                        num_steps=num_steps,
                        last_step=self._last_step,
                        is_over=lambda waited_s: waited_s > PATIENCE_S or rendezvous.is_broken(),
                    )
                except (ClusterError, RuntimeError):  # the view is over: who meets next will notice
                    self._meets_after = self._last_step
        return num_steps >= (self._last_step if self._meets_after is None else self._meets_after)

    def begin(self, number: int) -> None:
        """It waits for the others where they meet."""

    def look(self) -> None:
        """Still waiting: let those know how far this one is who were asked in the midst of their round."""
        kept = rendezvous.kept_for_view()
        if session.stop_requested() is None or self._has_told or kept is None:
            return
        self._has_told = True
        store, prefix = kept
        with contextlib.suppress(ClusterError, RuntimeError):  # the view is over: who waits will notice
            store.set(f"{prefix}/{self._name}/{self._rank}", str(self._num_steps))
