"""A job of `shoal bench ps`: one worker pushes to a server and pulls from it. OUT PAIRS.

A push is over when it is acknowledged; a pull when the rows lie in an array of
the caller's. Keys come in order; the first push of a table, which makes its
rows, is not counted.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

NUM_ROWS, DIM = 1 << 20, 16


def median_s(call: Callable[[], object], times: int) -> float:
    """Of so many calls, after one that is not counted."""
    call()
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def main(out: Path, num_pairs: int) -> None:
    """Measure, and tell."""
    import numpy as np

    from shoal.ps.client.kv import connect

    told = []
    with connect() as kv:
        table = kv.table("small", dim=DIM, num_rows=NUM_ROWS)
        few, some = np.arange(16) * 1009, np.ones((16, DIM), np.float32)  # 1 KiB
        push_s = median_s(lambda: kv.push(table, few, some).result(), 1000)
        pull_s = median_s(lambda: kv.pull(table, few).result(), 1000)
        told += [("push of 1 KiB", 1e6 * push_s, "us"), ("pull of 1 KiB", 1e6 * pull_s, "us")]

        for what, rows, dim, is_bounded, times in (
            ("64 MiB", NUM_ROWS, DIM, True, 7),
            (f"{num_pairs / 1e6:g} M pairs, ids of a known range", num_pairs, 1, True, 3),
            (f"{num_pairs / 1e6:g} M pairs, any int64 key", num_pairs, 1, False, 3),
        ):
            table = kv.table(what, dim=dim, num_rows=rows if is_bounded else None)
            keys = np.arange(rows) if is_bounded else np.arange(rows) * 922_337_203_685
            draw = np.random.default_rng(0)
            first, second = draw.random((rows, dim), np.float32), draw.random((rows, dim), np.float32)
            # Other values each time: a push that did nothing would show.
            turns = itertools.cycle([first, second])
            push_s = median_s(lambda: kv.push(table, keys, next(turns)).result(), times)  # noqa: B023
            pull_s = median_s(lambda: kv.pull(table, keys).result(), times)  # noqa: B023
            if not np.array_equal(kv.pull(table, keys).result(), second if times % 2 else first):
                raise AssertionError("the server gave back other rows than it was given")
            size, unit = (first.nbytes / 1e9, "GB/s") if dim > 1 else (rows / 1e6, "M pairs/s")
            told += [(f"push of {what}", size / push_s, unit), (f"pull of {what}", size / pull_s, unit)]
    lines = [{"what": what, "value": round(value, 2), "unit": unit} for what, value, unit in told]
    (out / "0.json").write_text(json.dumps(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
