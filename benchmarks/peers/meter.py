"""When a peer's run is warm, how long it is measured, and the one JSON line it prints.

A runner loops `while meter.goes_on(): <one step>; meter.step(samples)`. What
is counted lies between the end of the warm-up and the deadline; the sum over
a run's processes is the run's rate. Nothing but the standard library: every
peer's interpreter imports this.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from collections.abc import Callable
from typing import Any

MIN_WARM_STEPS = 9
"""The Trainer checks a loss at steps 1, 2, 4 and 8."""


def options(*extra: Callable[[argparse.ArgumentParser], Any]) -> argparse.Namespace:
    """The arguments every runner understands."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", help="folder with ids.npy and label.npy")
    parser.add_argument("--seconds", type=float, default=8.0, help="measured, after the warm-up")
    parser.add_argument("--warm", type=float, default=3.0, help="seconds of warm-up")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=0, help="of the computing library; 0: cores / workers")
    for add in extra:
        add(parser)
    found = parser.parse_args()
    found.threads = found.threads or max(1, len(os.sched_getaffinity(0)) // found.workers)
    return found


class Meter:
    """Counts the steps of one process between warm-up and deadline."""

    def __init__(self, *, warm_s: float, seconds: float, num_steps: int | None = None) -> None:
        """`num_steps` is measured in the place of `seconds`; the warm-up then has `MIN_WARM_STEPS`, whatever they take."""
        self._warm_until = time.perf_counter() + warm_s
        self._seconds, self._num_wanted = seconds, num_steps
        self._num_seen = 0
        self._began: float | None = None
        self._last = 0.0
        self.num_steps = 0
        self.num_samples = 0

    def step(self, num_samples: int) -> None:
        """One step is over."""
        self._last = time.perf_counter()
        self._num_seen += 1
        if self._began is not None:
            self.num_steps += 1
            self.num_samples += num_samples
        elif self._num_seen >= MIN_WARM_STEPS and (self._num_wanted or self._last >= self._warm_until):
            self._began = self._last

    def goes_on(self) -> bool:
        """Whether there is time for one more step."""
        if self._num_wanted is not None:
            return self.num_steps < self._num_wanted
        return self._began is None or self._last - self._began < self._seconds

    @property
    def seconds(self) -> float:
        return self._last - self._began if self._began is not None else 0.0

    @property
    def samples_per_s(self) -> float:
        return self.num_samples / self.seconds if self.seconds else 0.0


def tell(peer: str, samples_per_s: float, **configuration: Any) -> None:
    """The runner's last line of output; the driver looks for it among whatever the peer prints."""
    line = {"peer": peer, "samples_per_s": round(samples_per_s, 1), "configuration": configuration}
    print("\n" + json.dumps(line), flush=True)


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on now. Peers insist on being told theirs, so a race with others remains."""
    held = [socket.socket() for _ in range(count)]
    for each in held:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports
