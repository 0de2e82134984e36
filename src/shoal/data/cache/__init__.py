"""Caches of data over RAM and disk, within limits in bytes; `shoal.memory` is their public face.

row_store.py      rows by number, the first part in RAM and the rest on disk, shared by the processes of a host
row_file.py       rows and heaps in anonymous files
table_cache.py    decoded rows of tables; sample_cache.py: samples of `Dataset.cache`
cache_plan.py     memory budget, the split between RAM and disk, figures
"""

from shoal.data.cache.cache_plan import CacheConfig, stats

__all__ = ["CacheConfig", "stats"]
