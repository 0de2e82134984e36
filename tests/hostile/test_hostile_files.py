"""Files that another user may have planted in /tmp or in a run directory: none is read, followed or waited for."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from other_user import UID, as_root, run_as_other

from shoal.cluster.launch.run_directory import RunDirectory, is_alive, read_config
from shoal.cluster.supervisor.output import Log
from shoal.config.launch import RunConfig, Versions
from shoal.errors import RunDirectoryError
from shoal.observe import runs
from shoal.runtime import scratch

CONFIG = RunConfig(
    script="/here/train.py",
    args=[],
    cwd="/here",
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


def claim(base: Path, name: str = "run") -> RunDirectory:
    return RunDirectory.claim(base, name=name, config=CONFIG)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


# ---- scratch ------------------------------------------------------------------------------------


@pytest.mark.parametrize("planted", ["fifo", "endless", "text", "loop", "directory"])
def test_scratch_reads_no_planted_owner_file(tmp_path: Path, planted: str) -> None:
    place = tmp_path / "shoal-scratch-planted"
    place.mkdir()
    owner = place / "owner"
    match planted:
        case "fifo":
            os.mkfifo(owner)
        case "endless":
            owner.symlink_to("/dev/zero")
        case "text":
            owner.write_text("² 5")
        case "loop":
            owner.symlink_to(owner)
        case "directory":
            owner.mkdir()
    scratch._sweep(tmp_path)
    assert place.is_dir()


def test_scratch_does_not_follow_a_link_to_a_directory(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "owner").write_text("1 0")  # of a process that is not there any more
    places = tmp_path / "tmp"
    places.mkdir()
    (places / "shoal-scratch-link").symlink_to(kept)
    scratch._sweep(places)
    assert (kept / "owner").exists()


@as_root
def test_scratch_of_another_user_stays(tmp_path: Path) -> None:
    place = tmp_path / "shoal-scratch-other"
    place.mkdir()
    (place / "owner").write_text("1 0")
    os.chown(place, UID, UID)
    scratch._sweep(tmp_path)
    assert place.is_dir()


# ---- run directories ----------------------------------------------------------------------------


def test_a_run_directory_is_closed_to_others(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with claim(tmp_path) as run:
            Log(run.log_path(0)).close()
            assert mode(run.path) == 0o700
            files = ("lock", "config.json", "events.jsonl", "logs/worker-0.log")
            assert {mode(run.path / name) for name in files} == {0o600}
    finally:
        os.umask(before)


@as_root
def test_another_user_neither_reads_nor_locks_a_run(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        path.chmod(0o755)
    with claim(tmp_path) as run:
        for name in ("lock", "config.json"):
            assert run_as_other(lambda name=name: os.open(run.path / name, os.O_RDONLY)) == 1
        run.path.chmod(0o755)  # as in runs of earlier versions
        for name in ("lock", "config.json"):
            assert run_as_other(lambda name=name: os.open(run.path / name, os.O_RDONLY)) == 1


def test_a_run_of_an_earlier_version_is_closed_when_it_is_resumed(tmp_path: Path) -> None:
    with claim(tmp_path) as run:
        path = run.path
    for each in (path, path / "lock", path / "logs"):
        each.chmod(0o755)
    with RunDirectory.reopen(path, CONFIG):
        assert (mode(path), mode(path / "lock"), mode(path / "logs")) == (0o700, 0o600, 0o700)


@as_root
@pytest.mark.parametrize("what", ["directory", "link", "config"])
def test_a_foreign_run_is_refused(tmp_path: Path, what: str) -> None:
    with claim(tmp_path) as run:
        path = run.path
    match what:
        case "directory":
            os.chown(path, UID, UID)
        case "link":
            path = tmp_path / "link"
            path.symlink_to(run.path)
            os.chown(path, UID, UID, follow_symlinks=False)
        case "config":
            os.chown(path / "config.json", UID, UID)
    with pytest.raises(RunDirectoryError, match="user 65534"):
        RunDirectory.reopen(path, CONFIG)
    with pytest.raises(RunDirectoryError, match="user 65534"):
        claim(tmp_path, path.name)


@as_root
def test_an_empty_directory_of_another_user_is_not_claimed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    os.chown(tmp_path / "run", UID, UID)
    with pytest.raises(RunDirectoryError, match="belongs to user 65534"):
        claim(tmp_path)


@pytest.mark.parametrize("name", ["lock", "logs"])
def test_a_planted_link_in_a_run_directory_is_not_followed(tmp_path: Path, name: str) -> None:
    target = tmp_path / "target"
    target.mkdir() if name == "logs" else target.write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(target)
    with pytest.raises(RunDirectoryError, match="cannot be written"):
        claim(tmp_path)
    assert target.is_dir() if name == "logs" else target.read_text() == "mine"


def test_a_new_file_replaces_a_planted_one(tmp_path: Path) -> None:
    with claim(tmp_path) as run:
        target = tmp_path / "target"
        target.write_text("mine")
        (run.path / ".summary.json.new").symlink_to(target)
        run.write_summary({"exit": 0})
        assert target.read_text() == "mine"
        assert runs.read_json(run.path / "summary.json") == {"exit": 0}


def test_status_does_not_wait_for_a_planted_fifo(tmp_path: Path) -> None:
    for name in ("config.json", "summary.json", "metrics.jsonl", "lock"):
        os.mkfifo(tmp_path / name)
    assert runs.read(tmp_path).state is runs.RunState.DEAD
    assert not is_alive(tmp_path)
    with pytest.raises(RunDirectoryError, match=r"config\.json cannot be read: .*no regular file"):
        read_config(tmp_path)
