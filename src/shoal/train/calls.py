"""What a call says of its data when it is compared over the ranks: enough that ranks which differ hear in what."""

from __future__ import annotations

from shoal.core import job as jobs
from shoal.data.batches import Batches


def described(batches: Batches) -> str:
    """Sizes and seeds: ranks that shuffle by different seeds would train some samples twice and others never."""
    stages = batches.describe().get("stages", [])
    seeds = [stage["seed"] for stage in stages if stage.get("seed") is not None]
    size = batches.batch_size(jobs.num_workers())
    said = f"samples={batches.num_samples}, batch={size or None}"
    return f"{said}, seeds={seeds}" if seeds else said
