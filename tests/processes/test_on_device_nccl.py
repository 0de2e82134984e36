"""Workers whose accelerators exchange by themselves (NCCL): each on its own, or all on one where there are too few.

Skipped where there is none. Workers that share a device talk NCCL through
sockets, which is slow, and the same code above it.
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
from shoal.errors import WaitTimedOut

Launch = Callable[..., Launched]

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")

NUM = torch.cuda.device_count()  # asked now: the driver opens files that no test should have left

REPEATABLE = tuple(name for name, case in CASES.items() if not case.draws)
"""A device draws other random numbers than the CPU."""


def devices(workers: int) -> str:
    return ",".join(f"cuda:{rank if workers <= NUM else 0}" for rank in range(workers))


@pytest.mark.parametrize(
    ("strategy", "workers", "names", "options"),
    [
        ("ddp", 2, REPEATABLE, {"exchange": "native"}),
        ("ddp", 3, ("mlp", "resnet", "gpt", "clicks"), {"exchange": "native"}),
        ("fsdp", 2, REPEATABLE, {}),
        ("fsdp", 3, ("mlp", "lstm", "gpt", "clicks"), {"offload": True}),
        ("tp", 2, REPEATABLE, {}),
        ("tp", 3, ("mlp", "gpt"), {"sequence_parallel": True}),
        ("pp", 2, REPEATABLE, {}),
        ("pp", 3, ("mlp", "gpt", "tree"), {"schedule": "gpipe"}),
        ("pp", 2, ("mlp", "gpt"), {"schedule": "zero-bubble"}),
        ("dp=2,fsdp=2", 4, ("mlp", "gpt"), {}),
        ("fsdp=2,tp=2", 4, ("mlp", "bert"), {}),
        ("pp=2,tp=2", 4, ("mlp", "gpt"), {}),
        ("dp=2,pp=2", 4, ("mlp", "gpt"), {"schedule": "interleaved"}),
    ],
)
def test_every_model_is_trained_as_in_one_process_on_the_cpu(
    launch_script: Launch,
    one_process: OneProcess,
    tmp_path: Path,
    strategy: str,
    workers: int,
    names: tuple[str, ...],
    options: dict[str, Any],
) -> None:
    done = launch_script(
        Path(matrix_job.__file__),
        workers=workers,
        strategy=strategy,
        device=devices(workers),
        args=(str(tmp_path), *names),
        **options,
    )
    assert done.exit_code == 0, f"{done.error}\n{done.stderr}"
    assert problems(tmp_path, one_process, strategy, workers, names) == {}


SCRIPT = """
import json, time
import torch, shoal
from torch import nn
from shoal.parallel import fsdp as fsdp_cut

fsdp_cut.UNIT_BYTES = 100
rank = shoal.rank()
generator = torch.Generator().manual_seed(1)
x = torch.randn(96, 16, dtype=torch.float64, generator=generator)
data = shoal.Dataset.from_arrays((x, torch.arange(96) * 5 % 4)).shuffle(seed=2).batch(8)

class Late(nn.Module):
    calls = 0
    def forward(self, x):
        Late.calls += self.training
        if rank == 1 and Late.calls == 5 and self.training:
            time.sleep(LATE_S)
        return x

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(16, 24), NORM, nn.Tanh(), Late(), nn.Linear(24, 24), nn.Dropout(0.2), nn.Tanh(), nn.Linear(24, 4)
).double()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
trainer = shoal.Trainer(model, loss=nn.CrossEntropyLoss(), optimizer=optimizer, seed=3, clip_norm=1.0, accumulate=ACCUMULATE)
trainer.fit(data, max_steps=12)
predicted = trainer.predict(data)
summed = shoal.collectives.all_reduce(torch.ones(3, device=predicted.device) * (rank + 1))
print("result", json.dumps([trainer.evaluate(data)["loss"], float(predicted.abs().sum()), float(summed.sum())]))
"""


def script(*, late_s: float = 0.0, norm: str = "nn.Identity()", accumulate: int = 1) -> str:
    text = SCRIPT.replace("LATE_S", str(late_s)).replace("NORM", norm)
    return text.replace("ACCUMULATE", str(accumulate))


def result(done: Launched) -> list[float]:
    assert done.exit_code == 0, f"{done.error}\n{done.stderr}"
    line = next(line for line in done.stdout.splitlines() if "result" in line)
    return list(json.loads(line.partition("result ")[2]))


WAYS: list[tuple[str, dict[str, Any]]] = [
    ("ddp", {"exchange": "native"}),
    ("fsdp", {}),
    ("tp", {}),
    ("pp", {}),
]


@pytest.mark.parametrize(("strategy", "options"), WAYS)
def test_a_killed_worker_leaves_no_trace_and_a_late_one_is_waited_for(
    launch_script: Launch, strategy: str, options: dict[str, Any]
) -> None:
    asked = {"workers": 2, "strategy": strategy, "device": devices(2), **options}
    undisturbed = result(launch_script(script(), **asked))
    # Longer than a look at the connections takes: NCCL must not take that for the end.
    assert result(launch_script(script(late_s=1.5), name="late", **asked)) == undisturbed
    for number, at in enumerate(("worker: before commit", "worker: before forward")):
        faults = Faults().kill("worker-1", at_step=7, at=at)
        snapshots = {} if strategy == "ddp" else {"snapshot_every": 4}
        killed = launch_script(script(), faults=faults, name=f"killed-{number}", **snapshots, **asked)
        assert result(killed) == undisturbed, at
        assert killed.summary["restarts"] >= 1
        assert "ncclRemoteError" not in killed.stderr


@pytest.mark.parametrize(
    ("strategy", "operation"),
    [("ddp", "the exchange of losses and statistics"), ("fsdp", "forward and backward")],
)
def test_a_worker_that_does_not_come_is_named_with_the_operation_and_the_step(
    launch_script: Launch, strategy: str, operation: str
) -> None:
    done = launch_script(
        script(late_s=1000.0),
        workers=2,
        strategy=strategy,
        device=devices(2),
        step_timeout_s=6.0,
        max_restarts=0,
        grace_s=0.2,
    )
    assert isinstance(done.error, WaitTimedOut), f"{done.error}\n{done.stderr}"
    assert f"{operation} of step 5 waited" in str(done.error)
    assert "for rank 1" in str(done.error)


@pytest.mark.parametrize(("strategy", "workers", "accumulate"), [("tp", 2, 1), ("tp", 3, 1), ("pp", 2, 4)])
def test_layers_in_parts_and_stages_draw_what_one_process_draws(
    launch_script: Launch, strategy: str, workers: int, accumulate: int
) -> None:
    # Stages run a batch in four parts; each draws for itself.
    alone = result(launch_script(script(accumulate=accumulate), device="cuda:0"))
    cut = launch_script(script(), workers=workers, strategy=strategy, device=devices(workers), name="cut")
    assert result(cut)[:2] == pytest.approx(alone[:2], rel=1e-9)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_batchnorm_over_the_whole_batch(launch_script: Launch, strategy: str) -> None:
    plain = script(norm="nn.BatchNorm1d(24)").replace("Dropout(0.2)", "Dropout(0.0)")
    alone = result(launch_script(plain, device="cuda:0"))
    options = {"batchnorm": "sync", "exchange": "native"} if strategy == "ddp" else {"batchnorm": "sync"}
    spread = launch_script(plain, workers=2, strategy=strategy, device=devices(2), name="spread", **options)
    assert result(spread)[:2] == pytest.approx(alone[:2], rel=1e-9)


@pytest.mark.parametrize(
    "options",
    [{"compress": "bf16"}, {"compress": "topk"}, {"compress": "powersgd"}, {"sync_every": 3}],
)
def test_compressed_and_seldom_exchanges(launch_script: Launch, options: dict[str, Any]) -> None:
    done = launch_script(script(), workers=2, strategy="ddp", exchange="native", device=devices(2), **options)
    loss, _, summed = result(done)
    assert 0.5 < loss < 1.5
    assert summed == 9.0
