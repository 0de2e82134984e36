"""Averages of weights, weights given by a state_dict, learning rates that follow values or workers: by hand in torch, and over workers, servers and deaths."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launched import Launched
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shoal import Faults

SCRIPT = """
import json, pathlib, sys, torch, shoal
from torch import nn
from shoal.callbacks import EMA, SWA, ModelCheckpoint, ReduceLROnPlateau

generator = torch.Generator().manual_seed(0)
x = torch.randn(50, 4, generator=generator, dtype=torch.float64)
y = x @ torch.randn(4, 2, generator=generator, dtype=torch.float64)
data = shoal.Dataset.from_arrays((x, y))
size = 16 // shoal.num_workers() if 16 % shoal.num_workers() == 0 else None
folder = pathlib.Path(sys.argv[1])

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()

def trainer(*callbacks, **options):
    return shoal.Trainer(model(), loss="mse", callbacks=callbacks, progress=False,
                         **{"optimizer": "adam", "lr": 0.05, "params": {"lr": 0.05, "by": "test"}} | options)

for name, callback in {"ema": EMA(0.8), "swa": SWA(2)}.items():
    one = trainer(callback)
    one.fit(data.batch(16), epochs=4)
    one.save(folder / name)

plateau = ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=10.0)
one = trainer(plateau)
one.fit(data.batch(16), epochs=4)
one.save(folder / "plateau")
rates = [one.learning_rates, plateau.num_reductions]
one.load({name: 2 * tensor for name, tensor in model().state_dict().items()})
one.save(folder / "given")

if size is not None:
    one = trainer(optimizer="sgd", scale_lr="linear", lr=0.2 / shoal.num_workers())
    one.fit(data.batch(size, per_worker=True), epochs=2)
    one.save(folder / "scaled")
if shoal.rank() == 0:
    (folder / "rates.json").write_text(json.dumps(rates))
"""


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def by_hand() -> dict[str, dict[str, Tensor]]:
    """The same in a loop of torch, with torch's own AveragedModel."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 4, generator=generator, dtype=torch.float64)
    y = x @ torch.randn(4, 2, generator=generator, dtype=torch.float64)
    found = {}
    for name in ("ema", "swa", "plateau", "scaled"):
        net = model()
        optimizer = (
            torch.optim.SGD(net.parameters(), 0.2)
            if name == "scaled"
            else torch.optim.Adam(net.parameters(), 0.05)
        )
        average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.8) if name == "ema" else None)
        for epoch in range(2 if name == "scaled" else 4):
            for inputs, target in zip(x.split(16), y.split(16), strict=True):
                optimizer.zero_grad()
                nn.functional.mse_loss(net(inputs), target).backward()
                optimizer.step()
                if name == "ema":
                    average.update_parameters(net)
            if name == "swa" and epoch + 1 >= 2:
                average.update_parameters(net)
            if name == "plateau" and epoch:  # by less than min_delta: every epoch but the first
                optimizer.param_groups[0]["lr"] *= 0.5
        kept = average.module if name in ("ema", "swa") else net
        found[name] = {key: tensor.detach().clone() for key, tensor in kept.state_dict().items()}
    return found | {"given": {key: 2 * tensor for key, tensor in model().state_dict().items()}}


@pytest.mark.parametrize(
    ("workers", "options"),
    [
        pytest.param(1, {}, id="single", marks=pytest.mark.matrix),
        pytest.param(2, {"strategy": "fsdp"}, id="fsdp-2"),
        pytest.param(2, {"strategy": "tp"}, id="tp-2", marks=pytest.mark.matrix),
        pytest.param(3, {"faults": Faults().kill("worker-1", at_step=6)}, id="ddp-3-a-worker-killed"),
        pytest.param(
            2,
            {
                "strategy": "ps",
                "servers": 2,
                "replicas": 2,
                "faults": Faults().kill("server-0", at_step=7).kill("worker-0", at_step=10),
            },
            id="ps-2-a-server-and-a-worker-killed",
        ),
    ],
)
def test_averages_and_rates_are_those_of_one_process(
    workers: int, options: dict[str, object], launch_script: Callable[..., Launched], tmp_path: Path
) -> None:
    launched = launch_script(SCRIPT, workers=workers, args=[str(tmp_path)], **options)
    assert launched.exit_code == 0, f"{launched.error}\n{launched.stderr}"
    expected = by_hand()
    for name, weights in expected.items():
        if name == "scaled" and (16 % workers or options.get("strategy") == "tp"):  # one batch for all of tp
            continue
        found = load_file(tmp_path / name / "model.safetensors")
        for key, tensor in weights.items():
            torch.testing.assert_close(found[key], tensor, rtol=1e-9, atol=1e-11, msg=f"{name} {key}")
    rates, num_reductions = json.loads((tmp_path / "rates.json").read_text())
    assert (rates, num_reductions) == ([0.05 * 0.5**3], 3)
    assert json.loads((launched.run_dir / "params.json").read_text()) == {"lr": 0.05, "by": "test"}
    if options.get("strategy") in ("fsdp", "ps"):
        assert "global batch 16 (8 x 2 workers), learning rate 0.2 (0.1 x 2)" in launched.stderr
