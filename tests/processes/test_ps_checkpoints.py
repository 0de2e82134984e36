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

from shoal import Faults
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


AT_EVERY_STEP = """
import sys, torch, shoal
from pathlib import Path
from shoal.callbacks import Callback, EarlyStopping, ModelCheckpoint
from torch import nn

class Uploads(Callback):
    def on_step_end(self, trainer, logs):
        trainer.wish_checkpoint()
    def on_checkpoint(self, trainer, path):
        assert (Path(path) / "manifest.json").exists(), path

x = torch.randn(64, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
data = shoal.Dataset.from_arrays((x, x.sum(1, keepdim=True))).shuffle(seed=0).batch(16)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()
if sys.argv[1] == "loop":
    model, optimizer, data = shoal.setup(model, torch.optim.Adam(model.parameters(), lr=0.01), data)
    step = shoal.resume(step=0).step
    for a, b in data:  # of one epoch
        optimizer.zero_grad()
        nn.functional.mse_loss(model(a), b).backward()
        optimizer.step()
        step += 1
        shoal.checkpoint(step=step)
else:
    first_is_best = EarlyStopping("loss", mode="max", patience=9, restore_best=True)
    at_every_step = [ModelCheckpoint(every_steps=1, keep_last=9), first_is_best]
    callbacks = at_every_step if sys.argv[1] == "trainer" else [ModelCheckpoint(keep_last=1), Uploads()]
    trainer = shoal.Trainer(model, loss=nn.MSELoss(), seed=0, callbacks=callbacks,
                            optimizer=lambda params: torch.optim.Adam(params, lr=0.01))
    trainer.fit(data, epochs=2)
"""


def saved(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of every checkpoint and saved model in a run's directory, by its path there."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for file in sorted(folder.rglob("*.safetensors")):
        found.setdefault(str(file.parent.relative_to(folder)), {}).update(load_file(file))
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def differing(got: Launched, expected: Launched) -> list[str]:
    ours, theirs = saved(got.run_dir), saved(expected.run_dir)
    names = sorted(ours.keys() | theirs.keys())
    return [
        name for name in names if not (name in ours and name in theirs and same(ours[name], theirs[name]))
    ]


@pytest.mark.parametrize(
    ("strategy", "kind", "point"),
    [
        ("ps", "trainer", "checkpoint written"),
        ("ps", "trainer", "checkpoint not written"),
        ("ps", "loop", "checkpoint written"),
        ("ddp", "trainer", "checkpoint written"),
        ("fsdp", "trainer", "checkpoint written"),
    ],
)
def test_a_replaced_rank_0_leaves_the_checkpoints_of_the_steps_that_it_replays(
    launch_script: Launch, strategy: str, kind: str, point: str
) -> None:
    def run(name: str, faults: Faults | None = None) -> Launched:
        servers = 2 if strategy == "ps" else None
        done = launch_script(
            AT_EVERY_STEP,
            workers=2,
            strategy=strategy,
            servers=servers,
            args=(kind,),
            name=name,
            faults=faults or Faults(),
        )
        assert done.exit_code == 0, f"{done.error}\n{done.stderr}"
        return done

    undisturbed = run("undisturbed")
    faults = Faults().kill("worker-0", at_step=3, at=f"worker: {point}")
    if kind == "trainer":  # it replays the end of the first epoch, whose weights are the best ones
        faults = faults.kill("worker-0", at_step=7, incarnation=1)
    killed = run("killed", faults)
    assert killed.summary["restarts"] == len(faults.planned)
    assert differing(killed, undisturbed) == []
    assert "were moved to" not in killed.stderr


def test_a_replaced_rank_0_of_a_relaxed_run_goes_on_saving(launch_script: Launch) -> None:
    faults = Faults().kill("worker-0", at_step=2, at="worker: checkpoint written")
    done = launch_script(
        AT_EVERY_STEP, workers=2, strategy="ps:ssp=1", servers=1, args=("trainer",), faults=faults
    )
    assert (done.exit_code, done.summary["restarts"]) == (0, 1), f"{done.error}\n{done.stderr}"
    # Its own steps are saved, and with a bound of 1 some of them are of the second epoch.
    assert max(name for name in saved(done.run_dir) if "step-" in name) > "checkpoints/step-000000004"


def test_a_job_that_ends_while_rank_0_replays_goes_on_from_the_newest_checkpoint(
    launch_script: Launch,
) -> None:
    options: Any = {"workers": 2, "strategy": "ps", "servers": 2, "args": ("trainer",)}
    undisturbed = launch_script(AT_EVERY_STEP, name="undisturbed", **options)
    faults = Faults().kill("worker-0", at_step=3, at="worker: checkpoint written")
    ended = launch_script(
        AT_EVERY_STEP, name="ended", faults=faults.fail("worker-0", at_step=3, incarnation=1), **options
    )
    assert ended.exit_code != 0
    resumed = launch_script(AT_EVERY_STEP, name="ended", resume=True, **options)
    assert resumed.exit_code == 0, f"{resumed.error}\n{resumed.stderr}"
    assert differing(resumed, undisturbed) == []


def test_a_checkpoint_that_is_gone_when_its_step_is_replayed_is_not_announced_again(
    launch_script: Launch,
) -> None:
    faults = Faults().kill("worker-0", at_step=5, at="worker: checkpoint written")
    done = launch_script(AT_EVERY_STEP, workers=2, strategy="ps", servers=1, args=("uploads",), faults=faults)
    assert (done.exit_code, done.summary["restarts"]) == (0, 1), f"{done.error}\n{done.stderr}"
    assert [name for name in saved(done.run_dir) if "step-" in name] == ["checkpoints/step-000000008"]
