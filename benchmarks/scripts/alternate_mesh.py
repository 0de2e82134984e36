"""A step of fsdp, tp or pp under shoal against the same by hand, alternated in the same processes: STRATEGY SCHEDULE STEPS OUT ROUNDS."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
import torch.distributed as dist
from torch import nn

import shoal
from benchmarks.harness import in_turn
from benchmarks.scripts import by_hand, mesh_job

strategy, schedule, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
x, y = mesh_job.arrays()
data = shoal.Dataset.from_arrays((x, y)).batch(mesh_job.BATCH)
trainer = shoal.Trainer(
    mesh_job.model(),
    loss=nn.CrossEntropyLoss(),
    optimizer=lambda params: torch.optim.Adam(params, lr=1e-4),
    device="cpu",
    progress=False,
)
trainer.fit(data, max_steps=2)  # forms the group
step = by_hand.build(strategy, mesh_job.model(), schedule)


def theirs() -> None:
    for number in range(steps):
        begin = number * mesh_job.BATCH % len(x)
        step(x[begin : begin + mesh_job.BATCH], y[begin : begin + mesh_job.BATCH])


def ours() -> None:
    trainer.fit(data, max_steps=steps)


def timed(side: Callable[[], None]) -> float:
    dist.barrier()
    began = time.perf_counter()
    side()
    dist.barrier()
    return (time.perf_counter() - began) / steps


theirs()
ours()
pairs = [in_turn(partial(timed, ours), partial(timed, theirs), number) for number in range(int(sys.argv[5]))]
if shoal.rank() == 0:
    Path(sys.argv[4]).write_text(json.dumps(pairs))
