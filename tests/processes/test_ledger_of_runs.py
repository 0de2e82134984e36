"""Ledger of runs that are killed, resumed with other workers, and lose single processes."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launched import Launched
from typer.testing import CliRunner

from shoal import Faults
from shoal.cli import app
from shoal.cluster.launch.api import launch, resume_config
from shoal.cluster.supervisor.warm_parent import WarmParent
from shoal.observe import runs
from waiting import wait_until

SCRIPT = Path(__file__).parent / "scripts" / "counted_epochs.py"
SAMPLES = 8 * 45
Launch = Callable[..., Launched]


def ledger(run: Path) -> dict[str, Any]:
    return runs.read_ledger(run, is_alive=False)


def times(out: Path) -> Counter[float]:
    return Counter(json.loads(out.read_text())["times"])


def covered(epoch: dict[str, Any]) -> list[int]:
    return [sample for span in epoch["ranges"] for sample in range(span["start"], span["stop"])]


def computed(folder: Path) -> int:
    """Samples of which any worker has computed a gradient, as the script itself wrote down."""
    return sum(len(path.read_text().splitlines()) for path in folder.glob("computed-*"))


def accounted_for(found: dict[str, Any]) -> int:
    """The same by the ledger: what counts, what did not because it counted already, and what was lost."""
    again = sum(span["stop"] - span["start"] for epoch in found["epochs"] for span in epoch["again"])
    return sum(epoch["trained"] + epoch["repeated"] for epoch in found["epochs"]) + again


def by_worker(spans: list[dict[str, Any]]) -> Counter[tuple[int, str]]:
    had: Counter[tuple[int, str]] = Counter()
    for span in spans:
        had.update({(span["launch"], rank): samples for rank, samples in span["by_rank"].items()})
    return had


def test_leases_are_theirs_who_trained_them_and_what_was_lost_with_a_job_is_counted_to_the_sample(
    supervisor_process: Callable[..., Any],
    warm_parent: WarmParent,
    tmp_path: Path,
) -> None:
    out, samples, batch = tmp_path / "out.json", 8 * 150, 8
    supervisor = supervisor_process(
        SCRIPT,
        workers=3,
        strategy="ps:async",
        seed=0,
        args=(
            str(out),
            "--samples",
            str(samples),
            "--pause-at",
            "70",
            "--pause-all",
            "--save-every",
            "30",
            "--computed",
            "--step-s",
            "0.002",
            "--die-in",
            "9",
        ),
        name="killed",
        quiet=True,
    )
    assert wait_until(lambda: len(list(tmp_path.glob("paused-*"))) == 3)
    os.kill(supervisor.pid, signal.SIGKILL)
    supervisor.wait()
    run = tmp_path / "runs" / "killed"
    (cut,) = ledger(run)["epochs"]
    num_before = computed(tmp_path)
    assert cut["trained"] + cut["repeated"] == num_before
    assert set(by_worker(cut["ranges"])) == {(1, "0"), (1, "1"), (1, "2")}
    result = launch(resume_config(str(run), workers=2), warm=warm_parent)
    assert result.exit_code == 0, result.error
    assert times(out) == {2.0: samples}
    found = ledger(run)
    assert [epoch["is_exact"] for epoch in found["epochs"]] == [True, True]
    assert accounted_for(found) == computed(tmp_path)
    first = found["epochs"][0]
    lost, kept = by_worker(first["again"]), by_worker(first["ranges"])
    assert {launch for launch, _ in lost} == {1}
    for rank in "012":  # of the first launch: what the checkpoint has, and what it has not
        assert lost[1, rank] + kept[1, rank] == by_worker(cut["ranges"])[1, rank]
    assert sum(lost.values()) + sum(kept[1, rank] for rank in "012") == cut["trained"]
    assert 0 < sum(lost.values()) <= cut["trained"] - 30 * batch + 3 * batch
    said = CliRunner().invoke(app, ["status", "killed", "--run-dir", str(tmp_path / "runs")]).output
    assert f"{sum(lost.values())} trained again from an earlier checkpoint or the beginning" in " ".join(
        said.split()
    )
    assert (
        f"launch 1, before: rank 0 {kept[1, '0'] // batch} batches, {kept[1, '0']} samples; rank 1 " in said
    )


def test_a_run_that_is_killed_and_resumed_at_another_number_of_workers_has_an_exact_ledger(
    supervisor_process: Callable[..., Any],
    warm_parent: WarmParent,
    tmp_path: Path,
) -> None:
    out, after = tmp_path / "out.json", 2
    supervisor = supervisor_process(
        SCRIPT,
        workers=3,
        strategy="ddp",
        seed=0,
        args=(str(out), "--pause-at", "17", "--step-s", "0.005"),
        name="killed",
        quiet=True,
    )
    assert wait_until((tmp_path / "paused").exists)
    alive = runs.read_ledger(tmp_path / "runs" / "killed", is_alive=True)  # the coordinator has it open
    os.kill(supervisor.pid, signal.SIGKILL)
    supervisor.wait()
    run = tmp_path / "runs" / "killed"
    (cut,) = ledger(run)["epochs"]
    assert not cut["is_exact"]
    assert 0 < cut["trained"] < SAMPLES
    assert alive["epochs"][0]["ranges"][0]["start"] == 0
    result = launch(resume_config(str(run), workers=after), warm=warm_parent)
    assert result.exit_code == 0, result.error
    assert times(out) == {2.0: SAMPLES}  # what the weights say
    found = ledger(run)
    assert [epoch["is_exact"] for epoch in found["epochs"]] == [True, True]
    for epoch in found["epochs"]:
        assert covered(epoch) == list(range(SAMPLES))
        assert sum(had["samples"] for had in epoch["workers"].values()) == SAMPLES
    first, second = found["epochs"]
    assert {span["launch"] for span in first["ranges"]} == {1, 2}
    assert {span["launch"] for span in second["ranges"]} == {2}
    assert first["again"]
    assert len(second["workers"]) == after
    said = CliRunner().invoke(app, ["status", "killed", "--run-dir", str(tmp_path / "runs")]).output
    assert f"epoch 1: all {SAMPLES} samples trained exactly once; " in said.replace("\n", " ")
    assert "trained again from an earlier checkpoint or the beginning" in " ".join(said.split())
    listed = (
        CliRunner().invoke(app, ["status", "killed", "--ledger", "--run-dir", str(tmp_path / "runs")]).output
    )
    assert listed.count("trained exactly once") == 2
    assert "lost with it, and trained again" in listed


@pytest.mark.parametrize(
    ("strategy", "faults"),
    [
        ("ddp", Faults().kill("worker-0", at_step=20).kill("coordinator", at_step=50)),
        ("ps", Faults().kill("worker-1", at_step=20)),
        (
            "ps:async",
            Faults()
            .kill("worker-0", at_step=20)
            .kill("worker-1", at="worker: committed, not counted")
            .kill("coordinator", at_step=50),
        ),
    ],
)
def test_workers_that_are_replaced_and_a_coordinator_that_is_killed_leave_it_exact(
    launch_script: Launch, tmp_path: Path, strategy: str, faults: Faults
) -> None:
    out = tmp_path / "out.json"
    done = launch_script(
        SCRIPT,
        workers=3,
        strategy=strategy,
        args=(str(out), "--step-s", "0.002", "--computed"),
        faults=faults,
        quiet=True,
        step_timeout_s=20.0,
    )
    assert done.exit_code == 0, done.error
    assert times(out) == {2.0: SAMPLES}
    found = ledger(done.run_dir)
    assert [epoch["is_exact"] for epoch in found["epochs"]] == [True, True]
    assert found["replaced"]
    assert found["epochs"][0]["again"] == []
    if strategy == "ps:async":
        assert accounted_for(found) == computed(tmp_path)
        assert "1" in found["epochs"][0]["workers"], "its push counts, though it never heard so"


@pytest.mark.parametrize("how", ["balanced", "weighted", "measured"])
def test_what_each_worker_had_follows_how_batches_are_cut(
    launch_script: Launch, tmp_path: Path, how: str
) -> None:
    out = tmp_path / "out.json"
    faults = Faults().slow("worker-0", by_s=0.02) if how == "measured" else None
    done = launch_script(
        SCRIPT, workers=3, args=(str(out), "--how", how, "--epochs", "3"), faults=faults, quiet=True
    )
    assert done.exit_code == 0, done.error
    assert times(out) == {3.0: SAMPLES}
    last = ledger(done.run_dir)["epochs"][-1]
    assert last["is_exact"]
    had = [last["workers"][str(rank)]["samples"] for rank in range(3)]
    if how == "weighted":
        assert had == [SAMPLES // 2, SAMPLES // 4, SAMPLES // 4]
    if how == "measured":
        assert had[0] < had[1] / 2
        assert "so may the last bits" in done.stderr
        assert any(event["event"] == "shares-agreed" for event in done.events)
    if how == "balanced":
        assert "times the mean load" in done.stderr
        assert done.summary["sharding"]["max_over_mean"] < done.summary["sharding"]["equal_max_over_mean"]


@pytest.mark.parametrize("strategy", ["ddp", "ps:async"])
def test_a_last_batch_that_is_left_out_is_said_to_be(
    launch_script: Launch, tmp_path: Path, strategy: str
) -> None:
    out = tmp_path / "out.json"
    args = (str(out), "--samples", "83", "--epochs", "1", "--drop-last")
    done = launch_script(SCRIPT, workers=2, strategy=strategy, args=args, quiet=True)
    assert done.exit_code == 0, done.error
    assert times(out) == {1.0: 80, 0.0: 3}
    (epoch,) = ledger(done.run_dir)["epochs"]
    assert epoch["is_exact"]
    assert "3 left out with a last batch that is not full" in runs.ledger_sentence(epoch)
