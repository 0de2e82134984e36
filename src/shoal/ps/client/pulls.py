"""Pulls of rows and chunks from the servers.

With one server the answer lands where it is used: a pulled row is read from
the memory that the server gathered it into. With several, what each holds is
put together in the order of the keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.ps.client.server_group import Group, memory_of
from shoal.ps.kernels import partition
from shoal.runtime.transport.arena import Buffer
from shoal.runtime.transport.messages.client_server import PullDense, Pulled, PullRows
from shoal.runtime.transport.shared_client import Link


class RowsPull:
    """Rows of one table, for keys that are strictly increasing. `release` them when they were used."""

    def __init__(
        self, table: int, keys: NDArray[np.int64], dim: int, dtype: np.dtype[Any], *, clock: int, create: bool
    ) -> None:
        self.table, self.keys, self.clock = table, keys, clock
        self.sent_in = 0
        self.staleness = 0
        """Distance of the slowest worker behind `clock` when the rows were read."""
        self.updates = 0
        """Updates by then, on the server with most."""
        self._dim, self._dtype, self._create = dim, dtype, create
        self._asked: list[tuple[int, int, Buffer, NDArray[np.int64] | None]] = []
        self._held: list[tuple[Link, Buffer]] = []
        self._aside: list[tuple[Link, Buffer]] = []  # of requests in a view that is over
        self._rows: NDArray[Any] | None = None

    def send(self, group: Group) -> None:
        """Ask every server for its rows."""
        self._set_aside()
        self._asked = []
        message = PullRows(group.view, self.clock, self.table, self._create)
        if len(group.servers) == 1:
            parts: list[tuple[int, NDArray[np.int64] | None]] = [(group.servers[0], None)]
        else:
            parts = list(split(self.table, self.keys, group))
        for server, order in parts:
            keys = self.keys if order is None else self.keys[order]
            link = group.link(server)
            frame, into = (
                self._alloc(link, keys.nbytes),
                self._alloc(link, len(keys) * self._dim * self._dtype.itemsize),
            )
            frame.view[:] = memory_of(keys)
            self._asked.append((server, group.send(server, message, [frame], [into]), into, order))

    def receive(self, group: Group) -> None:
        """Wait for them."""
        self.staleness = 0
        arrays = []
        for server, ticket, into, order in self._asked:
            answer, _ = group.wait(server, ticket)
            assert isinstance(answer, Pulled)
            self.staleness = max(self.staleness, self.clock - answer.slowest)
            self.updates = max(self.updates, answer.updates)
            rows = np.frombuffer(into.view, self._dtype).reshape(-1, self._dim)
            arrays.append((rows, order))
        if len(arrays) == 1 and arrays[0][1] is None:
            self._rows = arrays[0][0]
            return
        whole = np.empty((len(self.keys), self._dim), self._dtype)
        for rows, order in arrays:
            whole[order] = rows
        self.release()
        self._rows = whole

    @property
    def rows(self) -> NDArray[Any]:
        """One row per key. With one server, memory that is given back by `release`."""
        assert self._rows is not None
        return self._rows

    def release(self) -> None:
        """Give the memory back."""
        give_back(self._held, self._aside)
        self._held, self._aside, self._rows = [], [], None

    def _set_aside(self) -> None:
        # A server that has not heard of the new view may still write there.
        self._aside += self._held
        self._held, self._rows = [], None

    def _alloc(self, link: Link, nbytes: int) -> Buffer:
        buffer = link.alloc(nbytes)
        self._held.append((link, buffer))
        return buffer


class DensePull:
    """Chunks of dense parameters, each (number, slot, bytes). `release` them when they were copied."""

    def __init__(self, chunks: Sequence[tuple[int, int, int]], *, clock: int) -> None:
        self._chunks, self.clock = chunks, clock
        self.sent_in = 0
        self.staleness = 0
        self.updates = 0
        self.arrived: dict[int, memoryview] = {}
        """Bytes by chunk, once received."""
        self._asked: list[tuple[int, int]] = []
        self._held: list[tuple[Link, Buffer]] = []
        self._aside: list[tuple[Link, Buffer]] = []  # of requests in a view that is over

    def send(self, group: Group) -> None:
        """Ask every server for its chunks."""
        self._set_aside()
        self._asked = []
        by_server: dict[int, list[tuple[int, int]]] = {}
        for number, slot, nbytes in self._chunks:
            by_server.setdefault(group.owner(slot), []).append((number, nbytes))
        for server, chunks in by_server.items():
            link = group.link(server)
            into = [link.alloc(nbytes) for _, nbytes in chunks]
            self._held += [(link, buffer) for buffer in into]
            message = PullDense(group.view, self.clock, [number for number, _ in chunks])
            self._asked.append((server, group.send(server, message, [], into)))
            self.arrived |= {number: buffer.view for (number, _), buffer in zip(chunks, into, strict=True)}

    def receive(self, group: Group) -> None:
        """Wait for them."""
        self.staleness = 0
        for server, ticket in self._asked:
            answer, _ = group.wait(server, ticket)
            assert isinstance(answer, Pulled)
            self.staleness = max(self.staleness, self.clock - answer.slowest)
            self.updates = max(self.updates, answer.updates)

    def release(self) -> None:
        """Give the memory back."""
        give_back(self._held, self._aside)
        self._held, self._aside, self.arrived = [], [], {}

    def _set_aside(self) -> None:
        self._aside += self._held
        self._held, self.arrived = [], {}


def give_back(held: Sequence[tuple[Link, Buffer]], aside: Sequence[tuple[Link, Buffer]]) -> None:
    """Free what was answered into; and what was set aside of links whose servers have answered since.

    Of others it is never used again: they may not know yet that nobody waits for it.
    """
    answered = {id(link) for link, _ in held}
    for link, buffer in held:
        link.free(buffer)
    for link, buffer in aside:
        if id(link) in answered:
            link.free(buffer)


class DenseLook:
    """Chunks of dense parameters where the servers have them, each (number, slot, bytes): to be copied at once.

    For exact steps: a server cannot update before this worker has ended its
    next step, so what is read is of one version. Nothing is copied by the
    servers, who would do it for one worker after the other.
    """

    def __init__(self, chunks: Sequence[tuple[int, int, int]], *, clock: int) -> None:
        self._chunks, self.clock = chunks, clock
        self.sent_in = 0
        self.staleness = 0
        self.updates = 0
        self.arrived: dict[int, memoryview] = {}
        """Bytes by chunk, once received."""
        self._asked: dict[int, int] = {}

    def send(self, group: Group) -> None:
        """Ask every server to say when it has come so far."""
        servers = sorted({group.owner(slot) for _, slot, _ in self._chunks})
        message = PullDense(group.view, self.clock, [])
        self._asked = {server: group.send(server, message) for server in servers}

    def receive(self, group: Group) -> None:
        """Wait for it."""
        for server, ticket in self._asked.items():
            answer, _ = group.wait(server, ticket)
            assert isinstance(answer, Pulled)
            self.updates = max(self.updates, answer.updates)
        self.arrived = {
            number: group.chunk_at(group.owner(slot), number)[:nbytes]
            for number, slot, nbytes in self._chunks
        }

    def release(self) -> None:
        """Nothing was borrowed."""
        self.arrived = {}


def split(table: int, keys: NDArray[np.int64], group: Group) -> list[tuple[int, NDArray[np.int64]]]:
    """(server, places of its keys among `keys`, increasing) for every server that holds any."""
    order, bounds = partition(keys, group.owner_of_slot, table)
    return [
        (server, order[bounds[server] : bounds[server + 1]])
        for server in range(len(bounds) - 1)
        if bounds[server] < bounds[server + 1]
    ]
