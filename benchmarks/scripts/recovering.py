"""A job with light set-up whose ranks hash their final weights: STEPS OUT MODE.

plain        a fit of STEPS steps
whole        the same with validation and checkpoints, then evaluate and predict: it passes every failpoint
alternate-*  leaves out, in every second block of steps, what recovery costs a step without faults: the anchor, and
             the log of exchanges. "small" is a step of a millisecond or two, "large" one of some tens
timed-*      a stop-watch around just those: what lies inside an exchange, waiting and updating, is not counted
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shoal
from shoal.recovery.elastic_group import ElasticGroup
from shoal.train import loop

steps, out, mode = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
BLOCK = 20
times: list[float] = []
full = (loop.note_anchor, ElasticGroup.exchange)


def exchange(self: Any, first: Any, again: Any = None, **how: Any) -> Any:
    return how.get("conclude", lambda result: result)(first(self.native))


bare = (lambda trainer, place: None, exchange)
own = [0.0]  # seconds of recovery's own, up to each step


def timed_note(trainer: Any, place: Any) -> None:
    began = time.perf_counter()
    full[0](trainer, place)
    own[-1] += time.perf_counter() - began


def timed_exchange(self: Any, first: Any, again: Any = None, **how: Any) -> Any:
    began = time.perf_counter()
    how["conclude"] = left_out(how.get("conclude", lambda result: result))
    result = full[1](self, left_out(first), again, **how)
    own[-1] += time.perf_counter() - began
    return result


def left_out(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def called(value: Any) -> Any:
        began = time.perf_counter()
        result = call(value)
        own[-1] -= time.perf_counter() - began
        return result

    return called


if mode.startswith("timed"):
    loop.note_anchor, ElasticGroup.exchange = timed_note, timed_exchange  # type: ignore


class Clock(shoal.callbacks.Callback):
    """Times every step, and, where asked to, leaves the cost of recovery out of half of the blocks."""

    ranks = "every"

    def on_step_end(self, trainer: shoal.Trainer, logs: object) -> None:
        times.append(time.perf_counter())
        own.append(0.0)
        if mode.startswith("alternate") and trainer.step % BLOCK == 0:
            # Blocks from 0: one and two warm up, then with, without, without, with, ...
            is_bare = (trainer.step // BLOCK - 2) % 4 in (1, 2) and trainer.step >= 2 * BLOCK
            loop.note_anchor, ElasticGroup.exchange = bare if is_bare else full  # type: ignore


torch.manual_seed(0)
width = 1024 if mode.endswith("large") else 256
model = nn.Sequential(
    nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
)
x = torch.randn(4096, 64, generator=torch.Generator().manual_seed(1))
data = shoal.Dataset.from_arrays((x, x[:, :10].argmax(1)))
callbacks: list[shoal.callbacks.Callback] = [Clock()]
if mode == "whole":
    callbacks.append(shoal.callbacks.ModelCheckpoint(every_steps=50))
trainer = shoal.Trainer(
    model,
    loss=nn.CrossEntropyLoss(),
    optimizer=lambda params: torch.optim.Adam(params, lr=1e-3),
    callbacks=callbacks,
    seed=0,
    device="cpu",
)
few, _ = data.split(0.125, 0.875, seed=0)
trainer.fit(
    data.shuffle(seed=0).batch(256),
    max_steps=steps,
    validation_data=few.batch(256) if mode == "whole" else None,
)
if mode == "whole":
    trainer.evaluate(few.batch(128))
    trainer.predict(few.batch(128))
digest = hashlib.sha256(b"".join(t.numpy().tobytes() for t in model.state_dict().values())).hexdigest()
(out / f"{shoal.rank()}.json").write_text(json.dumps({"weights": digest, "times": times, "own": own}))
