"""BatchNorm over the whole batch: the result of one process with whole batches, and deaths without a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shoal.config.faults import Faults
from whole_matrix import matrix_only

SCRIPT = """
import json, torch, shoal
from torch import nn
from safetensors.torch import load_file
from shoal.parallel import fsdp as fsdp_cut
from shoal.train.checkpoint import saving

fsdp_cut.UNIT_BYTES = 100
saving.EVERY_STEPS = 2
generator = torch.Generator().manual_seed(0)
x = torch.randn(38, 3, 4, 4, generator=generator, dtype=torch.float64) * 2 + 5
y = (x[:, 0, 0, 0] > 5).long()
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(24, 8), nn.BatchNorm1d(8, momentum=None),
    nn.Tanh(), nn.Linear(8, 2),
).double()
trainer = shoal.Trainer(
    model, loss=nn.CrossEntropyLoss(), optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), seed=0,
)
data = shoal.Dataset.from_arrays((x, y))
trainer.fit(data.shuffle(seed=0).batch(9), epochs=2)  # an epoch's last batch has two samples: some worker borrows one
result = trainer.evaluate(data.batch(16))
trainer.save("there")
if shoal.rank() == 0:
    state = load_file("there/model.safetensors").values()
    print("result", json.dumps([result["loss"].hex(), *(float((v.double() * (v.double() + 1)).sum()).hex() for v in state)]))
"""

_results: dict[str, list[float]] = {}


def known(launch_script: Callable[..., Any], strategy: str, workers: int, **options: Any) -> list[float]:
    key = f"{strategy} {workers} {options}"
    if key not in _results:
        _results[key] = launch_script(
            SCRIPT, workers=workers, strategy=strategy, batchnorm="sync", **options
        ).printed()
    return _results[key]


@pytest.mark.parametrize(
    ("strategy", "workers", "options"),
    [
        ("ddp", 3, {}),
        ("ddp", 2, {"shard": "weighted=3,1"}),
        ("ddp", 4, {"exchange": "ring"}),
        ("fsdp", 3, {}),
        ("pp", 2, {}),
        ("pp=2,fsdp=2", 4, {"schedule": "zero-bubble"}),
        ("dp=2,tp=2", 4, {}),
        *matrix_only(("dp=2,pp=2", 4, {})),
    ],
)
def test_the_whole_batch_is_normalised_as_in_one_process(
    launch_script: Callable[..., Any], strategy: str, workers: int, options: dict[str, Any]
) -> None:
    alone = known(launch_script, "single", 1)
    assert known(launch_script, strategy, workers, **options) == pytest.approx(alone, rel=1e-9)


@pytest.mark.parametrize(
    ("strategy", "workers", "at"),
    [
        ("ddp", 3, "worker: exchange begun"),
        ("ddp", 2, "worker: exchange begun"),  # slices that a replaced worker tries alone
        ("fsdp", 3, "worker: before forward"),
        *matrix_only(("ddp", 3, "worker: before forward"), ("dp=2,pp=2", 4, "worker: before forward")),
    ],
)
def test_a_rank_killed_while_others_wait_for_it_within_the_model_leaves_no_trace(
    launch_script: Callable[..., Any], strategy: str, workers: int, at: str
) -> None:
    undisturbed = known(launch_script, strategy, workers)
    killed = launch_script(
        SCRIPT,
        workers=workers,
        strategy=strategy,
        batchnorm="sync",
        faults=Faults().kill("worker-1", at_step=4, at=at),
    )
    assert killed.printed() == undisturbed
    assert killed.summary["restarts"] == 1
    assert "normalises its own slice" not in killed.stderr


FALSE_ALARM = """
from shoal.errors import PeerLost
from shoal.collectives.sync_batchnorm import BatchNormRanks

enter = BatchNormRanks.enter

def enter_and_lose(self, view):
    enter(self, view)
    if shoal.rank() == 1 and view == 1:
        raise PeerLost(rank=1, operation="a sum", reason="nobody is lost")

BatchNormRanks.enter = enter_and_lose
"""


def test_a_rank_that_leaves_the_others_of_a_mesh_alone_is_noticed_where_they_wait_for_it(
    launch_script: Callable[..., Any],
) -> None:
    script = SCRIPT.replace("generator =", FALSE_ALARM + "generator =", 1)
    done = launch_script(script, workers=2, strategy="fsdp", batchnorm="sync", step_timeout_s=120.0)
    assert done.exit_code == 3
    assert "the connections of 'fsdp=2' were lost at step 1 though every worker lives" in str(done.error)
    began_at, ended_at = done.events[0]["monotonic"], done.events[-1]["monotonic"]
    assert ended_at - began_at < 60.0, "the other sat out the step's time-out"
