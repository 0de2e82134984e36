"""The tiers of a store, and how much each of them may hold."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from shoal.errors import ConfigError


class Tier(IntEnum):
    """Where a block lies; from fast to slow."""

    DEVICE = 0
    RAM = 1
    DISK = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How many bytes of blocks each tier holds at most."""

    device_bytes: int = 0
    """Of the accelerator's memory. On a machine without one the tier is empty, whatever this says."""

    ram_bytes: int
    """Of RAM. What is handed out stays the caller's and is not counted."""

    disk_bytes: int | None = None
    """Of disk: 0 for none, None for as much as the disk takes."""

    def __post_init__(self) -> None:
        for name, value in (("device_bytes", self.device_bytes), ("ram_bytes", self.ram_bytes)):
            if value < 0:
                raise ConfigError(f"{name} must be 0 or more, got {value}")
        if self.disk_bytes is not None and self.disk_bytes < 0:
            raise ConfigError(f"disk_bytes must be 0 or more, or None for no limit, got {self.disk_bytes}")

    def of(self, tier: Tier) -> int | None:
        """Of one tier; None where there is no limit."""
        return (self.device_bytes, self.ram_bytes, self.disk_bytes)[tier]
