"""--push-norm and --staleness-lr: effect of the push filters on servers, under deaths too; and where they are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launched import Launched

from shoal import Faults

SCRIPT = Path(__file__).parent / "scripts" / "ps_constant_gradient.py"
NUM_PUSHES = 120  # of the script; each has a gradient of 50
Launch = Callable[..., Launched]


@pytest.mark.parametrize(
    ("strategy", "faults"),
    [
        ("ps:async", None),
        ("ps:async", Faults().kill("worker-1", at_step=20)),
        ("ps:ssp=1", Faults().kill("server-0", at_step=20)),
    ],
)
def test_a_push_norm_bounds_every_push_once(
    launch_script: Launch, tmp_path: Path, strategy: str, faults: Faults | None
) -> None:
    out = tmp_path / "out.json"
    launched = launch_script(
        SCRIPT, workers=3, servers=2, replicas=2, strategy=strategy, push_norm=0.5, args=(str(out),),
        faults=faults, quiet=True, step_timeout_s=20.0,
    )  # fmt: skip
    assert launched.exit_code == 0, f"{launched.error}\n{launched.stderr}"
    assert json.loads(out.read_text())["weight"] == -0.5 * NUM_PUSHES


def test_staleness_divides_the_learning_rate_of_a_push(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = shoal_run(
        tmp_path, "--servers", "2", "--strategy", "ps:ssp=0", "--staleness-lr", str(SCRIPT), str(out)
    )
    assert done.returncode == 0, done.stderr
    # In a round of ssp=0 the first push missed nothing, the second one update, the third two: 0.61 of the rate on average.
    # At the end of a lease a worker may rest, and the others go on with fewer.
    assert 0.5 < -json.loads(out.read_text())["weight"] / (50 * NUM_PUSHES) < 0.8
    (config,) = (tmp_path / "runs").glob("*/config.json")
    assert json.loads(config.read_text())["staleness_lr"] is True


def test_staleness_is_refused_by_name_in_exact_steps(tmp_path: Path) -> None:
    done = shoal_run(tmp_path, "--servers", "1", "--strategy", "ps", "--staleness-lr", str(SCRIPT))
    assert done.returncode == 2
    assert "--staleness-lr" in done.stderr
    assert "under 'ps' no push is an update of its own" in " ".join(done.stderr.split())


def shoal_run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shoal", "run", "-n", "3", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
