"""A server knows what it holds, and says in time that it can take no more."""

from __future__ import annotations

import pytest

from shoal.ps.server import process as server_memory
from shoal.ps.server.process import MemoryGuard, private_bytes
from shoal.runtime.memory import available_bytes
from shoal.runtime.transport.messages.client_server import PullRows, PushRows, ReadRows


def test_what_a_process_holds_of_its_own_is_counted_to_the_page() -> None:
    before = private_bytes()
    held = bytearray(b"x") * (64 << 20)
    assert 64 << 20 <= private_bytes() - before <= 70 << 20
    del held
    assert available_bytes() > 0


def test_up_to_the_limit_all_is_taken_and_beyond_it_nothing_that_grows() -> None:
    guard = MemoryGuard("server-7", private_bytes() + (1 << 30))
    assert guard.problem() is None
    assert guard.problem(1 << 29) is None
    problem = guard.problem(1 << 31)
    assert problem is not None
    assert "server-7" in problem
    assert "2,147,483,648 more" in problem
    tight = MemoryGuard("server-7", 1)
    assert tight.refusal(PushRows(view=1, stream=0, seq=1, table=0)) is not None
    assert tight.refusal(PullRows(view=1, clock=0, table=0)) is None
    assert tight.refusal(ReadRows(view=1, table=0, slot=0)) is None


def test_what_clients_read_counts_to_the_limit_too() -> None:
    guard = MemoryGuard("server-7", private_bytes() + (1 << 30), shared_bytes=lambda: 1 << 31)
    assert "server-7 holds" in str(guard.problem())


def test_a_machine_that_runs_out_is_noticed_whoever_uses_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = MemoryGuard("server-7")
    assert guard.problem() is None
    monkeypatch.setattr(server_memory, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(server_memory, "LOOK_AROUND_EVERY_S", 0.0)
    monkeypatch.setattr(server_memory, "available_bytes", lambda: guard.reserve_bytes - 1)
    assert "has only" in str(guard.problem())


def test_between_two_looks_around_what_a_server_takes_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [1 << 20]
    monkeypatch.setattr(server_memory, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(server_memory, "LOOK_AROUND_EVERY_S", 3600.0)
    monkeypatch.setattr(server_memory, "available_bytes", lambda: 100 << 20)
    monkeypatch.setattr(server_memory, "private_bytes", lambda: held[0])
    guard = MemoryGuard("server-7", 1 << 40)
    assert guard.problem() is None
    held[0] += 96 << 20
    assert "has only 4,194,304 left" in str(guard.problem())
    held[0] -= 96 << 20
    assert guard.problem() is None
