"""`shoal.memory`: data over device memory, RAM and disk, within limits in bytes.

block_store.py   blocks by key, promoted and demoted between the tiers; what decides is `tiering.py`, and is pure
row_store.py     rows by number, the first part of them in RAM and the rest on disk, shared by the processes of a host
placing.py       how much of a cache lies where, and why
figures.py       hit rates and bytes moved
"""

from shoal.data.cache.block_store import BlockStore
from shoal.data.cache.cache_plan import CacheConfig
from shoal.data.cache.statistics import stats
from shoal.data.cache.tiering import Limits, Tier

__all__ = ["BlockStore", "CacheConfig", "Limits", "Tier", "stats"]
