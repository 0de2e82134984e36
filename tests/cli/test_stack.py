from __future__ import annotations

import json
from pathlib import Path

import pytest
from invoking import Shoal

from shoal.cli.inspect import stack
from shoal.observe import runs

EVENTS = [
    {"event": "coordinator-started", "pid": 10},
    {"event": "server-started", "server": 0, "pid": 11},
    {"event": "worker-started", "rank": 0, "pid": 12},
    {"event": "worker-started", "rank": 1, "pid": 13},
    {"event": "worker-started", "rank": 2, "pid": 14, "host": 1},
    {"event": "worker-exited", "rank": 1, "code": -9},
    {"event": "worker-replaced", "rank": 1, "pid": 15, "incarnation": 1},
    {"event": "server-exited", "server": 0, "code": -9},
]


def fake_spy(folder: Path, body: str) -> list[str]:
    folder.mkdir()
    (folder / "py-spy").write_text(f"#!/bin/sh\n{body}\n")
    (folder / "py-spy").chmod(0o755)
    return [str(folder / "py-spy")]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = tmp_path / "runs" / "click"
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in EVENTS))
    monkeypatch.setattr(runs, "state", lambda path, summary: runs.RunState.ALIVE)
    return str(path)


def test_stacks_of_living_processes_of_this_host(
    shoal: Shoal, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = fake_spy(tmp_path / "bin", 'echo "stack of $3"')
    monkeypatch.setattr(stack, "_spy", lambda: spy)
    shown = shoal("stack", run)
    assert shown.exit_code == 0
    assert [line for line in shown.stdout.splitlines() if line.startswith("stack")] == [
        "stack of 10",
        "stack of 12",
        "stack of 15",
    ]


def test_a_process_that_may_not_be_looked_at_is_a_paragraph(
    shoal: Shoal, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = fake_spy(tmp_path / "bin", "echo 'Error: Operation not permitted' >&2; exit 1")
    monkeypatch.setattr(stack, "_spy", lambda: spy)
    shown = shoal("stack", run, "worker-0")
    assert shown.exit_code != 0
    said = " ".join(shown.stderr.split())
    assert "worker-0: Error: Operation not permitted" in said
    assert "--cap-add SYS_PTRACE" in said


def test_a_process_that_is_not_there_is_refused(
    shoal: Shoal, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack, "_spy", lambda: ["py-spy"])
    assert "no process 'worker-2' on this host" in " ".join(shoal("stack", run, "worker-2").stderr.split())


def test_a_run_that_is_over_has_no_stacks(shoal: Shoal, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "state", lambda path, summary: runs.RunState.FINISHED)
    assert "is not running" in shoal("stack", run).stderr


def test_processes_are_found_after_hours_of_leases(
    shoal: Shoal, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = json.dumps({"event": "leases", "by_rank": {str(rank): [9, 9] for rank in range(9)}}) + "\n"
    with open(Path(run) / "events.jsonl", "a") as file:
        file.write(lease * 4000)
    spy = fake_spy(tmp_path / "bin", 'echo "stack of $3"')
    monkeypatch.setattr(stack, "_spy", lambda: spy)
    assert "stack of 12" in shoal("stack", run).stdout
    assert [event["event"] for event in runs.read_events(Path(run))].count("leases") == 1


def test_a_run_without_processes_here_is_a_paragraph(
    shoal: Shoal, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack, "_spy", lambda: ["py-spy"])
    (Path(run) / "events.jsonl").write_text("")
    shown = shoal("stack", run)
    assert shown.exit_code != 0
    assert "none of its processes is on this host" in " ".join(shown.stderr.split())
