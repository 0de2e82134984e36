"""The click model under TorchRec, its table sharded over processes: python -m benchmarks.peers.torchrec_sharded.

Its own best on a processor: FBGEMM's fused table with Adagrad in the
backward pass, one KeyedJaggedTensor of 26 keys, the sharding its planner chooses.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torchrec
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.click_model import BATCH, DIM, LR, NUM_COLUMNS, NUM_ROWS, ROW_STD, batches
from benchmarks.click_torch import mlp
from benchmarks.peers.meter import Meter, options, tell

COLUMNS = [f"column_{number}" for number in range(NUM_COLUMNS)]


class ClickModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        table = torchrec.EmbeddingBagConfig(
            name="rows",
            embedding_dim=DIM,
            num_embeddings=NUM_ROWS,
            feature_names=COLUMNS,
            init_fn=lambda weight: nn.init.normal_(weight, std=ROW_STD),
        )
        self.rows = torchrec.EmbeddingBagCollection(tables=[table], device=torch.device("cpu"))
        self.mlp = mlp()

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        return torch.squeeze(self.mlp(self.rows(ids).values()), 1)


def worker(rank: int, chosen: argparse.Namespace, rendezvous: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(chosen.threads)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=chosen.workers)
    torch.manual_seed(0)
    local = BATCH // chosen.workers
    model = ClickModel()
    apply_optimizer_in_backward(torch.optim.Adagrad, model.rows.parameters(), {"lr": LR})
    sharders: list[Any] = [EmbeddingBagCollectionSharder()]
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=chosen.workers, compute_device="cpu", local_world_size=chosen.workers),
        batch_size=local,
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    sharded = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
    dense = [value for name, value in sharded.named_parameters() if "mlp" in name]
    optimizer = torch.optim.Adagrad(dense, lr=LR)
    loss_of = nn.BCEWithLogitsLoss()
    # The same 1,024 samples a step, whatever the number of processes.
    stream = batches(chosen.data, batch=local, worker=rank, num_workers=chosen.workers)
    lengths = torch.ones(NUM_COLUMNS * local, dtype=torch.int32)
    meter = Meter(warm_s=chosen.warm, seconds=chosen.seconds)
    number, over, loss = 0, torch.zeros(1), torch.zeros(())
    while not over:
        ids, label = next(stream)
        columns = KeyedJaggedTensor.from_lengths_sync(
            COLUMNS, torch.from_numpy(ids).t().contiguous().view(-1), lengths
        )
        optimizer.zero_grad()
        loss = loss_of(sharded(columns), torch.from_numpy(label))
        loss.backward()
        optimizer.step()
        meter.step(BATCH)
        number += 1
        if number % 20 == 0:  # rarely, so that agreeing on the end costs nothing
            over = torch.tensor([float(not meter.goes_on())])
            dist.broadcast(over, 0)
    if rank == 0:
        sharding = {name: each.sharding_type for group in plan.plan.values() for name, each in group.items()}
        tell(
            "TorchRec",
            meter.samples_per_s,
            version=torchrec.__version__,
            processes=chosen.workers,
            threads=chosen.threads,
            batch_per_update=BATCH,
            sharding=sharding["rows"],
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
