"""What the coordinator keeps for torch's rendezvous: keys, values, and who waits for them.

Pure: no clock, no socket. The rules are those of torch's own stores, so that
`store.py` can stand in for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from shoal.wire.messages import (
    Message,
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
    StoreRefused,
    StoreSet,
    StoreValues,
    StoreWait,
    WaitExpired,
)

Request: TypeAlias = (
    StoreSet
    | StoreGet
    | StoreWait
    | StoreAdd
    | StoreAppend
    | StoreCompareSet
    | StoreCheck
    | StoreDelete
    | StoreNumKeys
)

_INT64 = range(-(2**63), 2**63)


@dataclass(frozen=True, slots=True)
class Asked:
    """A client asks something; it asks nothing else before it is answered."""

    client: int
    request: Request
    at: float


@dataclass(frozen=True, slots=True)
class Gone:
    """A client left: it waits for nothing any more. What it set stays."""

    client: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""

    at: float


Event: TypeAlias = Asked | Gone | Tick


@dataclass(frozen=True, slots=True)
class Answer:
    """Send `message` to `client`."""

    client: int
    message: Message


class _Waiter(NamedTuple):
    request: StoreGet | StoreWait
    since: float

    @property
    def deadline(self) -> float:
        return self.since + self.request.timeout_s


class StoreTable:
    """A dictionary whose readers may wait, each with a deadline.

    A value is answered as it is at the moment the last missing key appears;
    a key that was deleted again by then is waited for again.
    """

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._waiting: dict[int, _Waiter] = {}

    @property
    def deadline(self) -> float | None:
        """When a Tick will have something to do, if nothing happens before."""
        return min((waiter.deadline for waiter in self._waiting.values()), default=None)

    def handle(self, event: Event) -> list[Answer]:
        """Apply one event; return what must now be answered, in order."""
        match event:
            case Asked(client, StoreGet() | StoreWait() as request, at):
                self._waiting[client] = _Waiter(request, at)
                return self._wake(client)
            case Asked(client, request, _):
                return [Answer(client, self._apply(request)), *self._wake(*self._waiting)]
            case Gone(client):
                self._waiting.pop(client, None)
                return []
            case Tick(at):
                late = [client for client, waiter in self._waiting.items() if at >= waiter.deadline]
                return [Answer(client, self._expired(self._waiting.pop(client), at)) for client in late]

    def _apply(self, request: Request) -> Message:
        values = self.values
        match request:
            case StoreSet(changes):
                values.update(changes)
                return StoreDone()
            case StoreAdd(key, amount):
                try:
                    total = int(values.get(key, b"0")) + amount
                except ValueError:
                    return StoreRefused(f"the value of {key!r} is no number, so nothing can be added to it")
                if total not in _INT64:
                    return StoreRefused(f"{key!r} would become {total}, which 64 bits cannot hold")
                values[key] = str(total).encode()
                return StoreCount(total)
            case StoreAppend(key, value):
                values[key] = values.get(key, b"") + value
                return StoreDone()
            case StoreCompareSet(key, expected, desired):
                if values.get(key, b"") == expected:
                    values[key] = desired
                return StoreValues([values.get(key, expected)])
            case StoreCheck(keys):
                return StoreFlag(not self._missing(keys))
            case StoreDelete(key):
                return StoreFlag(values.pop(key, None) is not None)
            case StoreNumKeys():
                return StoreCount(len(values))
            case StoreGet(keys):
                return StoreValues([values[key] for key in keys])
            case StoreWait():
                return StoreDone()

    def _wake(self, *clients: int) -> list[Answer]:
        ready = [client for client in clients if not self._missing(self._waiting[client].request.keys)]
        return [Answer(client, self._apply(self._waiting.pop(client).request)) for client in ready]

    def _missing(self, keys: Sequence[str]) -> list[str]:
        return [key for key in keys if key not in self.values]

    def _expired(self, waiter: _Waiter, at: float) -> WaitExpired:
        return WaitExpired("the store", at - waiter.since, self._missing(waiter.request.keys))
