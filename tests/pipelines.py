"""Helpers for tests of datasets: an epoch as plain numbers, read by any number of workers."""

from __future__ import annotations

from typing import Any

import torch

from shoal.data import Batches, Dataset, Slice


def numbers(num_samples: int) -> Dataset:
    return Dataset.from_arrays(torch.arange(num_samples))


def epoch_of(dataset: Dataset, epoch: int = 0) -> list[int]:
    """The samples of an epoch, in order, by one process."""
    if not dataset._indexed("test")[1].length(epoch):
        return []
    batches = dataset.batch(7)
    return seen(read(batches, num_workers=1, epoch=epoch))


def read(batches: Batches, *, num_workers: int, epoch: int = 0, start: int = 0) -> list[list[Slice]]:
    """Step by step, the slices of all ranks."""
    by_rank = [
        list(batches.slices(epoch=epoch, start=start, rank=rank, num_workers=num_workers))
        for rank in range(num_workers)
    ]
    return [list(step) for step in zip(*by_rank, strict=True)]


def seen(steps: list[list[Slice]]) -> list[Any]:
    return [
        sample.tolist() for step in steps for part in step for sample in part.batch[: part.num_local].unbind()
    ]
