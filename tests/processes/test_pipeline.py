"""Stages of a pipeline: the result of one process, checkpoints for every other strategy, and deaths without a trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.cluster.faults import Faults

SCRIPT = """
import json, torch, shoal
from torch import nn
from shoal.train import snapshots

snapshots.EVERY_STEPS = 4
generator = torch.Generator().manual_seed(0)
x = torch.randn(99, 6, generator=generator, dtype=torch.float64)
y = (x[:, 0] > x[:, 1] * x[:, 2]).long()
torch.manual_seed(0)
blocks = [nn.Sequential(nn.Linear(9, 9), nn.Tanh(), nn.LayerNorm(9)) for _ in range(4)]
model = nn.Sequential(nn.Flatten(), nn.Linear(6, 9), nn.Tanh(), *blocks, nn.Dropout(0.0), nn.Linear(9, 2)).double()
trainer = shoal.Trainer(
    model, loss=nn.CrossEntropyLoss(), optimizer=lambda params: torch.optim.Adam(params, lr=0.02), seed=0,
    clip_norm=0.5, metrics=["accuracy"], OPTIONS
)
data = shoal.Dataset.from_arrays((x, y))
trainer.fit(data.shuffle(seed=0).batch(16), epochs=EPOCHS, resume=RESUME)
result = trainer.evaluate(data.batch(40))
predicted = trainer.predict(data.batch(40))
path = trainer.save_checkpoint("DIRECTORY") if "DIRECTORY" else ""
accuracy = trainer.histories[-1].epochs[-1]["accuracy"]
if shoal.rank() == 0:
    print("result", json.dumps([result["loss"].hex(), result["accuracy"], accuracy, float(predicted.sum()).hex(), path]))
"""


def script(epochs: int = 2, resume: str | None = None, directory: str = "", options: str = "") -> str:
    text = SCRIPT.replace("EPOCHS", str(epochs)).replace("RESUME", repr(resume))
    return text.replace("DIRECTORY", directory).replace("OPTIONS", options)


def result(done: Any) -> list[Any]:
    assert done.exit_code == 0, f"{done.error}\n{done.stderr}"
    [line] = [line for line in done.stdout.splitlines() if line.startswith("result")]
    loss, accuracy, trained, predicted, path = json.loads(line.removeprefix("result "))
    return [float.fromhex(loss), accuracy, trained, float.fromhex(predicted), path]


@pytest.mark.parametrize(
    ("strategy", "workers", "schedule"),
    [
        ("pp", 2, "1f1b"),
        ("pp", 3, "gpipe"),
        ("pp", 4, "1f1b"),
        ("pp", 2, "interleaved"),
        ("pp", 2, "zero-bubble"),
        ("pp=2,dp=2", 4, "1f1b"),
        ("pp=2,fsdp=2", 4, "1f1b"),
    ],
)
def test_stages_train_as_one_process(
    launch_script: Callable[..., Any], strategy: str, workers: int, schedule: str
) -> None:
    alone = result(launch_script(script()))
    staged = result(launch_script(script(), workers=workers, strategy=strategy, schedule=schedule))
    assert staged[:4] == pytest.approx(alone[:4], rel=1e-9)


@pytest.mark.parametrize(("strategy", "workers"), [("pp", 2), ("pp=2,dp=2", 4)])
def test_a_killed_stage_takes_all_back_to_the_snapshot(
    launch_script: Callable[..., Any], strategy: str, workers: int
) -> None:
    undisturbed = result(launch_script(script(), workers=workers, strategy=strategy))
    killed = launch_script(
        script(),
        workers=workers,
        strategy=strategy,
        faults=Faults().kill("worker-1", at_step=7, at="worker: before commit"),
    )
    assert result(killed) == undisturbed
    events = [json.loads(line) for line in (killed.run_dir / "events.jsonl").read_text().splitlines()]
    [went_back] = [event for event in events if event["event"] == "went-back"]
    assert went_back["to_step"] == 4


@pytest.mark.parametrize(
    ("first", "second"), [(("pp", 3), ("ddp", 2)), (("single", 1), ("pp", 2)), (("fsdp", 2), ("pp", 2))]
)
def test_a_checkpoint_of_stages_goes_on_under_another_strategy(
    launch_script: Callable[..., Any], tmp_path: Path, first: tuple[str, int], second: tuple[str, int]
) -> None:
    whole = result(launch_script(script(epochs=2)))
    strategy, workers = first
    saved = result(
        launch_script(script(epochs=1, directory=f"{tmp_path}/there"), strategy=strategy, workers=workers)
    )
    strategy, workers = second
    resumed = result(
        launch_script(script(epochs=2, resume=saved[4]), strategy=strategy, workers=workers, name="second")
    )
    assert resumed[:4] == pytest.approx(whole[:4], rel=1e-9)


def test_the_users_cut_and_its_refusal(launch_script: Callable[..., Any]) -> None:
    done = launch_script(script(epochs=1, options="pipeline_cut=['4']"), strategy="pp", workers=2)
    result(done)
    assert "4.0 ... 8" in done.stderr
    refused = launch_script(
        script(epochs=1, options="pipeline_cut=['9']"), strategy="pp", workers=2, name="refused"
    )
    assert refused.exit_code != 0
    assert "pipeline_cut names '9', and no layer in a row is called so" in f"{refused.error}{refused.stderr}"
