"""Tests that failed are run once more by CI, but not where others have not run at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FLAKY = """
from pathlib import Path

def test_flaky():
    before = Path("ran").exists()
    Path("ran").touch()
    assert before

def test_sound():
    pass
"""


def run_twice(folder: Path, root: Path, *options: str) -> tuple[int, str]:
    """Exit code and output of `.ci/again` after a `make test` that failed, in a folder with tests of its own."""
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -q\n")
    (folder / "Makefile").write_text(f"test:\n\t{sys.executable} -m pytest {' '.join(options)}\n")
    (folder / "test_flaky.py").write_text(FLAKY)
    with (folder / "report").open("w") as report:
        assert subprocess.run(
            ["make", "test"], cwd=folder, stdout=report, stderr=report, check=False
        ).returncode
    command = [root / ".ci/again", "report", sys.executable, "-m", "pytest"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_a_flaky_test_passes_at_the_second_run_and_is_named(tmp_path: Path, root: Path) -> None:
    code, said = run_twice(tmp_path, root)
    assert code == 0
    assert "passed only at the second run: test_flaky.py::test_flaky\n" in said
    assert "test_sound" not in said


def test_a_test_that_fails_twice_fails(tmp_path: Path, root: Path) -> None:
    (tmp_path / "test_broken.py").write_text("def test_broken():\n    assert False\n")
    assert run_twice(tmp_path, root)[0] == 1


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("import no_such_module\n", []),
        ("import no_such_module\n", ["-n", "1"]),
        ("import os\n\ndef test_crash():\n    os._exit(1)\n", ["-n", "1", "--max-worker-restart", "0"]),
    ],
)
def test_nothing_is_run_again_where_pytest_was_interrupted(
    tmp_path: Path, root: Path, text: str, options: list[str]
) -> None:
    (tmp_path / "test_other.py").write_text(text)
    assert run_twice(tmp_path, root, *options) == (1, "some tests may not have run: none is run again\n")
