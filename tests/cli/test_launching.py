"""Configs that `run`, `resume` and `verify` make of their arguments."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from invoking import Shoal

from shoal.cli.run import run
from shoal.cluster.launch import api
from shoal.cluster.launch.api import LaunchConfig, RunResult
from shoal.config.parallel_options import ParallelOptions, as_typed
from shoal.errors import ScriptFailed


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[LaunchConfig]:
    """What reaches `launch`, in place of a job."""
    configs: list[LaunchConfig] = []

    def launch(config: LaunchConfig, **_: Any) -> RunResult:
        configs.append(config)
        return RunResult(exit_code=0, run_dir=Path("runs/x"))

    monkeypatch.setattr(api, "launch", launch)
    return configs


def test_everything_after_the_script_is_the_scripts(shoal: Shoal, launched: list[LaunchConfig]) -> None:
    result = shoal("run", "-n", "3", "train.py", "--lr", "0.1", "-x", "--", "--help", "data")
    assert result.exit_code == 0
    (config,) = launched
    assert config.script == "train.py"
    assert config.args == ("--lr", "0.1", "-x", "--", "--help", "data")
    assert config.workers == 3


def test_every_option_of_run_reaches_the_launch(shoal: Shoal, launched: list[LaunchConfig]) -> None:
    given = "-n 4 --strategy ddp --name click --run-dir out --seed 7 --step-timeout 9.5 --grace 2 --max-restarts 5 t.py"
    assert shoal("run", *given.split()).exit_code == 0
    assert launched == [
        LaunchConfig(
            script="t.py",
            workers=4,
            strategy="ddp",
            name="click",
            run_dir="out",
            seed=7,
            step_timeout_s=9.5,
            max_restarts=5,
            grace_s=2.0,
        )
    ]


def test_every_option_beside_a_strategy_is_a_flag_of_run() -> None:
    shown = {name: parameter.default for name, parameter in inspect.signature(run).parameters.items()}
    for option in fields(ParallelOptions):
        # What "auto" came to is measured, and tasks are the workers of mapreduce.
        if option.name not in ("exchange_rule", "tasks", "tasks_on"):
            assert shown[option.name] == option.default


def test_options_beside_a_strategy_reach_the_launch(shoal: Shoal, launched: list[LaunchConfig]) -> None:
    said = "--exchange ring --compress bf16 --device cpu --soft-placement --sync-every 4 --shard equal --checkpoint-activations"
    assert shoal("run", "-n", "3", *said.split(), "t.py").exit_code == 0
    (config,) = launched
    assert sorted(as_typed(config).split()) == sorted(said.split())


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_resume_says_when_there_is_nothing_to_go_on_from(
    shoal: Shoal, launched: list[LaunchConfig], monkeypatch: pytest.MonkeyPatch, has_checkpoint: bool
) -> None:
    run = Path("runs/click")
    (run / "checkpoints/step-000000004").mkdir(parents=True)
    (run / "config.json").touch()
    monkeypatch.setattr(api, "resume_config", lambda path, **_: LaunchConfig(script="t.py", resume=True))
    if has_checkpoint:
        (run / "checkpoints/step-000000004/manifest.json").touch()
    result = shoal("resume", "click")
    assert result.exit_code == 0
    assert len(launched) == 1
    assert ("runs/click holds no checkpoint" in result.stderr) != has_checkpoint


def test_what_is_not_given_is_left_to_the_launch_config(shoal: Shoal, launched: list[LaunchConfig]) -> None:
    assert shoal("run", "t.py").exit_code == 0
    assert launched == [LaunchConfig(script="t.py")]


def test_defaults_in_the_help_are_the_launch_configs() -> None:
    shown = {name: parameter.default for name, parameter in inspect.signature(run).parameters.items()}
    config = LaunchConfig(script="t.py")
    assert shown["workers"] == config.workers
    assert shown["step_timeout"] == config.step_timeout_s
    assert shown["grace"] == config.grace_s
    assert shown["max_restarts"] == config.max_restarts
    assert str(shown["run_dir"]) == config.run_dir
    assert (shown["strategy"], shown["name"], shown["seed"]) == (config.strategy, config.name, config.seed)


def test_workers_asked_for_behind_the_script_are_noted(shoal: Shoal, launched: list[LaunchConfig]) -> None:
    assert "-n stands after t.py" in shoal("run", "t.py", "-n", "4").stderr
    assert shoal("run", "-n", "2", "t.py", "-n", "4").stderr == ""
    assert shoal("run", "t.py", "--seed", "4").stderr == ""


def test_a_failed_job_shows_its_error_once_and_gives_its_own_exit_code(
    shoal: Shoal, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = ScriptFailed(rank=1, traceback="Traceback ...\nSystemExit: 7", num_workers=2)
    monkeypatch.setattr(
        api, "launch", lambda *_, **__: RunResult(exit_code=7, run_dir=Path("x"), error=error)
    )
    result = shoal("run", "t.py")
    assert result.exit_code == 7
    assert result.stderr.count("SystemExit: 7") == 1
