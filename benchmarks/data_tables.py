"""The table that the data benchmarks read: the shape of a click log, 13 floats and 26 ids a row, and a label."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

NUM_DENSE, NUM_IDS = 13, 26
ROW_GROUP = 131_072


def arrays(num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Dense [n, 13], ids [n, 26], label [n]."""
    generator = torch.Generator().manual_seed(0)
    dense = torch.rand(num_rows, NUM_DENSE, generator=generator)
    ids = torch.randint(0, 100_000, (num_rows, NUM_IDS), generator=generator)
    return dense, ids, (torch.rand(num_rows, generator=generator) < 0.2).float()


def write_parquet(path: Path, num_rows: int) -> None:
    """The same as columns of a Parquet file, a stretch at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer = None
    for begin in range(0, num_rows, ROW_GROUP):
        generator = np.random.default_rng(begin)
        length = min(ROW_GROUP, num_rows - begin)
        columns = {f"dense_{n}": generator.random(length, dtype=np.float32) for n in range(NUM_DENSE)}
        columns |= {f"id_{n}": generator.integers(0, 100_000, length) for n in range(NUM_IDS)}
        columns["label"] = (generator.random(length) < 0.2).astype(np.float32)
        table = pa.table(columns)
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    if writer is not None:
        writer.close()


def per_million(batches: Iterable[Any], num_batches: int, batch_size: int) -> float:
    """Seconds per million samples, over so many batches after the first: what an epoch costs once is another figure."""
    it = iter(batches)
    next(it)
    began = time.perf_counter()
    count = sum(1 for _ in itertools.islice(it, num_batches))
    return (time.perf_counter() - began) / count / batch_size * 1e6


def with_rates(values: dict[str, Any]) -> dict[str, Any]:
    """The figure of two times per million samples, with what they are in samples per second."""
    rates = {f"{side}_samples_per_s": round(1e6 / values[f"{side}_s"]) for side in ("ours", "theirs")}
    return {**values, **rates}


def whole(epoch: Callable[[], Iterable[Any]]) -> float:
    """Seconds of an epoch, from nothing to its last batch."""
    began = time.perf_counter()
    for _ in epoch():
        pass
    return time.perf_counter() - began
