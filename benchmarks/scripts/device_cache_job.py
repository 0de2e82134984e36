"""The click model with rows of 64 numbers: by hand in plain PyTorch, or by a Trainer under `shoal run`; samples/s at each batch size."""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import pstats
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.peers.meter import Meter

parser = argparse.ArgumentParser()
parser.add_argument("how", choices=("plain", "shoal"))
parser.add_argument("--data", type=Path, required=True)
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--rows", type=int, required=True)
parser.add_argument("--device", required=True)
parser.add_argument("--batch", type=int, action="append", required=True)
parser.add_argument("--seconds", type=float, default=4.0)
parser.add_argument("--warm", type=float, default=2.0)
parser.add_argument(
    "--profile", type=Path, help="file for where the host's time goes, in a fit after the measured ones"
)
options = parser.parse_args()

DIM, LR = 64, 0.02
INITIAL_ROWS = 1_000_000


class Click(nn.Module):
    """26 ids a sample, their rows side by side, an MLP over them."""

    def __init__(self, num_columns: int) -> None:
        super().__init__()
        some = torch.randn(min(options.rows, INITIAL_ROWS), DIM).mul_(
            0.01
        )  # drawing all of 20 M takes longer than the rest
        weight = some.repeat(-(-options.rows // len(some)), 1)[: options.rows]
        self.rows = nn.Embedding(options.rows, DIM, sparse=True, _weight=weight)
        self.mlp = nn.Sequential(
            nn.Linear(num_columns * DIM, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, ids: Tensor) -> Tensor:
        return torch.squeeze(self.mlp(self.rows(ids).flatten(1)), 1)


torch.manual_seed(0)
ids, label = (
    torch.from_numpy(np.load(options.data / f"{name}.npy", mmap_mode="c")) for name in ("ids", "label")
)
model = Click(ids.shape[1])
loss = nn.BCEWithLogitsLoss()


def adagrad(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params, lr=LR)


def by_hand(batch: int, trained: Any) -> Meter:
    """As a script would have it: pinned batches, copies that do not block, the loss is not read."""
    meter, at = Meter(warm_s=options.warm, seconds=options.seconds), 0
    while meter.goes_on():
        some, wanted = (
            each[at : at + batch].pin_memory().to(options.device, non_blocking=True)
            if is_device
            else each[at : at + batch]
            for each in (ids, label)
        )
        at = (at + batch) % (len(label) - batch + 1)
        trained.zero_grad()
        loss(model(some), wanted).backward()
        trained.step()
        if is_device and meter.num_steps % 16 == 0:
            torch.cuda.synchronize()
        meter.step(batch)
    return meter


is_device = options.device != "cpu"
rates: dict[int, float] = {}
steps: dict[int, float] = {}
if options.how == "plain":
    model.to(options.device)
    trained = adagrad(model.parameters())
    for batch in options.batch:
        meter = by_hand(batch, trained)
        rates[batch], steps[batch] = meter.samples_per_s, 1e3 * meter.seconds / max(1, meter.num_steps)
else:
    import shoal

    class Clock(shoal.callbacks.Callback):
        """Feeds a meter, and ends the fit when it has seen enough."""

        meter: Meter

        def on_step_end(self, trainer: shoal.Trainer, logs: Any) -> None:
            if trainer.step > self.first_step:  # joining and laying out are not what is measured
                self.meter.step(self.batch)
                if not self.meter.goes_on():
                    trainer.stop()
            else:
                self.meter = Meter(warm_s=options.warm, seconds=options.seconds)

    clock = Clock()
    trainer = shoal.Trainer(model, loss=loss, optimizer=adagrad, callbacks=[clock], progress=False, seed=0)
    data = shoal.Dataset.from_arrays((ids, label))

    def fit(batch: int) -> None:
        clock.batch, clock.first_step = batch, trainer.step + 1
        trainer.fit(data.batch(batch, drop_last=True), epochs=1_000_000)

    for batch in options.batch:
        fit(batch)
        rates[batch], steps[batch] = (
            clock.meter.samples_per_s,
            1e3 * clock.meter.seconds / max(1, clock.meter.num_steps),
        )
    if options.profile is not None:
        text = io.StringIO()
        for batch in options.batch:
            profile = cProfile.Profile()
            profile.runcall(fit, batch)
            print(f"batch {batch}: {clock.meter.num_steps} measured steps", file=text)
            pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(45)
        options.profile.write_text(text.getvalue())
options.out.write_text(json.dumps({"samples_per_s": rates, "ms_per_step": steps}))
