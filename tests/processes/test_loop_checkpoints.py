"""A loop of the user's own that is stopped, or loses workers, goes on from its checkpoint with the bits of the undisturbed one."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launched import Launched

from shoal import Faults
from shoal.cluster.launch.api import resume_config
from shoal.observe import runs
from shoal.train.checkpoint.checkpoint import list_checkpoints, open_checkpoint

Launch = Callable[..., Launched]
AtFile = Callable[[Path, Callable[[], object]], None]

SCRIPT = Path(__file__).parent / "scripts" / "saving_loop.py"
STEPS = 20

_undisturbed: dict[int, tuple[dict[str, Any], dict[str, torch.Tensor]]] = {}


def ended(out: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return json.loads((out / "0.json").read_text()), torch.load(out / "0.pt")


def undisturbed(launch: Launch, folder: Path, workers: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    if workers not in _undisturbed:
        out = folder / f"undisturbed-{workers}"
        out.mkdir()
        done = launch(SCRIPT, workers=workers, args=(str(out),), name=f"whole-{workers}")
        assert done.exit_code == 0, done.error
        _undisturbed[workers] = ended(out)
        lines = [json.loads(line) for line in (done.run_dir / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [*range(1, STEPS + 1)]
        assert all(line["loss"] > 0 and line["samples"] in (10, 7) for line in lines)
        assert [line["part"] for line in lines[:5]] == [10 / workers] * 4 + [7 / workers]
        run = runs.read(done.run_dir)
        assert (run.step, run.loss) == (STEPS, lines[-1]["loss"])
        assert done.summary["samples"] == 4 * 47
        assert len(list_checkpoints(done.run_dir / "checkpoints")) == 3
    return _undisturbed[workers]


def resume(launch: Launch, folder: Path, *, workers: int, strategy: str | None = None) -> Launched:
    config = resume_config(folder / "runs" / "cut", workers=workers, strategy=strategy)
    return launch(
        SCRIPT,
        workers=workers,
        strategy=config.strategy,
        name="cut",
        args=config.args,
        resume=True,
        seed=config.seed,
    )


@pytest.mark.parametrize(("workers", "stop", "signum"), [(3, 7, signal.SIGINT), (2, 10, signal.SIGTERM)])
def test_a_loop_that_is_asked_to_leave_saves_and_goes_on_at_any_number_of_workers(
    launch_script: Launch, at_file: AtFile, tmp_path: Path, workers: int, stop: int, signum: signal.Signals
) -> None:
    facts, weights = undisturbed(launch_script, tmp_path, workers)
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "stop-at").write_text(str(stop))

    at_file(tmp_path / "now", lambda: os.kill(os.getpid(), signum))
    cut = launch_script(SCRIPT, workers=workers, args=(str(out),), name="cut")
    assert cut.exit_code == 128 + signum
    assert "the loop saves at its next shoal.checkpoint" in cut.stderr
    newest = list_checkpoints(cut.run_dir / "checkpoints")[-1]
    saved = open_checkpoint(newest).progress["values"]["step"]
    assert saved in (stop, stop + 1)  # decided with a step
    assert f"the newest checkpoint is {newest}" in str(cut.error)
    (tmp_path / "stop-at").unlink()

    other = resume(launch_script, tmp_path, workers=5 - workers)
    assert other.exit_code == 0, other.error
    assert f"going on from {newest}: step {saved}," in other.stderr
    facts_there, weights_there = ended(out)
    assert {**facts_there, "digest": ""} == {**facts, "digest": ""}
    for name, value in weights.items():
        torch.testing.assert_close(weights_there[name], value, rtol=1e-12, atol=1e-12, msg=name)
    lines = [json.loads(line) for line in (other.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, STEPS + 1)]
    epochs = runs.read_ledger(other.run_dir, is_alive=False)["epochs"]
    assert [(epoch["trained"], epoch["is_exact"]) for epoch in epochs] == [(47, True)] * 4


@pytest.mark.parametrize("point", ["worker: checkpoint not written", "worker: checkpoint written"])
def test_a_loop_whose_workers_begin_anew_begins_at_its_newest_checkpoint(
    launch_script: Launch, tmp_path: Path, point: str
) -> None:
    """Two optimizer steps on a batch: a death takes all workers back, to the checkpoint."""
    facts, _ = undisturbed(launch_script, tmp_path, 3)
    out = tmp_path / "out"
    out.mkdir()
    faults = Faults().kill("worker-0", at_step=8, at=point)
    done = launch_script(SCRIPT, workers=3, args=(str(out),), faults=faults)
    assert done.exit_code == 0, done.error
    assert done.summary["restarts"] > 0
    assert "going on from" in done.stderr
    assert ended(out)[0] == facts


def test_a_worker_killed_around_a_checkpoint_is_replaced_and_the_checkpoint_is_written(
    launch_script: Launch, tmp_path: Path
) -> None:
    results = []
    faults = Faults().kill("worker-0", at_step=8, at="worker: checkpoint not written")
    faults = faults.kill("worker-1", at_step=9, at="worker: exchange finished, not committed")
    faults = faults.kill("worker-0", at_step=12, at="worker: checkpoint written", incarnation=1)
    for name, given in (("whole", None), ("killed", faults)):
        out = tmp_path / name
        out.mkdir()
        done = launch_script(SCRIPT, workers=3, args=(str(out), "one"), name=name, faults=given)
        assert done.exit_code == 0, done.error
        exits = [e["code"] for e in done.events if e["event"] == "worker-exited" and e["code"]]
        assert exits == ([] if given is None else [-9] * 3)
        saved = [open_checkpoint(each).progress for each in list_checkpoints(done.run_dir / "checkpoints")]
        assert [each["values"]["step"] for each in saved] == [12, 16, 20]
        lines = [json.loads(line) for line in (done.run_dir / "metrics.jsonl").read_text().splitlines()]
        results.append((ended(out)[0], [(line["step"], line["loss"]) for line in lines]))
    assert results[0] == results[1]
