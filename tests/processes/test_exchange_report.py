"""Report of a run on its exchange: bytes, scheme, compression, and the devices of its workers."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from launched import Launched

from shoal.errors import DeviceMissing

SCRIPT = """
import torch, shoal
from torch import nn

torch.manual_seed(0)
x = torch.randn(96, 8)
trainer = shoal.Trainer(
    nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)), loss=nn.MSELoss(),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1), seed=0,
)
trainer.fit(shoal.Dataset.from_arrays((x, x[:, :1])).batch(24), epochs=1)
if shoal.rank() == 0:
    print(round(float(sum(p.double().sum() for p in trainer.model.parameters())), 5))
"""
NUM_WEIGHTS = 8 * 32 + 32 + 32 + 1


def test_bytes_and_the_loss_curve_are_in_the_report(launch_script: Callable[..., Launched]) -> None:
    plain = launch_script(SCRIPT, workers=2, exchange_rule="shm")
    assert plain.error is None
    told = plain.summary["exchange"]
    assert (told["exchange"], told["compress"], told["steps"], told["ratio"]) == ("shm", "none", 4, 1.0)
    # Two flags or so beside the weights: whether a gradient was used.
    assert 4 * NUM_WEIGHTS <= told["raw_bytes_per_step"] == told["sent_bytes_per_step"] < 4 * NUM_WEIGHTS + 64
    curve = [json.loads(line) for line in (plain.run_dir / told["loss_curve"]).read_text().splitlines()]
    assert [line["step"] for line in curve] == [1, 2, 3, 4]
    assert all(line["loss"] > 0 for line in curve)
    assert "B a step" not in plain.stderr  # nothing was saved, so nothing is said

    small = launch_script(SCRIPT, workers=2, compress="int8", exchange="ring")
    told = small.summary["exchange"]
    assert (told["exchange"], told["compress"], told["raw_bytes_per_step"]) == (
        "ring",
        "int8",
        4 * NUM_WEIGHTS,
    )
    assert told["ratio"] > 3
    assert "times less, by int8 over ring; the loss of every step is in metrics.jsonl" in small.stderr
    assert any(event["event"] == "exchanged" for event in small.events)


def test_sums_by_size_and_on_the_cpu_for_want_of_a_device_are_the_same(
    launch_script: Callable[..., Launched],
) -> None:
    """The losses travel by one exchange, the gradients by another; and the devices that were asked for are not there."""
    with_shm = launch_script(SCRIPT, workers=3, exchange="shm", device="cpu", quiet=True)
    by_size = launch_script(
        SCRIPT, workers=3, exchange_rule="native<=512,ring", device="cuda", soft_placement=True, quiet=True
    )
    assert by_size.error is None
    assert by_size.stdout == with_shm.stdout
    for rank in range(3):
        assert (
            f"worker {rank} computes on the CPU: there is no cuda:{rank} (--soft-placement)" in by_size.stderr
        )


def test_a_device_that_is_not_there_is_refused_before_the_script_begins(
    launch_script: Callable[..., Launched],
) -> None:
    ran = launch_script("print('began')", workers=2, device="cuda")
    assert isinstance(ran.error, DeviceMissing)
    assert ran.exit_code == 2
    assert "began" not in ran.stdout
    with pytest.raises(Exception, match="names 3 devices, and there are 2 workers"):
        launch_script("", workers=2, device="cuda:0,cpu,cpu")
