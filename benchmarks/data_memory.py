"""Memory stays flat while a data set of four times the limit is streamed.

A process of its own reads a Parquet table whose decoded rows are four times
`ram_bytes`, shuffled, for three epochs, and a cache of mapped samples four
times its limit; a thread looks at what the process has in memory. What it
grows by is the limit and what is on the way: blocks being decoded, rows read
ahead.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from benchmarks.data_tables import NUM_DENSE, NUM_IDS, write_parquet
from benchmarks.harness import Report

ROW_BYTES = 8 * NUM_IDS + 4 * (NUM_DENSE + 1)
BATCH = 1024


class Watch:
    """The most memory this process had, between two looks."""

    def __init__(self) -> None:
        import psutil

        self._process = psutil.Process()
        self.peak = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._is_over.wait(0.01):
            self.peak = max(self.peak, self._process.memory_info().rss)

    def since(self) -> int:
        peak, self.peak = self.peak, 0
        return peak

    def end(self) -> None:
        self._is_over.set()
        self._thread.join()


def stream(kind: str, path: str, num_rows: int, limit: int, directory: str) -> None:
    """In the process: three epochs, and what memory each of them had at most."""
    import psutil
    import torch

    import shoal

    if kind == "table":
        cache = shoal.memory.CacheConfig(ram_bytes=limit, directory=directory)
        data = shoal.Dataset.from_parquet(path, label="label", cache=cache)
    else:
        width = (ROW_BYTES - 8) // 4
        data = shoal.Dataset.from_function(
            lambda indices: {
                "x": torch.rand(len(indices), width, generator=torch.Generator()),
                "i": torch.tensor(indices),
            },
            num_rows,
        ).cache(ram_bytes=limit, directory=directory)
    batches = data.shuffle(seed=0).batch(BATCH)
    for _ in zip(
        range(2), shoal.Dataset.from_arrays(torch.zeros(10**5)).shuffle(seed=0).batch(BATCH), strict=False
    ):
        pass  # what any first batch needs
    before = psutil.Process().memory_info().rss
    watch = Watch()
    peaks = []
    for _ in range(3):
        num_samples = sum(len(batch[1] if kind == "table" else batch["i"]) for batch in batches)
        assert num_samples == num_rows
        peaks.append(watch.since() - before)
    watch.end()
    print(json.dumps({"before_bytes": before, "growth_bytes": peaks}))


def main(quick: bool = False) -> None:
    report = Report("data_memory")
    limit = (32 if quick else 128) << 20
    num_rows = 4 * limit // ROW_BYTES
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        path = Path(folder) / "clicks.parquet"
        write_parquet(path, num_rows)
        for kind in ("table", "cache"):
            measured = _in_a_process(kind, path, num_rows, limit, folder)
            growth = measured["growth_bytes"]
            report.add(
                f"memory of a process that reads 4x the limit, shuffled ({kind})",
                {
                    "growth_over_limit": [round(peak / limit, 3) for peak in growth],
                    "third_over_first_epoch": round(growth[2] / growth[0], 3),
                    **measured,
                },
                rows=num_rows,
                limit_bytes=limit,
                data_bytes=num_rows * ROW_BYTES,
                batch=BATCH,
                aim="flat: no more in the third epoch than in the first; growth close to the limit",
            )
    report.save()


def _in_a_process(kind: str, path: Path, num_rows: int, limit: int, folder: str) -> dict[str, Any]:
    arguments = [kind, str(path), str(num_rows), str(limit), folder]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.data_memory", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


if __name__ == "__main__":
    if len(sys.argv) == 6:
        stream(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
    else:
        main()
