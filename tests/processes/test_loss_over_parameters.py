"""Losses that read parameters: the result of one process, or a refusal before the first update."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from shoal.errors import ConfigError, LossDoesNotRecombine, LossReadsParameters, TrainingError
from whole_matrix import matrix_only

SCRIPT = """
import json, torch, shoal
from torch import nn
from torch.nn import functional as F
from shoal.parallel import fsdp as fsdp_cut

fsdp_cut.UNIT_BYTES = 100
torch.set_default_dtype(torch.float64)
torch.manual_seed(3)
# 43 samples in batches of 10: the last batch leaves a third worker one sample, and it is cut unevenly.
ids, y = torch.randint(0, 20, (43, 4)), torch.randint(0, 3, (43,))
data = shoal.Dataset.from_arrays((ids, y)).batch(10)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(20, 4)
        self.body = nn.Sequential(nn.Sequential(nn.Linear(16, 12), nn.Tanh()), nn.Linear(12, 3))
        self.returns_penalty = False

    def forward(self, ids):
        output = self.body(self.rows(ids).flatten(1))
        return (output, penalty(self.parameters())) if self.returns_penalty else output

def penalty(parameters):
    return 0.05 * sum(parameter.pow(2).sum() for parameter in parameters)

model = Model()
kept = list(model.parameters())
LOSS
trainer = shoal.Trainer(model, loss=loss, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
trainer.fit(data, epochs=2)
result = trainer.evaluate(data)
trainer.save("SAVED")
if shoal.rank() == 0:
    print("result", json.dumps(result["loss"]))
"""

MEAN = "loss = lambda output, target: F.cross_entropy(output, target) + penalty(model.parameters())"
KEPT = "loss = lambda output, target: F.cross_entropy(output, target) + penalty(kept)"
SUM = "lambda output, target: F.cross_entropy(output, target, reduction='sum')"
RETURNED = """
model.returns_penalty = True
def loss(output, target):
    logits, penalised = output
    return F.cross_entropy(logits, target, reduction="sum") + len(target) * penalised, len(target)
"""

Launch = Callable[..., Any]


def script(loss: str, saved: Path) -> str:
    return SCRIPT.replace("LOSS", loss).replace("SAVED", str(saved))


def in_one_process(launch_script: Launch, loss: str, saved: Path) -> None:
    done = launch_script(script(loss, saved))
    assert done.exit_code == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith("result")]
    saved.with_suffix(".json").write_text(told[0].removeprefix("result "))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.mark.parametrize(
    ("strategy", "workers", "loss"),
    [
        ("ddp", 3, MEAN),
        ("ddp", 3, KEPT),
        ("fsdp", 3, MEAN),
        ("fsdp=2,tp=2", 4, MEAN),
        ("ps", 3, MEAN),
        *matrix_only(("tp", 2, MEAN), ("ps", 2, KEPT)),
        ("ps:hybrid", 2, MEAN),
        ("ddp", 3, RETURNED),
        ("tp", 2, RETURNED),
    ],
)
def test_a_penalty_on_parameters_gives_the_weights_and_the_loss_of_one_process(
    launch_script: Launch, saved: Path, strategy: str, workers: int, loss: str
) -> None:
    alone = saved / "alone"
    if not alone.exists():
        in_one_process(launch_script, MEAN, alone)
    here = saved / f"{strategy}-{workers}-{len(loss)}"
    done = launch_script(script(loss, here), workers=workers, strategy=strategy)
    assert done.exit_code == 0, done.stderr
    [told] = [line for line in done.stdout.splitlines() if line.startswith("result")]
    expected = json.loads(alone.with_suffix(".json").read_text())
    assert json.loads(told.removeprefix("result ")) == pytest.approx(expected, rel=1e-12)
    weights = load_file(here / "model.safetensors")
    for name, tensor in load_file(alone / "model.safetensors").items():
        np.testing.assert_allclose(weights[name], tensor, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("strategy", "loss", "says"),
    [
        ("fsdp", KEPT, "taken from the model before it was cut"),
        ("tp", KEPT, "taken from the model before it was cut"),
        ("pp", KEPT, "the loss runs where the last stage is"),
        ("pp", MEAN, "the loss runs where the last stage is"),
    ],
)
def test_parameters_that_are_not_at_hand_are_refused_by_name_before_the_first_update(
    launch_script: Launch, tmp_path: Path, strategy: str, loss: str, says: str
) -> None:
    done = launch_script(script(loss, tmp_path / "saved"), workers=2, strategy=strategy)
    assert isinstance(done.error, LossReadsParameters), done.stderr
    assert {"rows.weight", "body.1.weight"} & set(done.error.names)
    assert says in str(done.error)
    assert "weight_decay=" in str(done.error)


@pytest.mark.parametrize("strategy", ["fsdp", "pp"])
def test_a_forward_that_returns_a_penalty_is_refused_where_parameters_are_in_parts(
    launch_script: Launch, tmp_path: Path, strategy: str
) -> None:
    done = launch_script(script(RETURNED, tmp_path / "saved"), workers=2, strategy=strategy)
    assert isinstance(done.error, (TrainingError, ConfigError)), done.stderr
    assert "outside of the layers they belong to" in str(done.error)


def test_a_penalty_that_every_worker_would_add_once_more_is_refused(
    launch_script: Launch, tmp_path: Path
) -> None:
    # Too small to show in the value: 1e-7 of the loss.
    loss = f"total = {SUM}\nloss = lambda output, target: (total(output, target) + 1e-6 * penalty(kept), len(target))"
    done = launch_script(script(loss, tmp_path / "saved"), workers=3, strategy="ddp")
    assert isinstance(done.error, LossDoesNotRecombine), done.stderr
    assert "(sum + count * penalty, count)" in str(done.error)
