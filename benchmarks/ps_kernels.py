"""Loops of the parameter server on one core: a click model's batch through each kernel, and 10 M pairs into a table.

    python benchmarks/ps_kernels.py [--seconds 1.0]

One JSON line per figure. A batch is 26,624 ids, Zipf 1.05 over 1 M rows of 16 float32, some 10,300 of them distinct.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from shoal.embedding.kernels import expand, sum_back, unique
from shoal.ps.server.contents import ServerTable
from shoal.runtime.kernel_cache import warm
from shoal.runtime.transport.messages.client_server import TableSpec

NUM_ROWS, NUM_IDS, DIM, NUM_BATCHES = 1_000_000, 26_624, 16, 20
NUM_PAIRS = 10_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each kernel is run")
    seconds = parser.parse_args().seconds
    start = time.perf_counter()
    num_kernels = warm()
    say("kernels loaded", num_kernels=num_kernels, seconds=round(time.perf_counter() - start, 3))
    click_batches(seconds)
    for kind, num_rows in (("ids below a known number", NUM_PAIRS), ("any id", None)):
        pairs(kind, num_rows)


def click_batches(seconds: float) -> None:
    rng = np.random.default_rng(0)
    weight = np.cumsum(1 / np.arange(1, NUM_ROWS + 1) ** 1.05)
    shuffled = rng.permutation(NUM_ROWS)
    draws = [np.searchsorted(weight, rng.random(NUM_IDS) * weight[-1]) for _ in range(NUM_BATCHES)]
    batches = [shuffled[np.minimum(draw, NUM_ROWS - 1)] for draw in draws]
    found = [unique(batch) for batch in batches]
    most = max(len(keys) for keys, _ in found)
    rows, out = rng.random((most, DIM), np.float32), np.empty((NUM_IDS, DIM), np.float32)
    sums = np.empty_like(rows)

    def timed(what: str, function: Callable[[np.ndarray[Any, Any], np.ndarray[Any, Any]], Any]) -> None:
        times = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for keys, inverse in found:
                start = time.perf_counter()
                function(keys, inverse)
                times.append(time.perf_counter() - start)
        times.sort()
        say(what, median_ms=round(times[len(times) // 2] * 1e3, 3), least_ms=round(times[0] * 1e3, 3))

    times = iter(range(10**9))
    timed("unique, sorted, with inverse", lambda keys, inverse: unique(batches[next(times) % NUM_BATCHES]))
    timed("expand", lambda keys, inverse: expand(rows, inverse, out))
    timed("sum back", lambda keys, inverse: sum_back(out, inverse, sums[: len(keys)]))
    for kind, num_rows in (("ids below 1 M", NUM_ROWS), ("any id", None)):
        table = ServerTable(TableSpec(0, "click", DIM, "float32", "adagrad", {"lr": 0.02}, num_rows=num_rows))
        every = np.arange(NUM_ROWS)
        start = time.perf_counter()
        table.apply(every, np.zeros((NUM_ROWS, DIM), np.float32))
        created = round(NUM_ROWS / (time.perf_counter() - start) / 1e6, 2)
        say("first update of all rows", kind=kind, million_rows_per_s=created)
        say("index", kind=kind, of_rows=round(table.num_index_bytes / table.num_bytes, 4))
        timed(f"pull, {kind}", lambda keys, inverse: table.pull(keys, sums[: len(keys)]))  # noqa: B023
        timed(f"Adagrad, {kind}", lambda keys, inverse: table.apply(keys, rows[: len(keys)], 1.0))  # noqa: B023

    def two_ranks(keys: np.ndarray[Any, Any], inverse: np.ndarray[Any, Any]) -> None:
        table.accumulate(keys, rows[: len(keys)])
        table.accumulate(found[0][0], rows[: len(found[0][0])])
        table.take_sum()

    timed("sum of two ranks", two_ranks)


def pairs(kind: str, num_rows: int | None) -> None:
    table = ServerTable(TableSpec(0, "pairs", 1, "float32", "store", {}, num_rows=num_rows))
    keys = np.arange(NUM_PAIRS)
    values = np.random.default_rng(0).random((NUM_PAIRS, 1), np.float32)
    out = np.empty_like(values)

    def rate(function: Callable[[], None]) -> float:
        start = time.perf_counter()
        function()
        return round(NUM_PAIRS / (time.perf_counter() - start) / 1e6, 1)

    def push() -> None:
        table.check_keys(keys)
        table.apply(keys, values, 1.0)

    rates = [rate(push) for _ in range(4)]
    pulls = [rate(lambda: table.pull(keys, out)) for _ in range(3)]
    assert np.array_equal(out, values)
    say("store pairs", kind=kind, first_push=rates[0], pushes=rates[1:], pulls=pulls, unit="million pairs/s")


def say(what: str, **figures: Any) -> None:
    print(json.dumps({"what": what, **figures}), flush=True)


if __name__ == "__main__":
    main()
