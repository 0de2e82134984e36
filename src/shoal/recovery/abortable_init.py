"""Calling into torch to form a group, in a way that it can be given up.

Should a rank die between the meeting and the last connection, gloo waits for
it, tries again, and takes no notice of anything else (measured: 5 s with a
time-out of 1 s, 20 s with 10 s). So it runs in a thread, and whoever needs
it looks around meanwhile. A thread that was given up ends at the first thing
torch's Python does after the call it is stuck in: nothing that such a call
made is ever registered as this process's group.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType

LOOK_AFTER_S = 0.1
"""Forming a group takes milliseconds: so long, and it is worth asking whether it will ever succeed."""

LOOK_EVERY_S = 0.05

STUCK_AFTER_S = 0.25
"""What is not over by then is inside of a call that takes its time; what runs in Python takes microseconds."""


class GivenUp(RuntimeError):
    """Not an error a user sees: it will not succeed any more, or nobody needs it."""


class _Attempt:
    """One call, in a thread of its own; its error, if any, is held here and nowhere else."""

    def __init__(self, act: Callable[[], None], inside: str) -> None:
        self.is_wanted = True
        self.raised: list[BaseException] = []
        self._act = act
        self._inside = inside
        self.thread = threading.Thread(target=self._run, name="forming a group", daemon=True)

    def _run(self) -> None:
        try:
            # Looks at every call that Python makes, so also at the first one after a long call into C++ has returned.
            # A flag and no exception thrown into the thread: that one could be lost in a callback of the long call, or
            # meet another thread under the same number.
            sys.setprofile(self._check)
            self._act()
        except BaseException as error:
            if self.is_wanted:
                self.raised.append(error)
        finally:
            sys.setprofile(None)

    def _check(self, frame: FrameType, event: str, argument: object) -> None:
        # An error in a callback (the store's) would be caught by C++, and tried again.
        if not self.is_wanted and frame.f_globals.get("__name__") == self._inside:
            raise GivenUp("nobody waits for this group any more")


def unless(is_over: Callable[[], bool], act: Callable[[], None], *, inside: str) -> None:
    """Do `act`, and raise what it raises; GivenUp as soon as `is_over`, once it takes long.

    Given up, it ends at the next call made by the module named `inside`.
    """
    attempt = _Attempt(act, inside)
    attempt.thread.start()
    try:
        attempt.thread.join(LOOK_AFTER_S)
        while attempt.thread.is_alive():
            if is_over():
                raise GivenUp("a rank has left the view")
            attempt.thread.join(LOOK_EVERY_S)
    except BaseException:
        attempt.is_wanted = False
        attempt.thread.join(STUCK_AFTER_S)
        raise
    if attempt.raised:
        raise attempt.raised.pop()
