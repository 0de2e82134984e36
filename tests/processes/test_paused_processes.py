"""Under `ps` a worker or server that was stopped is killed after step_timeout_s and replaced; the weights are as without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launched import Launched
from torch import nn

from shoal import Faults
from shoal.errors import WaitTimedOut
from whole_matrix import matrix_only

NUM_STEPS = 12
SCRIPT = f"""
import sys, torch, shoal
from torch import nn
torch.set_num_threads(1)
x = torch.arange(24, dtype=torch.float64).reshape(12, 2).sin()
torch.manual_seed(0)
model = nn.Linear(2, 1).double()
trainer = shoal.Trainer(model, loss=nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), seed=0)
trainer.fit(shoal.Dataset.from_arrays((x, x[:, :1] * 3)).batch(12), epochs={NUM_STEPS})
torch.save(model.state_dict(), f"rank-{{shoal.rank()}}.pt")
"""
Launch = Callable[..., Launched]


def expected() -> torch.Tensor:
    """The weight that one process comes to."""
    x = torch.arange(24, dtype=torch.float64).reshape(12, 2).sin()
    torch.manual_seed(0)
    model = nn.Linear(2, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x[:, :1] * 3).backward()
        optimizer.step()
    return model.weight.detach()


def suspects(launched: Launched) -> list[tuple[int, bool]]:
    return [(event["rank"], event["killed"]) for event in launched.events if event["event"] == "suspect"]


@pytest.mark.parametrize(("workers", "servers"), [(3, 2), *matrix_only((2, 1))])
def test_a_paused_worker_is_killed_and_replaced(
    launch_script: Launch, tmp_path: Path, workers: int, servers: int
) -> None:
    done = launch_script(
        SCRIPT,
        workers=workers,
        servers=servers,
        strategy="ps",
        step_timeout_s=2.0,
        faults=Faults().pause("worker-1", at_step=5),
        quiet=True,
    )
    assert done.exit_code == 0, f"{done.error}\n{done.stderr}"
    # On a busy machine its replacement, and whoever waits for it, are looked at too, and let be.
    assert [rank for rank, killed in suspects(done) if killed] == [1]
    assert done.summary["restarts"] == 1
    for rank in range(workers):
        weight = torch.load(tmp_path / f"rank-{rank}.pt")["weight"]
        torch.testing.assert_close(weight, expected(), rtol=1e-9, atol=1e-9)


def test_a_paused_server_is_killed_and_replaced_while_workers_wait(
    launch_script: Launch, tmp_path: Path
) -> None:
    done = launch_script(
        SCRIPT,
        workers=2,
        servers=2,
        strategy="ps",
        step_timeout_s=2.0,
        faults=Faults().pause("server-1", at_step=5),
        quiet=True,
    )
    assert done.exit_code == 0, f"{done.error}\n{done.stderr}"
    for rank in range(2):
        weight = torch.load(tmp_path / f"rank-{rank}.pt")["weight"]
        torch.testing.assert_close(weight, expected(), rtol=1e-9, atol=1e-9)


def test_who_is_slow_is_let_be_and_named_in_the_end(launch_script: Launch) -> None:
    slow = "import time\nfrom torch import nn\nclass Slow(nn.Linear):\n    calls = 0\n"
    slow += "    def forward(self, x):\n        Slow.calls += 1\n"
    slow += "        time.sleep(60 if Slow.calls > 3 and __import__('shoal').rank() == 1 else 0)\n"
    slow += "        return super().forward(x)\n"
    done = launch_script(
        slow + SCRIPT.replace("model = nn.Linear", "model = Slow"),
        workers=2,
        servers=1,
        strategy="ps",
        step_timeout_s=2.0,  # for whoever works, on a busy machine too
        grace_s=0.2,
        quiet=True,
    )
    assert isinstance(done.error, WaitTimedOut), done.error
    assert "waited 4.0 s for worker-1" in str(done.error)
    assert not any(killed for _, killed in suspects(done))
    assert (1, False) in suspects(done)
