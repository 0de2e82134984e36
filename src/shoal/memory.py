"""`shoal.memory`: where caches of data lie, and how often they were hit."""

from shoal.data.cache import CacheConfig, stats

__all__ = ["CacheConfig", "stats"]
