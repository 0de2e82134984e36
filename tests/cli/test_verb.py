from __future__ import annotations

import re
from typing import Any

import pytest
import typer
from invoking import Shoal
from typer.testing import CliRunner

from shoal.cli import app, load
from shoal.cli.verb import did_you_mean, paragraph
from shoal.errors import ConfigError, Interrupted, ScriptFailed


@pytest.mark.parametrize(
    ("args", "answer"),
    [
        (["rnu"], "No such command 'rnu'. Did you mean 'run'?"),
        (["verfy", "x.py"], "No such command 'verfy'. Did you mean 'verify'?"),
        (["--versoin"], "No such option: --versoin. Did you mean '--version'?"),
        (["run", "--stratgy", "ddp", "x.py"], "No such option: --stratgy. Did you mean '--strategy'?"),
        (["run", "--stratgy=ddp", "x.py"], "No such option: --stratgy. Did you mean '--strategy'?"),
        (["run", "--num-workers", "2", "x.py"], "No such option: --num-workers. Did you mean '--workers'?"),
        (["verify", "x.py", "-n", "2", "--step", "3"], "No such option: --step. Did you mean '--steps'?"),
        (["status", "--jsn"], "No such option: --jsn. Did you mean '--json'?"),
        (["run", "-strategy", "ddp", "x.py"], "No such option: -strategy. Did you mean '--strategy'?"),
        (["launch", "x.py"], "No such command 'launch'. Did you mean 'run'?"),
        (["train", "x.py"], "No such command 'train'. Did you mean 'run'?"),
        (["run", "--nproc-per-node", "2", "x.py"], "No such option: --nproc-per-node. Did you mean '-n'?"),
        (["run", "--nproc_per_node=2", "x.py"], "No such option: --nproc_per_node. Did you mean '-n'?"),
        (["run", "--num_processes", "2", "x.py"], "No such option: --num_processes. Did you mean '-n'?"),
        (["doctor", "-z"], "No such option: -z."),
    ],
)
def test_a_misspelt_verb_or_option_is_answered_with_what_was_meant(
    shoal: Shoal, args: list[str], answer: str
) -> None:
    result = shoal(*args)
    assert result.exit_code == 2
    assert answer in result.stderr


@pytest.mark.parametrize(
    "args",
    [
        ["run"],
        ["run", "-n", "two", "x.py"],
        ["run", "-n", "0", "x.py"],
        ["run", "--step-timeout", "soon", "x.py"],
        ["run", "--seed", "-1", "x.py"],
        ["verify", "x.py", "--steps", "0"],
        ["resume"],
        ["status", "one", "two"],
    ],
)
def test_what_cannot_be_parsed_is_a_usage_error_with_exit_code_2(shoal: Shoal, args: list[str]) -> None:
    result = shoal(*args)
    assert result.exit_code == 2
    assert "Usage: shoal" in result.stderr
    assert "Error: " in result.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["run", "nope.py"], ["nope.py", "does not exist"]),
        (["run", "--strategy", "ddpp", "x.py"], ["no strategy 'ddpp'", "Did you mean 'ddp'?"]),
        (["run", "-n", "2", "--strategy", "single", "x.py"], ["'single' is one process"]),
        (["run", "--grace", "-1", "x.py"], ["grace_s must be a positive number of seconds"]),
        (["verify", "nope.py", "-n", "2"], ["nope.py", "does not exist"]),
        (["status", "nope"], ["no run 'nope'"]),
        (["resume", "nope"], ["no run 'nope'"]),
    ],
)
def test_a_refusal_is_one_paragraph_on_stderr_without_traceback(
    shoal: Shoal, args: list[str], words: list[str]
) -> None:
    result = shoal(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr
    told = " ".join(result.stderr.split())
    assert all(word in told for word in words), told


def test_the_paragraph_is_wrapped_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    lines = paragraph(ConfigError("a word and " * 20)).splitlines()
    assert len(lines) > 4
    assert all(len(line) <= 40 for line in lines)


def test_lines_that_belong_to_a_message_stay_lines() -> None:
    assert paragraph(ConfigError("it died.\nIts last lines:\n  boom")).endswith("\nIts last lines:\n  boom")


def test_a_traceback_of_the_script_comes_first_and_as_it_is() -> None:
    error = ScriptFailed(rank=0, traceback='Traceback:\n  File "train.py", line 1\nValueError: ' + "x" * 300)
    assert paragraph(error).startswith('Traceback:\n  File "train.py", line 1\nValueError: xxx')


def test_leaving_when_asked_to_is_not_called_an_error() -> None:
    asked = Interrupted(signal_name="SIGINT", step=7, checkpoint="runs/x/checkpoints/step-000000007")
    assert paragraph(asked).startswith("stopped by SIGINT after step 7;")


def test_nothing_close_is_not_guessed() -> None:
    assert did_you_mean("zzz", ["ddp", "single"]) == ""


def test_version_is_shown() -> None:
    import shoal

    result = CliRunner().invoke(app, ["--version"], prog_name="shoal")
    assert result.exit_code == 0
    assert result.stdout == f"shoal {shoal.__version__}\n"


def split(*args: str) -> tuple[list[str], list[str]]:
    verb: Any = typer.main.get_command(load("verify"))
    return verb._split(typer.Context(verb), list(args))


@pytest.mark.parametrize(
    ("args", "ours", "scripts"),
    [
        (["-n", "3", "--tls", "x.py", "--lr", "0.1"], ["-n", "3", "--tls"], ["x.py", "--lr", "0.1"]),
        (
            ["x.py", "-n", "3", "--lr=0.1", "--strategy=ddp"],
            ["-n", "3", "--strategy=ddp"],
            ["x.py", "--lr=0.1"],
        ),
        (["-n", "3", "x.py", "--", "-n", "4"], ["-n", "3"], ["x.py", "-n", "4"]),
        (["x.py", "--stratgy", "ddp"], ["--stratgy"], ["x.py", "ddp"]),
        (["--stratgy", "x.py"], ["--stratgy"], ["x.py"]),
    ],
)
def test_what_follows_a_script_is_its_own_but_for_options_of_shoal(
    args: list[str], ours: list[str], scripts: list[str]
) -> None:
    assert split(*args) == (ours, scripts)


def test_help_of_run_is_in_groups(shoal: Shoal) -> None:
    lines = shoal("run", "--help").stdout.splitlines()
    headings = [line.rstrip(":") for line in lines if re.fullmatch(r"[A-Z][a-z]+:", line)]
    assert headings == ["Arguments", "Launch", "Strategy", "Data", "Recovery", "Hosts", "Testing"]
