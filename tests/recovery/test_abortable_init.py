"""Giving up what blocks: at once, and for good."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest

from shoal.recovery import rendezvous as forming


def is_over() -> bool:
    return True


def never() -> bool:
    return False


def install(into: list[str]) -> None:
    into.append("installed")


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "forming a group"]


def test_what_succeeds_is_done_and_what_fails_raises_its_own_error() -> None:
    done: list[str] = []
    forming.abortable_init(never, lambda: install(done), inside=__name__)
    assert done == ["installed"]
    with pytest.raises(ZeroDivisionError):
        forming.abortable_init(never, lambda: print(1 / 0), inside=__name__)


def test_what_takes_long_is_given_up_at_once_and_does_nothing_after_its_long_call() -> None:
    may_return, done = threading.Event(), list[str]()

    def act() -> None:
        may_return.wait(30.0)
        install(done)

    before = time.monotonic()
    with pytest.raises(forming.GivenUp):
        forming.abortable_init(is_over, act, inside=__name__)
    assert time.monotonic() - before < 5.0
    (stuck,) = threads()
    may_return.set()
    stuck.join(10.0)
    assert not stuck.is_alive()
    assert done == []


def test_an_interruption_gives_it_up_too() -> None:
    may_return, done = threading.Event(), list[str]()

    def act() -> None:
        may_return.wait(30.0)
        install(done)

    def interrupt() -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        forming.abortable_init(interrupt, act, inside=__name__)
    (stuck,) = threads()
    may_return.set()
    stuck.join(10.0)
    assert done == []


def test_nothing_holds_what_a_failed_attempt_had_made() -> None:
    class Group:
        pass

    made: list[weakref.ref[Group]] = []

    def act() -> None:
        group = Group()
        made.append(weakref.ref(group))
        raise RuntimeError("a peer is gone")

    try:
        forming.abortable_init(never, act, inside=__name__)
    except RuntimeError:
        pass
    gc.collect()
    assert made[0]() is None


def test_a_callback_of_the_long_call_is_not_interrupted() -> None:
    """C++ would catch that, and go on."""
    looked, done = threading.Event(), list[str]()
    scope = {"__name__": "elsewhere", "looked": looked, "done": done}
    exec("def callback():\n    looked.wait(30.0)\n    [].append(len([]))\n    done.append('callback')", scope)

    def act() -> None:
        scope["callback"]()  # type: ignore[operator]
        install(done)

    with pytest.raises(forming.GivenUp):
        forming.abortable_init(is_over, act, inside=__name__)
    (stuck,) = threads()
    looked.set()
    stuck.join(10.0)
    assert done == ["callback"]
