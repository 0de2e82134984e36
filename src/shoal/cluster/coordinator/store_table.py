"""Key-value store of torch's rendezvous, with waiting readers.

Pure: no clock, no socket. The rules are those of torch's own stores, so that
`recovery/rendezvous.py` can stand in for one. Beyond them, the keys of a view end
with it, and a reader that still waits for one is told so at once.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from shoal.cluster.coordinator.actions import Answer, Tick
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

MAX_BYTES = 256 << 20
"""All keys and values together."""

MAX_ANSWER_BYTES = 3 << 20
"""Values that one request may ask for: a message has no more."""

MAX_ANSWERS = 1 << 16
"""Clients whose newest answer is kept."""

_INT64 = range(-(2**63), 2**63)


def prefix_of(view: int) -> str:
    return f"view-{view}"


_VIEW_OF = re.compile(prefix_of(0).replace("0", "([0-9]{1,9})") + "/")


@dataclass(frozen=True, slots=True)
class StoreAsked:
    """A client sends a request; it sends no other before the answer."""

    client: int
    request: Request
    at: float


@dataclass(frozen=True, slots=True)
class StoreClientGone:
    """A client left and no longer waits. The keys it set stay."""

    client: int


@dataclass(frozen=True, slots=True)
class ViewClosed:
    """This view is over: its keys are deleted, and requests for them are refused."""

    view: int


Event: TypeAlias = StoreAsked | StoreClientGone | Tick | ViewClosed


class _StoreWaiter(NamedTuple):
    number: int  # in the order in which they came
    request: StoreGet | StoreWait
    since: float

    @property
    def deadline(self) -> float:
        return self.since + self.request.timeout_s


class StoreTable:
    """Dictionary whose readers may wait, each with a deadline.

    A request is answered with the values at the moment its last missing key appears; a key that was
    deleted again by then is waited for again.
    """

    def __init__(
        self,
        values: Mapping[str, bytes] | None = None,
        answers: Mapping[int, tuple[int, Message]] | None = None,
    ) -> None:
        """`values` and `answers` are those of a coordinator that died."""
        self.values = dict(values or {})
        self.num_bytes = sum(len(key) + len(value) for key, value in self.values.items())
        # By client: answer to its newest request that must not be applied twice.
        self.answers = dict(answers or {})
        self._closed_view = 0
        self._waiting: dict[int, _StoreWaiter] = {}
        self._num_waited = 0
        # Missing key -> clients that wait for it, and possibly for others too.
        self._wanted: dict[str, set[int]] = {}
        # Heap of deadline, number and client; may contain clients that are gone.
        self._deadlines: list[tuple[float, int, int]] = []
        self._changed_keys: set[str] = set()
        self._changed_answers: set[int] = set()

    @property
    def deadline(self) -> float | None:
        """Time of the next Tick that has an effect."""
        while self._deadlines:
            at, number, client = self._deadlines[0]
            if client in self._waiting and self._waiting[client].number == number:
                return at
            heapq.heappop(self._deadlines)
        return None

    def handle(self, event: Event) -> list[Answer]:
        """Apply one event; return what must now be answered, in order."""
        match event:
            case StoreAsked(client, request) if view := self._view_over(request):
                return [Answer(client, _over(view))]
            case StoreAsked(client, StoreGet() | StoreWait() as request, at):
                self._num_waited += 1
                waiter = self._waiting[client] = _StoreWaiter(self._num_waited, request, at)
                answers = self._wake({client})
                if not answers:
                    heapq.heappush(self._deadlines, (waiter.deadline, waiter.number, client))
                return answers
            case StoreAsked(client, request, _):
                return [Answer(client, self._apply_once(request)), *self._wake_by(request)]
            case ViewClosed(view) if view <= self._closed_view:
                return []
            case ViewClosed(view):
                self._closed_view = view
                for key in [key for key in self.values if self._is_over(key)]:
                    self._forget(key)
                    self._changed_keys.add(key)
                self._wanted = {key: each for key, each in self._wanted.items() if not self._is_over(key)}
                woken = [client for client, each in self._waiting.items() if self._view_over(each.request)]
                return [Answer(client, _over(view)) for client in woken if self._waiting.pop(client)]
            case StoreClientGone(client):
                self._waiting.pop(client, None)
                return []
            case Tick(at):
                if (deadline := self.deadline) is None or at < deadline:
                    return []
                late = [client for client, waiter in self._waiting.items() if at >= waiter.deadline]
                return [Answer(client, self._expired(self._waiting.pop(client), at)) for client in late]

    def take_changes(self) -> tuple[dict[str, bytes | None], dict[int, tuple[int, Message]]]:
        """Changes since the last call: values by key (None: deleted), newest answers by client."""
        changed = {key: self.values.get(key) for key in sorted(self._changed_keys)}
        answered = {client: self.answers[client] for client in sorted(self._changed_answers)}
        self._changed_keys.clear()
        self._changed_answers.clear()
        return changed, answered

    def _apply_once(self, request: Request) -> Message:
        """Apply a request, or repeat the answer where it was applied before."""
        client = getattr(request, "client", 0)
        if not client:
            return self._apply(request)
        serial: int = getattr(request, "serial", 0)
        done = self.answers.get(client)
        if done is None or done[0] != serial:
            done = self.answers[client] = (serial, self._apply(request))
            while len(self.answers) > MAX_ANSWERS:
                del self.answers[next(iter(self.answers))]
            self._changed_answers.add(client)
        return done[1]

    def _view_over(self, request: Request) -> int:
        """The closed view whose keys this request names; 0 where there is none."""
        match request:
            case StoreSet(values):
                keys: Iterable[str] = values
            case StoreGet(keys) | StoreWait(keys) | StoreCheck(keys):
                pass
            case StoreNumKeys():
                return 0
            case _:
                keys = (request.key,)
        return self._closed_view if any(self._is_over(key) for key in keys) else 0

    def _is_over(self, key: str) -> bool:
        found = _VIEW_OF.match(key)
        return found is not None and int(found[1]) <= self._closed_view

    def _put(self, key: str, value: bytes) -> None:
        self.num_bytes += len(value) - (len(self.values[key]) if key in self.values else -len(key))
        self.values[key] = value

    def _forget(self, key: str) -> bool:
        """Delete a key; whether it existed."""
        value = self.values.pop(key, None)
        if value is None:
            return False
        self.num_bytes -= len(key) + len(value)
        return True

    def _problem(self, request: Request) -> str | None:
        """Reason why a request exceeds the limits; empty if it does not."""
        added = asked = 0
        match request:
            case StoreSet(changes):
                added = sum(len(key) + len(value) for key, value in changes.items())
            case StoreAppend(key, value):
                added = len(key) + len(value)
            case StoreCompareSet(key, _, desired):
                added = len(key) + len(desired)
            case StoreAdd(key):
                added = len(key) + 20
            case StoreGet(keys):
                asked = sum(len(self.values[key]) for key in keys)
        if self.num_bytes + added > MAX_BYTES:
            return f"the store holds {self.num_bytes:,} bytes, and {added:,} more would be over its limit of {MAX_BYTES:,}"
        if asked > MAX_ANSWER_BYTES:
            return f"the answer is too large: {asked:,} bytes, where at most {MAX_ANSWER_BYTES:,} are allowed"
        return None

    def _apply(self, request: Request) -> Message:
        values = self.values
        problem = self._problem(request)
        if problem is not None:
            return StoreRefused(problem)
        match request:
            case StoreSet(changes):
                self._changed_keys.update(changes)
            case StoreAdd(key) | StoreAppend(key) | StoreCompareSet(key) | StoreDelete(key):
                self._changed_keys.add(key)
        match request:
            case StoreSet(changes):
                for key, value in changes.items():
                    self._put(key, value)
                return StoreDone()
            case StoreAdd(key, amount):
                try:
                    total = int(values.get(key, b"0")) + amount
                except ValueError:
                    return StoreRefused(f"the value of {key!r} is no number, so nothing can be added to it")
                if total not in _INT64:
                    return StoreRefused(f"{key!r} would become {total}, which 64 bits cannot hold")
                self._put(key, str(total).encode())
                return StoreCount(total)
            case StoreAppend(key, value):
                self._put(key, values.get(key, b"") + value)
                return StoreDone()
            case StoreCompareSet(key, expected, desired):
                if values.get(key, b"") == expected:
                    self._put(key, desired)
                return StoreValues([values.get(key, expected)])
            case StoreCheck(keys):
                return StoreFlag(not self._missing(keys))
            case StoreDelete(key):
                return StoreFlag(self._forget(key))
            case StoreNumKeys():
                return StoreCount(len(values))
            case StoreGet(keys):
                return StoreValues([values[key] for key in keys])
            case StoreWait():
                return StoreDone()

    def _wake_by(self, request: Request) -> list[Answer]:
        """Answer those that waited for a key that this request may have set."""
        match request:
            case StoreSet(values):
                keys: Iterable[str] = values
            case StoreAdd(key) | StoreAppend(key) | StoreCompareSet(key):
                keys = (key,)
            case _:
                return []
        return self._wake({client for key in keys for client in self._wanted.pop(key, ())})

    def _wake(self, clients: set[int]) -> list[Answer]:
        """Answer those of these clients that have all their keys; the others wait for the next one that is missing."""
        ready: list[int] = []
        for client in clients & self._waiting.keys():
            missing = next(
                (key for key in self._waiting[client].request.keys if key not in self.values), None
            )
            if missing is None:
                ready.append(client)
            else:
                self._wanted.setdefault(missing, set()).add(client)
        ready.sort(key=lambda client: self._waiting[client].number)
        return [Answer(client, self._apply(self._waiting.pop(client).request)) for client in ready]

    def _missing(self, keys: Sequence[str]) -> list[str]:
        return [key for key in keys if key not in self.values]

    def _expired(self, waiter: _StoreWaiter, at: float) -> WaitExpired:
        return WaitExpired("the store", at - waiter.since, self._missing(waiter.request.keys))


def _over(view: int) -> StoreRefused:
    return StoreRefused(f"view {view} is over: a rank has left it")
