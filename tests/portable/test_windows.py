"""Windows is refused in one sentence, by the import and by the command."""

from __future__ import annotations

import subprocess
import sys

import pytest

SENTENCE = "ImportError: shoal runs on Linux and macOS, and this is Windows: use it inside WSL 2 (`wsl --install`).\n"


@pytest.mark.parametrize("asked", ["import shoal", "from shoal.cli import main; main()"])
def test_windows_is_refused_in_one_sentence(asked: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.platform = 'win32'; {asked}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, SENTENCE)
