"""A pass over data without updates: evaluate and predict, exact over all workers."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.cluster.worker import session
from shoal.data.batches import Batches
from shoal.data.slice import Slice
from shoal.data.tree import Tree, concatenate, leaves, map_tensors
from shoal.errors import EmptyDataset, Interrupted, TrainingError
from shoal.parallel import gathering
from shoal.parallel.compute import autocast, place
from shoal.parallel.loss import LossRule, OutputKind
from shoal.parallel.protocol import Strategy, TrainJob
from shoal.runtime import recorder
from shoal.runtime.failpoints import failpoint
from shoal.train.calls import asked_to_leave
from shoal.train.progress import TrainingProgress

if TYPE_CHECKING:
    from shoal.train.metrics import Gather, MetricSet

Tick = Callable[[Slice], None]
"""Called after every slice of a pass."""


def evaluate(
    strategy: Strategy,
    job: TrainJob,
    batches: Batches,
    metrics: MetricSet | NoMetrics,
    *,
    rank: int,
    num_workers: int,
    tick: Tick,
    num_batches: int = 0,
    loss: LossRule | None = None,
) -> dict[str, float]:
    """Mean loss and metrics over all of `batches`, or the first `num_batches`, equal on every rank.

    `loss` replaces the training loss.
    """
    loss = loss or job.loss
    metrics.reset()
    sums = torch.zeros(2, dtype=torch.float64)
    for part in _slices(batches, rank, num_workers, what="evaluate", num_batches=num_batches):
        with recorder.COMPUTE:
            output = strategy.forward(part)
        target, weight = place((part.target, part.weight), job.device, job.cast_inputs)
        # As in training: a loss rounds less than the layers before it.
        with torch.no_grad(), autocast(job), gathering.over(part):
            # For a borrowed sample too: a loss that reads parameters may have to gather them, on all ranks.
            total, count = loss(output, target, max(part.num_local, 1), part.num_global, weight)
        if not part.borrowed:
            sums += torch.tensor([float(total), count], dtype=torch.float64)
            metrics.update(loss.predictions(output), target, part.num_local)
        tick(part)
        failpoint("worker: evaluating")
    total, count = strategy.reduce(sums).tolist()
    return {"loss": total / count if count else math.nan, **metrics.compute(strategy.gather)}


def predict(
    strategy: Strategy,
    job: TrainJob,
    batches: Batches,
    *,
    rank: int,
    num_workers: int,
    tick: Tick,
    num_batches: int = 0,
    out: str | None = None,
    is_writer: bool = True,
) -> Tree:
    """The model's outputs for all of `batches`, in the order of the data, the same on every rank.

    With `out` the writer ranks write them there, and their number is returned.
    """
    if out is not None:
        from shoal.train.prediction_files import PredictionFile, write_manifest  # and with them pyarrow

        with contextlib.ExitStack() as stack:
            file = stack.enter_context(PredictionFile(out, rank).opened()) if is_writer else None
            for part, output in _outputs(
                strategy, job, batches, rank, num_workers, tick=tick, num_batches=num_batches
            ):
                if file is not None:
                    file.write(part, output)
        counts = strategy.gather(torch.tensor([file.num_rows if file is not None else 0]))
        rows = [int(each.sum()) for each in counts]
        if rank == 0 and is_writer:
            write_manifest(out, rows)
        strategy.reduce(torch.zeros(1))  # barrier: no rank goes on before it is written
        return {"out": out, "rows": sum(rows)}
    kept: list[Tree] = []
    sizes: list[int] = []
    template: Tree = None
    for part, own in _outputs(strategy, job, batches, rank, num_workers, tick=tick, num_batches=num_batches):
        template = own
        kept.append(own)
        sizes.append(part.num_local)
    mine = concatenate(kept)
    gathered = [strategy.gather(leaf) for leaf in leaves(mine) if isinstance(leaf, Tensor)]
    # Every rank's own sizes, not those of an even division: shares may differ, and bad samples may be
    # skipped.
    by_rank = [counts.tolist() for counts in strategy.gather(torch.tensor(sizes))]
    whole = iter([_in_data_order(parts, by_rank) for parts in gathered])
    return map_tensors(lambda tensor: next(whole), template)


def _outputs(
    strategy: Strategy,
    job: TrainJob,
    batches: Batches,
    rank: int,
    num_workers: int,
    *,
    tick: Tick,
    num_batches: int,
) -> Iterator[tuple[Slice, Tree]]:
    for part in _slices(batches, rank, num_workers, what="predict", num_batches=num_batches):
        output = job.loss.predictions(strategy.forward(part))
        _refuse_uncut(output, max(part.num_local, 1))
        yield part, map_tensors(lambda tensor, n=part.num_local: tensor[:n].cpu(), output)  # type: ignore[misc]
        tick(part)
        failpoint("worker: predicting")


def pass_reporter(phase: str, num_steps: int | None, progress: TrainingProgress) -> Tick:
    """A tick that reports how far the pass is, and leaves when the job is asked to."""
    began_at, samples, done = time.monotonic(), 0, 0

    def tick(part: Slice) -> None:
        nonlocal samples, done
        samples += part.num_global
        done += 1
        asked = asked_to_leave()
        if asked is not None:
            raise Interrupted(
                signal_name=asked, step=progress.position.step, checkpoint=progress.newest_checkpoint
            )
        session.report(
            phase=phase,
            epoch=0,
            num_epochs=None,
            step=done,
            num_steps=num_steps,
            loss=None,
            metrics={},
            samples=samples,
            samples_per_s=samples / max(time.monotonic() - began_at, 1e-9),
            eta_s=None,
        )

    return tick


def _slices(
    batches: Batches, rank: int, num_workers: int, *, what: str, num_batches: int = 0
) -> Iterator[Slice]:
    empty = True
    slices = batches.slices(epoch=0, start=0, rank=rank, num_workers=num_workers)
    for part in itertools.islice(slices, num_batches or None):
        empty = False
        yield part
    if empty:
        raise EmptyDataset(what=what)


def _in_data_order(parts: list[Tensor], sizes: list[list[int]]) -> Tensor:
    """Every rank's rows, in the order of the batches they were divided from; `sizes` are by rank and batch."""
    pieces = [torch.split_with_sizes(part, own) for part, own in zip(parts, sizes, strict=True)]
    return torch.cat([piece for batch in zip(*pieces, strict=True) for piece in batch])


def _refuse_uncut(output: Tree, num_samples: int) -> None:
    for leaf in leaves(output):
        if isinstance(leaf, Tensor) and (leaf.dim() == 0 or leaf.shape[0] != num_samples):
            raise TrainingError(
                f"the model returned a tensor of shape {tuple(leaf.shape)} for {num_samples} samples, so predict cannot "
                "put it in the order of the data. Return tensors with one row per sample, or compute the rest in the loss."
            )


class NoMetrics:
    """Nothing is measured but the loss."""

    def __len__(self) -> int:
        return 0

    def reset(self) -> None:
        pass

    def update(self, outputs: Tree, target: Tree | None, num_local: int) -> None:
        pass

    def compute(self, gather: Gather) -> dict[str, float]:
        return {}

    def state(self, gather: Gather) -> dict[str, Tensor]:
        return {}

    def load_state(self, tensors: Mapping[str, Tensor], rank: int, num_workers: int | None = None) -> bool:
        return not tensors


def metric_set(
    metrics: Sequence[Any] | dict[str, Any], *, loss_kind: OutputKind, ignore_index: int | None
) -> MetricSet | NoMetrics:
    """The requested metrics, by name or as torchmetrics objects.

    torchmetrics is imported only when there is something to measure: it can take longer than a
    short script trains.
    """
    # An empty list or dict; a lone torchmetrics object defines its own truth value, and is handled below.
    if isinstance(metrics, (list, tuple, dict)) and not metrics:
        return NoMetrics()
    from shoal.train.metrics import MetricSet

    return MetricSet(metrics, loss_kind=loss_kind, ignore_index=ignore_index)
