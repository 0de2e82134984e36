from __future__ import annotations

from pathlib import Path

import pytest
from invoking import Command


def complete(command: Command, words: str) -> list[str]:
    """What bash would offer for the last word of `words`."""
    typed = words.split(" ")
    answer = command(_SHOAL_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(len(typed) - 1))
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_gives_the_shell_a_script(command: Command, shell: str) -> None:
    answer = command(_SHOAL_COMPLETE=f"source_{shell}")
    assert answer.returncode == 0
    assert f"complete_{shell}" in answer.stdout
    assert "shoal" in answer.stdout


def test_verbs_options_and_strategies_complete(command: Command) -> None:
    assert complete(command, "shoal res") == ["resume"]
    assert complete(command, "shoal run --st") == ["--strategy", "--staleness-lr", "--step-timeout"]
    assert complete(command, "shoal run --strategy ")[:3] == ["single", "ddp", "fsdp"]
    assert complete(command, "shoal verify x.py --strategy dd") == ["ddp"]


def test_names_of_runs_complete(command: Command, tmp_path: Path) -> None:
    for name in ("click-1", "click-2", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.json").write_text("{}")
    (tmp_path / "runs" / "click-stray").mkdir()
    assert complete(command, "shoal status click") == ["click-1", "click-2"]
    assert complete(command, "shoal resume o") == ["other"]
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    assert complete(command, "shoal resume --run-dir elsewhere o") == ["other"]
    assert complete(command, "shoal resume o") == []
