"""Connections to a database: kept, given back after a refusal, replaced when they break, and never shared with a child."""

from __future__ import annotations

import gc
import os
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest

from shoal.data.formats import sql as databases
from shoal.data.formats.databases import ConnectionGone
from shoal.data.formats.sql import Sessions
from shoal.errors import DatabaseLost, DatabaseRefused, QueryRefused
from shoal.runtime import events


class FakeSession:
    def __init__(self, log: list[str], number: int) -> None:
        self.log, self.number = log, number

    def end(self) -> None:
        self.log.append(f"end {self.number}")

    def close(self) -> None:
        self.log.append(f"close {self.number}")


class FakeDatabase:
    place = "fake://me@here"

    def __init__(self, failing_connects: tuple[int, ...] = ()) -> None:
        self.log: list[str] = []
        self.num_connects = 0
        self._failing = failing_connects

    def connect(self) -> Any:
        self.num_connects += 1
        if self.num_connects in self._failing:
            raise ConnectionGone("it is away")
        return FakeSession(self.log, self.num_connects)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(databases, "_FIRST_PAUSE_S", 0.001)
    events.emitted.clear()


def sessions(database: FakeDatabase, timeout_s: float = 10.0) -> Sessions:
    return Sessions(database, timeout_s)  # type: ignore[arg-type]  # what is asked of it is there


def breaking(*numbers: int) -> Callable[[Any], str]:
    """A read that breaks on the connections with these numbers."""

    def read(session: FakeSession) -> str:
        if session.number in numbers:
            raise ConnectionGone("the server closed it")
        return f"read by {session.number}"

    return read


def test_a_connection_is_kept_and_used_again() -> None:
    database = FakeDatabase()
    kept = sessions(database)
    assert kept.first(breaking()) == kept.again(breaking(), what="rows") == "read by 1"
    assert database.log == ["end 1", "end 1"]
    kept.close()
    assert database.log[-1] == "close 1"


def test_a_broken_one_is_replaced_and_that_is_told() -> None:
    database = FakeDatabase(failing_connects=(3, 4))
    kept = sessions(database)
    assert kept.again(breaking(1, 2), what="rows 1 to 9") == "read by 5"
    assert [facts["attempt"] for _, facts in events.emitted] == [1, 2, 3, 4]
    kind, facts = events.emitted[0]
    assert kind == "database connection lost"
    assert facts == {
        "database": "fake://me@here",
        "reading": "rows 1 to 9",
        "reason": "the server closed it",
        "attempt": 1,
    }
    assert database.log == ["close 1", "close 2", "end 5"]


def test_after_the_time_is_over_there_is_a_paragraph() -> None:
    kept = sessions(FakeDatabase(failing_connects=tuple(range(2, 1000))), timeout_s=0.05)
    with pytest.raises(DatabaseLost) as found:
        kept.again(breaking(1), what="the table 't', id < 5")
    assert re.fullmatch(
        r"the connection to the database fake://me@here was lost while reading the table 't', id < 5, and \d+ attempts "
        r"within 0\.\d s did not bring it back: it is away\. Nothing of that range was used, and checkpoints written so far "
        r"are whole\. Bring the database back and go on with `shoal resume`; timeout_s= says how long to wait for it\.",
        str(found.value),
    )
    assert found.value.num_attempts > 3


def test_the_first_time_a_failure_is_told_at_once() -> None:
    database = FakeDatabase(failing_connects=(1,))
    with pytest.raises(DatabaseRefused, match="the database fake://me@here cannot be read: it is away"):
        sessions(database).first(breaking())
    assert database.num_connects == 1
    assert not events.emitted


def test_a_refused_query_leaves_a_good_connection() -> None:
    database = FakeDatabase()
    kept = sessions(database)

    def refuse(session: Any) -> None:
        raise QueryRefused(place="", what="it", reason="so")

    with pytest.raises(QueryRefused):
        kept.again(refuse, what="rows")
    assert kept.again(breaking(), what="rows") == "read by 1"
    assert database.log == ["end 1", "end 1"]


def test_whatever_else_is_raised_closes_the_connection() -> None:
    database = FakeDatabase()

    def fail(session: Any) -> None:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        sessions(database).again(fail, what="rows")
    assert database.log == ["close 1"]


def test_two_threads_have_one_each_a_third_waits_and_one_is_kept() -> None:
    database = FakeDatabase()
    kept = sessions(database)
    together = threading.Barrier(2)

    def read(session: FakeSession) -> None:
        together.wait(60.0)

    threads = [threading.Thread(target=kept.again, args=(read,), kwargs={"what": "rows"}) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert database.num_connects in (2, 3), "never more than two at once, of which one is kept for the next"
    closed = sum(line.startswith("close") for line in database.log)
    assert database.num_connects - closed == 1


def test_connections_go_with_whoever_held_them() -> None:
    database = FakeDatabase()
    kept = sessions(database)
    kept.first(breaking())
    del kept
    gc.collect()
    assert database.log == ["end 1", "close 1"]


def test_a_forked_child_opens_its_own_and_leaves_its_parents_alone() -> None:
    database = FakeDatabase()
    kept = sessions(database)
    kept.first(breaking())
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            mine = kept.again(breaking(), what="rows")
            kept.close()
            code = (
                0
                if mine == "read by 2" and "close 1" not in database.log and "close 2" in database.log
                else 2
            )
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert kept.again(breaking(), what="rows") == "read by 1"
