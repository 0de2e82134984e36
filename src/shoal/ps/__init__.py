"""The parameter server: slots of rows and dense parameters, kept, updated, replicated and given out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.ps.client.kv import Handle as Handle
    from shoal.ps.client.kv import Kv as Kv
    from shoal.ps.client.kv import connect as connect

__all__ = ["Handle", "Kv", "connect"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'shoal.ps' has no attribute '{name}'")
    from shoal.ps.client import kv  # numba and torch: only for those who use it

    return getattr(kv, name)


def __dir__() -> list[str]:
    return [*__all__]
