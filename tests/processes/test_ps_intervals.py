"""--push-every, --pull-every, --row-cache and --fan-in together: every batch counts once, under deaths too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from launched import Launched

from shoal import Faults

SCRIPTS = Path(__file__).parent / "scripts"
SCRIPT = SCRIPTS / "ps_constant_rows.py"
NUM_STEPS = 512
Launch = Callable[..., Launched]


def test_every_batch_counts_once_when_the_aggregator_and_a_worker_die(
    launch_script: Launch, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    launched = launch_script(
        SCRIPT, workers=4, servers=2, replicas=2, strategy="ps:ssp=4", push_every=3, pull_every=3, row_cache=64,
        fan_in=4, args=(str(out),), faults=Faults().kill("worker-0", at_step=40).kill("worker-2", at_step=150),
        quiet=True, step_timeout_s=60.0,
    )  # fmt: skip
    assert launched.exit_code == 0, f"{launched.error}\n{launched.stderr}"
    found = json.loads(out.read_text())
    assert found["weight"] == [-NUM_STEPS] * 8
    assert found["rows"] == [[-NUM_STEPS / 2] * 2, [0.0, 0.0], [0.0, 0.0], [-NUM_STEPS / 2] * 2]
    summary = launched.summary
    assert summary["restarts"] == 2
    assert max(map(int, summary["staleness"])) <= 4  # the bound, with gradients kept and rows cached
    assert summary["row_cache"]["hits"] > 0
    assert summary["fan_in"]["pushes"] >= summary["fan_in"]["sent"] > 0


def test_a_stop_ends_its_own_fit_alone_and_each_trainer_has_its_aggregators(
    launch_script: Launch, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    launched = launch_script(
        SCRIPTS / "ps_stopped_and_again.py", workers=3, servers=2, strategy="ps:async", fan_in=3,
        args=(str(out),), quiet=True,
    )  # fmt: skip
    assert launched.exit_code == 0, f"{launched.error}\n{launched.stderr}"
    stopped, again, second = json.loads(out.read_text())
    assert 20 <= stopped < 90
    assert again - stopped >= 96
    assert second == 96
    assert launched.summary["fan_in"]["sent"] > 0
