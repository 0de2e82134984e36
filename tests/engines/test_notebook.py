"""A notebook, run by a real kernel: progress in a cell, and a function of it launched on workers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

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


def test_a_notebook_shows_progress_and_launches_a_function(tmp_path: Path) -> None:
    if not os.environ.get("SHOAL_TEST_ENGINES"):
        pytest.skip("notebooks are run by `make test-engines` alone")
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    cells = [NOTEBOOK, "train()", "print('ended with', shoal.run(train, workers=3).exit_code)"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    shown = ["".join(out.get("text", "") for out in cell.outputs) for cell in notebook.cells]
    assert "epoch 2/2 done" in shown[1]
    assert "trained 4 steps on 1" in shown[1]
    assert "trained 4 steps on 3" in shown[2]
    assert "ended with 0" in shown[2]
    assert "epoch 2/2 done" in shown[2]
