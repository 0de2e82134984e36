"""However batches are cut over the workers, exact strategies compute what one process does; relaxed ones count every sample once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launched import Launched, close, results

from shoal import Faults
from shoal.cli.equality import check
from shoal.cli.verify import VerifyRuns
from shoal.cluster.launch.api import LaunchConfig
from shoal.cluster.supervisor.warm_parent import WarmParent
from shoal.observe import runs

SCRIPTS = Path(__file__).parent / "scripts"
COUNTED = SCRIPTS / "counted_epochs.py"
TOLERANCE = 1e-12
Launch = Callable[..., Launched]


@pytest.mark.parametrize(
    ("workers", "shard"),
    [(4, "weighted=1,3,0,2"), (3, "balanced=bytes")],
)
def test_uneven_parts_and_empty_ones_train_evaluate_and_predict_as_one_process_does(
    launch_script: Launch, tmp_path: Path, workers: int, shard: str
) -> None:
    for count, how in ((1, None), (workers, shard)):
        (tmp_path / str(count)).mkdir()
        done = launch_script(
            SCRIPTS / "equality.py", workers=count, shard=how, args=(str(tmp_path / str(count)),)
        )
        assert done.exit_code == 0, done.stderr
    reference, report = results(tmp_path / "1", 0)
    for rank in range(workers):
        weights, told = results(tmp_path / str(workers), rank)
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, reference[name], rtol=TOLERANCE, atol=TOLERANCE, msg=name)
        assert close(told, report), f"rank {rank} reports {told}, one process {report}"


MIXING = """
import torch, shoal
from torch import nn

torch.manual_seed(3)
x, y = torch.randn(103, 8), torch.randint(0, 3, (103,))
costs = [1 + 9 * (number % 5 == 0) for number in range(103)]
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))
trainer = shoal.Trainer(model, loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
data = shoal.Dataset.from_arrays((x, y)).shuffle(seed=0).batch(20, drop_last=True)
trainer.fit(data.shard(HOW), epochs=3)
"""


@pytest.mark.parametrize("how", ['"balanced", cost=costs', '"weighted", weights=[3, 1, 2]'])
def test_layers_that_mix_the_batch_are_compared_with_the_workers_own_slices(
    warm_parent: WarmParent,
    tmp_path: Path,
    how: str,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(MIXING.replace("HOW", how))
    config = LaunchConfig(
        script=str(script), workers=3, strategy="ddp", run_dir=str(tmp_path), seed=0, quiet=True
    )
    outcome = check(VerifyRuns(config, warm_parent, num_steps=8), num_workers=3, tolerance=1e-9)
    assert outcome.mixes
    assert outcome.equal


def counted(launched: Launched, out: Path) -> tuple[Counter[float], list[dict[str, Any]]]:
    assert launched.exit_code == 0, launched.error
    times = Counter(json.loads(out.read_text())["times"])
    return times, runs.read_ledger(launched.run_dir, is_alive=False)["epochs"]


def test_the_last_ranges_of_an_epoch_are_handed_out_twice_and_count_once(
    launch_script: Launch, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    done = launch_script(
        COUNTED,
        workers=3,
        servers=2,
        strategy="ps:async",
        args=(str(out), "--step-s", "0.005", "--how", "dynamic", "--drain", "1e6"),
        faults=Faults().slow("worker-2", by_s=0.15),
        quiet=True,
        step_timeout_s=20.0,
    )
    times, epochs = counted(done, out)
    assert times == {2.0: 8 * 45}
    assert [epoch["is_exact"] for epoch in epochs] == [True, True]
    assert sum(epoch["handed_out_twice"] for epoch in epochs) > 0
    had = {rank: each["samples"] for rank, each in epochs[-1]["workers"].items()}
    assert had.get("2", 0) < min(had["0"], had["1"])


def test_a_worker_far_slower_than_the_others_is_drained_and_readmitted_when_it_recovers(
    launch_script: Launch, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    args = ("--samples", "480", "--epochs", "12", "--step-s", "0.01", "--how", "dynamic", "--drain", "3")
    done = launch_script(
        COUNTED,
        workers=3,
        strategy="ps:async",
        args=(str(out), *args, "--save-every", "1000"),
        faults=Faults().slow("worker-2", by_s=0.1, for_s=1.2),
        quiet=True,
        step_timeout_s=20.0,
    )
    times, epochs = counted(done, out)
    assert times == {12.0: 480}
    assert all(epoch["is_exact"] for epoch in epochs)
    told = [
        event
        for event in done.events
        if event["event"] in ("worker-drained", "worker-readmitted") and event["rank"] == 2
    ]
    assert [event["event"] for event in told[:2]] == ["worker-drained", "worker-readmitted"]
    drained, readmitted = told[:2]
    assert drained["times_slower"] > drained["slower_than"] == 3.0
    assert drained["others_samples_per_s"] > drained["samples_per_s"] > 0
    assert readmitted["times_slower"] < 3.0


def test_fixed_shares_of_an_epoch_stay_with_their_workers(launch_script: Launch, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = launch_script(
        COUNTED, workers=3, strategy="ps:async", shard="weighted=2,1,1", args=(str(out),), quiet=True
    )
    times, epochs = counted(done, out)
    assert times == {2.0: 8 * 45}
    had = [epochs[0]["workers"][str(rank)]["samples"] for rank in range(3)]
    assert abs(had[0] - 180) <= 16
    assert abs(had[1] - 90) <= 16


@pytest.mark.parametrize(
    ("strategy", "how", "problem"),
    [
        ("ddp", "dynamic", "computes every batch on all 2 workers together"),
        ("ps:async", "balanced", "gives every worker whole batches"),
    ],
)
def test_a_way_of_cutting_that_a_strategy_cannot_do_is_refused(
    launch_script: Launch, tmp_path: Path, strategy: str, how: str, problem: str
) -> None:
    done = launch_script(
        COUNTED, workers=2, strategy=strategy, args=(str(tmp_path / "o"), "--how", how), quiet=True
    )
    assert done.exit_code != 0
    assert problem in " ".join(str(done.error).split())
