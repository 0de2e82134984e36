"""Loops of the user's own over a model of which each worker holds a part."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launched import Launched
from safetensors.torch import load_file

from shoal import Faults
from whole_matrix import matrix_only

Launch = Callable[..., Launched]
SCRIPTS = Path(__file__).parent / "scripts"

_one_process: dict[str, torch.Tensor] = {}


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [("fsdp", 3), ("tp", 3), ("pp", 2), *matrix_only(("fsdp", 2), ("tp", 2), ("pp", 3), ("dp=2,pp=2", 4))],
)
def test_a_loop_over_a_cut_model_trains_the_weights_of_one_process(
    launch_script: Launch, tmp_path: Path, strategy: str, workers: int
) -> None:
    """Plain, clipped, and accumulated over batches of different size."""
    script = SCRIPTS / "cut_loop.py"
    if not _one_process:
        assert launch_script(script, workers=1, args=(str(tmp_path / "one"),)).exit_code == 0
        _one_process.update(load_file(tmp_path / "one"))
    done = launch_script(script, workers=workers, strategy=strategy, args=(str(tmp_path / "cut"),))
    assert done.exit_code == 0, done.error
    found = load_file(tmp_path / "cut")
    for name, value in _one_process.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)


def test_a_death_takes_a_loop_over_a_cut_model_back_to_its_checkpoint(
    launch_script: Launch, tmp_path: Path
) -> None:
    script, ends = SCRIPTS / "saving_loop.py", []
    faults = Faults().kill("worker-1", at_step=10, at="worker: before forward")
    for name, given in (("whole", None), ("killed", faults)):
        out = tmp_path / name
        out.mkdir()
        done = launch_script(
            script, workers=3, strategy="fsdp", args=(str(out), "one"), name=name, faults=given
        )
        assert done.exit_code == 0, done.error
        assert "takes all of them back to the newest shoal.checkpoint" in done.stderr
        assert ("step-000000008: step 8" in done.stderr) == (given is not None)
        ends.append(json.loads((out / "0.json").read_text()))
    assert ends[0] == ends[1]


def test_a_loop_is_refused_by_name_where_its_forward_cannot_be_cut(launch_script: Launch) -> None:
    script = """
    import torch, shoal
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    data = shoal.Dataset.from_arrays(torch.ones(16, 4)).batch(8)
    model, optimizer, data = shoal.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    for x in data:
        model[0](x).mean().backward()
        optimizer.step()
    """
    for strategy, said in (
        ("tp=2,pp=2", "cuts the layers of each stage"),
        ("fsdp", "the loop calls the layer '0' of the model by itself"),
    ):
        done = launch_script(
            script, workers=4 if "," in strategy else 2, strategy=strategy, name=strategy[:2]
        )
        assert done.exit_code == 2
        assert said in str(done.error)


OF_ALL = """
import torch, shoal
from torch import nn

class OfAll(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        given = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in given]).norm()
        for p in given:
            p -= 0.1 * p.grad / norm

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
data = shoal.Dataset.from_arrays((torch.randn(16, 4), torch.arange(16) % 4)).batch(8)
"""


@pytest.mark.parametrize(
    "body",
    [
        """
model, optimizer, data = shoal.setup(model, OfAll(model.parameters()), data)
for x, y in data:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
""",
        "shoal.Trainer(model, loss=nn.CrossEntropyLoss(), optimizer=OfAll).fit(data)",
    ],
    ids=["loop", "Trainer"],
)
def test_an_optimizer_that_mixes_parameters_is_refused_over_stages(launch_script: Launch, body: str) -> None:
    done = launch_script(OF_ALL + body, workers=2, strategy="pp")
    assert done.exit_code == 2, done.stderr
    assert "the update of OfAll mixes parameters" in str(done.error)


PENALTY = """
import sys
import torch, shoal
from safetensors.torch import save_file
from torch import nn
from torch.autograd import grad  # by name, before shoal.setup

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))

def penalised(model, x, y):
    points = x.clone().requires_grad_()
    output = model(points)
    if sys.argv[1] == "grad":
        (slope,) = grad(output.sum(), points, create_graph=True)
    else:
        output.sum().backward(create_graph=True, inputs=[points])
        slope = points.grad
    return (output - y).square().mean() + (slope.norm(dim=1) - 1).square().mean()

torch.manual_seed(0)
model = Block().double()
draw = torch.Generator().manual_seed(1)
x = torch.randn(40, 6, dtype=torch.float64, generator=draw)
data = shoal.Dataset.from_arrays((x, x[:, :1].sin())).batch(10)
"""
IN_A_LOOP = """
model, optimizer, data = shoal.setup(model, torch.optim.SGD(model.parameters(), lr=0.05), data)
for x, y in data:
    optimizer.zero_grad()
    penalised(model, x, y).backward()
    optimizer.step()
if shoal.rank() == 0:
    save_file(model.state_dict(), sys.argv[2])
"""
IN_A_TRAINER = """
def training_step(model, batch):
    return penalised(model, *batch)

shoal.Trainer(model, training_step=training_step, optimizer=lambda p: torch.optim.SGD(p, lr=0.05)).fit(data)
"""


@pytest.mark.parametrize(
    ("strategy", "workers", "body", "how"),
    [
        ("tp", 2, IN_A_LOOP, "grad"),
        ("tp", 2, IN_A_LOOP, "backward"),
        ("tp", 2, IN_A_TRAINER, "grad"),
        ("dp=2,tp=2", 4, IN_A_LOOP, "grad"),
        ("dp=2,tp=2", 4, IN_A_TRAINER, "backward"),
        ("fsdp", 2, IN_A_LOOP, "backward"),
        ("pp", 2, IN_A_LOOP, "grad"),
    ],
)
def test_a_gradient_penalty_is_refused_where_sums_over_workers_would_be_left_out(
    launch_script: Launch, strategy: str, workers: int, body: str, how: str
) -> None:
    done = launch_script(PENALTY + body, workers=workers, strategy=strategy, args=(how, "none"))
    assert done.exit_code == 2, done.error
    assert "differentiates a gradient" in str(done.error)


def test_a_gradient_penalty_of_a_loop_is_that_of_one_process_where_parameters_are_whole(
    launch_script: Launch, tmp_path: Path
) -> None:
    found = {}
    for strategy, workers in (("single", 1), ("ddp", 2), ("ps", 2)):
        out = tmp_path / strategy
        done = launch_script(
            PENALTY + IN_A_LOOP,
            workers=workers,
            strategy="ddp" if workers == 1 else strategy,
            args=("grad", str(out)),
            name=strategy,
        )
        assert done.exit_code == 0, done.error
        found[strategy] = load_file(out)
    for strategy in ("ddp", "ps"):
        torch.testing.assert_close(found[strategy], found["single"], rtol=1e-12, atol=1e-12)
