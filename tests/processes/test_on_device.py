"""On a machine with an accelerator: the same training as on the CPU, alone, over servers, sharded, and beside CPU workers.

Skipped where there is none. In float64, so that equality can be asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matrix_job
import pytest
import torch
from launched import Launched
from matrix_expected import OneProcess, problems
from matrix_models import CASES

from shoal.config.faults import Faults
from shoal.errors import ShoalError

Launch = Callable[..., Launched]

pytestmark = pytest.mark.skipif(
    not torch.accelerator.is_available(), reason="this machine has no accelerator"
)

KIND = device.type if (device := torch.accelerator.current_accelerator()) else "cuda"
NUM = torch.accelerator.device_count()  # asked now: the driver opens files that no test should have left
ONE, TWICE, MIXED, THREE = f"{KIND}:0", f"{KIND}:0,{KIND}:0", f"{KIND}:0,cpu", f"{KIND}:0,cpu,cpu"

REPEATABLE = tuple(name for name, case in CASES.items() if not case.draws)
"""A device draws other random numbers than the CPU."""


@pytest.mark.parametrize(
    ("strategy", "workers", "device", "options"),
    [
        ("single", 1, ONE, {}),
        ("ddp", 1, ONE, {}),
        ("ddp", 2, TWICE, {}),
        ("ddp", 2, MIXED, {"shard": "equal"}),
        ("ddp", 3, THREE, {"shard": "equal", "exchange": "ring"}),
        ("fsdp", 1, ONE, {}),
        ("fsdp", 1, ONE, {"offload": True}),
        ("ps", 1, ONE, {}),
        ("ps", 2, TWICE, {}),
        ("ps", 3, THREE, {"servers": 2}),
    ],
)
def test_every_model_is_trained_as_in_one_process_on_the_cpu(
    launch_script: Launch,
    one_process: OneProcess,
    tmp_path: Path,
    strategy: str,
    workers: int,
    device: str,
    options: dict[str, Any],
) -> None:
    done = launch_script(
        Path(matrix_job.__file__),
        workers=workers,
        strategy=strategy,
        device=device,
        args=(str(tmp_path), *REPEATABLE),
        **options,
    )
    assert done.exit_code == 0, f"{done.error}\n{done.stderr}"
    assert problems(tmp_path, one_process, strategy, workers, REPEATABLE) == {}


def test_activations_are_kept_on_the_device_or_run_again(
    launch_script: Launch, one_process: OneProcess, tmp_path: Path
) -> None:
    options = {"offload": True, "checkpoint_activations": True}
    job = Path(matrix_job.__file__)
    done = launch_script(job, strategy="fsdp", device=ONE, args=(str(tmp_path), "gpt", "bert"), **options)
    assert done.exit_code == 0, f"{done.error}\n{done.stderr}"
    assert problems(tmp_path, one_process, "fsdp", 1, ("gpt", "bert")) == {}


SCRIPT = """
import json, pathlib
import torch, shoal
from torch import nn

WIDTH, SAMPLES, STEPS = {width}, {samples}, {steps}
g = torch.Generator().manual_seed(1)
x = torch.randn(SAMPLES, WIDTH, dtype=torch.float64, generator=g)
label = torch.arange(SAMPLES) * 5 % 4
data = shoal.Dataset.from_arrays((x, label)).shuffle(seed=2).batch({batch})

def build():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)).double()

trainer = shoal.Trainer(build, loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.Adam(p, lr=1e-3), seed=3,
                        metrics=["accuracy"], precision="{precision}")
history = trainer.fit(data, max_steps=STEPS)
scores = trainer.evaluate(data)
outcome = [history["loss"][-1], scores["loss"], scores["accuracy"],
           float(sum(p.detach().double().abs().sum().cpu() for p in trainer.model.parameters()))]
pathlib.Path(f"outcome-{{shoal.rank()}}.json").write_text(json.dumps(outcome))
pathlib.Path(f"device-{{shoal.rank()}}").write_text(str(next(trainer.model.parameters()).device))
"""


def script(**settings: Any) -> str:
    return SCRIPT.format(
        **{"width": 16, "samples": 96, "steps": 12, "batch": 8, "precision": "float32"} | settings
    )


def outcome(launched: Launched, folder: Path) -> list[float]:
    assert launched.exit_code == 0, f"{launched.error}\n{launched.stderr}"
    return list(json.loads((folder / "outcome-0.json").read_text()))


def test_without_a_word_a_single_worker_computes_on_the_device(launch_script: Launch, tmp_path: Path) -> None:
    on_device = outcome(launch_script(script()), tmp_path)
    assert (tmp_path / "device-0").read_text() == ONE
    assert outcome(launch_script(script(), device="cpu", name="b"), tmp_path) == pytest.approx(
        on_device, rel=1e-9
    )


def test_workers_of_different_kinds_share_batches_by_speed_with_the_result_of_one_process(
    launch_script: Launch, tmp_path: Path
) -> None:
    alone = outcome(launch_script(script(), device="cpu"), tmp_path)
    mixed = launch_script(script(), workers=2, strategy="ddp", device=MIXED, name="mixed")
    assert outcome(mixed, tmp_path) == pytest.approx(alone, rel=1e-9)
    assert [(tmp_path / f"device-{rank}").read_text() for rank in range(2)] == [ONE, "cpu"]


@pytest.mark.parametrize(("strategy", "device"), [("ddp", MIXED), ("ddp", TWICE), ("ps", TWICE)])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker_leaves_no_trace(
    launch_script: Launch, tmp_path: Path, strategy: str, device: str, rank: int
) -> None:
    options = {"workers": 2, "strategy": strategy, "device": device, "shard": "equal"}
    undisturbed = outcome(launch_script(script(), **options), tmp_path)
    faults = Faults().kill(f"worker-{rank}", at_step=7, at="worker: before commit")
    killed = launch_script(script(), faults=faults, name="killed", **options)
    assert outcome(killed, tmp_path) == pytest.approx(undisturbed, rel=1e-12)


def test_half_precision(launch_script: Launch, tmp_path: Path) -> None:
    single = script(precision="bf16").replace("float64", "float32").replace(".double()", "", 1)
    for strategy in ("single", "fsdp", "ps"):
        on_device = outcome(launch_script(single, strategy=strategy, device=ONE, name=strategy), tmp_path)
        assert on_device[0] == pytest.approx(1.39, abs=0.15), strategy


def test_relaxed_servers(launch_script: Launch, tmp_path: Path) -> None:
    for strategy in ("ps:async", "ps:ssp=2", "ps:hybrid"):
        launched = launch_script(
            script(), workers=2, strategy=strategy, device=TWICE, name=strategy.replace(":", "-")
        )
        assert outcome(launched, tmp_path)[0] == pytest.approx(1.39, abs=0.15), strategy


def test_a_device_too_many_is_refused_or_replaced_by_the_cpu(launch_script: Launch, tmp_path: Path) -> None:
    missing = f"{KIND}:{NUM}"
    refused = launch_script(script(), device=missing)
    assert refused.exit_code != 0
    assert missing in str(refused.error)
    assert "Traceback" not in refused.stderr
    soft = launch_script(script(), device=missing, soft_placement=True, name="soft")
    outcome(soft, tmp_path)
    assert f"there is no {missing}" in soft.stderr


def test_checkpoints_travel_between_devices(launch_script: Launch, tmp_path: Path) -> None:
    job = Path(matrix_job.__file__)
    names = ("gpt", "clicks")
    for number, (first, second) in enumerate(((ONE, "cpu"), ("cpu", ONE))):
        there = tmp_path / f"there-{number}"
        there.mkdir()
        done = launch_script(
            job,
            device=first,
            args=(str(there), *names, "--steps", "1", "--keep", str(there)),
            name=there.name,
        )
        assert done.exit_code == 0, f"{done.error}\n{done.stderr}"
        resumed = launch_script(
            job, device=second, args=(str(there), *names, "--resume", str(there)), name=f"{there.name}-2"
        )
        assert resumed.exit_code == 0, f"{resumed.error}\n{resumed.stderr}"
        assert problems(there, OneProcess(), "single", 1, names) == {}


def test_a_loop_of_ones_own(launch_script: Launch, tmp_path: Path) -> None:
    loop = """
    import json, pathlib
    import torch, shoal
    from torch import nn
    g = torch.Generator().manual_seed(1)
    x = torch.randn(96, 16, dtype=torch.float64, generator=g)
    data = shoal.Dataset.from_arrays((x, torch.arange(96) % 4)).batch(8)
    torch.manual_seed(0)
    model = nn.Linear(16, 4).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer, batches = shoal.setup(model, optimizer, data)
    for a, b in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(a), b)
        loss.backward()
        optimizer.step()
    total = float(model.weight.detach().abs().sum().cpu())
    pathlib.Path(f"outcome-{shoal.rank()}.json").write_text(json.dumps([total]))
    """
    alone = outcome(launch_script(loop, device="cpu"), tmp_path)
    for strategy, workers, device in (("single", 1, ONE), ("ddp", 2, MIXED), ("ps", 2, TWICE)):
        done = launch_script(loop, strategy=strategy, workers=workers, device=device, name=f"{strategy}-d")
        assert outcome(done, tmp_path) == pytest.approx(alone, rel=1e-9), strategy


def test_a_mesh_over_devices_of_different_kinds_is_refused(launch_script: Launch) -> None:
    with pytest.raises(ShoalError, match="devices of different kinds"):
        launch_script(script(), workers=2, strategy="fsdp", device=MIXED)
