"""A plain process takes its scratch directory away, and those of processes that could not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from shoal import system

MAKES = "import os, sys\nfrom shoal.runtime import scratch\nprint(scratch.directory('copies'), flush=True)\n"


def test_what_a_killed_process_left_goes_with_the_next_one(tmp_path: Path) -> None:
    def run(then: str) -> Path:
        done = subprocess.run(
            [sys.executable, "-c", MAKES + then],
            env={**os.environ, "TMPDIR": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        return Path(done.stdout.strip())

    left = run("os.kill(os.getpid(), 9)")
    assert left.is_dir()
    assert left.is_relative_to(tmp_path)
    alive = tmp_path / "shoal-scratch-alive"
    alive.mkdir()
    (alive / "owner").write_text(f"{os.getpid()} {system.start_of(os.getpid())}")
    run("")
    assert list(tmp_path.iterdir()) == [alive], "a living process keeps its own"
