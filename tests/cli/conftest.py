"""The command line in this process, and as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from invoking import Command, Shoal
from typer.testing import CliRunner, Result

from shoal.cli import app


@pytest.fixture
def shoal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shoal:
    """`shoal(*args)`: parsed and run in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*args: str) -> Result:
        return CliRunner().invoke(app, args, prog_name="shoal")

    return run


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """`command(*args)`: a real process in an empty folder, with an environment of its own where asked."""

    def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "shoal", *args],
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "100", **env},
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )

    return run
