"""Starting in other ways than `shoal run script.py`: a module, a debugger on one rank. tests/engines has notebooks."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

from launched import Launched

Launch = Callable[..., Launched]


def test_a_setting_error_names_the_line_of_the_script(launch_script: Launch) -> None:
    script = """
        import shoal, torch
        from torch import nn

        shoal.Trainer(nn.Linear(2, 1), loss=nn.MSELoss(), precision="float7")
    """
    done = launch_script(script, workers=2)
    assert done.result.exit_code == 2
    assert 'line 5: shoal.Trainer(nn.Linear(2, 1), loss=nn.MSELoss(), precision="float7")' in str(
        done.result.error
    )


def test_a_module_runs_as_by_python_m_and_a_debugger_stops_the_chosen_rank(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "settings.py").write_text("ANSWER = 42\n")
    (package / "train.py").write_text(
        textwrap.dedent(
            """
            import shoal
            from .settings import ANSWER

            if shoal.rank() == 1:
                breakpoint()
            print("rank", shoal.rank(), "of", shoal.num_workers(), "knows", ANSWER, "as", __name__)
            """
        )
    )
    command = [sys.executable, "-m", "shoal", "run", "-n", "2", "--debug-rank", "1", "-m", "package.train"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        input="p ANSWER + 1000\nc\n",
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONBREAKPOINT": ""},
    )
    assert done.returncode == 0, done.stderr
    assert "(Pdb) 1042" in done.stdout
    assert "rank 1 of 2 knows 42 as __main__" in done.stdout
    assert "rank 0 of 2" not in done.stdout
