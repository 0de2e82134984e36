"""A script under `launch` finds what it would find under python, and what a job adds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from launched import Launched

Launch = Callable[..., Launched]


def test_script_sees_the_world_as_under_python(launch_script: Launch, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("value = 'found'\n")
    done = launch_script(
        """
        import os, sys, beside
        print(__name__, sys.argv[1:], beside.value, os.getcwd(), __file__)
        """,
        args=("--lr", "0.1"),
    )
    assert done.stdout == f"__main__ ['--lr', '0.1'] found {tmp_path} {tmp_path / 'script.py'}\n"
    assert done.exit_code == 0
    assert done.error is None
