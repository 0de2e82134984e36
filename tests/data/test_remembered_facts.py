"""Facts about files are looked up once: in a process, and by one worker of a job for all."""

from __future__ import annotations

import multiprocessing
import types
from pathlib import Path
from typing import Any

import pytest

from shoal.data import files
from shoal.data.files import FileInfo, identity_of, remembered


@pytest.fixture
def in_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(files.jobs, "current", lambda: types.SimpleNamespace(launched=True))
    monkeypatch.setattr(files.scratch, "directory", lambda *parts: tmp_path)
    return tmp_path


def never() -> Any:
    raise AssertionError("it was known")


def test_it_is_found_out_once() -> None:
    identity = identity_of([FileInfo("a", 1, "x")], test="once")
    assert remembered(identity, lambda: [1]) == [1]
    assert remembered(identity, never) == [1]


def test_the_identity_follows_files_and_options() -> None:
    info = FileInfo("a", 1, "x")
    made = [
        identity_of([info], columns=["a"]),
        identity_of([info], columns=["b"]),
        identity_of([info._replace(stamp="y")], columns=["a"]),
        identity_of([info._replace(num_bytes=2)], columns=["a"]),
        identity_of([info, info], columns=["a"]),
    ]
    assert len(set(made)) == 5
    assert identity_of([info], columns=["a"]) == made[0]


def test_what_fails_is_not_remembered() -> None:
    identity = identity_of([], test="fails")
    with pytest.raises(ZeroDivisionError):
        remembered(identity, lambda: 1 // 0)
    assert remembered(identity, lambda: 3) == 3


def test_old_things_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MOST_REMEMBERED", 2)
    for name in "abc":
        remembered(f"old-{name}", lambda name=name: name)
    assert remembered("old-c", never) == "c"
    assert remembered("old-a", lambda: "anew") == "anew"


def _worker(identity: str, folder: Path) -> None:
    def find_out() -> str:
        with open(folder / "asked", "a") as file:
            file.write("x")
        return "found"

    assert remembered(identity, find_out) == "found"


def test_workers_of_a_job_share_it(in_a_job: Path) -> None:
    identity = identity_of([], test="job")
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_worker, args=(identity, in_a_job)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert (in_a_job / "asked").read_text() == "x"
    assert remembered(identity, never) == "found"
