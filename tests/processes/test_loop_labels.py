"""Losses of a loop of the user's own that leave out labels or average over a mask: weighted by what each slice counts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launched import Launched
from safetensors.torch import load_file

from whole_matrix import matrix_only

Launch = Callable[..., Launched]

HEAD = """
import json, pathlib, sys
import torch, shoal
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

OUT = pathlib.Path(sys.argv[1])
g = torch.Generator().manual_seed(1)
x = torch.randn(42, 5, 6, dtype=torch.float64, generator=g)
label = torch.randint(0, 4, (42, 5), generator=g)
label[torch.rand(42, 5, generator=g) < torch.linspace(0, 0.9, 42)[:, None]] = -100
label[20:25] = -100  # all of one slice
data = shoal.Dataset.from_arrays((x, label)).batch(10)
results = {}

def set_up(seed, **settings):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    return shoal.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), data)

def keep(name, model):
    results.update({f"{name}/{k}": getattr(v, "full_tensor", lambda v=v: v)().clone() for k, v in model.state_dict().items()})
"""

COUNTED = """
def ignored(out, y):
    return F.cross_entropy(out.mT, y) / 2

def weighted(out, y):
    weights = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)
    return F.cross_entropy(out.reshape(-1, 4), y.reshape(-1), weights, label_smoothing=0.1)

def masked(out, y):
    kept = (y >= 0).reshape(-1)
    return (F.cross_entropy(out.reshape(-1, 4), y.clamp(min=0).reshape(-1), reduction="none") * kept).sum() / kept.sum()

def summed(out, y):
    return 0.07 * F.cross_entropy(out.mT, y, reduction="sum")

def summed_over_constant(out, y):
    return out.square().sum() / 10 + F.cross_entropy(out.mT, y.clamp(min=0))

def one_by_one(out, y):
    rows = [each.reshape(-1)[:7] for each in out]
    return sum(F.mse_loss(each, each.detach() + 1) + each.square().mean().sqrt() for each in rows) / len(out)

for seed, loss_of in enumerate((ignored, weighted, masked, summed, summed_over_constant, one_by_one)):
    model, optimizer, batches = set_up(seed)
    for number, (a, b) in enumerate(batches):
        optimizer.zero_grad()
        loss = loss_of(model(a), b)
        loss.backward()
        if seed in (0, 3):
            shoal.log(loss=loss)
        if number % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    keep(loss_of.__name__, model)
"""

TAIL = """
save_file({k: v.contiguous() for k, v in results.items()}, OUT / f"rank-{shoal.rank()}.safetensors")
"""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "ps", *matrix_only("tp", "pp")])
def test_losses_that_leave_out_labels_are_those_of_one_process(
    launch_script: Launch, tmp_path: Path, strategy: str
) -> None:
    trained, logged = {}, {}
    for workers in (1, 2) if strategy in ("tp", "pp") else (1, 2, 3):
        folder = tmp_path / str(workers)
        folder.mkdir()
        settings = {"strategy": strategy} if workers > 1 else {}
        done = launch_script(HEAD + COUNTED + TAIL, workers=workers, args=(str(folder),), **settings)
        assert done.exit_code == 0, done.error
        trained[workers] = load_file(folder / "rank-0.safetensors")
        lines = map(json.loads, (done.run_dir / "metrics.jsonl").read_text().splitlines())
        logged[workers] = [line["loss"] for line in lines if "loss" in line]
    for workers in trained:
        assert logged[workers] == pytest.approx(logged[1], rel=1e-9)
        for name, expected in trained[1].items():
            torch.testing.assert_close(trained[workers][name], expected, rtol=1e-9, atol=1e-11, msg=name)


OVER_BATCHES = """
model, optimizer, batches = set_up(0)
for number, (a, b) in enumerate(batches, 1):
    F.cross_entropy(model(a).mT, b).backward()
    if number % 2 == 0:
        optimizer.step()
        optimizer.zero_grad()
"""

OF_SEVERAL_LOSSES = """
model, optimizer, batches = set_up(0)
for a, b in batches:
    optimizer.zero_grad()
    out = model(a)
    (F.cross_entropy(out.mT, b) + 0.1 * out.square().mean()).backward()
    optimizer.step()
"""

OF_PAIRS = """
model, optimizer, batches = set_up(0)
for a, b in batches:
    optimizer.zero_grad()
    out = model(a)[:, 0]
    F.cross_entropy(out @ F.normalize(out).T, torch.arange(len(out))).backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (OF_PAIRS, "compares the 5 samples of this worker's slice with each other (in-batch negatives)"),
        (
            OF_SEVERAL_LOSSES.replace(
                "F.cross_entropy(out.mT, b)", "F.mse_loss(out, out.detach() + 1).sqrt()"
            ),
            "takes the root of numbers",
        ),
    ],
    ids=["pairs", "a root"],
)
def test_losses_that_compare_samples_are_refused(
    launch_script: Launch, tmp_path: Path, body: str, said: str
) -> None:
    done = launch_script(HEAD + body + TAIL, workers=2, args=(str(tmp_path),))
    assert done.exit_code == 2, done.error
    assert said in str(done.error)
    assert "use shoal.gather" in str(done.error) or "compare shoal.gather" in str(done.error)


@pytest.mark.parametrize("strategy", ["ddp", *matrix_only("fsdp", "ps")])
@pytest.mark.parametrize(
    ("body", "said"),
    [
        (OVER_BATCHES, "accumulated into one step, and one of the losses left out labels"),
        (OF_SEVERAL_LOSSES, "a sum of parts that count differently"),
    ],
    ids=["over batches", "of several losses"],
)
def test_losses_whose_weights_are_known_too_late_are_refused(
    launch_script: Launch, tmp_path: Path, body: str, said: str, strategy: str
) -> None:
    done = launch_script(HEAD + body + TAIL, workers=2, args=(str(tmp_path),), strategy=strategy)
    assert done.exit_code == 2, done.error
    assert said in str(done.error)
    assert "use shoal.mean(sum, count)" in str(done.error)


def test_the_refusal_of_accumulated_labels_names_a_cure_that_is_right(
    launch_script: Launch, tmp_path: Path
) -> None:
    body = OVER_BATCHES.replace(
        "F.cross_entropy(model(a).mT, b).backward()",
        "shoal.mean(F.cross_entropy(model(a).mT, b, reduction='sum'), (b >= 0).sum()).backward()",
    )
    for workers in (1, 2):
        (tmp_path / str(workers)).mkdir()
        script = HEAD + body + "keep('model', model)" + TAIL
        assert launch_script(script, workers=workers, args=(str(tmp_path / str(workers)),)).exit_code == 0
    one, two = (load_file(tmp_path / str(workers) / "rank-0.safetensors") for workers in (1, 2))
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-10, atol=1e-12)
