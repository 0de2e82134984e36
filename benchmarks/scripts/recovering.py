"""A job with light set-up whose ranks hash their final weights: STEPS OUT [bare].

`bare` leaves out what recovery costs a step without faults: the anchor, and
the log of exchanges.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path

import torch
from torch import nn

import shoal
from shoal.strategies.together import Together
from shoal.train import anchoring, loop

steps, out, is_bare = int(sys.argv[1]), Path(sys.argv[2]), "bare" in sys.argv
times: list[float] = []
if is_bare:
    anchoring.note = lambda trainer, place: None
    assert loop.anchoring is anchoring
    Together.exchange = lambda self, first, again=None, conclude=lambda r: r, abandon=None: conclude(  # type: ignore
        first(self.native)
    )


class Clock(shoal.callbacks.Callback):
    ranks = "zero"

    def on_step_end(self, trainer: shoal.Trainer, logs: object) -> None:
        times.append(time.perf_counter())


torch.manual_seed(0)
width = 256
model = nn.Sequential(
    nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
)
x = torch.randn(4096, 64, generator=torch.Generator().manual_seed(1))
data = shoal.Dataset.from_arrays((x, x[:, :10].argmax(1)))
trainer = shoal.Trainer(
    model,
    loss=nn.CrossEntropyLoss(),
    optimizer=lambda params: torch.optim.Adam(params, lr=1e-3),
    callbacks=[Clock()],
    seed=0,
    device="cpu",
)
trainer.fit(data.shuffle(seed=0).batch(256), max_steps=steps)
digest = hashlib.sha256(b"".join(t.numpy().tobytes() for t in model.state_dict().values())).hexdigest()
(out / f"{shoal.rank()}.json").write_text(json.dumps({"weights": digest, "times": times}))
