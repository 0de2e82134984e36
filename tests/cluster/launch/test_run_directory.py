from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import msgspec
import pytest

from shoal.cluster.launch.run_directory import RunDirectory, is_alive, read_config, write_atomically
from shoal.config.launch import RunConfig, Versions
from shoal.errors import RunDirectoryError


def config(script: str = "/work/train.py") -> RunConfig:
    return RunConfig(
        script=script,
        args=["--lr", "0.1"],
        cwd="/work",
        strategy="ddp",
        workers=2,
        seed=1,
        threads=1,
        step_timeout_s=300.0,
        join_timeout_s=120.0,
        grace_s=60.0,
        versions=Versions(python="3.11", torch="2.13.0", shoal="0.1.0"),
        started=0.0,
    )


def claim(base: Path, name: str | None = None, script: str = "/work/train.py") -> RunDirectory:
    return RunDirectory.claim(base, name=name, config=config(script))


def test_runs_are_numbered_by_the_first_free_number(tmp_path: Path) -> None:
    for expected in ("train-1", "train-2"):
        with claim(tmp_path / "runs") as run:
            assert run.name == expected
    (tmp_path / "runs" / "train-3").touch()
    with claim(tmp_path / "runs") as run:
        assert run.name == "train-4"


def test_launches_at_the_same_time_get_different_runs(tmp_path: Path) -> None:
    names: list[str] = []

    def launch() -> None:
        with claim(tmp_path) as run:
            names.append(run.name)

    threads = [threading.Thread(target=launch) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(names) == sorted(f"train-{k}" for k in range(1, 17))


def test_what_was_launched_can_be_read_again(tmp_path: Path) -> None:
    with claim(tmp_path, "mine") as run:
        assert read_config(run.path) == config()
        assert {path.name for path in run.path.iterdir()} == {
            "config.json",
            "events.jsonl",
            "journal.sqlite",
            "lock",
            "logs",
            "checkpoints",
        }


def test_a_live_run_is_refused_and_an_ended_one_is_not(tmp_path: Path) -> None:
    with claim(tmp_path, "mine") as run:
        assert is_alive(run.path)
        with pytest.raises(RunDirectoryError, match="still alive") as refused:
            claim(tmp_path, "mine")
        with pytest.raises(RunDirectoryError, match="still alive"):
            RunDirectory.reopen(run.path, config())
        assert refused.value.path == str(run.path)
    assert not is_alive(run.path)
    with claim(tmp_path, "mine"):
        pass
    with RunDirectory.reopen(run.path, config()):
        pass


def test_a_run_of_another_script_is_refused_and_untouched(tmp_path: Path) -> None:
    with claim(tmp_path, "mine"):
        pass
    before = (tmp_path / "mine" / "config.json").read_bytes()
    with pytest.raises(RunDirectoryError, match="another job"):
        claim(tmp_path, "mine", script="/work/other.py")
    assert (tmp_path / "mine" / "config.json").read_bytes() == before


def test_a_folder_that_is_no_run_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        claim(tmp_path, "photos")
    assert os.listdir(tmp_path / "photos") == ["cat.jpg"]


def test_an_empty_folder_may_become_a_run(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with claim(tmp_path, "mine") as run:
        assert read_config(run.path) == config()


def test_a_damaged_config_is_refused(tmp_path: Path) -> None:
    with claim(tmp_path, "mine"):
        pass
    (tmp_path / "mine" / "config.json").write_text('{"script": 3')
    with pytest.raises(RunDirectoryError, match=r"config\.json cannot be read"):
        claim(tmp_path, "mine")


def test_a_place_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match="cannot be made"):
        claim(tmp_path / "file" / "runs")


@pytest.mark.parametrize("name", [None, "mine"])
def test_a_place_that_takes_no_writing_is_refused_and_left_as_it_was(name: str | None) -> None:
    # /proc takes no files from anybody, root included.
    with pytest.raises(RunDirectoryError, match=r"cannot be (written|made)"):
        claim(Path("/proc/self/fdinfo"), name)


def test_events_carry_both_clocks(tmp_path: Path) -> None:
    with claim(tmp_path) as run:
        run.event("saved", path="x", step=3)
        run.event("job-ended", exit=0)
        lines = [json.loads(line) for line in (run.path / "events.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["saved", "job-ended"]
    assert lines[0]["monotonic"] <= lines[1]["monotonic"]
    assert lines[0]["time"] > 1e9
    assert lines[0]["step"] == 3


def test_a_disk_that_takes_no_more_events_does_not_end_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with claim(tmp_path) as run:
        (run.path / "events.jsonl").unlink()
        run._events.close()  # type: ignore[union-attr]
        run._events = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
        run.event("saved")
        run.event("saved")


def test_a_new_run_in_an_old_directory_has_no_summary_yet(tmp_path: Path) -> None:
    with claim(tmp_path, "mine") as run:
        run.write_summary({"exit": 0, "loss": float("nan")})
        assert (run.path / "summary.json").read_text() == '{"exit":0,"loss":null}'
    with claim(tmp_path, "mine") as run:
        assert not (run.path / "summary.json").exists()


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_config_is_plain_json(tmp_path: Path) -> None:
    with claim(tmp_path) as run:
        assert msgspec.json.decode((run.path / "config.json").read_bytes())["args"] == ["--lr", "0.1"]


def test_the_last_step_is_that_of_the_last_whole_line(tmp_path: Path) -> None:
    with claim(tmp_path) as run:
        assert run.last_step() == 0
        (run.path / "metrics.jsonl").write_bytes(b'{"step": 28}\n{"step": 29, "loss": null}\n{"st')
        assert run.last_step() == 29
