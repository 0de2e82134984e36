"""`--strategy mapreduce` on processes of this machine: the average of its tasks, and the same bits where some are killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

SCRIPT = Path(__file__).parent / "scripts" / "rounds.py"
ROUNDS = ((0, 3), (3, 4))
"""First step and end of each: --sync-every 3 in an epoch of 4 steps."""


def _run(folder: Path, name: str, *options: str, args: tuple[str, ...] = ()) -> dict[str, Any]:
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "shoal",
                "run",
                "-n",
                "2",
                "--strategy",
                "mapreduce",
                "--sync-every",
                "3",
            ),
            *("--seed", "0", "--name", name, *options, str(SCRIPT), str(folder / name), *args),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = torch.load(folder / name)
    return found


def _reference() -> dict[str, torch.Tensor]:
    """The same rounds in plain PyTorch: an Adam per part, models averaged by samples."""
    torch.manual_seed(0)
    x = torch.randn(20, 4)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    common = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    states: dict[int, Any] = {}
    for begin, end in ROUNDS:
        trained, counts = [], []
        for part, (first, last) in enumerate(((0, 2), (2, 5))):  # of the five samples of a batch
            model.load_state_dict(common)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
            if part in states:
                optimizer.load_state_dict(states[part])
            for step in range(begin, end):
                inputs = x[step * 5 + first : step * 5 + last]
                optimizer.zero_grad()
                nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True)).backward()
                optimizer.step()
            states[part] = optimizer.state_dict()
            trained.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
            counts.append((last - first) * (end - begin))
        common = {
            name: sum(each[name] * count for each, count in zip(trained, counts, strict=True)) / sum(counts)
            for name in common
        }
    return common


@pytest.mark.timeout(400)
def test_rounds_are_those_of_plain_pytorch_and_kills_of_task_and_driver_change_no_bit(tmp_path: Path) -> None:
    calm = _run(tmp_path, "calm")
    for name, tensor in _reference().items():
        torch.testing.assert_close(calm["weights"][name], tensor, rtol=1e-5, atol=1e-6)
    assert (calm["step"], calm["workers"]) == (4, 2)
    hit = _run(tmp_path, "hit", "--faults", "kill worker-0 at step 4", args=("kill",))
    assert (tmp_path / "hit.hit").exists()
    assert all(torch.equal(calm["weights"][name], hit["weights"][name]) for name in calm["weights"])
    assert (hit["loss"], hit["evaluated"]) == (calm["loss"], calm["evaluated"])
    log = (tmp_path / "runs/hit/events.jsonl").read_text()
    assert '"worker-replaced"' in log
