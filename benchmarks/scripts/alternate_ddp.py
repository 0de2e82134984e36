"""One step of shoal's ddp against one of torch's DistributedDataParallel, alternated in the same processes.

`shoal run -n 2 alternate_ddp.py MODEL STEPS OUT ROUNDS`: both sides share the
processes, the group and the threads, so that the ratio is of the step alone.
"""

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
from torch.nn.parallel import DistributedDataParallel

import shoal
from benchmarks.harness import in_turn
from benchmarks.scripts.job import Job

job = Job(sys.argv)
inputs, target = job.arrays()
torch.manual_seed(0)
trainer = shoal.Trainer(job.model(), loss=job.loss(), optimizer=job.optimizer, device="cpu", progress=False)
data = shoal.Dataset.from_arrays((inputs, target)).shuffle(seed=0).batch(job.batch)
trainer.fit(data, max_steps=2)  # forms the group

torch.manual_seed(0)
model = DistributedDataParallel(job.model())
optimizer = job.optimizer(model.parameters())
loss_of = job.loss()
local = job.batch // shoal.num_workers()
order = torch.randperm(target.shape[0], generator=torch.Generator().manual_seed(0))


def theirs() -> None:
    for step in range(job.steps):
        begin = step * job.batch % (target.shape[0] - job.batch + 1) + shoal.rank() * local
        chosen = order[begin : begin + local]
        x = {name: tensor.index_select(0, chosen) for name, tensor in inputs.items()}
        optimizer.zero_grad()
        loss = loss_of(model(**x), target.index_select(0, chosen))
        loss.backward()
        optimizer.step()
        loss.item()


def ours() -> None:
    trainer.fit(data, max_steps=job.steps)


def timed(side: Callable[[], None]) -> float:
    dist.barrier()
    began = time.perf_counter()
    side()
    return (time.perf_counter() - began) / job.steps


theirs()
ours()
pairs = [in_turn(partial(timed, ours), partial(timed, theirs), number) for number in range(int(sys.argv[4]))]
if shoal.rank() == 0:
    Path(sys.argv[3]).write_text(json.dumps(pairs))
