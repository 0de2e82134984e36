"""Forwards that do something else by their slice: experts equal to one process, attributes over several samples refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

SCRIPT = """
import torch, shoal
from torch import nn
from torch.nn import functional as F
from shoal.parallel import fsdp as fsdp_cut

fsdp_cut.UNIT_BYTES = UNIT
torch.set_default_dtype(torch.float64)
torch.manual_seed(3)
x, y = torch.randn(36, 6), torch.randint(0, 3, (36,))
x[:, 0] += torch.arange(36).remainder(12).div(4, rounding_mode="floor") * 6.0 - 6  # each worker has samples of one expert

class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 6)

    def forward(self, x):
        return self.second(self.first(x).relu())

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(4))  # the last is never chosen
        self.router = nn.Linear(6, 4)
        with torch.no_grad():
            self.router.weight.zero_()[:3, 0] = torch.tensor([-3.0, 0.0, 3.0])
            self.router.bias.copy_(torch.tensor([0.0, 2.0, 0.0, -9.0]))

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        chosen, output = scores.argmax(-1), x
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                output = output.index_add(0, rows, expert(x[rows]) * scores[rows, number, None])
        self.balance = (scores.mean(0) * F.one_hot(chosen, 4).double().mean(0)).sum()
        return output

class Bounded(nn.Linear):
    def forward(self, x):
        self.weight.data.clamp_(-0.2, 0.2)
        return super().forward(x)

class Remembering(nn.Linear):
    left = None

    def forward(self, x):
        hidden = super().forward(x)
        output = hidden if self.left is None else hidden + self.left.mean(0)
        self.left = hidden.detach()
        return output

model = nn.Sequential(LAYER, nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 3))
loss = F.cross_entropy
if BALANCED:
    loss = lambda output, target: F.cross_entropy(output, target) + 0.01 * model[0].balance
trainer = shoal.Trainer(
    model, loss=loss, optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1)
)
trainer.fit(shoal.Dataset.from_arrays((x, y)).batch(12), epochs=2)
trainer.save("SAVED")
"""

Launch = Callable[..., Any]


def script(layer: str, saved: Path, *, balanced: bool = False, unit: int = 100) -> str:
    text = (
        SCRIPT.replace("LAYER", layer)
        .replace("SAVED", str(saved))
        .replace("UNIT_BYTES = UNIT", f"UNIT_BYTES = {unit}")
    )
    return text.replace("BALANCED", str(balanced))


@pytest.mark.parametrize("unit", [100, 1 << 20], ids=["experts as units", "one unit"])
def test_experts_that_run_on_some_workers_only_train_as_in_one_process(
    launch_script: Launch, tmp_path: Path, unit: int
) -> None:
    for name, settings in (("alone", {}), ("cut", {"workers": 3, "strategy": "fsdp"})):
        done = launch_script(script("Experts()", tmp_path / name, unit=unit), **settings)
        assert done.exit_code == 0, done.stderr
    cut = load_file(tmp_path / "cut" / "model.safetensors")
    for name, tensor in load_file(tmp_path / "alone" / "model.safetensors").items():
        np.testing.assert_allclose(cut[name], tensor, rtol=0, atol=1e-13, err_msg=name)


@pytest.mark.parametrize(
    ("layer", "strategy", "workers", "says"),
    [
        ("Experts()", "ddp", 2, "reads '0.balance', which the model's forward leaves in an attribute"),
        ("Experts()", "fsdp", 2, "reads '0.balance', which the model's forward leaves in an attribute"),
        (
            "Remembering(6, 6)",
            "ddp",
            2,
            "depends on the samples of the forward before, which it keeps in '0.left'",
        ),
        (
            "Remembering(6, 6)",
            "fsdp",
            2,
            "depends on the samples of the forward before, which it keeps in '0.left'",
        ),
        ("Bounded(6, 6)", "fsdp", 2, "writes into its parameter '0.weight'"),
        ("Bounded(6, 6)", "pp", 2, "writes into its parameter '0.weight'"),
    ],
)
def test_a_forward_that_slices_make_something_else_of_is_refused_before_the_first_update(
    launch_script: Launch, tmp_path: Path, layer: str, strategy: str, workers: int, says: str
) -> None:
    text = script(layer, tmp_path / "saved", balanced=layer == "Experts()")
    done = launch_script(text, workers=workers, strategy=strategy)
    assert says in str(done.error), done.stderr
    assert not (tmp_path / "saved").exists()


BALANCED_WITHIN = """
import torch, shoal
from torch import nn
from torch.nn import functional as F

torch.manual_seed(3)

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(6, 4)
        self.experts = nn.ModuleList(nn.Linear(6, 4) for _ in range(4))

    def forward(self, x, labels):
        scores = self.router(x).softmax(-1)
        logits = sum(scores[:, number, None] * expert(x) for number, expert in enumerate(self.experts))
        load = F.one_hot(scores.argmax(-1), 4).float().mean(0)
        return {"loss": F.cross_entropy(logits, labels) + COEFFICIENT * 4 * (scores.mean(0) * load).sum()}

data = shoal.Dataset.from_arrays({"x": torch.randn(1024, 6), "labels": torch.randint(0, 4, (1024,))})
trainer = shoal.Trainer(Experts(), loss="model", optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
trainer.fit(data.batch(512), epochs=2)
"""


@pytest.mark.parametrize(("workers", "coefficient", "times"), [(2, 0.01, 1), (3, 0.01, 1), (2, 0.0, 0)])
def test_a_balance_of_experts_within_the_models_loss_is_named_once(
    launch_script: Launch, workers: int, coefficient: float, times: int
) -> None:
    done = launch_script(BALANCED_WITHIN.replace("COEFFICIENT", str(coefficient)), workers=workers)
    assert done.exit_code == 0, f"{done.error}\n{done.stderr}"
    assert done.stderr.count("loss compares samples of a batch") == times
