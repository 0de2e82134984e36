"""Caches of data over device memory, RAM and disk, within limits in bytes; `shoal.memory` is their public face.

block_store.py    blocks by key, promoted and demoted between tiers; decisions are in tiering.py (pure) and eviction.py
row_store.py      rows by number, the first part in RAM and the rest on disk, shared by the processes of a host
table_cache.py    decoded rows of tables; sample_cache.py: samples of `Dataset.cache`
cache_plan.py     memory budget, and the split between RAM and disk
statistics.py     hit rates and bytes moved
disk_cache.py     facts about files, such as line offsets, kept for all workers of a job
"""

from shoal.data.cache.block_store import BlockStore
from shoal.data.cache.cache_plan import CacheConfig
from shoal.data.cache.statistics import stats
from shoal.data.cache.tiering import Limits, Tier

__all__ = ["BlockStore", "CacheConfig", "Limits", "Tier", "stats"]
