"""shoal's side: an ordinary Trainer script over the same data, which measures its own steady rate.

    shoal run -n 2 --servers 1 --strategy ps:async benchmarks/click_train.py --data DIR --out DIR

Every rank writes OUT/RANK.json: what it trained between the end of the
warm-up and the deadline. The sum over the ranks is the job's rate, whatever a
strategy makes of the batch, because samples are counted where the loss sees them:
once a step, since the Trainer checks a loss on the same slice again at steps 1, 2, 4, 8 and so on.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from torch import Tensor, nn

import shoal
from benchmarks.click_model import BATCH, LR, read_data
from benchmarks.click_torch import WIDE_BATCH, WIDE_LR, ClickModel, wide_arrays, wide_mlp
from benchmarks.peers.meter import Meter
from benchmarks.plain_models import image_arrays, resnet18

parser = argparse.ArgumentParser()
parser.add_argument("--data", help="folder with ids.npy and label.npy")
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--model", choices=("click", "wide", "resnet18"), default="click")
parser.add_argument("--seconds", type=float, default=8.0)
parser.add_argument("--warm", type=float, default=3.0)
parser.add_argument(
    "--steps", type=int, help="measure these many steps, not seconds: two runs then do the same work"
)
parser.add_argument("--batch", type=int, help="of one update; that of the model without")
parser.add_argument("--per-worker", action="store_true", help="the batch is each worker's, not all workers'")
options = parser.parse_args()


class Counted(nn.Module):
    """A loss that counts the samples of a step."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self._loss = loss
        self._num_samples = 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self._num_samples = self._num_samples or target.shape[0]  # checks of the loss follow
        return self._loss(output, target)

    def take(self) -> int:
        """Samples since the last look."""
        found, self._num_samples = self._num_samples, 0
        return found


class Clock(shoal.callbacks.Callback):
    """Feeds the meter, and ends the fit when it has seen enough."""

    ranks = "every"

    def __init__(self) -> None:
        self.meter: Meter | None = None
        self.last_loss: float | None = None
        self.cpu_s = 0.0

    def on_step_end(self, trainer: shoal.Trainer, logs: Any) -> None:
        # The clock starts with the first step: joining and the first pulls are not what is measured.
        self.meter = self.meter or Meter(
            warm_s=options.warm, seconds=options.seconds, num_steps=options.steps
        )
        if not self.meter.goes_on():
            return
        self.meter.step(loss.take())
        if not self.meter.num_steps:
            self._cpu_before = time.process_time()
        self.last_loss = logs.loss
        if not self.meter.goes_on():
            self.cpu_s = time.process_time() - self._cpu_before
            trainer.stop()


torch.manual_seed(0)
if options.model == "click":
    ids, label = read_data(options.data)
    arrays = (torch.from_numpy(ids), torch.from_numpy(label))
    model: nn.Module = ClickModel()
    loss = Counted(nn.BCEWithLogitsLoss())
    batch = BATCH
elif options.model == "resnet18":
    arrays = image_arrays(512)
    model, loss, batch = resnet18(), Counted(nn.CrossEntropyLoss()), 16
else:
    arrays = wide_arrays()
    model, loss, batch = wide_mlp(), Counted(nn.CrossEntropyLoss()), WIDE_BATCH


def optimizer(params: Any) -> torch.optim.Optimizer:
    if options.model == "click":
        return torch.optim.Adagrad(params, lr=LR)
    return torch.optim.SGD(params, lr=WIDE_LR, momentum=0.9)


clock = Clock()
trainer = shoal.Trainer(
    model, loss=loss, optimizer=optimizer, callbacks=[clock], device="cpu", progress=False
)
data = shoal.Dataset.from_arrays(arrays).batch(
    options.batch or batch, per_worker=options.per_worker, drop_last=True
)
trainer.fit(data, epochs=1_000_000)
meter = clock.meter
if meter is None:
    raise SystemExit("no step was trained")
told = {
    "samples_per_s": meter.samples_per_s,
    "steps": meter.num_steps,
    "samples": meter.num_samples,
    "seconds": meter.seconds,
    "cpu_ms_per_step": 1e3 * clock.cpu_s / max(1, meter.num_steps),
    "last_loss": clock.last_loss,
    "threads": torch.get_num_threads(),
}
options.out.mkdir(parents=True, exist_ok=True)
(options.out / f"{shoal.rank()}.json").write_text(json.dumps(told))
