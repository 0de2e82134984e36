"""Who is given which number, in as few steps as possible; `simulation/joining.py` takes many."""

from __future__ import annotations

import pytest

from shoal.cluster.hosts.seats import (
    ADMITTED_TIMEOUT_S,
    AGENT_TIMEOUT_S,
    REJOIN_S,
    SEAT_TIMEOUT_S,
    JoiningHost,
    JoinWait,
    Seats,
)
from shoal.errors import HostNotAdmitted, WireError


@pytest.fixture
def seats() -> Seats:
    return Seats((1, 2), "job", {})


def machine(name: str) -> JoiningHost:
    return JoiningHost(name, "10.0.0.9", 4, name.encode())


def take(seats: Seats, name: str, now: float = 0.0, asked_at: float | None = None) -> tuple[int, int] | None:
    return seats.take(machine(name), now if asked_at is None else asked_at, now)


def test_a_handshake_that_ends_late_does_not_free_the_seat_of_the_next(seats: Seats) -> None:
    assert take(seats, "a") == (1, 0)  # and its machine loses power before it is admitted
    assert take(seats, "a", AGENT_TIMEOUT_S) == (1, 1)
    seats.release(1, 0)
    seats.admit(1, 1, sees_run_dir=True)
    seats.connect(1, 1)
    assert take(seats, "b", 20.0) == (2, 0)


def test_a_handshake_that_lost_its_seat_is_not_admitted(seats: Seats) -> None:
    take(seats, "a")
    take(seats, "a", AGENT_TIMEOUT_S)
    with pytest.raises(HostNotAdmitted, match="host 1 has joined anew since"):
        seats.admit(1, 0, sees_run_dir=True)
    assert not seats.taken[1].sees_run_dir


def test_a_host_that_comes_back_has_its_own_number_again(seats: Seats) -> None:
    for name in ("a", "b"):
        take(seats, name)
    seats.release(1, 0)
    seats.release(2, 0)
    assert [take(seats, name) for name in ("b", "a")] == [(2, 1), (1, 1)]


def test_a_joiner_that_waits_is_given_a_seat_that_was_added(seats: Seats) -> None:
    for name in ("a", "b"):
        take(seats, name)
    assert take(seats, "c") is None
    seats.open(4)
    assert take(seats, "c", 1.0, asked_at=0.0) == (3, 0)


def test_a_joiner_waits_for_a_loss_to_be_noticed_and_is_told_then_who_has_the_seats(seats: Seats) -> None:
    for number, name in ((1, "a"), (2, "b")):
        take(seats, name)
        seats.connect(number, 0)
    for name, why in (("a", "a .* is host 1 of this job already"), ("c", "the key is used up")):
        assert take(seats, name, SEAT_TIMEOUT_S - 0.1, asked_at=0.0) is None
        with pytest.raises(HostNotAdmitted, match=why):
            take(seats, name, SEAT_TIMEOUT_S, asked_at=0.0)


def test_a_machine_that_was_started_again_before_its_agent_came_waits_for_its_own_seat(seats: Seats) -> None:
    take(seats, "a")
    assert take(seats, "a", 1.0 + SEAT_TIMEOUT_S, asked_at=1.0) is None
    assert take(seats, "a", AGENT_TIMEOUT_S, asked_at=1.0) == (1, 1)


def test_a_host_that_copies_files_keeps_its_seat_and_a_silent_one_does_not(seats: Seats) -> None:
    for name in ("a", "b"):
        take(seats, name)
    seats.heard(1, 0, ADMITTED_TIMEOUT_S / 2)
    assert take(seats, "c", ADMITTED_TIMEOUT_S) == (2, 1)
    seats.connect(1, 0)
    with pytest.raises(HostNotAdmitted, match="host 2 has joined anew since"):
        seats.connect(2, 0)


def test_an_agent_that_was_given_up_is_not_believed(seats: Seats) -> None:
    take(seats, "a")
    seats.release(1, 0)
    with pytest.raises(HostNotAdmitted, match="host 1 was given up"):
        seats.connect(1, 0)


def test_after_the_end_nobody_joins_and_nobody_is_refused_for_good(seats: Seats) -> None:
    take(seats, "a")
    seats.close()
    for act in (lambda: take(seats, "b"), lambda: seats.connect(1, 0)):
        with pytest.raises(WireError, match="the job is over"):
            act()


def test_a_head_that_took_over_waits_for_all_but_one_and_for_whoever_is_on_its_way() -> None:
    wait = JoinWait(began_at=10.0, is_takeover=True)
    assert wait.is_over([3], is_coming=False, now=10.0)
    assert not wait.is_over([3], is_coming=True, now=10.0 + REJOIN_S)
    assert not wait.is_over([2, 3], is_coming=False, now=10.0)
    assert wait.is_over([2, 3], is_coming=False, now=10.0 + REJOIN_S)
    assert not JoinWait(began_at=10.0).is_over([3], is_coming=False, now=10.0 + REJOIN_S)
