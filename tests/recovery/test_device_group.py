"""The watch over a device: when it lets go, and what becomes of whoever waited."""

from __future__ import annotations

import threading

import pytest
import torch

from shoal.recovery import device_group as device_watch
from shoal.recovery.device_group import DeviceWatch


class Waiting:
    """A group with a device that somebody waits for."""

    def __init__(self, *, timeout_s: float = 100.0, is_busy: bool = True) -> None:
        self.is_broken = self.is_busy = False
        self.is_busy = is_busy
        self.aborted = threading.Event()
        self.num_looks = 0
        self.watch = DeviceWatch(
            torch.device("cpu"),
            timeout_s,
            is_broken=self._look,
            abort_groups=self.aborted.set,
            is_busy=lambda: self.is_busy,
        )

    def _look(self) -> bool:
        self.num_looks += 1
        return self.is_broken


def test_a_closed_connection_frees_whoever_waits_and_nothing_of_it_is_used() -> None:
    waiting = Waiting()

    def step() -> None:
        waiting.is_broken = True
        assert waiting.aborted.wait(10.0)
        raise FloatingPointError("the loss is no number")  # what became of what the collectives left behind

    with pytest.raises(RuntimeError, match="a connection of the group was closed"), waiting.watch.over():
        step()


def test_a_device_that_is_not_done_in_time_is_let_go_of() -> None:
    waiting = Waiting(timeout_s=0.0)
    with pytest.raises(RuntimeError, match="not done after"), waiting.watch.over():
        assert waiting.aborted.wait(10.0)


def test_a_host_that_takes_its_time_is_left_alone_and_the_device_has_all_of_its_own() -> None:
    waiting = Waiting(timeout_s=0.6, is_busy=False)
    with waiting.watch.over():
        seen = waiting.num_looks
        while waiting.num_looks < seen + 5:
            threading.Event().wait(0.05)
        waiting.is_busy = True  # for the first time now, though it is long since we began
        while waiting.num_looks < seen + 6:
            threading.Event().wait(0.05)
    assert not waiting.aborted.is_set()
    waiting.watch.ended = "over"  # ends the thread


def test_what_cannot_be_asked_or_ended_is_not_waited_for() -> None:
    stuck = threading.Event()

    def broken() -> bool:
        raise RuntimeError("the driver is gone")

    device_watch.FREE_WITHIN_S, before = 0.1, device_watch.FREE_WITHIN_S
    try:
        watch = DeviceWatch(torch.device("cpu"), 1.0, is_broken=broken, give_up=stuck.set)
        with pytest.raises(RuntimeError, match="cannot be asked: the driver is gone"), watch.over():
            assert stuck.wait(10.0)
    finally:
        device_watch.FREE_WITHIN_S = before


def test_a_wish_to_leave_stays_one() -> None:
    waiting = Waiting()

    def step() -> None:
        waiting.is_broken = True
        assert waiting.aborted.wait(10.0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), waiting.watch.over(), waiting.watch.over():
        step()


def test_errors_of_the_step_itself_pass_and_nobody_is_watched_in_between() -> None:
    waiting = Waiting()
    with pytest.raises(KeyError), waiting.watch.over():
        raise KeyError("of the user's")
    seen = waiting.num_looks
    waiting.is_broken = True
    assert not waiting.aborted.wait(0.6)
    assert waiting.num_looks == seen
    with pytest.raises(RuntimeError), waiting.watch.over():
        assert waiting.aborted.wait(10.0)
