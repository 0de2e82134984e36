"""Scripts of the migration pages whose peers install here, before and after: they run as their pages say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples/migration"
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")

RUNS = {
    "ddp_before": TORCHRUN,
    "accelerate_before": ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"),
    "hf_trainer_before": TORCHRUN,
    "keras_before": (),
    "lightning_before": (),
    "spark_before": (),
    "hf_trainer_after": ("-m", "shoal", "run", "-n", "2"),
    "keras_after": ("-m", "shoal", "run", "-n", "2"),
    "spark_after": (),
}

IN_OWN_ENVIRONMENT = {"estimator_before", "tf_ps_before", "paddle_before", "mxnet_before"}
"""Those of test_scripts_of_peers.py."""

NOT_BUILT = {"horovod_before"}
"""docs/migration/index.md says what was tried."""

# Only another version of a peer can break what is before a migration: the slow ones run by `make matrix` alone.
SLOW = {"hf_trainer_before", "spark_before"}


def test_every_script_before_a_migration_is_tried() -> None:
    tried = {name for name in RUNS if name.endswith("_before")} | IN_OWN_ENVIRONMENT | NOT_BUILT
    assert tried == {path.stem for path in FOLDER.glob("*_before.py")}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.matrix] if name in SLOW else []) for name in RUNS]
)
def test_the_script_runs_as_its_page_says(name: str, tmp_path: Path) -> None:
    if not os.environ.get("SHOAL_TEST_ENGINES"):
        pytest.skip("peers are installed by `make test-engines` alone")
    ran = subprocess.run(
        [sys.executable, *RUNS[name], str(FOLDER / f"{name}.py")],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    accuracies = [float(value) for value in re.findall(r"accuracy (\d\.\d+)", ran.stdout)]
    assert all(value > 0.9 for value in accuracies), ran.stdout
    if name.startswith("spark"):
        assert "weight" in ran.stdout or "prediction" in ran.stdout
    elif name != "hf_trainer_before":
        assert accuracies, ran.stdout
