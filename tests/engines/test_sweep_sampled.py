"""`shoal sweep --trials` with Optuna: lists, ranges of integers and logarithmic ones, sampled the same by one seed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import argparse, torch, shoal
from torch import nn
parser = argparse.ArgumentParser()
for name, kind in (("lr", float), ("hidden", int), ("activation", str)):
    parser.add_argument(f"--{name}", type=kind)
given = parser.parse_args()
torch.manual_seed(0)
x = torch.randn(64, 4)
model = nn.Sequential(nn.Linear(4, given.hidden), getattr(nn, given.activation)(), nn.Linear(given.hidden, 1))
trainer = shoal.Trainer(model, loss="mse", optimizer="sgd", lr=given.lr)
trainer.fit(shoal.Dataset.from_arrays((x, x.sum(1, keepdim=True))).batch(16), epochs=1)
"""

WORDS = (
    *("--arg", "lr=log:1e-4..1e-1", "--arg", "hidden=2..9", "--arg", "activation=ReLU,Tanh"),
    *("--minimize", "loss", "--trials", "3", "--", "train.py"),
)


def swept(folder: Path) -> dict[str, Any]:
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "sweep", *WORDS],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((folder / "runs/sweep/sweep.json").read_text())
    return found


def test_values_are_sampled_within_lists_and_ranges_and_by_the_seed(tmp_path: Path) -> None:
    if not os.environ.get("SHOAL_TEST_ENGINES"):
        pytest.skip("Optuna is installed by `make test-engines` alone")
    pytest.importorskip("optuna")
    found = swept(tmp_path / "one")
    trials = [trial["values"] for trial in found["trials"]]
    assert len(trials) == 3
    assert len({trial["lr"] for trial in trials}) == 3
    for trial in trials:
        assert 1e-4 <= float(trial["lr"]) <= 0.1
        assert int(trial["hidden"]) in range(2, 10)
        assert trial["activation"] in ("ReLU", "Tanh")
    objectives = [trial["objective"] for trial in found["trials"]]
    assert objectives[found["best"]] == min(objectives)
    again = swept(tmp_path / "again")
    assert [trial["values"] for trial in again["trials"]] == trials
