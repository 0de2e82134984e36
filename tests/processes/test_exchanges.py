"""Every exchange trains the same model, and a killed worker leaves no trace under any of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shoal.config.choices import EXCHANGES
from shoal.config.faults import Faults
from shoal.config.parallel_options import ParallelOptions, check
from shoal.errors import ConfigError
from whole_matrix import matrix_only

SCRIPT = """
import torch, shoal
from torch import nn

generator = torch.Generator().manual_seed(0)
x = torch.randn(97, 6, generator=generator, dtype=torch.float64)
y = (x[:, 0] > x[:, 1] * x[:, 2]).long()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 2)).double()
trainer = shoal.Trainer(
    model, loss=nn.CrossEntropyLoss(), optimizer=lambda params: torch.optim.SGD(params, lr=0.3, momentum=0.9), seed=0
)
trainer.fit(shoal.Dataset.from_arrays((x, y)).shuffle(seed=0).batch(16), epochs=2)
if shoal.rank() == 0:
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    print("weights", flat.sum().item().hex(), (flat * torch.arange(len(flat))).sum().item().hex())
"""


def weights(done: Any) -> list[float]:
    assert done.exit_code == 0, done.error
    [line] = [line for line in done.stdout.splitlines() if line.startswith("weights")]
    return [float.fromhex(each) for each in line.split()[1:]]


@pytest.fixture(scope="module")
def alone() -> list[list[float]]:
    return []


@pytest.mark.parametrize(
    ("exchange", "workers"),
    [
        *((exchange, 3) for exchange in sorted(set(EXCHANGES) - {"auto"})),
        *matrix_only(*((exchange, 4) for exchange in ("shm", "ring", "halving"))),
    ],
)
def test_training_is_that_of_one_process_and_a_kill_leaves_no_trace(
    launch_script: Callable[..., Any], alone: list[list[float]], exchange: str, workers: int
) -> None:
    if not alone:
        alone.append(weights(launch_script(SCRIPT)))
    options = {"workers": workers, "exchange": exchange}
    undisturbed = weights(launch_script(SCRIPT, **options))
    assert undisturbed == pytest.approx(alone[0], rel=1e-9)
    if exchange not in ("native", "shm", "ring", "hierarchical", "tree"):
        return  # how a view is left is the same for all schemes
    faults = Faults().kill("worker-1", at_step=3, at="worker: exchange begun")
    killed = launch_script(SCRIPT, **options, faults=faults)
    assert weights(killed) == undisturbed
    assert killed.summary["restarts"] == 1


def test_an_unknown_exchange_is_refused_with_a_guess(launch_script: Callable[..., Any]) -> None:
    with pytest.raises(Exception, match=r"there is no exchange 'rnig'\. Did you mean 'ring'"):
        launch_script(SCRIPT, workers=2, exchange="rnig")


def test_shared_memory_does_not_reach_other_hosts() -> None:
    with pytest.raises(ConfigError, match="they are on 2 hosts"):
        check(ParallelOptions(exchange="shm"), strategy="ddp", num_workers=2, num_hosts=2)
