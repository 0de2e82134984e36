"""The store over which torch's process groups find each other: the coordinator's, behind torch's interface.

torch's own TCPStore listens on every interface and lets anybody in; this one
goes over the coordinator's Unix socket. It has a connection of its own, so a
wait in here never holds up a call.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from datetime import timedelta
from typing import TypeVar

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from shoal.cluster.worker.coordinator_client import GRACE_S, CoordinatorClient
from shoal.config.liveness import LivenessConfig
from shoal.errors import ClusterError, WaitTimedOut
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.worker_coordinator import (
    StoreAdd,
    StoreAppend,
    StoreCheck,
    StoreCompareSet,
    StoreCount,
    StoreDelete,
    StoreDone,
    StoreFlag,
    StoreGet,
    StoreNumKeys,
    StoreSet,
    StoreValues,
    StoreWait,
)

QUICK_S = 60.0
"""For questions that the coordinator answers at once: so long without an answer, and it is gone."""

A = TypeVar("A", bound=Message)


class StoreWaitTimedOut(WaitTimedOut, DistStoreError):
    """Keys that nobody set in time: torch's kind of error, with the facts of ours."""


class ShoalStore(Store):
    """torch.distributed's Store over a coordinator connection.

    torch calls some methods by their C++ names, so those are here too. Every
    failure is a DistStoreError, because torch's own waits catch just that.
    """

    timeout: timedelta  # torch's own property, which its stub leaves out

    def __init__(
        self, path: str, rank: int, incarnation: int = 0, *, num_workers: int, timeout: timedelta
    ) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self._clones: list[ShoalStore] = []
        self._number = secrets.randbits(62) + 1
        self._serials = itertools.count(1)
        self._client = CoordinatorClient(
            path,
            rank,
            incarnation,
            num_workers=num_workers,
            liveness=LivenessConfig(join_timeout_s=timeout.total_seconds()),
        )

    def set(self, key: str, value: str | bytes) -> None:
        """Keep `value` under `key`."""
        self._ask(StoreSet({key: _bytes(value)}), StoreDone)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Keep several values, all at once."""
        self._ask(StoreSet({key: _bytes(value) for key, value in zip(keys, values, strict=True)}), StoreDone)

    def get(self, key: str) -> bytes:
        """The value of `key`, once it is there."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of `keys`, once all are there."""
        timeout_s = self.timeout.total_seconds()
        return self._ask(StoreGet(list(keys), timeout_s), StoreValues, timeout_s).values

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return once all `keys` are there."""
        timeout_s = (timeout or self.timeout).total_seconds()
        self._ask(StoreWait(list(keys), timeout_s), StoreDone, timeout_s)

    def add(self, key: str, amount: int) -> int:
        """Add to the counter `key` and return what it is then."""
        return self._ask(StoreAdd(key, amount, *self._once()), StoreCount).value

    def append(self, key: str, value: str | bytes) -> None:
        """Add `value` to the end of what `key` holds."""
        self._ask(StoreAppend(key, _bytes(value), *self._once()), StoreDone)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set `key` to `desired` if it holds `expected`; return what it holds then."""
        change = StoreCompareSet(key, _bytes(expected), _bytes(desired), *self._once())
        return self._ask(change, StoreValues).values[0]

    def check(self, keys: Sequence[str]) -> bool:
        """Are all `keys` there?"""
        return self._ask(StoreCheck(list(keys)), StoreFlag).value

    def delete_key(self, key: str) -> bool:
        """Forget `key`; was it there?"""
        return self._ask(StoreDelete(key, *self._once()), StoreFlag).value

    def num_keys(self) -> int:
        """How many keys there are, of all views and groups."""
        return self._ask(StoreNumKeys(), StoreCount).value

    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def has_extended_api(self) -> bool:
        """append, multi_get and multi_set are here: one question where there would be many."""
        return True

    def clone(self) -> ShoalStore:
        """Another connection to the same keys: for a thread that must not queue behind this one's waits."""
        client = self._client
        clone = ShoalStore(
            client.path, client.rank, client.incarnation, num_workers=client.num_workers, timeout=self.timeout
        )
        # torch keeps the C++ half alone, and without its Python half that answers nothing.
        self._clones.append(clone)
        return clone

    def close(self) -> None:
        """Close the connection and those of all clones; torch may keep the object for longer."""
        self._client.close()
        for clone in self._clones:
            clone.close()

    def _once(self) -> tuple[int, int]:
        """Names a request, so that one which is repeated after the coordinator's death is not done twice."""
        return self._number, next(self._serials)

    def _ask(self, message: Message, expected: type[A], timeout_s: float | None = None) -> A:
        try:
            answer = self._client.request(message, QUICK_S if timeout_s is None else timeout_s + GRACE_S)
        except WaitTimedOut as error:
            raise StoreWaitTimedOut(
                operation=error.operation,
                waited_s=error.waited_s,
                missing=error.missing,
                setting=f"the store's timeout (now {self.timeout.total_seconds():g} s)",
            ) from None
        except ClusterError as error:
            raise DistStoreError(str(error)) from error
        if not isinstance(answer, expected):
            raise DistStoreError(f"{type(message).__name__} was answered by {type(answer).__name__}")
        return answer


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
