"""Starting in other ways than `shoal run script.py`: a module, a function of a notebook, a debugger on one rank."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
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


NOTEBOOK = """
import torch, shoal
from torch import nn

RATE = 0.1

def build():
    torch.manual_seed(0)
    return nn.Linear(4, 1)

def train():
    data = shoal.Dataset.from_arrays((torch.ones(12, 4), torch.ones(12, 1)))
    trainer = shoal.Trainer(build(), loss=nn.MSELoss(), optimizer=lambda params: torch.optim.SGD(params, lr=RATE))
    trainer.fit(data.batch(6), epochs=2)
    if shoal.rank() == 0:
        print("trained", trainer.step, "steps on", shoal.num_workers())
"""


@pytest.mark.slow
def test_a_notebook_shows_progress_and_launches_a_function(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    cells = [NOTEBOOK, "train()", "shoal.run(train, workers=2).summary['exit_code']"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(notebook, timeout=100, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    shown = ["".join(out.get("text", "") for out in cell.outputs) for cell in notebook.cells]
    assert "epoch 2/2 done" in shown[1]
    assert "trained 4 steps on 1" in shown[1]
    assert "trained 4 steps on 2" in shown[2]
    assert "epoch 2/2 done" in shown[2]
