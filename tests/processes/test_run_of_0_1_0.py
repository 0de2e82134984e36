"""A run directory written by shoal 0.1.0, before the tree was laid out anew, is read and resumed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launched import Launched
from safetensors.torch import load_file

from shoal.cluster.launch.api import resume_config
from whole_matrix import matrix_only

RECORDED = Path(__file__).parents[1] / "fixtures" / "run_0_1_0"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The recorded run as it lay on its disk: killed after the checkpoint of step 10 of 12."""
    run = tmp_path / "runs" / "before"
    shutil.copytree(RECORDED, run, ignore=shutil.ignore_patterns("final.safetensors", "train.py"))
    shutil.copy(RECORDED / "train.py", tmp_path / "train.py")
    config = json.loads((run / "config.json").read_text())
    config |= {"script": str(tmp_path / "train.py"), "cwd": str(tmp_path)}
    (run / "config.json").write_text(json.dumps(config))
    return run


def test_status_and_ledger_read_a_run_of_0_1_0(run: Path) -> None:
    def status(*options: str) -> str:
        command = [sys.executable, "-m", "shoal", "status", *options, str(run)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert "ddp" in status()
    assert "epoch 2: all 96 samples trained exactly once" in status("--ledger")


@pytest.mark.parametrize("workers", [3, *matrix_only(2)])
def test_a_run_of_0_1_0_resumes_to_the_weights_it_ended_with(
    launch_script: Callable[..., Launched], run: Path, tmp_path: Path, workers: int
) -> None:
    config = resume_config(run, workers=workers)
    done = launch_script(
        Path(config.script),
        workers=workers,
        strategy=config.strategy,
        name="before",
        resume=True,
        seed=config.seed,
    )
    assert done.exit_code == 0, done.stderr
    assert "step 10," in done.stderr
    ended, expected = (
        load_file(tmp_path / "out/model/model.safetensors"),
        load_file(RECORDED / "final.safetensors"),
    )
    assert ended.keys() == expected.keys()
    if (
        workers == 2
    ):  # BatchNorm normalises per worker: another number of workers is another model after step 10
        for name, tensor in expected.items():
            torch.testing.assert_close(ended[name], tensor, rtol=1e-5, atol=1e-6)
