"""Checkpoints of `ps` load under any other strategy and at any number of servers, and the other way round."""

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
from safetensors.torch import load_file

from shoal.cluster.launch.api import launch, resume_config
from shoal.cluster.supervisor.warm_parent import WarmParent
from waiting import wait_until

SCRIPT = Path(__file__).parent / "scripts" / "ps_resumed.py"
Launch = Callable[..., Launched]
Outcome = tuple[dict[str, torch.Tensor], dict[str, Any]]
_whole: dict[str, Outcome] = {}


def outcome(folder: Path) -> Outcome:
    return load_file(folder / "weights"), json.loads((folder / "report").read_text())


@pytest.fixture
def run(launch_script: Launch, tmp_path: Path) -> Callable[..., Launched]:
    def run(out: str, *args: str, strategy: str, workers: int, servers: int | None = None) -> Launched:
        launched = launch_script(
            SCRIPT,
            workers=workers,
            strategy=strategy,
            servers=servers,
            args=(str(tmp_path / out), *args),
            name=out,
            quiet=True,
            step_timeout_s=20.0,
        )
        assert launched.exit_code == 0, f"{launched.error}\n{launched.stderr}"
        return launched

    return run


@pytest.mark.parametrize(
    ("writes", "reads", "optimizer"),
    [
        (("single", 1, None), ("ps", 2, 1), "adagrad"),
        (("ps", 2, 1), ("single", 1, None), "adagrad"),
        (("ps", 3, 2), ("ddp", 2, None), "adamw"),
        (("ddp", 2, None), ("ps", 2, 3), "adamw"),
        (("ps", 2, 2), ("ps", 3, 1), "sgd"),
    ],
)
def test_a_checkpoint_loads_under_another_strategy_and_number_of_servers(
    run: Callable[..., Launched], tmp_path: Path, writes: Any, reads: Any, optimizer: str
) -> None:
    if optimizer not in _whole:
        run("whole", "--optimizer", optimizer, strategy="single", workers=1)
        _whole[optimizer] = outcome(tmp_path / "whole")
    weights, report = _whole[optimizer]

    def part(out: str, *args: str, how: Any) -> Launched:
        return run(out, "--optimizer", optimizer, *args, strategy=how[0], workers=how[1], servers=how[2])

    wrote = part("wrote", "--until", "12", how=writes)
    part("read", "--from", str(wrote.run_dir / "checkpoints" / "step-000000006"), how=reads)
    got, told = outcome(tmp_path / "read")
    assert (told["step"], told["epoch"], told["lr"]) == (report["step"], report["epoch"], report["lr"])
    for name, tensor in weights.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("strategy", ["ps:async", "ps:ssp=1"])
def test_a_relaxed_run_saves_by_steps_too_and_another_strategy_goes_on_from_it(
    run: Callable[..., Launched], tmp_path: Path, strategy: str
) -> None:
    wrote = run("wrote", "--until", "12", strategy=strategy, workers=2, servers=2)
    first = sorted((wrote.run_dir / "checkpoints").iterdir())[0]
    # Each of the two workers may have a batch under way when the sixth counts.
    assert first.name in ("step-000000006", "step-000000007", "step-000000008")
    run("read", "--from", str(first), strategy="single", workers=1)
    _, told = outcome(tmp_path / "read")
    assert told["step"] == 16


def test_a_run_whose_supervisor_was_killed_is_resumed_with_its_servers(
    supervisor_process: Callable[..., Any],
    run: Callable[..., Launched],
    warm_parent: WarmParent,
    tmp_path: Path,
) -> None:
    run("whole", strategy="ps", workers=2, servers=2)
    supervisor = supervisor_process(
        SCRIPT,
        workers=2,
        strategy="ps",
        servers=2,
        seed=0,
        args=(str(tmp_path / "killed"), "--pause-at", "9"),
        name="killed",
        quiet=True,
    )
    assert wait_until((tmp_path / "paused").exists)
    os.kill(supervisor.pid, signal.SIGKILL)
    supervisor.wait()
    (tmp_path / "paused").unlink()
    result = launch(resume_config(str(tmp_path / "runs" / "killed")), warm=warm_parent)
    assert result.exit_code == 0, result.error
    expected, report = outcome(tmp_path / "whole")
    got, told = outcome(tmp_path / "killed")
    assert told == report
    assert all(torch.equal(got[name], expected[name]) for name in expected)


LOADED = """
import torch, shoal
from torch import nn
class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.head = nn.Embedding(10, 4), nn.Linear(4, 1)
    def forward(self, ids):
        return self.head(self.rows(ids))
y = torch.randn(64, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
data = shoal.Dataset.from_arrays((torch.arange(64) % 10, y)).batch(8)
torch.manual_seed(0)
trainer = shoal.Trainer(Rows().double(), loss=nn.MSELoss(), seed=0,
                        optimizer=lambda params: torch.optim.Adagrad(params, lr=0.1))
trainer.fit(data, epochs=1)
trainer.save("saved")
trainer.fit(data, epochs=1)
trainer.load("saved")
loaded = trainer.evaluate(data)["loss"]
trainer.fit(data, epochs=1)
print(round(loaded, 9), round(trainer.evaluate(data)["loss"], 9))
"""


def test_weights_loaded_between_fits_leave_the_optimizer_its_state(launch_script: Launch) -> None:
    said = []
    for options in ({}, {"strategy": "ps", "workers": 3, "servers": 2}):
        done = launch_script(LOADED, quiet=True, **options)
        assert done.exit_code == 0, done.error
        said.append(done.stdout)
    assert said[0] == said[1]
