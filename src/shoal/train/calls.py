"""The data a call is given: refused before anything runs, and described so that ranks which differ hear in what."""

from __future__ import annotations

from typing import Any

from shoal.core import job as jobs
from shoal.core.errors import BatchTooSmall, EmptyDataset
from shoal.data.batches import Batches, as_batches


def batches_of(data: Any, *, what: str, seed: int) -> Batches:
    """What was handed to `what` as batches. Validation data is looked at here too, not after an epoch of training."""
    batches = as_batches(data, default_seed=seed)
    if batches.num_samples == 0:
        raise EmptyDataset(what=what)
    size = batches.batch_size(jobs.num_workers())
    if 0 < size < jobs.num_workers():
        raise BatchTooSmall(batch_size=size, num_workers=jobs.num_workers())
    return batches


def described(batches: Batches) -> str:
    """Sizes and seeds: ranks that shuffle by different seeds would train some samples twice and others never."""
    stages = batches.describe().get("stages", [])
    seeds = [stage["seed"] for stage in stages if stage.get("seed") is not None]
    size = batches.batch_size(jobs.num_workers())
    said = f"samples={batches.num_samples}, batch={size or None}"
    return f"{said}, seeds={seeds}" if seeds else said
