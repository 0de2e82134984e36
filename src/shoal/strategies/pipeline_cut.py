"""Stages of a pipeline run: micro-batches, metas of what travels, and torch's schedules.

A slice is run in micro-batches of one size. Where it has too few samples for
that, the last ones are repetitions, cut off again before the loss: every
schedule sees the same shapes, and nothing of a repetition reaches a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from shoal.core.errors import TrainingError
from shoal.core.seeds import mix
from shoal.data.slice import Slice, split_target, weight_of
from shoal.data.tree import Tree, map_tensors
from shoal.strategies import pipeline_wire as wire
from shoal.strategies.compute import autocast, evaluating, place, seed_all
from shoal.strategies.pipeline_plan import Layer
from shoal.strategies.pipeline_wire import Value
from shoal.strategies.protocol import LossSum, TrainJob

_EVALUATION = 1 << 40
_MAX_SHAPES = 32  # of inputs, for which stages are kept ready


class Stage(nn.Module):
    """Some layers of the user's model, one after the other."""

    def __init__(self, job: TrainJob, layers: Sequence[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer.module for layer in layers)
        self.last_name = layers[-1].name
        self._job = job

    def forward(self, *values: Any) -> Any:
        """From what the stage before gives to what the stage after it takes."""
        value = values[0] if len(values) == 1 else values
        with autocast(self._job):
            for layer in self.layers:
                value = layer(value)
        return wire.tensors_of(value, self.last_name) if isinstance(value, tuple) else value


def num_micro_batches(num_samples: int, num_ranks: int, *, rounds_only: bool, factor: int = 1) -> int:
    """Parts in which about so many samples are run: from one to two per rank, whichever leaves least to repeat."""
    candidates = [num_ranks, 2 * num_ranks] if rounds_only else range(num_ranks, 2 * num_ranks + 1)
    best = min(candidates, key=lambda number: (-(-num_samples // number) * number, -number))
    return best * factor


def padded(inputs: Tree, num_samples: int, num_wanted: int) -> Tree:
    """The inputs with samples repeated at their end."""
    if num_samples == num_wanted:
        return inputs

    def longer(tensor: Tensor) -> Tensor:
        at = torch.arange(num_wanted, device=tensor.device) % num_samples
        return tensor.index_select(0, at)

    return map_tensors(longer, inputs)


class PipelineRunner:
    """This rank's stages of one model."""

    def __init__(
        self,
        job: TrainJob,
        stages: dict[int, Stage],
        *,
        num_stages: int,
        schedule: str,
        group: dist.ProcessGroup,
        data_groups: Sequence[dist.ProcessGroup],
        num_data_ranks: int,
    ) -> None:
        """`stages` by their numbers; `data_groups`: those that run the same stages on other parts of a batch."""
        self._job, self._stages, self._num_stages = job, stages, num_stages
        self._schedule, self._group, self._data_groups = schedule, group, data_groups
        self._num_data_ranks = num_data_ranks
        self._ranks = dist.get_process_group_ranks(group)
        self._at = dist.get_rank(group)
        self._schedules: dict[Any, Any] = {}
        self._must_check_loss = True
        self.is_last = num_stages - 1 in stages

    def forward_backward(self, batch: Slice, *, rank: int, step: int) -> LossSum:
        """All micro-batches forward and back: gradients of the loss sum, divided by the samples of the global batch."""
        job = self._job
        for stage in self._stages.values():
            stage.train()
        placed = place(batch.batch, job.device, job.cast_inputs)
        (inputs, target), weight = split_target(placed), weight_of(placed)
        num_micro, size = self._sizes(batch, factor=job.num_micro)
        whole = padded(self._input(inputs), max(batch.num_local, 1), num_micro * size)
        key = (num_micro, tuple(whole.shape), whole.dtype)
        if self._is_new(key):
            self._prepare(key, whole[:size], num_micro)
        loss = _Loss(job, batch, target, weight, size)
        schedule = self._schedules[key]
        schedule._loss_fn = loss  # the schedule is kept, what it is to compare with is this step's
        seed_all(mix(job.seed, rank, step, self._at), job.device)
        rows = torch.arange(num_micro * size)
        arguments = (whole,) if 0 in self._stages else ()
        if self.is_last:
            schedule.step(*arguments, target=rows, losses=[], return_outputs=False)
        else:
            schedule.step(*arguments, return_outputs=False)
        if not self.is_last:
            return LossSum(torch.zeros(()), 0.0, None)
        contributed = loss.sum()
        if self._must_check_loss and batch.num_local > 1:
            job.loss.check(contributed.outputs, target, batch.num_local, weight)
            self._must_check_loss = False
        return contributed

    def forward(self, batch: Slice, *, rank: int) -> Tree:
        """The outputs of a slice in evaluation mode, without gradients, on every rank of the pipeline."""
        job = self._job
        seed_all(mix(job.seed, rank, _EVALUATION + batch.start, self._at), job.device)
        num_samples = max(batch.num_local, 1)
        inputs = self._input(split_target(place(batch.batch, job.device, job.cast_inputs))[0])
        num_micro, size = self._sizes(batch)
        whole = padded(inputs, num_samples, num_micro * size)
        outputs = self._run(list(whole.split(size)))
        joined = _joined(outputs, num_samples) if self.is_last else None
        return wire.share(
            joined, self._ranks[(self._num_stages - 1) % len(self._ranks)], self._group, job.device
        )

    def _run(
        self, micro_batches: Sequence[Value], keep: dict[int, tuple[Value, Value]] | None = None
    ) -> list[Value]:
        """Forward alone, without gradients; returns the outputs where the last stage is. `keep`: what went in and out."""
        device, outputs, under_way = self._job.device, [], []
        modules = [module for stage in self._stages.values() for module in stage.modules()]
        with evaluating(modules), torch.no_grad():
            for micro_batch in micro_batches:
                for number, stage in sorted(self._stages.items()):
                    value: Any = micro_batch
                    if number > 0:
                        value = wire.receive(self._rank_of(number - 1), self._group, device)
                    given = value
                    value = stage(*value) if isinstance(value, tuple) else stage(value)
                    wire.tensors_of(value, stage.last_name)
                    if keep is not None:
                        keep[number] = (given, value)
                    if number < self._num_stages - 1:
                        under_way += wire.send(value, self._rank_of(number + 1), self._group, device)
                    else:
                        outputs.append(value)
        for work, _ in under_way:
            work.wait()
        return outputs

    def _rank_of(self, stage: int) -> int:
        return self._ranks[stage % len(self._ranks)]

    def _sizes(self, batch: Slice, factor: int = 1) -> tuple[int, int]:
        """How many micro-batches, the same on all ranks, and samples in each of this rank's."""
        about = -(-batch.num_global // self._num_data_ranks)
        rounds_only = self._schedule in ("interleaved", "zero-bubble")
        number = num_micro_batches(about, len(self._ranks), rounds_only=rounds_only, factor=factor)
        return number, -(-max(batch.num_local, 1) // number)

    def _input(self, inputs: Tree) -> Tensor:
        if isinstance(inputs, (tuple, list)) and len(inputs) == 1:
            inputs = inputs[0]
        if not isinstance(inputs, Tensor):
            raise TrainingError(
                f"a pipeline's first layer takes one tensor, and batches have a {type(inputs).__name__} as inputs. Nothing was "
                "trained; let batches be pairs (inputs, target) with one tensor of inputs, or use fsdp or tp."
            )
        return inputs

    def _is_new(self, key: Any) -> bool:
        """Whether anybody has yet to get ready for inputs of this shape: those that share weights do it together."""
        if not self._data_groups:
            return key not in self._schedules
        flag = torch.tensor([int(key not in self._schedules)], device=self._job.device)
        for group in self._data_groups:
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
        return bool(flag.item())

    def _prepare(self, key: Any, micro_batch: Tensor, num_micro: int) -> None:
        """Run one micro-batch forward to learn the shapes between stages, and build the schedule for them."""
        if len(self._schedules) >= _MAX_SHAPES:
            self._schedules.clear()
        buffers = [buffer for stage in self._stages.values() for buffer in stage.buffers()]
        before = [buffer.clone() for buffer in buffers]
        seen: dict[int, tuple[Value, Value]] = {}
        self._run([micro_batch], keep=seen)
        for buffer, kept in zip(buffers, before, strict=True):
            buffer.copy_(kept)
        stages = [
            PipelineStage(
                self._stages[number],
                number,
                self._num_stages,
                self._job.device,
                input_args=_meta(given, needs_grad=number > 0),
                output_args=_meta(out, needs_grad=True),
                group=self._group,
            )
            for number, (given, out) in sorted(seen.items())
        ]
        kind: Callable[..., Any] = {
            "gpipe": ScheduleGPipe,
            "1f1b": Schedule1F1B,
            "interleaved": ScheduleInterleaved1F1B,
            "zero-bubble": ScheduleInterleavedZeroBubble,
        }[self._schedule]
        several = self._schedule in ("interleaved", "zero-bubble")
        self._schedules[key] = kind(
            stages if several else stages[0],
            num_micro,
            loss_fn=lambda output, target: output,
            scale_grads=False,
        )


class _Loss:
    """The loss of one step's micro-batches, and what they add up to."""

    def __init__(self, job: TrainJob, batch: Slice, target: Tree, weight: Tensor | None, size: int) -> None:
        self._job, self._batch, self._target, self._weight, self._size = job, batch, target, weight, size
        self._totals: list[Tensor] = []
        self._outputs: list[Value] = []
        self._count = 0.0

    def __call__(self, output: Value, rows: Tensor) -> Tensor:
        """The part of one micro-batch in the mean over the global batch."""
        begin = int(rows[0])
        num_own = min(max(self._batch.num_local - begin, 0), self._size)
        if not num_own:  # all of it repeats others, or is borrowed
            return sum(part.sum() for part in _parts(output) if part.requires_grad) * 0.0  # type: ignore[return-value]

        def own(tensor: Tensor) -> Tensor:
            return tensor[begin : begin + num_own]

        output = _map(lambda part: part[: part.shape[0] // self._size * num_own], output)
        target = map_tensors(own, self._target)
        weight = own(self._weight) if self._weight is not None else None
        with autocast(self._job):
            total, count = self._job.loss(output, target, num_own, self._batch.num_global, weight)
        self._totals.append(total.detach())
        self._outputs.append(_map(lambda part: part.detach(), output))
        self._count += count
        return total / self._batch.num_global

    def sum(self) -> LossSum:
        """What the slice contributed."""
        if not self._outputs:
            return LossSum(torch.zeros(()), 0.0, None)
        return LossSum(torch.stack(self._totals).sum(), self._count, _joined(self._outputs, None))


def _parts(value: Value) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def _map(fn: Callable[[Tensor], Tensor], value: Value) -> Value:
    return tuple(fn(part) for part in value) if isinstance(value, tuple) else fn(value)


def _joined(outputs: Sequence[Value], num_samples: int | None) -> Value:
    """Outputs of micro-batches in their order; without what was repeated where `num_samples` says how many are real."""
    columns = list(zip(*(_parts(output) for output in outputs), strict=True))
    joined = tuple(torch.cat(column)[:num_samples] for column in columns)
    return joined if isinstance(outputs[0], tuple) else joined[0]


def _meta(value: Value, *, needs_grad: bool) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty(part.shape, dtype=part.dtype, device="meta").requires_grad_(
            needs_grad and part.is_floating_point()
        )
        for part in _parts(value)
    )
