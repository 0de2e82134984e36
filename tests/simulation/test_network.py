from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import WireError
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.worker_coordinator import Leave, StoreCount, StoreSet
from simulation.network import End, Network


class Time:
    """A queue of events, and delays as they were asked for."""

    def __init__(self, delays: list[float] | None = None) -> None:
        self.now = 0.0
        self._delays = delays or []
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = count()

    def schedule(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:
        heappush(self._queue, (self.now + delay_s, next(self._numbers), action, arguments))

    def delay_s(self) -> float:
        return self._delays.pop(0) if self._delays else 1.0

    def run(self, until: float = math.inf) -> None:
        while self._queue and self._queue[0][0] <= until:
            self.now, _, action, arguments = heappop(self._queue)
            action(*arguments)


class Somebody:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.ends: list[End] = []
        self.said: list[Message] = []
        self.num_lost = 0

    def accepted(self, end: End) -> None:
        self.ends.append(end)

    def heard(self, end: End, message: Message) -> None:
        self.said.append(message)

    def lost(self, end: End) -> None:
        self.num_lost += 1


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def network(time: Time) -> Network:
    return Network(time.schedule, lambda: time.now, time.delay_s)


@given(st.lists(st.floats(0, 10), min_size=7, max_size=7))
def test_messages_of_one_connection_come_in_order_whatever_their_delays(delays: list[float]) -> None:
    time, near, far = Time(list(delays)), Somebody(), Somebody()
    network = Network(time.schedule, lambda: time.now, time.delay_s)
    network.listen(far)
    end = network.connect(near, "here")
    for number in range(5):
        end.send(StoreCount(number))
    end.close()
    time.run()
    assert far.said == [StoreCount(number) for number in range(5)]
    assert far.num_lost == 1


def test_answers_come_back_on_the_same_connection(time: Time, network: Network) -> None:
    near, far = Somebody(), Somebody()
    network.listen(far)
    network.connect(near, "here")
    time.run()
    far.ends[0].send(Leave())
    time.run()
    assert near.said == [Leave()]


def test_who_connects_while_nobody_accepts_waits_in_the_backlog(time: Time, network: Network) -> None:
    near, far = Somebody(), Somebody()
    end = network.connect(near, "here")
    end.send(StoreCount(1))
    time.run()
    network.listen(far)
    assert far.said == [StoreCount(1)]


def test_a_connection_that_closed_in_the_backlog_is_accepted_and_lost(time: Time, network: Network) -> None:
    far = Somebody()
    end = network.connect(Somebody(), "here")
    end.send(StoreCount(1))
    end.close()
    time.run()
    network.listen(far)
    assert (far.said, far.num_lost) == ([StoreCount(1)], 1)


def test_what_a_killed_process_said_still_arrives(time: Time, network: Network) -> None:
    far = Somebody()
    network.listen(far)
    end = network.connect(Somebody(), "here")
    end.send(StoreCount(1))
    end.close()
    end.send(StoreCount(2))  # after its death
    time.run()
    assert far.said == [StoreCount(1)]


def test_a_cut_connection_loses_what_is_said_later_and_each_side_notices_by_itself(
    time: Time, network: Network
) -> None:
    near, far = Somebody(), Somebody()
    network.listen(far)
    end = network.connect(near, "here")
    time.run()
    end.send(StoreCount(1))
    network.cut(end, notice_s=0.1, far_notice_s=5.0)
    end.send(StoreCount(2))
    time.run(until=time.now + 2.0)
    assert (near.num_lost, far.num_lost) == (1, 0)
    assert far.said == [StoreCount(1)]  # it was under way
    far.ends[0].send(Leave())
    time.run()
    assert far.num_lost == 1
    assert near.said == []


def test_a_late_message_of_an_old_connection_comes_after_those_of_the_new_one(
    time: Time, network: Network
) -> None:
    near, far = Somebody(), Somebody()
    network.listen(far)
    old = network.connect(near, "here")
    old.lag_s = 10.0
    old.send(StoreCount(1))
    network.cut(old, notice_s=0.1, far_notice_s=20.0)
    network.connect(near, "here").send(StoreCount(2))
    time.run()
    assert far.said == [StoreCount(2), StoreCount(1)]


def test_a_partition_holds_messages_back_and_loses_none(time: Time, network: Network) -> None:
    far = Somebody()
    network.listen(far)
    cut_off, other = network.connect(Somebody(), "here"), network.connect(Somebody(), "there")
    time.run(until=2.0)
    network.silence("here", until=50.0)
    cut_off.send(StoreCount(1))
    other.send(StoreCount(2))
    time.run(until=49.0)
    assert far.said == [StoreCount(2)]
    time.run()
    assert far.said == [StoreCount(2), StoreCount(1)]


def test_through_the_codec_a_message_is_the_same_and_one_too_large_is_refused(time: Time) -> None:
    near, far = Somebody(), Somebody()
    network = Network(time.schedule, lambda: time.now, time.delay_s, as_bytes=True)
    network.listen(far)
    end = network.connect(near, "here")
    end.send(StoreSet({"key": b"\x00\xff"}))
    time.run()
    assert far.said == [StoreSet({"key": b"\x00\xff"})]
    with pytest.raises(WireError):
        end.send(StoreSet({"key": bytes(5 << 20)}))
