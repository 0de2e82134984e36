"""The job of `shoal bench exchange`: every exchange sums tensors of every size, in turn, and rank 0 writes medians down.

bench_exchange_job.py OUT SECONDS
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from shoal.collectives.exchanges import open_exchange
from shoal.collectives.native import Native
from shoal.collectives.reducer import Reducer
from shoal.config import job as jobs
from shoal.config.choices import EXCHANGES
from shoal.recovery.elastic_group import together
from shoal.recovery.rendezvous import is_broken

SIZES = [4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20]
SHORT_SIZES = SIZES[:3]
SHORT_S = 3.0
"""In less, large tensors are left out: three rounds of all exchanges alone would take longer."""

MAX_ROUNDS = 200


def main(out: str, seconds: float) -> None:
    """Time them all. Alternating: what disturbs the machine disturbs all of them."""
    job = jobs.current()
    _ = together().native  # the group is there
    native = Native(rank=job.rank, num_workers=job.num_workers, is_broken=is_broken)
    names = [name for name in EXCHANGES if name not in ("auto", "hierarchical")]
    reducers = {name: open_exchange(replace(job, exchange=name), native) for name in names}
    sizes = SIZES if seconds >= SHORT_S else SHORT_SIZES
    medians = {size: _measure(reducers, native, size, seconds / len(sizes)) for size in sizes}
    for reducer in reducers.values():
        reducer.close()
    if job.rank == 0:
        Path(out, "0.json").write_text(json.dumps(medians))


def _measure(reducers: dict[str, Reducer], native: Native, size: int, seconds: float) -> dict[str, float]:
    tensor = torch.zeros(size // 4)
    took_s: dict[str, list[float]] = {name: [] for name in reducers}
    begun = time.monotonic()
    for number in range(MAX_ROUNDS):
        for name, reducer in reducers.items():
            tensor.fill_(native.rank + 1.0)
            native.all_gather(torch.zeros(1))  # all begin together
            started = time.perf_counter()
            reducer.finish(reducer.start_all_reduce(tensor), f"a sum by {name}")
            took_s[name].append(time.perf_counter() - started)
            expected = native.num_workers * (native.num_workers + 1) / 2
            assert float(tensor[0]) == float(tensor[-1]) == expected, f"{name}: {tensor[0]} is not {expected}"
        is_over = number >= 2 and time.monotonic() - begun > seconds
        # Rank 0's clock decides for all.
        if any(bool(told) for told in native.all_gather(torch.tensor([float(is_over and native.rank == 0)]))):
            break
    return {name: statistics.median(took[1:]) for name, took in took_s.items()}


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
