"""Hand-written torch DistributedDataParallel, started by torchrun: what shoal is compared with."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.scripts.job import Job

job = Job(sys.argv)
share = max(1, len(os.sched_getaffinity(0)) // int(os.environ["WORLD_SIZE"]))
torch.set_num_threads(int(os.environ.get("TORCH_NUM_THREADS", share)))
dist.init_process_group("gloo")
rank, num_workers = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(job.model())
optimizer = job.optimizer(model.parameters())
inputs, target = job.arrays()
loss_of: nn.Module = job.loss()
local = job.batch // num_workers
order = torch.randperm(target.shape[0], generator=torch.Generator().manual_seed(0))
for step in range(job.steps):
    begin = step * job.batch % (target.shape[0] - job.batch + 1) + rank * local
    chosen = order[begin : begin + local]
    x = {name: tensor.index_select(0, chosen) for name, tensor in inputs.items()}
    optimizer.zero_grad()
    loss = loss_of(model(**x), target.index_select(0, chosen))
    loss.backward()
    optimizer.step()
    loss.item()
    if rank == 0:
        job.step_done(time.time())
if rank == 0:
    job.write()
dist.destroy_process_group()
