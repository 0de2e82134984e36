from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

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


def claim(
    base: Path, name: str | None = None, script: str = "/work/train.py", **options: bool
) -> RunDirectory:
    return RunDirectory.claim(base, name=name, config=config(script), **options)


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


@pytest.mark.parametrize("option", ["again", "overwrite", None])
def test_a_live_run_is_refused_and_an_ended_one_is_gone_on_with(tmp_path: Path, option: str | None) -> None:
    with claim(tmp_path, "mine") as run:
        assert is_alive(run.path)
        with pytest.raises(RunDirectoryError, match="still alive") as refused:
            claim(tmp_path, "mine", **({option: True} if option else {}))
        with pytest.raises(RunDirectoryError, match="still alive"):
            RunDirectory.reopen(run.path, config())
        assert refused.value.path == str(run.path)
    assert not is_alive(run.path)
    with RunDirectory.reopen(run.path, config()):
        pass


@pytest.mark.parametrize("script", ["/work/train.py", "/work/other.py"])
def test_a_name_is_one_run(tmp_path: Path, script: str) -> None:
    with claim(tmp_path, "mine"):
        pass
    (tmp_path / "mine.1").mkdir()
    before = (tmp_path / "mine" / "config.json").read_bytes()
    with pytest.raises(
        RunDirectoryError, match=r"train\.py --lr 0\.1, started 19.*keeps it as mine\.2"
    ) as refused:
        claim(tmp_path, "mine", script=script)
    assert refused.value.exit_code == 2
    assert (tmp_path / "mine" / "config.json").read_bytes() == before


def test_a_name_is_used_again_with_the_former_run_kept_aside(tmp_path: Path) -> None:
    for number in range(3):
        with claim(tmp_path, "mine", again=True) as run:
            (run.path / "metrics.jsonl").write_text(str(number))
    assert sorted(os.listdir(tmp_path)) == ["mine", "mine.1", "mine.2"]
    written = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("mine.1", "mine.2", "mine")]
    assert written == ["0", "1", "2"]


def test_a_name_is_used_again_with_the_former_run_removed(tmp_path: Path) -> None:
    with claim(tmp_path, "mine") as run:
        (run.path / "metrics.jsonl").touch()
    with claim(tmp_path, "mine", overwrite=True) as run:
        assert not (run.path / "metrics.jsonl").exists()
    assert os.listdir(tmp_path) == ["mine"]


@pytest.mark.parametrize("option", ["again", "overwrite"])
def test_a_folder_that_is_no_run_is_neither_moved_nor_removed(tmp_path: Path, option: str) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        claim(tmp_path, "photos", **{option: True})
    assert os.listdir(tmp_path / "photos") == ["cat.jpg"]


@pytest.mark.parametrize("other", [{"script": "/work/other.py"}, {"args": ["--lr", "0.2"]}])
def test_a_run_is_gone_on_with_by_its_own_script_and_arguments_alone(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    with claim(tmp_path, "mine") as run:
        pass
    before = (run.path / "config.json").read_bytes()
    with pytest.raises(RunDirectoryError, match="another job"):
        RunDirectory.reopen(run.path, replace(config(), **other))
    assert (run.path / "config.json").read_bytes() == before


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


def test_a_run_that_goes_on_has_no_summary_yet(tmp_path: Path) -> None:
    with claim(tmp_path, "mine") as run:
        run.write_summary({"exit": 0, "loss": float("nan")})
        assert (run.path / "summary.json").read_text() == '{"exit":0,"loss":null}'
    with RunDirectory.reopen(run.path, config()) as run:
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
