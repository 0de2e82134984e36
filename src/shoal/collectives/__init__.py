"""`shoal.collectives`: sums, gathers and products over the workers, for a script's own algorithms.

    total = shoal.collectives.all_reduce(gradient, timeout_s=30)

Every rank makes the same calls; in a plain process they return their argument. The other files of
this folder implement sums, gathers and buffer layout.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from shoal.collectives.calls import all_gather as all_gather
    from shoal.collectives.calls import all_reduce as all_reduce
    from shoal.collectives.calls import barrier as barrier
    from shoal.collectives.calls import broadcast as broadcast
    from shoal.collectives.calls import matmul as matmul
    from shoal.collectives.calls import reduce_scatter as reduce_scatter

T = TypeVar("T")

__all__ = ["all_gather", "all_reduce", "barrier", "broadcast", "matmul", "reduce_scatter"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'shoal.collectives' has no attribute '{name}'")
    # Lazy: they load torch, and specs in this folder must not.
    return getattr(importlib.import_module("shoal.collectives.calls"), name)


def _run_over_deaths(call: str, number: int, run: Callable[[Any], T], timeout_s: float | None) -> T:
    # By name: recovery is implemented in a higher layer, and this folder is below.
    module = importlib.import_module("shoal.train.collective_run")
    return cast(T, module.run_over_deaths(call, number, run, timeout_s))


def __dir__() -> list[str]:
    return [*__all__]
