"""A job with light set-up whose ranks hash their final weights: STEPS OUT [alternate].

`alternate` leaves out, in every second block of steps, what recovery costs a
step without faults: the anchor, and the log of exchanges.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shoal
from shoal.strategies.together import Together
from shoal.train import anchoring

steps, out, alternates = int(sys.argv[1]), Path(sys.argv[2]), "alternate" in sys.argv
BLOCK = 20
times: list[float] = []
full = (anchoring.note, Together.exchange)


def exchange(self: Any, first: Any, again: Any = None, **how: Any) -> Any:
    return how.get("conclude", lambda result: result)(first(self.native))


bare = (lambda trainer, place: None, exchange)


class Clock(shoal.callbacks.Callback):
    """Times every step, and, where asked to, leaves the cost of recovery out of every second block of them."""

    ranks = "every"

    def on_step_end(self, trainer: shoal.Trainer, logs: object) -> None:
        times.append(time.perf_counter())
        if alternates and trainer.step % BLOCK == 0:
            anchoring.note, Together.exchange = bare if trainer.step // BLOCK % 2 else full  # type: ignore


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
