"""The rule of `--exchange auto`: an exchange for each size, measured by `shoal bench exchange` on this machine or built in.

Pure, but for reading and writing the table of measurements in the user's cache
directory. A rule is text, "native<=65536,shm": it is written into config.json,
so that a resumed run sums in the same order.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from shoal import system

Measured = Mapping[int, Mapping[int, Mapping[str, float]]]
"""Seconds by number of workers, bytes and exchange."""

ON_ONE_HOST, ON_SEVERAL, ONE_EACH = "shm", "hierarchical", "native"
"""Exchanges without a measurement, at every size: on one host, on several, and if no host has two workers to sum between.

benchmarks/results/README.md has the measurements behind it.
"""

WORTH_IT = 0.85
"""Of the built-in choice's time: another exchange is taken where it needed less. Less would be noise."""

ORDERED = ("x86_64", "AMD64")
"""Processors that `shm` was tested on. Its counters order reads and writes on others too, but that is untested."""

IN_MEMORY = ("shm", "native")
"""Exchanges that may run concurrently. Of the others, which share the group's connections, a rule holds one at most."""

TABLE = "exchange.json"


def parse(rule: str) -> list[tuple[float, str]]:
    """(most bytes, exchange), smallest first; the last one has no limit."""
    found = []
    for word in rule.split(","):
        name, _, most = word.partition("<=")
        found.append((float(most) if most else math.inf, name))
    return found


def built_in(*, num_workers: int, num_hosts: int, processor: str) -> str:
    if not system.IS_LINUX or processor not in ORDERED or (num_hosts > 1 and num_workers <= num_hosts):
        return ONE_EACH
    return ON_ONE_HOST if num_hosts == 1 else ON_SEVERAL


def choose(measured: Measured, *, num_workers: int, num_hosts: int, processor: str) -> str:
    """The rule for a job. Measurements on one host do not apply to several."""
    usual = built_in(num_workers=num_workers, num_hosts=num_hosts, processor=processor)
    if num_hosts > 1 or num_workers == 1 or not measured:
        return usual
    # As many workers as were measured, or the nearest number below.
    counts = sorted(measured)
    by_size = measured[max([count for count in counts if count <= num_workers], default=counts[0])]
    allowed = set(IN_MEMORY) if usual == "shm" else {"native"}
    relayed = Counter(
        best
        for medians in by_size.values()
        if (best := _best(medians, usual, set(medians) - {"shm"} | allowed)) not in IN_MEMORY
    )
    if relayed:
        allowed.add(relayed.most_common(1)[0][0])
    words: list[tuple[int, str]] = []
    for size in sorted(by_size):
        name = _best(by_size[size], usual, allowed)
        if words and words[-1][1] == name:
            words.pop()
        words.append((size, name))
    if not words:
        return usual
    # From one size to the next where another one wins: up to their geometric mean.
    sizes = sorted(by_size)
    ends = [int(math.sqrt(size * sizes[sizes.index(size) + 1])) for size, _ in words[:-1]]
    return ",".join(
        [f"{name}<={end}" for (_, name), end in zip(words[:-1], ends, strict=True)] + [words[-1][1]]
    )


def _best(medians: Mapping[str, float], usual: str, allowed: set[str]) -> str:
    times = {name: took_s for name, took_s in medians.items() if name in allowed}
    if not times:
        return usual
    fastest = min(times, key=lambda name: times[name])
    return fastest if times[fastest] < WORTH_IT * times.get(usual, math.inf) else usual


def for_job(*, num_workers: int, num_hosts: int) -> str:
    return choose(read(path()), num_workers=num_workers, num_hosts=num_hosts, processor=platform.machine())


# ---- the table --------------------------------------------------------------------------------------


def path() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "shoal" / TABLE


def _machine() -> dict[str, object]:
    return {"host": platform.node(), "processor": platform.machine(), "cores": os.cpu_count()}


def read(table: Path) -> dict[int, dict[int, dict[str, float]]]:
    """Measurements of this machine; nothing where the file is of another one, or not ours."""
    try:
        held = json.loads(table.read_text())
        if held["machine"] != _machine():
            return {}
        return {
            int(workers): {
                int(size): {str(name): float(took_s) for name, took_s in medians.items()}
                for size, medians in by_size.items()
            }
            for workers, by_size in held["workers"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # a cache: without it the built-in choice applies


def write(table: Path, measured: Measured) -> bool:
    """Store a measurement; False where that is not possible."""
    with contextlib.suppress(OSError):
        table.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = table.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({"machine": _machine(), "workers": measured}))
        temporary.replace(table)
        return True
    return False
