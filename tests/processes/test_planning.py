"""`shoal plan`, `shoal run --plan`: measured, predicted, run; a model that changed since; a script that cannot be run twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from shoal.cli.bench import command
from shoal.errors import ConfigError
from shoal.observe.planner import measuring
from shoal.observe.planner.measuring import ScriptRuns, calibrate

Invoke = Callable[..., Result]

pytestmark = pytest.mark.timeout(540)  # each run that is measured is a process that imports torch

SCRIPT = """
import pathlib, sys, torch, shoal
from torch import nn

width, epochs = int(pathlib.Path("width").read_text()), int(sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2))
trainer = shoal.Trainer(model, loss=nn.CrossEntropyLoss(), seed=0,
                        optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
data = shoal.Dataset.from_arrays((torch.randn(256, 8), torch.arange(256) % 2))
trainer.fit(data.batch(32), epochs=epochs)
"""


def test_a_script_is_planned_run_and_refused_once_its_model_has_changed(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # one worker then is measured once
    (tmp_path / "width").write_text("64")
    (tmp_path / "train.py").write_text(SCRIPT)
    shown = invoke(
        "plan", "train.py", "40", "--per-host", "2", "--try", "1", "--seconds", "0.5", "--price", "3.6"
    )
    assert shown.exit_code == 0, shown.output
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["args"] == ["40"]
    assert plan["model"]["0.weight"] == [64, 8]
    assert plan["workload"]["batch"] == 32
    ways = {(each["way"], each["workers"]): each for each in plan["candidates"]}
    assert ways["single", 1]["measured_s"] == pytest.approx(ways["single", 1]["predicted_s"])
    assert {("fsdp", 2), ("tp", 2), ("ps --servers 1", 2), ("ddp --exchange ring --compress int8", 2)} <= set(
        ways
    )
    # One worker and ddp by the calibration, and what was tried.
    assert ways["ddp", 2]["measured_s"] is not None
    assert sum(each["measured_s"] is not None for each in plan["candidates"]) >= 3
    assert {("ps:ssp=2 --servers 1", 2), ("ddp --sync-every 8", 2)} <= set(ways)
    assert any(each["reason"].startswith("4 stages are more than the 2 layers") for each in plan["dropped"])
    assert f"Plan: {plan['strategy']}" in shown.stdout
    assert plan["why"] in shown.stdout
    assert plan["stops_paying"] in shown.stdout

    (tmp_path / "plan.json").write_text(json.dumps(plan | {"workers": 2, "strategy": "ddp", "args": ["2"]}))
    done = invoke("run", "--plan", "plan.json", "--name", "planned")
    assert done.exit_code == 0, done.output
    config = json.loads((tmp_path / "runs" / "planned" / "config.json").read_text())
    assert (config["workers"], config["strategy"], config["args"]) == (2, "ddp", ["2"])
    assert config["options"]["workers"]["origin"] == "plan.json"

    (tmp_path / "width").write_text("32")
    refused = invoke("run", "--plan", "plan.json", "--name", "changed")
    assert refused.exit_code == 2
    said = " ".join(refused.output.split())
    assert "the model has changed since the plan was made: '0.weight' is 32×8 now and was 64×8 then" in said


DEEP = """
import torch, shoal
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
trainer = shoal.Trainer(model, loss=nn.MSELoss(), seed=0, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
data = shoal.Dataset.from_arrays((torch.randn(256, 512), torch.randn(256, 512)))
trainer.fit(data.batch(64), epochs=40)
"""


def test_memory_that_decides_is_by_a_dry_run_of_ranks_that_are_not_here(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4.2 MB of weights, as much of gradients and of buckets do not fit into 10 MB; shards of them do, with a layer gathered."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "deep.py").write_text(DEEP)
    cluster = ["--hosts", "8", "--per-host", "8", "--device-memory", "10M"]
    shown = invoke("plan", "deep.py", *cluster, "--try", "0", "--seconds", "0.5")
    assert shown.exit_code == 0, shown.output
    plan = json.loads((tmp_path / "plan.json").read_text())
    reasons = {(each["way"], each["workers"]): each["reason"] for each in plan["dropped"]}
    ran = {(each["ranks"], each["shards"]) for each in plan["workload"]["dry_runs"]}
    whole = sorted(ranks for ranks, shards in ran if shards == 1)
    assert whole[0] == 1
    assert len(whole) > 1
    for ranks in whole[1:]:
        assert "a device would need" in reasons["ddp", ranks]
        assert "GiB by a dry run of its step, and there are" in reasons["ddp", ranks]
    # How many shards, predictions decide, which vary with the machine's load.
    assert any(shards > 1 for _, shards in ran)
    assert ("fsdp", 64) in {(each["way"], each["workers"]) for each in plan["candidates"]}


def test_a_script_that_cannot_be_run_twice_is_named_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(measuring, "STARVED", 2.0)  # each run is repeated, as on a busy machine
    (tmp_path / "width").write_text("8")
    (tmp_path / "once.py").write_text("import pathlib\npathlib.Path('made').mkdir()\n" + SCRIPT)
    runs = ScriptRuns(
        script=str(tmp_path / "once.py"), args=("40",), folder=tmp_path / "runs", seconds=0.2, say=print
    )
    with pytest.raises(ConfigError, match=r"(?s)cannot be run twice.*none was made.*FileExistsError"):
        calibrate(runs, 2)


def test_links_are_measured_where_fsdp_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "CODEC_ROUNDS", 3)
    monkeypatch.setattr(command, "SHARD_ROUNDS", "none")  # its workers fail: no number
    monkeypatch.setattr(command, "SERVED_STEPS", 10)
    times = command.measure_links(0.1, 2)
    assert min(times.exchanges[max(times.exchanges)].values()) > 0
    assert "int8" in times.compressors
    assert times.shards == []
    assert [*times.rows] == ["auto", "native"]
    assert all(seconds[64 * 72] < seconds[8192 * 72] for seconds in times.rows.values())
    small, large, rows = times.served
    assert 0 < small["served_s"] < small["whole_s"] < large["whole_s"]
    assert rows["row_bytes"] == pytest.approx(8192 * 72, rel=0.1)  # an id and 16 numbers, hardly any twice


def test_auto_measures_once_runs_what_it_chose_and_keeps_the_choice(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("shoal.cli.plan.AUTO_SECONDS", 0.5)
    (tmp_path / "width").write_text("16")
    (tmp_path / "train.py").write_text(SCRIPT)
    first = invoke("run", "-n", "2", "--strategy", "auto", "--name", "first", "train.py", "20")
    assert first.exit_code == 0, first.output
    folder = tmp_path / "runs" / "train-plan"
    kept = json.loads((folder / "auto.json").read_text())
    [said] = [line for line in first.stderr.splitlines() if line.startswith("auto: ")]
    assert said == f"auto: {kept['said']}"
    config = json.loads((tmp_path / "runs" / "first" / "config.json").read_text())
    assert (config["workers"], config["strategy"]) == (2, kept["options"]["strategy"])

    measured = {path: path.stat().st_mtime_ns for path in folder.rglob("config.json")}
    assert len(measured) == 2  # one worker and two
    second = invoke("run", "-n", "2", "--strategy", "auto", "--name", "second", "train.py", "20")
    assert second.exit_code == 0, second.output
    assert f"{said} (as measured before, " in second.stderr
    assert measured == {path: path.stat().st_mtime_ns for path in folder.rglob("config.json")}
