"""`shoal.memory`: stores of blocks and rows over RAM and disk, within limits in bytes."""

from shoal.data.cache import BlockStore, CacheConfig, Limits, Tier, stats

__all__ = ["BlockStore", "CacheConfig", "Limits", "Tier", "stats"]
