"""Two sides, alternated in one run; only their ratio counts.

The machine may be shared and noisy, so a time alone says little. Each round
measures both sides one after the other, in alternating order, and gives one
ratio; the figure is the median of the rounds with its spread.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def alternate(
    ours: Callable[[], float], theirs: Callable[[], float], *, rounds: int, warmup: int = 1
) -> dict[str, Any]:
    """Seconds of both sides over some rounds, and the ratio ours / theirs."""
    for _ in range(warmup):
        theirs()
        ours()
    return summarise([in_turn(ours, theirs, number) for number in range(rounds)])


def in_turn(ours: Callable[[], float], theirs: Callable[[], float], number: int) -> tuple[float, float]:
    """Both sides of round `number`; who goes first changes from round to round."""
    if number % 2:
        mine = ours()
        return mine, theirs()
    other = theirs()
    return ours(), other


def summarise(pairs: Sequence[tuple[float, float]], *, digits: int = 4) -> dict[str, Any]:
    """The figure of some rounds of (ours, theirs) in seconds, those with so many digits."""
    ratios = sorted(mine / other for mine, other in pairs)
    quarter = len(ratios) // 4
    return {
        "ratio": round(statistics.median(ratios), 4),
        "ratio_spread": [round(ratios[quarter], 4), round(ratios[-1 - quarter], 4)],
        "ratio_of_minima": round(min(m for m, _ in pairs) / min(t for _, t in pairs), 4),
        "ours_s": round(statistics.median(m for m, _ in pairs), digits),
        "theirs_s": round(statistics.median(t for _, t in pairs), digits),
        "rounds": len(pairs),
    }


def timed(call: Callable[[], Any]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


class Report:
    """Figures of one benchmark: a JSON line each, on the screen and in benchmarks/results/NAME.jsonl.

    With `keeps_others`, figures in the file that this run does not measure
    stay, as long as they come from the same machine: for running it in parts.
    """

    def __init__(self, name: str, *, keeps_others: bool = False) -> None:
        self._name, self._keeps_others = name, keeps_others
        self._lines: list[str] = []

    def add(self, figure: str, values: dict[str, Any], **configuration: Any) -> None:
        """Write one figure down with the configuration it was measured in."""
        line = json.dumps(
            {"benchmark": self._name, "figure": figure, **values, "configuration": configuration}
        )
        self._lines.append(line)
        print(line, flush=True)

    def save(self) -> None:
        """Keep the figures, with the machine they come from."""
        import torch

        machine = {
            "benchmark": self._name,
            "machine": {
                "cores": os.cpu_count(),
                "processor": platform.machine(),
                "python": platform.python_version(),
                "torch": torch.__version__,
            },
            "measured": time.strftime("%Y-%m-%d"),
        }
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{self._name}.jsonl"
        lines = [
            json.dumps(machine),
            *(self._others(path, machine) if self._keeps_others else ()),
            *self._lines,
        ]
        path.write_text("\n".join(lines) + "\n")
        print(f"written to benchmarks/results/{self._name}.jsonl", file=sys.stderr)

    def _others(self, path: Path, machine: dict[str, Any]) -> list[str]:
        header, *lines = path.read_text().splitlines() if path.exists() else ["{}"]
        if json.loads(header).get("machine") != machine["machine"]:
            return []
        ours = {_which(line) for line in self._lines}
        return [line for line in lines if _which(line) not in ours]


def _which(line: str) -> tuple[Any, ...]:
    """What makes a figure the same one as another."""
    read = json.loads(line)
    configuration = read["configuration"]
    return read["figure"], configuration.get("workers"), configuration.get("model")
