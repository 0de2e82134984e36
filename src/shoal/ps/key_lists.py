"""Key lists sent before, by name: a repeated list is not sent again.

A batch's keys are pulled and then pushed, and come again in the next epoch. Both ends of a
connection keep the newest lists, within the same limit and in the order in which they were sent, so
the sender knows what the other end still has. All are dropped when a connection or a view ends.
Between hosts only: within one, keys are in shared memory.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

LIMIT_BYTES = 8 << 20
"""Bytes of the lists of one connection, at each end."""

Keys = NDArray[np.int64]


def name_of(keys: Keys) -> int:
    """A hash of the list, never 0."""
    return (hash(keys.tobytes()) & 0x7FFF_FFFF_FFFF_FFFE) + 1


class KeyLists:
    """The newest lists, as many as fit."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes, self._num_bytes = limit_bytes, 0
        self._lists: OrderedDict[int, Keys] = OrderedDict()

    def keep(self, name: int, keys: Keys) -> None:
        """Keep a list that is sent; a copy of it."""
        old = self._lists.pop(name, None)
        self._num_bytes += keys.nbytes - (old.nbytes if old is not None else 0)
        self._lists[name] = keys.copy()
        while self._num_bytes > self._limit_bytes:
            _, oldest = self._lists.popitem(last=False)
            self._num_bytes -= oldest.nbytes

    def find(self, name: int) -> Keys | None:
        return self._lists.get(name)

    def refer(self, keys: Keys) -> tuple[int, bool]:
        """Name of a list that is about to be sent, and whether the other end has it; from now on it does."""
        name = name_of(keys)
        known = self.find(name)
        if known is not None and np.array_equal(known, keys):
            return name, True
        self.keep(name, keys)
        return name, False
