"""torch's DistributedDataParallel over gloo, for the wide MLP: python -m benchmarks.peers.torch_ddp --workers 2."""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.click_torch import WIDE_BATCH, WIDE_LR, wide_arrays, wide_mlp
from benchmarks.peers.meter import Meter, options, tell


def worker(rank: int, chosen: argparse.Namespace, rendezvous: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(chosen.threads)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=chosen.workers)
    torch.manual_seed(0)
    model = DistributedDataParallel(wide_mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=WIDE_LR, momentum=0.9)
    loss_of = nn.CrossEntropyLoss()
    x, target = wide_arrays()
    local = WIDE_BATCH // chosen.workers
    meter = Meter(warm_s=chosen.warm, seconds=chosen.seconds)
    number, over, loss = 0, torch.zeros(1), torch.zeros(())
    while not over:
        begin = number * WIDE_BATCH % (len(x) - WIDE_BATCH + 1) + rank * local
        optimizer.zero_grad()
        loss = loss_of(model(x[begin : begin + local]), target[begin : begin + local])
        loss.backward()
        optimizer.step()
        meter.step(WIDE_BATCH)
        number += 1
        if number % 20 == 0:  # rarely, so that agreeing on the end costs nothing
            over = torch.tensor([float(not meter.goes_on())])
            dist.broadcast(over, 0)
    if rank == 0:
        tell(
            "torch DDP",
            meter.samples_per_s,
            version=torch.__version__,
            model=f"MLP of {sum(p.numel() for p in model.parameters())} parameters",
            processes=chosen.workers,
            threads=chosen.threads,
            batch_per_update=WIDE_BATCH,
            steps=meter.num_steps,
            last_loss=round(loss.item(), 4),
        )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    chosen = options()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (chosen, f"{folder}/rendezvous"), nprocs=chosen.workers)


if __name__ == "__main__":
    main()
