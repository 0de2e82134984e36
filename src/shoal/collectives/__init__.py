"""`shoal.collectives`: sums, gathers and products over the workers, for schemes of a script's own.

    total = shoal.collectives.all_reduce(gradient, timeout_s=30)

Every rank makes the same calls; in a plain process they give back what they
were given. Behind them, in this folder: how bytes are added, gathered and
laid out for it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.train.collective_calls import all_gather as all_gather
    from shoal.train.collective_calls import all_reduce as all_reduce
    from shoal.train.collective_calls import barrier as barrier
    from shoal.train.collective_calls import broadcast as broadcast
    from shoal.train.collective_calls import matmul as matmul
    from shoal.train.collective_calls import reduce_scatter as reduce_scatter

__all__ = ["all_gather", "all_reduce", "barrier", "broadcast", "matmul", "reduce_scatter"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'shoal.collectives' has no attribute '{name}'")
    # They survive deaths, which is known only further up: this folder is below.
    return getattr(importlib.import_module("shoal.train.collective_calls"), name)


def __dir__() -> list[str]:
    return [*__all__]
