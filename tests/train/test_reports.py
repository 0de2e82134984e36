from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from shoal.train import reports
from shoal.train.reports import MetricsLog


def lines(path: Path) -> list[Any]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def written(path: Path, *steps: int, from_step: int = 0, new_process: bool = True) -> list[int]:
    if new_process:
        reports._written_here.clear()
    log = MetricsLog(path, from_step=from_step)
    for step in steps:
        log.write({"step": step, "loss": 0.5})
    log.close()
    return [line["step"] for line in lines(path)]


def test_a_resumed_run_drops_the_lines_beyond_its_step(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    assert written(path, 1, 2, 3, 4) == [1, 2, 3, 4]
    assert written(path, 3, 4, 5, from_step=2) == [1, 2, 3, 4, 5]
    assert written(path, 1) == [1]
    assert [entry.name for entry in path.parent.iterdir()] == ["metrics.jsonl"]


def test_a_second_trainer_of_the_script_adds_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert written(path, 1, 2) == [1, 2]
    assert written(path, 1, new_process=False) == [1, 2, 1]


def test_a_line_torn_by_a_kill_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 0.5}\n{"no": "step"}\n[1]\n{"step": 2, "lo')
    assert written(path, 2, from_step=1) == [1, 2]


def test_every_line_is_json_whatever_the_loss(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl", from_step=0)
    log.write({"step": 1, "loss": math.nan, "mine": math.inf, "samples": 8})
    log.close()
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": None, "mine": None, "samples": 8}]


def test_a_full_disk_costs_lines_and_no_step(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl", from_step=0)
    log._file.close()
    log._file = open("/dev/full", "a", buffering=1)  # noqa: SIM115
    log.write({"step": 1, "loss": 0.5})
    log.close()
    assert log._file.closed


@pytest.mark.parametrize("last", ['{"step": 2, "lo', "[1]", '{"no": "step"}'])
def test_a_replacement_writes_its_step_behind_a_torn_line(tmp_path: Path, last: str) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, from_step=0)
    path.write_text(last + "\n")
    log.make_up_for({"step": 2, "loss": 0.5})
    log.make_up_for({"step": 2, "loss": 0.5})
    log.close()
    assert path.read_text().splitlines() == [last, '{"step": 2, "loss": 0.5}']


def test_a_full_disk_keeps_the_lines_there_were(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert written(path, 1, 2) == [1, 2]
    path.with_suffix(".tmp").symlink_to("/dev/full")
    assert written(path, 2, from_step=1) == [1, 2, 2]
