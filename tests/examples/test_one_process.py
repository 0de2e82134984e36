"""Every example under plain python."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from expectations import EXAMPLES, FOLDER, Example


def test_every_example_is_tried() -> None:
    assert {example.name for example in EXAMPLES} == {path.stem for path in FOLDER.glob("*.py")}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_the_example_learns(
    example: Example, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(example.script), *example.args])
    runpy.run_path(str(example.script), run_name="__main__")
    example.check(capsys.readouterr().out)


def test_an_example_runs_from_the_command_line_and_leaves_its_model(tmp_path: Path) -> None:
    example = EXAMPLES[0]
    ran = subprocess.run(
        [sys.executable, str(example.script), *example.args],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    example.check(ran.stdout)
    assert {path.name for path in (tmp_path / "out/clicks").iterdir()} == {
        "model.safetensors",
        "manifest.json",
    }
