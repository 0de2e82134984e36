from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal
from shoal.config.faults import BEFORE_FORWARD, POINTS, Fault
from shoal.runtime import failpoints
from shoal.runtime.failpoints import arm, failpoint


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    arm((), process="", incarnation=0)


def fault(**about: object) -> Fault:
    return Fault(**{"act": "raise", "process": "worker-1", **about})  # type: ignore[arg-type]


def happens(step: int | None = None, name: str = BEFORE_FORWARD) -> bool:
    try:
        failpoint(name, step)
    except Exception as error:
        return "made to fail" in str(error)
    return False


def test_a_fault_happens_at_its_step_and_once() -> None:
    arm([fault(step=3)], process="worker-1", incarnation=0)
    assert [happens(step) for step in (1, 2, 3, 3, 4)] == [False, False, True, False, False]


def test_a_slowed_process_takes_longer_at_every_step_until_it_recovers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    now = [0.0]
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    arm([fault(act="slow", step=2, by_s=0.5, for_s=3.0)], process="worker-1", incarnation=0)
    for step, at in enumerate((0.0, 1.0, 2.0, 3.0, 4.0, 9.0), start=1):
        now[0] = at
        assert not happens(step)
    assert slept == [0.5, 0.5, 0.5]  # at 1, 2 and 3 s; at 4 s it is over


def test_points_within_a_step_belong_to_the_step_named_last() -> None:
    arm([fault(step=2, at="worker: committed")], process="worker-1", incarnation=0)
    assert not happens(1)
    assert not happens(name="worker: committed")
    assert not happens(2)
    assert happens(name="worker: committed")


@pytest.mark.parametrize(("process", "incarnation"), [("worker-0", 0), ("worker-1", 1), ("coordinator", 0)])
def test_a_fault_is_for_one_process_in_one_life(process: str, incarnation: int) -> None:
    arm([fault(step=1)], process=process, incarnation=incarnation)
    assert not happens(1)


def test_a_fault_for_every_life_happens_in_each() -> None:
    for incarnation in range(3):
        arm([fault(step=1, incarnation=-1)], process="worker-1", incarnation=incarnation)
        assert happens(1)


def test_every_failpoint_in_the_code_is_in_the_table_and_the_other_way_round() -> None:
    source = "".join(path.read_text() for path in Path(shoal.__file__).parent.rglob("*.py"))
    written = set(re.findall(r'failpoint\(\s*"([^"]+)"', source)) | {BEFORE_FORWARD}
    written |= {
        f"coordinator: {moment} writing a {what}"
        for moment in ("before", "after")
        for what in ("call", "view")
    }
    assert written == set(POINTS)


def test_a_failpoint_costs_next_to_nothing_while_nothing_is_armed() -> None:
    assert failpoints._armed is None
    best = min(_seconds(10_000) for _ in range(20)) / 10_000
    assert best < 1e-6


def _seconds(times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        failpoint("worker: committed")
    return time.perf_counter() - began
