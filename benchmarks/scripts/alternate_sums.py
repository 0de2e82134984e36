"""All-reduce by shared memory against gloo's, alternated in the same processes: OUT SECONDS.

`shoal run -n 2 --exchange shm alternate_sums.py OUT SECONDS`; rank 0 writes, by
size in bytes, its pairs of (ours, theirs) in seconds.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
import torch.distributed as dist

from benchmarks.harness import in_turn
from shoal.recovery.elastic_group import elastic_group

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
MOST_ROUNDS = 400

out, seconds = Path(sys.argv[1]), float(sys.argv[2])
reducer = elastic_group().reducer
by_bytes: dict[int, list[tuple[float, float]]] = {}


def timed(side: Callable[[torch.Tensor], None], tensor: torch.Tensor) -> float:
    tensor.fill_(1.0)
    dist.barrier()
    began = time.perf_counter()
    side(tensor)
    took = time.perf_counter() - began
    assert float(tensor[0]) == float(tensor[-1]) == dist.get_world_size()
    return took


def ours(tensor: torch.Tensor) -> None:
    reducer.finish(reducer.start_all_reduce(tensor), "a sum")


def theirs(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor)


for size in SIZES:
    tensor = torch.empty(size // 4)
    pairs: list[tuple[float, float]] = []
    until = time.monotonic() + seconds
    for number in range(MOST_ROUNDS):
        pair = in_turn(partial(timed, ours, tensor), partial(timed, theirs, tensor), number)
        if number:  # the first touches memory for the first time
            pairs.append(pair)
        over = torch.tensor([float(time.monotonic() > until and number > 3)])
        dist.broadcast(over, 0)  # rank 0's clock decides for all
        if over.item():
            break
    by_bytes[size] = pairs
if reducer.rank == 0:
    out.write_text(json.dumps(by_bytes))
