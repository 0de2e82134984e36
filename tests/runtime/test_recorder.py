from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from shoal.runtime import recorder
from shoal.runtime.recorder import (
    HEADER_BYTES,
    KINDS,
    MAX_DEPTH,
    RECORD_BYTES,
    Recorder,
    Sampler,
    Span,
    TraceFile,
)


class Clock:
    """Nanoseconds that pass when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000_000_000
        monkeypatch.setattr(recorder, "monotonic_ns", lambda: self.now)

    def pass_ns(self, ns: int) -> None:
        self.now += ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def owned(clock: Clock) -> Recorder:
    made = Recorder()
    made.own(capacity=8)
    return made


def spent(recorded: Recorder) -> dict[str, int]:
    return {name: ns for name, ns in zip(KINDS, recorded.totals_ns(), strict=True) if ns}


def test_time_of_a_span_within_another_counts_once(owned: Recorder, clock: Clock) -> None:
    compute, pull = Span(owned, "compute"), Span(owned, "pull")
    clock.pass_ns(7)
    with compute:
        clock.pass_ns(10)
        with pull:
            clock.pass_ns(5)
        with compute:
            clock.pass_ns(2)
        clock.pass_ns(1)
    assert spent(owned) == {"other": 7, "compute": 13, "pull": 5}


def test_a_span_that_is_open_counts_so_far(owned: Recorder, clock: Clock) -> None:
    with Span(owned, "wait"):
        clock.pass_ns(30)
        assert spent(owned) == {"wait": 30}
        clock.pass_ns(1)
    assert spent(owned) == {"wait": 31}


def test_an_exception_closes_the_spans_it_leaves(owned: Recorder, clock: Clock) -> None:
    def fail() -> None:
        with Span(owned, "compute"), Span(owned, "exchange"):
            clock.pass_ns(3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    clock.pass_ns(4)
    assert owned.depth == 0
    assert spent(owned) == {"other": 4, "exchange": 3}


def test_spans_of_other_threads_are_left_out(owned: Recorder, clock: Clock) -> None:
    push = Span(owned, "push")

    def elsewhere() -> None:
        with push:
            clock.pass_ns(9)

    with Span(owned, "compute"):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert spent(owned) == {"compute": 9}
    assert owned.count == 1


def test_spans_deeper_than_the_stack_lose_none_of_the_time(owned: Recorder, clock: Clock) -> None:
    def nest(depth: int) -> None:
        with Span(owned, "compute"):
            clock.pass_ns(1)
            if depth:
                nest(depth - 1)

    nest(MAX_DEPTH + 4)
    assert spent(owned)["compute"] == MAX_DEPTH + 5


def test_time_outside_of_spans_is_of_the_base_kind(owned: Recorder, clock: Clock) -> None:
    owned.base(Span(owned, "compute"))
    clock.pass_ns(5)
    with Span(owned, "exchange"):
        clock.pass_ns(2)
    clock.pass_ns(1)
    owned.base(None)
    clock.pass_ns(3)
    assert spent(owned) == {"other": 3, "compute": 6, "exchange": 2}


def run_spans(recorded: Recorder, clock: Clock, count: int) -> None:
    for _ in range(count):
        with Span(recorded, "compute"):
            clock.pass_ns(1)
        recorded.done(recorded.step + 1, 4)


@pytest.mark.parametrize("bursts", [(3,), (8,), (5, 6), (30,), (7, 1, 8, 20)])
def test_trace_file_holds_the_newest_spans(
    owned: Recorder, clock: Clock, tmp_path: Path, bursts: tuple[int, ...]
) -> None:
    file = TraceFile(tmp_path / "trace", "worker-0", 0)
    for burst in bursts:
        run_spans(owned, clock, burst)
        file.write(owned)
    file.close()
    raw = (tmp_path / "trace" / "worker-0.0.bin").read_bytes()
    assert json.loads(raw[8:HEADER_BYTES])["count"] == sum(bursts)
    assert len(raw) == HEADER_BYTES + min(sum(bursts), 8) * RECORD_BYTES
    steps = {
        int.from_bytes(raw[at + 16 : at + 20], "little") for at in range(HEADER_BYTES, len(raw), RECORD_BYTES)
    }
    assert steps == set(range(sum(bursts))[-8:])


def test_trace_files_of_a_crash_loop_are_bounded(tmp_path: Path) -> None:
    for incarnation in range(30):
        TraceFile(tmp_path, "worker-0", incarnation).close()
    TraceFile(tmp_path, "worker-1", 0).close()
    assert len(list(tmp_path.iterdir())) == recorder.KEPT_INCARNATIONS + 1


def test_a_disk_that_takes_nothing_costs_the_trace_alone(
    owned: Recorder, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trace").touch()  # where the folder should be
    TraceFile(tmp_path / "trace", "worker-0", 0).write(owned)
    file = TraceFile(tmp_path / "there", "worker-0", 0)

    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    run_spans(owned, clock, 2)
    file.write(owned)
    monkeypatch.undo()
    file.write(owned)
    assert (tmp_path / "there" / "worker-0.0.bin").stat().st_size == 0


def test_a_dropped_line_is_counted_and_its_interval_is_told_with_the_next() -> None:
    recorded, lines, takes = Recorder(), list[dict[str, Any]](), [False, False, True]
    recorded.own(capacity=8)

    def send(line: str) -> bool:
        lines.append(json.loads(line))
        return takes.pop(0)

    sampler = Sampler(recorded, process="worker-0", incarnation=2, trace=None, send=send)
    try:
        for step in (1, 2):
            recorded.done(step, 16)
            sampler._send_line()
    finally:
        sampler.close()
    assert [line["steps"] for line in lines] == [1, 2, 2]
    last = lines[-1]
    assert (last["step"], last["samples"], last["dropped"], last["end"]) == (2, 32, 2, True)
    assert (last["process"], last["incarnation"]) == ("worker-0", 2)


def test_facts_that_cannot_be_told_cost_their_second_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "EVERY_S", 0.001)
    told, lines = threading.Event(), []

    def send(line: str) -> bool:
        lines.append(json.loads(line))
        told.set()
        return True

    facts: Any = iter([{"odd": {1}}, {"odd": object()}])
    recorded = Recorder()
    recorded.facts = lambda: next(facts, {"even": 1})
    sampler = Sampler(recorded, process="worker-0", incarnation=0, trace=None, send=send)
    assert told.wait(60)
    sampler._is_over.set()
    sampler._thread.join(60)
    assert lines[0]["even"] == 1
    assert lines[-1]["end"]
