"""A wait that looks around now and then: what it takes for a loss, and what it does not."""

from __future__ import annotations

from datetime import timedelta

import pytest

from shoal.collectives.native import Native
from shoal.errors import PeerLost


class Work:
    """torch's, as a script of looks: each is over in time or not; the last says what became of it."""

    def __init__(self, *, looks_in_vain: int, done_after_the_last: bool, error: str = "") -> None:
        self._in_vain, self._done_after, self._error = looks_in_vain, done_after_the_last, error
        self._is_done = False

    def wait(self, timeout: timedelta | None = None) -> None:
        if self._in_vain and not self._is_done:
            self._in_vain -= 1
            # Nobody is asked between the end of a look and this: it is when the last one comes.
            self._is_done = not self._in_vain and self._done_after
            raise RuntimeError("Operation timed out!")
        self._is_done = True
        if self._error:
            raise RuntimeError(self._error)

    def is_completed(self) -> bool:
        return self._is_done


def native(*, is_broken: bool = False) -> Native:
    return Native(rank=0, num_workers=2, is_broken=lambda: is_broken)


@pytest.mark.parametrize("done_after_the_last", [False, True])
@pytest.mark.parametrize("looks_in_vain", [1, 3])
def test_work_that_ends_right_after_a_look_in_vain_is_done_and_nobody_lost(
    looks_in_vain: int, done_after_the_last: bool
) -> None:
    native().finish(Work(looks_in_vain=looks_in_vain, done_after_the_last=done_after_the_last), "a sum")


@pytest.mark.parametrize("looks_in_vain", [0, 1])
def test_work_that_broke_tells_why_not_that_a_look_was_in_vain(looks_in_vain: int) -> None:
    work = Work(looks_in_vain=looks_in_vain, done_after_the_last=True, error="Connection closed by peer")
    with pytest.raises(PeerLost) as lost:
        native().finish(work, "a sum")
    assert lost.value.reason == "Connection closed by peer"


def test_a_closed_connection_ends_a_wait_that_would_go_on() -> None:
    with pytest.raises(PeerLost, match="a connection of the group was closed"):
        native(is_broken=True).finish(Work(looks_in_vain=9, done_after_the_last=False), "a sum")
