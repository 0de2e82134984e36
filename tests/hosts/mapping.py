"""Counts and sums by map_reduce. OUT/rank-N.json: what each rank found.

mapping.py OUT
    A rank of the last host touches OUT/mapping-RANK in its first map task, and waits for OUT/go.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import shoal
from shoal.config import job

OUT = Path(sys.argv[1])
NUM_SAMPLES = 4000


def look(number: int) -> list[tuple[str, float]]:
    here = job.current()
    if here.is_on_several_hosts and here.host == here.num_hosts - 1 and here.incarnation == 0:
        (OUT / f"mapping-{here.rank}").touch()
        while not (OUT / "go").exists():
            time.sleep(0.01)
    return [(f"key-{number % 97}", number / 3.0), ("all", 1.0 / (number + 1))]


def add(key: str, values: list[float]) -> float:
    return sum(values)


def mapped() -> dict[str, Any]:
    data = shoal.Dataset.from_torch(list(range(NUM_SAMPLES)))
    alone = data.map_reduce(look, add, partitions=5)
    # Files of these are not merged in memory, and two processes of each host share its tasks.
    listed = data.map_reduce(look, None, partitions=3, buffer_bytes=1 << 14, workers=2, key="listed")
    again = data.map_reduce(look, None, partitions=3, buffer_bytes=1 << 14, workers=2, key="listed")
    assert again.was_reused
    return {
        "alone": {key: value.hex() for key, value in alone.all_gather().items()},
        "listed": {key: [each.hex() for each in value] for key, value in listed.items()},
    }


if __name__ == "__main__":
    (OUT / f"rank-{shoal.rank()}.json").write_text(json.dumps(mapped()))
