"""A shoal script that another launcher started several times over: one job of its world, or refused at its first call of shoal."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launched import Launched

TRAINS = """
import torch, shoal
print("imported", flush=True)
trainer = shoal.Trainer(torch.nn.Linear(2, 1), loss=torch.nn.functional.mse_loss)
print("made", shoal.num_workers())
"""


def run(command: list[str], folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_script_that_torchrun_starts_is_one_job_of_its_world(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    ran = run(["-m", "torch.distributed.run", "--nproc-per-node=2", "train.py"], tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("made 2") == 1  # one process speaks for both
    assert "2 workers, ddp" in ran.stderr
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["train-1"]


def test_a_script_with_a_process_group_of_another_launcher_is_refused(tmp_path: Path) -> None:
    group = "torch.distributed.init_process_group(store=torch.distributed.HashStore(), rank=0, world_size=1)"
    (tmp_path / "train.py").write_text(TRAINS.replace('print("imported"', f'{group}; print("imported"'))
    ran = run(["train.py"], tmp_path, RANK="0", WORLD_SIZE="2")
    assert ran.returncode == 2, ran.stderr
    assert "imported" in ran.stdout
    assert "`shoal run -n 2 SCRIPT`" in ran.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("call", ["shoal.rank()", "shoal.run('other.py', workers=2)"])
def test_the_exit_code_is_that_of_a_wrong_configuration(tmp_path: Path, call: str) -> None:
    ran = run(["-c", f"import shoal; {call}"], tmp_path, SLURM_PROCID="1", SLURM_NTASKS="4")
    assert ran.returncode == 2
    assert ran.stderr.startswith("error: srun started this script as one of 4 processes")
    assert len(ran.stderr.splitlines()) == 1


def test_a_process_that_a_worker_starts_is_alone(launch_script: Callable[..., Launched]) -> None:
    done = launch_script(
        """
        import shoal, subprocess, sys
        shoal.rank()
        print(subprocess.check_output([sys.executable, "-c", "import shoal; print(shoal.num_workers())"], text=True))
        """,
        workers=2,
    )
    assert (done.exit_code, done.stdout.strip()) == (0, "1"), done.error
