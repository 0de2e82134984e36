"""A worker that pushes and pulls pairs through shoal.ps, and writes down the seconds of each: PAIRS ROUNDS OUT."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import shoal


def seconds(act: Callable[[], Any], rounds: int) -> list[float]:
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        act()
        found.append(time.perf_counter() - began)
    return found


def main() -> None:
    num_pairs, rounds, out = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    rng = np.random.default_rng(0)
    values = rng.random(num_pairs, np.float32)
    found: dict[str, dict[str, list[float]]] = {}
    with shoal.ps.connect() as kv:
        for kind, keys, num_rows in (
            ("ids below a known number", np.arange(num_pairs), num_pairs),
            ("any id", np.unique(rng.integers(-(2**62), 2**62, num_pairs)), None),
        ):
            table = kv.table(kind, dim=1, rule="store", num_rows=num_rows)
            rows = values[: len(keys)]

            def push() -> None:
                kv.push(table, keys, rows).result()  # noqa: B023

            def pull() -> None:
                assert kv.pull(table, keys).result()[-1, 0] == rows[-1]  # noqa: B023

            found[kind] = {
                "first push": seconds(push, 1),
                "push": seconds(push, rounds),
                "pull": seconds(pull, rounds),
            }
        small = kv.table("small", dim=1, rule="store")
        few = np.arange(256)
        found["256 pairs"] = {
            "push": seconds(lambda: kv.push(small, few, values[:256]).result(), 40 * rounds),
            "pull": seconds(lambda: kv.pull(small, few).result(), 40 * rounds),
        }
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
