"""What a host's devices cannot do for a job.

Part of the tree of `core/errors.py`, under ConfigError.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal.core.errors import ConfigError


class DeviceMissing(ConfigError):
    """A worker was to compute on a device that is not there."""

    def __init__(self, *, device: str, rank: int, num_workers: int, visible: Mapping[str, int]) -> None:
        self.device, self.rank, self.num_workers, self.visible = device, rank, num_workers, dict(visible)
        kind = device.partition(":")[0]
        found = visible.get(kind, 0)
        there = ", ".join(f"{count} {name}" for name, count in visible.items() if count) or "no accelerator"
        how_many = f" of {num_workers}" if num_workers > 1 else ""
        fewer = f", use -n {found} or fewer" if 0 < found < num_workers else ""
        super().__init__(
            f"worker {rank}{how_many} was to compute on {device}, and this host has {there} that torch can use (what "
            f"CUDA_VISIBLE_DEVICES and its like hide does not count). Nothing was trained; use --device cpu{fewer}, or "
            "--soft-placement, which puts workers without a device on the CPU."
        )
