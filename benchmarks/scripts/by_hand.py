"""fsdp, tp and pp as torch's own tutorials write them: what shoal's are compared with.

Each gives a function that makes one step on a global batch and returns its
mean loss (pp: on the last stage; elsewhere nothing).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

Step = Callable[[Tensor, Tensor], float]
NUM_MICRO_PER_RANK = 2  # as many micro-batches as shoal makes


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-4)


def _plain_step(model: nn.Module, part: Callable[[Tensor], Tensor]) -> Step:
    optimizer, loss_of = optimizer_of(model), nn.CrossEntropyLoss()

    def step(x: Tensor, y: Tensor) -> float:
        optimizer.zero_grad()
        loss = loss_of(model(part(x)), part(y))
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def fsdp(model: nn.Sequential) -> Step:
    """A unit per block, and one for the rest."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model[1:-1]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # gloo has no mean
            module.set_gradient_divide_factor(float(dist.get_world_size()))
            module.set_force_sum_reduction_for_comms(True)
    return _plain_step(model, lambda whole: whole.chunk(dist.get_world_size())[dist.get_rank()])


def tp(model: nn.Sequential) -> Step:
    """Each block's first layer by columns, its second by rows; every rank computes the whole batch."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model[1:-1]:
        parallelize_module(layer, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})
    return _plain_step(model, lambda whole: whole)


def pp(model: nn.Sequential, schedule: str) -> Step:
    """Two halves, micro-batches as shoal makes them."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    length = len(model) // num_ranks
    mine = model[rank * length : (rank + 1) * length if rank + 1 < num_ranks else len(model)]
    stage = PipelineStage(mine, rank, num_ranks, torch.device("cpu"))
    kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[schedule]
    running = kind(stage, NUM_MICRO_PER_RANK * num_ranks, loss_fn=nn.CrossEntropyLoss())
    optimizer = optimizer_of(mine)

    def step(x: Tensor, y: Tensor) -> float:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if rank == 0:
            running.step(x)
        elif rank == num_ranks - 1:
            running.step(target=y, losses=losses)
        else:
            running.step()
        optimizer.step()
        return float(torch.stack([loss.detach() for loss in losses]).mean()) if losses else 0.0

    return step


def build(strategy: str, model: nn.Sequential, schedule: str) -> Step:
    match strategy:
        case "fsdp":
            return fsdp(model)
        case "tp":
            return tp(model)
        case "pp":
            return pp(model, schedule)
    raise SystemExit(f"nothing written by hand for '{strategy}'")
