"""The workers of a host decode a table once, together, and keep one copy of it, of which nothing is left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

SCRIPT = """
    import pathlib
    import shoal
    from shoal.data.formats import parquet
    from shoal.data.formats.parquet import ParquetTable

    parquet._BLOCK_BYTES = 1  # a block for each row group, however small
    reads, read = [], ParquetTable.read

    def counted(table, block):
        reads.append(block)
        return read(table, block)

    ParquetTable.read = counted
    data = shoal.Dataset.from_parquet("table.parquet", cache=shoal.memory.CacheConfig(ram_bytes={ram_bytes}))
    rows = sorted(row for batch in data.shuffle(seed=shoal.rank()).batch(64) for row in batch["id"].tolist())
    assert rows == list(range(4000)), rows[:10]
    pathlib.Path(f"reads-{{shoal.rank()}}").write_text(" ".join(map(str, reads)))
"""


def _written(tmp_path: Path) -> None:
    table = pa.table({"id": np.arange(4000), "x": np.arange(4000) / 3, "name": [str(n) for n in range(4000)]})
    pq.write_table(table, tmp_path / "table.parquet", row_group_size=100)


def test_the_workers_of_a_host_decode_each_block_once(
    launch_script: Callable[..., Any], tmp_path: Path
) -> None:
    _written(tmp_path)
    for ram_bytes in (10**9, 20_000):
        done = launch_script(SCRIPT.format(ram_bytes=ram_bytes), workers=3)
        assert done.exit_code == 0, done.error or done.stderr
        reads = [
            int(block) for rank in range(3) for block in (tmp_path / f"reads-{rank}").read_text().split()
        ]
        assert sorted(reads) == list(range(40)), "each block once"
        assert not (done.run_dir / "scratch").exists()
        placed = [event for event in done.events if event["event"] == "cache placed"]
        assert len(placed) >= 1
        assert placed[0]["disk_bytes"] > 0 or ram_bytes == 10**9
