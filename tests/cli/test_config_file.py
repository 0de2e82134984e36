"""Options of `shoal run` from a file: it beats defaults, the command line beats it, and what is wrong in it is named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from invoking import Shoal

from shoal.cluster.launch import api
from shoal.cluster.launch.api import LaunchConfig, RunResult


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[LaunchConfig]:
    """What reaches `launch`, in place of a job."""
    configs: list[LaunchConfig] = []

    def launch(config: LaunchConfig, **_: Any) -> RunResult:
        configs.append(config)
        return RunResult(exit_code=0, run_dir=Path("runs/x"))

    monkeypatch.setattr(api, "launch", launch)
    return configs


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run.toml"


def test_the_command_line_beats_the_file_and_the_file_beats_the_default(
    shoal: Shoal, launched: list[LaunchConfig], file: Path
) -> None:
    file.write_text(
        'script = "train.py"\nargs = ["--lr", 0.1]\nworkers = 4\nstep-timeout = 9.5\nstrategy = "ddp"\nbatchnorm = "sync"\n'
    )
    result = shoal("run", "--config", str(file), "-n", "3", "--strategy", "fsdp")
    assert result.exit_code == 0, result.output
    (config,) = launched
    assert (config.script, config.args) == ("train.py", ("--lr", "0.1"))
    assert (config.workers, config.strategy, config.step_timeout_s) == (3, "fsdp", 9.5)
    assert config.batchnorm == "sync"
    origins = {name: option.origin for name, option in config.options.items()}
    assert origins["workers"] == origins["strategy"] == "command line"
    assert origins["step_timeout"] == origins["batchnorm"] == str(file)
    assert origins["script"] == origins["args"] == str(file)
    assert config.options["args"].value == "--lr 0.1"
    assert origins["grace"] == "default"
    assert config.options["workers"].value == 3


def test_arguments_of_the_file_belong_to_its_script(
    shoal: Shoal, launched: list[LaunchConfig], file: Path
) -> None:
    file.write_text('script = "train.py"\nargs = ["--lr", "0.1"]\n')
    for words in (["train.py", "--lr", "1"], ["other.py"], ["train.py"]):
        assert shoal("run", "--config", str(file), *words).exit_code == 0
    assert [config.args for config in launched] == [("--lr", "1"), (), ("--lr", "0.1")]
    said = [(config.options["args"].value, config.options["args"].origin) for config in launched]
    assert said == [("--lr 1", "command line"), (None, "default"), ("--lr 0.1", str(file))]


def test_hosts_in_a_list_and_resources_in_a_table(
    shoal: Shoal, launched: list[LaunchConfig], file: Path
) -> None:
    file.write_text('script = "t.py"\nworkers = 2\nhosts = ["a", "b"]\nbind = "10.0.0.1"\n')
    result = shoal("run", "--config", str(file))
    assert result.exit_code == 0, result.output
    assert launched[0].hosts is not None
    assert launched[0].hosts.names == ("a", "b")
    file.write_text(
        'script = "t.py"\non = "mpi"\n[resources]\nworker = { cpus = 2, memory = 4 }\nserver = { cpus = 1 }\n'
    )
    shoal("run", "--config", str(file))
    hosts = launched[-1].hosts
    if hosts is not None and hosts.on:  # where mpirun is installed
        assert hosts.worker_resources.cpus == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("wokers = 4\n", "'wokers', which is no option.* Did you mean 'workers'"),
        ("n = 4\n", "'n', which is no option.* Did you mean 'workers'"),
        ('workers = "four"\n', "workers = 'four'"),
        ("workers = 0\n", "workers = 0"),
        ("workers = true\n", "workers = true, and --workers takes a value"),
        ("strategy = false\n", "--strategy takes a value"),
        ("workers = 4\nworkers = 3\n", "is no TOML"),
        ("step-timeout = 3\nstep_timeout = 4\n", "twice"),
        ("args = 3\n", "a list of words"),
        ("[strategy]\nname = 1\n", r"a table \[strategy\]"),
        ("again = true\noverwrite = true\nname = 'x'\n", "--again.*--overwrite"),
        ("workers 4", "is no TOML"),
    ],
)
def test_what_is_wrong_in_the_file_is_named_and_nothing_starts(
    shoal: Shoal, file: Path, text: str, said: str
) -> None:
    file.write_text(text)
    result = shoal("run", "--config", str(file), "train.py")
    assert result.exit_code != 0
    assert re.search(said, " ".join(result.output.split())), result.output
    assert not (file.parent / "runs").exists()


def test_the_file_of_the_guide_runs_as_it_is_written(
    shoal: Shoal, launched: list[LaunchConfig], file: Path
) -> None:
    guide = (Path(__file__).parents[2] / "docs/guides/running.md").read_text()
    [block] = re.findall(r"```toml\n(.*?)```", guide, re.S)
    file.write_text(block)
    result = shoal("run", "--config", str(file))
    assert result.exit_code == 0, result.output
    assert (launched[0].strategy, launched[0].num_servers, launched[0].args) == ("ps", 2, ("--lr", "0.001"))


def test_a_file_that_is_not_there_is_named(shoal: Shoal) -> None:
    result = shoal("run", "--config", "nowhere.toml", "train.py")
    assert result.exit_code != 0
    assert "nowhere.toml of --config cannot be read: No such file" in " ".join(result.output.split())


def test_init_writes_a_job_that_runs_and_never_replaces_a_file(
    shoal: Shoal, launched: list[LaunchConfig], tmp_path: Path
) -> None:
    assert shoal("init", "click").exit_code == 0
    compile((tmp_path / "click/train.py").read_text(), "train.py", "exec")
    assert shoal("run", "--config", "click/run.toml").exit_code == 0
    assert (launched[0].script, launched[0].workers) == ("train.py", 2)
    assert "Nothing was written" in " ".join(shoal("init", "click").output.split())
