"""`shoal.memory`: data over device memory, RAM and disk, within limits in bytes.

block_store.py     blocks by key, promoted and demoted between the tiers; what decides is `tiering.py`, and is pure
stats.py           hit rates and bytes moved
"""

from shoal.memory.block_store import BlockStore
from shoal.memory.stats import stats
from shoal.memory.tier import Limits, Tier

__all__ = ["BlockStore", "Limits", "Tier", "stats"]
