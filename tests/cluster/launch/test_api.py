from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest

from shoal.cluster.launch.api import LaunchConfig, launch, resume_config
from shoal.errors import ConfigError, RunDirectoryError, ScriptNotFound


@pytest.mark.parametrize(
    "bad",
    [
        {"workers": 0},
        {"workers": -1},
        {"workers": 100_000},
        {"strategy": "single", "workers": 2},
        {"strategy": "fsdpp"},
        {"grace_s": 0},
        {"step_timeout_s": float("nan")},
        {"join_timeout_s": float("inf")},
        {"seed": -1},
        {"name": "a/b"},
        {"name": ""},
        {"name": ".."},
        {"args": ("caf\udce9",)},
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused_at_birth(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        LaunchConfig(script="train.py", **bad)
    assert refused.value.exit_code == 2


@pytest.mark.parametrize("typed", ["trian.py", "train", "."])
def test_a_script_that_is_no_file_is_refused(
    typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    with pytest.raises(ScriptNotFound) as refused:
        launch(LaunchConfig(script=typed))
    assert refused.value.guess == (None if typed == "." else "train.py")
    assert ("is a folder" if typed == "." else "does not exist") in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_folder_that_is_gone_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(ConfigError, match="does not exist"):
        launch(LaunchConfig(script=str(script), cwd=str(tmp_path / "gone")))


def test_more_workers_than_open_files_allow_are_refused(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Room for what launch itself opens, above what this process holds already; too little for 60 workers.
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 64, hard))
    try:
        with pytest.raises(ConfigError, match="ulimit -n"):
            launch(LaunchConfig(script=str(script), workers=60, run_dir=str(tmp_path / "runs")))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not (tmp_path / "runs").exists()


def test_only_a_run_can_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="there is no run"):
        resume_config(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="name of the run"):
        launch(LaunchConfig(script=__file__, resume=True))
