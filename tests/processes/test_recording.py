"""Recording of a job: every process tells where its time went, and a death shows in the report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from launched import Launched
from typer.testing import CliRunner

from shoal import Faults
from shoal.cli import app
from shoal.observe import record

Launch = Callable[..., Launched]

NUM_SAMPLES, BATCH, EPOCHS = 960, 24, 2

SCRIPT = f"""
import torch, shoal
from torch import nn
torch.manual_seed(0)
inputs = torch.randn({NUM_SAMPLES}, 6)
data = shoal.Dataset.from_arrays((inputs, inputs.sum(1, keepdim=True)))
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
trainer = shoal.Trainer(model, loss=nn.MSELoss(), optimizer=lambda params: torch.optim.SGD(params, lr=0.01), seed=0)
trainer.fit(data.shuffle(seed=0).batch({BATCH}), epochs={EPOCHS})
trainer.save_checkpoint()
"""


@pytest.mark.parametrize(
    ("strategy", "kinds"),
    [
        ("ddp", {"read", "compute", "exchange", "apply", "checkpoint"}),
        ("ps", {"read", "compute", "push", "pull", "wait", "checkpoint"}),
    ],
)
def test_every_process_tells_where_its_time_went(
    launch_script: Launch, strategy: str, kinds: set[str]
) -> None:
    killed = Faults().kill("worker-1", at_step=40)
    done = launch_script(SCRIPT, workers=3, strategy=strategy, faults=killed)
    assert done.exit_code == 0, done.stderr
    run = record.read(done.run_dir)
    servers = ["server-0"] if strategy == "ps" else []
    assert list(run.activity) == ["worker-0", "worker-1", "worker-2", *servers, "coordinator"]
    assert run.missing == []
    for rank in (0, 2):
        told = record.totals(run.activity[f"worker-{rank}"])
        assert told.seconds.keys() >= kinds - ({"checkpoint"} if rank else set())
        assert (told.steps, told.samples) == (EPOCHS * NUM_SAMPLES // BATCH, EPOCHS * NUM_SAMPLES // 3)
        assert told.sent_bytes > 0
        assert told.busy_s <= told.interval_s * 1.01
        assert run.activity[f"worker-{rank}"][-1]["end"]
    assert run.activity["worker-1"][-1]["incarnation"] == 1
    if servers:
        last = run.servers["server-0"][-1]
        assert last["slots"] == 256
        assert record.totals(run.servers["server-0"]).seconds.keys() >= {"push", "apply", "wait"}
    _check_report(done.run_dir)


@pytest.mark.parametrize("strategy", ["fsdp", "tp", "pp"])
def test_collectives_within_a_model_are_exchange_and_no_compute(launch_script: Launch, strategy: str) -> None:
    done = launch_script(SCRIPT, workers=2, strategy=strategy)
    assert done.exit_code == 0, done.stderr
    run = record.read(done.run_dir)
    traces, problems = record.read_traces(done.run_dir, run.activity)
    assert not problems
    for trace in (each for each in traces if each.process.startswith("worker-")):
        kind = {name: number for number, name in enumerate(trace.kinds)}
        waits = trace.spans[trace.spans["kind"] == kind["exchange"]]
        for compute in trace.spans[trace.spans["kind"] == kind["compute"]][5:10]:
            within = (waits["start_ns"] >= compute["start_ns"]) & (waits["end_ns"] <= compute["end_ns"])
            assert within.any()
            assert (waits["depth"][within] > compute["depth"]).all()


def _check_report(run_dir: Path) -> None:
    shown = CliRunner().invoke(app, ["report", str(run_dir)])
    assert shown.exit_code == 0, shown.output
    found = json.loads((run_dir / "report.json").read_text())
    assert [(fault["what"], fault["code"]) for fault in found["faults"]] == [("worker 1", -9)]
    assert found["restarts"] == 1
    assert found["bottleneck"]
    traced = CliRunner().invoke(app, ["trace", str(run_dir)])
    assert traced.exit_code == 0, traced.output
    events = json.loads((run_dir / "trace.json").read_text())["traceEvents"]
    rows = {event["args"]["name"].split(" on ")[0] for event in events if event["name"] == "process_name"}
    assert {"worker-0", "worker-1 (incarnation 1)", "worker-2", "coordinator"} <= rows
    steps = {event["args"]["step"] for event in events if event["name"] == "compute" and event["pid"] == 1}
    assert steps >= set(range(2, EPOCHS * NUM_SAMPLES // BATCH))
