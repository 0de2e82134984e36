"""Dry run of a step: its memory on one of many ranks, in one process, without peers and without the memory.

Forward and backward run on fake tensors (shapes and no data) over torch's fake process group, and
torch's MemTracker counts the peak. fsdp shards as in a real run; the planner
(`shoal.observe.planner.cost_model`) accounts for tp and pp, and for the optimizer's state, which is
measured in the one real step.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoal.data.batches import Batches
from shoal.data.slice import Slice, split_target, weight_of
from shoal.data.tree import Tree, leaves, map_tensors
from shoal.parallel import fsdp
from shoal.parallel.compute import ModelCall, autocast, run_again
from shoal.parallel.protocol import TrainJob


class DryRuns:
    """Dry runs of one model. Created before the strategy, which adds its own hooks to the model."""

    def __init__(self, model: nn.Module, wanted: Sequence[tuple[int, int]]) -> None:
        """`wanted`: ranks that share a batch, and shards of fsdp."""
        # Tensors of the script's own (a mask beside the module) are used as they are.
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        with FakeCopyMode(self._fake):
            self._wanted = [(*each, copy.deepcopy(model)) for each in wanted]

    def run(self, job: TrainJob, batches: Batches, optimizer: Any) -> list[dict[str, Any]]:
        """Bytes of parameters, gradients and optimizer, and the peak, of each wanted configuration."""
        state = _state_bytes(optimizer)
        found = []
        for num_ranks, num_shards, model in self._wanted:
            [part] = batches.slices(epoch=0, start=0, rank=0, num_workers=num_ranks, stop=1)
            try:
                with _fake_group(num_shards) as mesh:
                    figures = self._step(job, model, part, mesh)
            except Exception as error:  # a model may do anything that shapes alone do not support
                return [{"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}]
            found.append(
                {"ranks": num_ranks, "shards": num_shards, "optimizer_bytes": state // num_shards, **figures}
            )
        return found

    def _step(self, job: TrainJob, model: nn.Module, part: Slice, mesh: DeviceMesh | None) -> dict[str, int]:
        with self._fake:
            if job.checkpoint_activations:
                run_again(model, job.checkpoint_activations)
            if mesh is not None:
                fsdp.shard(model, mesh)
            model.train()
            batch = map_tensors(self._fake.from_tensor, part.batch)
            tracker = MemTracker()
            tracker.track_external(model, *(each for each in leaves(batch) if isinstance(each, Tensor)))
            with tracker:
                self._loss(job, model, batch, part).backward()  # type: ignore[no-untyped-call]
        peaks = tracker.get_tracker_snapshot("peak").values()
        held = sum(_local(each).nbytes for each in model.parameters())
        return {
            "parameter_bytes": held,
            "gradient_bytes": sum(_local(each).nbytes for each in model.parameters() if each.requires_grad),
            "peak_bytes": sum(int(peak["Total"]) for peak in peaks),
        }

    def _loss(self, job: TrainJob, model: nn.Module, batch: Tree, part: Slice) -> Tensor:
        with autocast(job):
            if job.training_step is not None:
                return _total(job.training_step(model, batch))
            inputs, target = split_target(batch)
            output = ModelCall(model)(inputs)
            try:
                return job.loss(output, target, max(part.num_local, 1), part.num_global, weight_of(batch))[0]
            except Exception:  # a loss that reads its values: its own tensors are small beside the model's
                return _total(output)


def _total(output: Tree) -> Tensor:
    """A scalar of all results."""
    found = [each for each in leaves(output) if isinstance(each, Tensor) and each.requires_grad]
    return sum((each.sum() for each in found[1:]), start=found[0].sum())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _state_bytes(optimizer: Any) -> int:
    """Bytes of an optimizer's state after a step."""
    if optimizer is None:
        return 0
    states = [each for state in optimizer.state.values() for each in state.values()]
    return sum(each.nbytes for each in states if isinstance(each, Tensor))


@contextmanager
def _fake_group(num_shards: int) -> Iterator[DeviceMesh | None]:
    """A group of this many ranks of which only this one exists; none for one."""
    if num_shards == 1:
        yield None
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=num_shards, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (num_shards,))
    finally:
        dist.destroy_process_group()
