"""Requests of `shoal.ps.connect`: one push or pull as servers get it, and the queue that keeps them in order.

A push keeps what it carries until it is acknowledged, in the memory where
servers read it, so that it is copied once. Servers deduplicate by the last
seq that was applied, so a push must never overtake another: where one has to
be sent again, all that are not acknowledged are, in order. Nothing runs by
itself; every call moves requests on as far as it can without waiting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.embedding.kernels import expand
from shoal.errors import ArenaFull, LinkLost, PsError
from shoal.ps.client.pulls import split
from shoal.ps.client.server_group import Group, ViewChanged, memory_of
from shoal.runtime.transport.arena import Buffer
from shoal.runtime.transport.messages.client_server import (
    PsRefused,
    PullRows,
    PushRows,
    StepEnd,
    TableSpec,
    ViewOver,
)
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.shared_client import Link

Keys: TypeAlias = NDArray[np.int64]


class KvRequest:
    """A push or a pull: its tickets, answers and buffers."""

    def __init__(self, table: TableSpec, num_bytes: int) -> None:
        self.table, self.num_bytes = table, num_bytes
        self.is_done = False
        self.error: PsError | None = None
        """Why it does not count, where it was refused."""
        self._left: dict[int, tuple[Link, int]] = {}  # server -> its ticket, where the answer is not here yet
        self._held: list[tuple[Link, Buffer]] = []

    def send(self, group: Group) -> None:
        """Ask, in the group's present view; nothing was asked where ArenaFull is raised."""
        raise NotImplementedError

    def keep(self) -> None:
        """The caller's arrays are the caller's again: have a copy of what is still needed of them."""

    def receive(self, group: Group) -> None:
        """Wait for the answers; raises ViewChanged or LinkLost where there will be none."""
        for server, (link, ticket) in list(self._left.items()):
            if group.link(server) is not link:
                raise ViewChanged(0)  # asked on a connection that is over: ask again
            try:
                group.wait(server, ticket)
            except (LinkLost, ArenaFull):
                raise
            except PsError as error:
                self.error = self.error or error
            del self._left[server]
        self._finish()

    def poll(self) -> bool:
        """True once all answers are here; does not wait, and raises as `receive` does."""
        for server, (link, ticket) in list(self._left.items()):
            answer = link.take(ticket)
            if answer is None:
                return False
            match answer[0]:
                case ViewOver(view):
                    raise ViewChanged(view)
                case PsRefused(reason):
                    why = next((each.message for each in link.unasked), answer[0])
                    self.error = self.error or PsError(getattr(why, "reason", reason))
            del self._left[server]
        self._finish()
        return True

    def fail(self, error: PsError) -> None:
        """It will not be asked."""
        self.error, self.is_done = error, True

    def _finish(self) -> None:
        self.is_done = True
        for link, buffer in self._held:
            link.free(buffer)
        self._held = []

    def _alloc(self, link: Link, nbytes: int) -> Buffer:
        buffer = link.alloc(nbytes)
        self._held.append((link, buffer))
        return buffer

    def _ask(self, group: Group, server: int, message: Message, frames: Any, into: Any = ()) -> None:
        self._left[server] = (group.link(server), group.send(server, message, frames, into))

    def _forget(self, group: Group) -> None:
        """Before it is asked again. Memory of an earlier view stays until this one answers, on the same connection:
        only then nobody can write into it, or read it, any more. What lies elsewhere is left to its connection.
        """
        self._left = {}
        links = {id(group.link(server)) for server in group.servers}
        self._held = [(link, buffer) for link, buffer in self._held if id(link) in links]


class Push(KvRequest):
    """Rows for one table, under a name; keys strictly increasing."""

    def __init__(
        self, table: TableSpec, keys: Keys, values: NDArray[Any], *, stream: int, seq: int, rank: int
    ) -> None:
        """`rank` is one that no worker has: clocks of workers do not count these pushes."""
        super().__init__(table, keys.nbytes + values.nbytes)
        self._stream, self._seq, self._rank = stream, seq, rank
        self._source: tuple[Keys, NDArray[Any]] | None = (keys, values)
        self._parts: list[tuple[int, Buffer, Buffer]] = []

    def keep(self) -> None:
        """Copy what does not lie in the servers' reach yet."""
        if self._source is not None:
            keys, values = self._source
            self._source = keys.copy(), values.copy()

    def send(self, group: Group) -> None:
        """Every server its rows, and to each that this is all."""
        keys, values = self._source or self._gathered()
        self._forget(group)
        before = len(self._held)
        try:
            parts = self._copied(group, keys, values)
        except ArenaFull:
            for link, buffer in self._held[before:]:
                link.free(buffer)
            del self._held[before:]
            self._source = keys, values
            raise
        self._parts, self._source = parts, None
        name = (group.view, self._stream, self._seq)
        for server, key_frame, value_frame in parts:
            group.push(server, PushRows(*name, self.table.number), [key_frame, value_frame])
        holders = {server for server, _, _ in parts}
        for server in group.servers:
            num_pushes = int(server in holders)
            end = StepEnd(*name, rank=self._rank, num_pushes=num_pushes, exchange=0, anchored_at=0)
            self._ask(group, server, end, [b"", b""])

    def _finish(self) -> None:
        super()._finish()
        self._parts = []

    def _copied(self, group: Group, keys: Keys, values: NDArray[Any]) -> list[tuple[int, Buffer, Buffer]]:
        parts = []
        dim, dtype = self.table.dim, np.dtype(self.table.dtype)
        for server, places in _by_server(self.table, keys, group):
            link, num_keys = group.link(server), len(keys) if places is None else len(places)
            key_frame = self._alloc(link, num_keys * 8)
            value_frame = self._alloc(link, num_keys * dim * dtype.itemsize)
            if places is None:
                key_frame.view[:], value_frame.view[:] = memory_of(keys), memory_of(values)
            else:
                np.take(keys, places, out=np.frombuffer(key_frame.view, np.int64), mode="clip")
                expand(values, places, np.frombuffer(value_frame.view, dtype).reshape(num_keys, dim))
            parts.append((server, key_frame, value_frame))
        return parts

    def _gathered(self) -> tuple[Keys, NDArray[Any]]:
        """Put together the parts that were cut over the servers of an earlier view."""
        keys = [np.zeros(0, np.int64), *(np.frombuffer(frame.view, np.int64) for _, frame, _ in self._parts)]
        values = [
            np.zeros(0, self.table.dtype),
            *(np.frombuffer(frame.view, self.table.dtype) for _, _, frame in self._parts),
        ]
        whole = np.concatenate(keys)
        order = np.argsort(whole)
        return whole[order], np.concatenate(values).reshape(-1, self.table.dim)[order]


class Pull(KvRequest):
    """Rows of one table, in the order of the keys asked for."""

    def __init__(
        self, table: TableSpec, keys: Keys, inverse: NDArray[np.int32] | None, shape: tuple[int, ...]
    ) -> None:
        """`keys` strictly increasing and nobody else's; `inverse`: where the row of each key asked for is among them, None: just there."""
        self._dtype = np.dtype(table.dtype)
        super().__init__(table, keys.nbytes + len(keys) * table.dim * self._dtype.itemsize)
        self._keys, self._inverse, self._shape = keys, inverse, shape
        self._parts: list[tuple[Buffer, NDArray[np.int32] | None]] = []
        self.result: NDArray[Any] | None = None

    def send(self, group: Group) -> None:
        """Ask every server for its rows."""
        self._forget(group)
        self._parts = []
        message = PullRows(group.view, 0, self.table.number, create=False)
        asked = []
        for server, places in _by_server(self.table, self._keys, group):
            link, num_keys = group.link(server), len(self._keys) if places is None else len(places)
            frame = self._alloc(link, num_keys * 8)
            into = self._alloc(link, num_keys * self.table.dim * self._dtype.itemsize)
            frame.view[:] = memory_of(self._keys if places is None else self._keys[places])
            asked.append((server, frame, into))
            self._parts.append((into, places))
        for server, frame, into in asked:
            self._ask(group, server, message, [frame], [into])

    def _finish(self) -> None:
        if self.error is None:
            self.result = self._whole().reshape(*self._shape, self.table.dim)
        self._parts = []
        super()._finish()

    def _whole(self) -> NDArray[Any]:
        dim = self.table.dim
        whole = np.empty((len(self._keys), dim), self._dtype)
        for into, places in self._parts:
            rows = np.frombuffer(into.view, self._dtype).reshape(-1, dim)
            if places is not None:
                whole[places] = rows
            elif self._inverse is None:
                whole[:] = rows
            else:
                whole = rows
        if self._inverse is None:
            return whole
        out = np.empty((len(self._inverse), dim), self._dtype)
        expand(whole, self._inverse, out)
        return out


def _by_server(table: TableSpec, keys: Keys, group: Group) -> list[tuple[int, NDArray[np.int32] | None]]:
    """(server, places of its keys) for every server that holds any; None: all of them."""
    if not len(keys):
        return []
    if len(group.servers) == 1:
        return [(group.servers[0], None)]
    return split(table.number, keys, group)  # type: ignore[return-value]  # places are int32


# ---- the queue -----------------------------------------------------------------------------------


MAX_REQUESTS = 64
"""Under way at a time; one more waits for the oldest. Far fewer than a server keeps of a view that it does not know yet."""

MAX_BYTES = 1 << 30
"""The same for what they carry."""


class RequestQueue:
    """An operation of the group: all that is under way, up to the request that is waited for."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.sent_in = 0
        self._sent: deque[KvRequest] = deque()
        self._held: deque[tuple[KvRequest, list[KvRequest]]] = deque()
        self._target: KvRequest | None = None
        self._is_behind = False
        self.failed: list[KvRequest] = []
        """Refused, and nobody has been told yet."""

    @property
    def all(self) -> list[KvRequest]:
        """Requests without an acknowledgement, in order."""
        return [*self._sent, *(request for request, _ in self._held)]

    def add(self, request: KvRequest, after: Sequence[KvRequest] = ()) -> None:
        """Send it now, or once those it follows are acknowledged."""
        self.advance()
        waits_for = [each for each in after if not each.is_done or each.error]
        if waits_for or self._held:
            request.keep()
            self._held.append((request, waits_for))
            self._release()
        else:
            self._begin(request)

    def advance(self) -> None:
        """Take the answers that are here, and send what waited for them."""
        try:
            while self._sent and self.sent_in == self._group.view and self._sent[0].poll():
                self._end(self._sent.popleft())
        except (LinkLost, ViewChanged):
            self.sent_in, self._is_behind = 0, True
        self._release()

    def finish(self, request: KvRequest) -> None:
        """Wait until this one is acknowledged, or refused."""
        while any(held is request for held, _ in self._held):
            first, waits_for = self._held[0]
            for each in waits_for:
                self.finish(each)
            self._release()
            assert first.is_done or first in self._sent
        if request.is_done:
            return
        if self._is_behind:
            self._group.renew()
            self._is_behind = False
        self._target = request
        self._group.finish(self)

    # ---- as the group sees it -------------------------------------------------------------------

    def send(self, group: Group) -> None:
        """All that is not acknowledged, in order."""
        for request in self._sent:
            request.send(group)
        self._flush()

    def receive(self, group: Group) -> None:
        """Wait for one after the other."""
        assert self._target is not None
        while not self._target.is_done:
            self._sent[0].receive(group)
            self._end(self._sent.popleft())

    # ---- steps ----------------------------------------------------------------------------------

    def _release(self) -> None:
        while self._held and all(each.is_done for each in self._held[0][1]):
            request, waited_for = self._held.popleft()
            refused = next((each.error for each in waited_for if each.error), None)
            if refused is not None:
                why = f"a request to table '{request.table.name}' was not sent, because what it was to follow was refused"
                request.fail(PsError(f"{why}: {refused}"))
                self._end(request)
            else:
                self._begin(request)

    def _begin(self, request: KvRequest) -> None:
        while self._sent and (
            len(self._sent) >= MAX_REQUESTS
            or request.num_bytes + sum(each.num_bytes for each in self._sent) > MAX_BYTES
        ):
            self.finish(self._sent[0])
        if not self._sent:
            self.sent_in, self._is_behind = self._group.view, False
        self._sent.append(request)
        try:
            if self.sent_in == self._group.view:
                request.send(self._group)
                self._flush()
        except (LinkLost, ViewChanged):
            self.sent_in, self._is_behind = 0, True
        except ArenaFull:  # it was not asked
            self._sent.pop()
            raise
        except BaseException:
            self.sent_in = 0  # who knows how much of it has left
            raise
        finally:
            request.keep()

    def _flush(self) -> None:
        """Send what is buffered: nobody may wait for it for long."""
        for server in self._group.servers:
            self._group.link(server).flush()

    def _end(self, request: KvRequest) -> None:
        if request.error is not None:
            self.failed.append(request)
