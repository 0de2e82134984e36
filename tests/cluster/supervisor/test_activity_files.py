from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cluster.supervisor import activity_files
from shoal.cluster.supervisor.activity_files import ActivityFiles, halved, merged


def line(at: float, **facts: Any) -> dict[str, Any]:
    return {"at": at, "incarnation": 0, "interval_s": 1.0, "steps": 2, "step": int(at), **facts}


def read(run: Path, process: str) -> list[dict[str, Any]]:
    return [json.loads(each) for each in (run / "activity" / f"{process}.jsonl").read_text().splitlines()]


def test_the_peak_of_a_device_is_the_larger_of_two() -> None:
    assert merged(line(1, device_peak_bytes=9), line(2, device_peak_bytes=5))["device_peak_bytes"] == 9


def test_merged_lines_sum_what_was_done_and_keep_what_is() -> None:
    first = line(
        1, seconds={"compute": 0.5}, rss_bytes=9, requests=3, queue_s=0.1, staleness={"0": 1}, slots=4
    )
    second = line(
        2,
        seconds={"compute": 0.25, "wait": 1},
        rss_bytes=5,
        requests=1,
        queue_s=0.5,
        staleness={"2": 1},
        slots=8,
    )
    both = merged(first, second)
    assert both["seconds"] == {"compute": 0.75, "wait": 1}
    assert (both["at"], both["interval_s"], both["steps"], both["rss_bytes"], both["slots"]) == (
        2,
        2.0,
        4,
        9,
        8,
    )
    assert (both["requests"], both["staleness"]) == (4, {"0": 1, "2": 1})
    assert both["queue_s"] == pytest.approx((3 * 0.1 + 0.5) / 4)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=40))
def test_halving_loses_no_step_of_any_incarnation(done: list[tuple[int, int]]) -> None:
    lines = [line(at, incarnation=i, steps=n) for at, (i, n) in enumerate(sorted(done))]
    kept = halved(lines)

    def total(lines: list[dict[str, Any]]) -> Counter[int]:
        counted: Counter[int] = Counter()
        for each in lines:
            counted[each["incarnation"]] += each["steps"]
        return counted

    assert total(kept) == total(lines)
    assert len(kept) <= len(lines) // 2 + 2 + (len(lines) > 0)


def test_files_stay_small_and_go_on_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity_files, "MAX_LINES", 16)
    for start in (0, 50):
        files = ActivityFiles(tmp_path)
        for at in range(start, start + 50):
            files.write(json.dumps(line(at)), process="worker-0", incarnation=0, host=0)
        files.close()
    kept = read(tmp_path, "worker-0")
    assert len(kept) < 16
    assert sum(each["steps"] for each in kept) == 200
    assert kept[-1]["at"] == 99


def test_clock_of_another_host_is_corrected_by_its_fastest_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(activity_files.time, "time", lambda: now[0])
    files = ActivityFiles(tmp_path, num_hosts=2)
    for sent_at, arrives_at in ((900.0, 1000.5), (901.0, 1001.1), (902.0, 1002.9)):
        now[0] = arrives_at
        files.write(json.dumps(line(sent_at)), process="worker-1", incarnation=0, host=1)
    files.close()
    assert [each["at"] for each in read(tmp_path, "worker-1")] == [1000.5, 1001.1, 1002.1]
    assert [each["host"] for each in read(tmp_path, "worker-1")] == [1, 1, 1]


@pytest.mark.parametrize("said", ["", "[]", "7", "{", '"x"', '{"at": "noon"}', "\n"])
def test_what_is_no_line_is_left_out(tmp_path: Path, said: str) -> None:
    files = ActivityFiles(tmp_path)
    files.write(said, process="worker-0", incarnation=0, host=1)
    files.write(json.dumps(line(5)), process="worker-0", incarnation=0, host=0)
    files.close()
    assert [each["at"] for each in read(tmp_path, "worker-0")] == [5]


def test_a_disk_that_takes_nothing_costs_lines_alone(tmp_path: Path) -> None:
    (tmp_path / "activity").touch()  # where the folder should be
    files = ActivityFiles(tmp_path)
    files.write(json.dumps(line(1)), process="worker-0", incarnation=0, host=0)
    files.close()


def test_odd_values_end_no_supervisor_and_the_file_stays_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activity_files, "MAX_LINES", 8)
    files = ActivityFiles(tmp_path)
    odd = [{"steps": "two"}, {"seconds": [1]}, {"rss_bytes": None}, {"bytes": {"sent": {}}}]
    for at in range(40):
        files.write(json.dumps(line(at) | odd[at % 4]), process="worker-0", incarnation=0, host=0)
    files.close()
    assert len(read(tmp_path, "worker-0")) < 8
