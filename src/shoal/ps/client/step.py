"""One step of one worker at the servers: pulls of rows and chunks, pushes, StepEnd, and (in two phases) Commit.

With one server a pulled row is read from the memory that the server gathered it into. With several,
their parts are merged in the order of the keys. A push keeps everything until it is acknowledged,
and can send all of it again in another view, divided anew over the servers that hold the slots by
then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.cluster.coordinator.slot_map import NUM_SLOTS
from shoal.errors import LinkLost
from shoal.ps import codecs
from shoal.ps.client.server_group import Group
from shoal.ps.layout import partition
from shoal.runtime import recorder, row_kernels
from shoal.runtime.serialization import raw_bytes
from shoal.runtime.transport.arena import Buffer
from shoal.runtime.transport.framing import Bytes
from shoal.runtime.transport.messages import client_server as msg
from shoal.runtime.transport.shared_client import Link

LARGE_NOTE_BYTES = 1 << 20
"""Larger notes go through shared memory: a request in the socket has a limit, and a recovery point's
note has all dense state.
"""


def by_server(
    table: int, keys: NDArray[np.int64], group: Group, *, is_pull: bool = False
) -> Sequence[tuple[int, NDArray[np.int32] | None]]:
    """(server, places of its keys among `keys`, increasing) for every server that has any; None: all of them."""
    servers = group.readers if is_pull else group.servers
    if len(servers) == 1:
        return [(servers[0], None)]
    order, bounds = partition(keys, group.reader_of_slot if is_pull else group.owner_of_slot, table)
    return [
        (server, order[bounds[server] : bounds[server + 1]])
        for server in range(len(bounds) - 1)
        if bounds[server] < bounds[server + 1]
    ]


def _key_frame(
    group: Group,
    server: int,
    keys: NDArray[np.int64],
    places: NDArray[np.int32] | None,
    alloc: Callable[[Link, int], Buffer],
) -> tuple[int, Buffer]:
    """A server's keys as they are sent: the name of their list, and a frame that is empty where the server has it."""
    link = group.link(server)
    if link.is_remote:
        own = keys if places is None else keys[places]
        name, is_known = group.name_keys(server, own)
        frame = alloc(link, 0 if is_known else own.nbytes)
        if not is_known:
            frame.view[:] = raw_bytes(own)
        return name, frame
    frame = alloc(link, len(keys if places is None else places) * keys.itemsize)
    if places is None:
        frame.view[:] = raw_bytes(keys)
    else:
        np.take(keys, places, out=np.frombuffer(frame.view, np.int64), mode="clip")
    return 0, frame


class _Pull:
    """Requests to servers and the buffers they answer into; `release` them when they were used."""

    def __init__(self, clock: int, unpushed: int = 0) -> None:
        self.clock = clock
        self._unpushed = unpushed  # batches of `clock` whose gradients this worker still keeps
        self.sent_in = 0
        self.staleness = 0  # distance of the slowest worker behind `clock` when it was read
        self.updates = 0  # updates by then, on the server with most
        self._asked: list[tuple[int, int]] = []
        self._held: list[tuple[Link, Buffer]] = []
        self._aside: list[tuple[Link, Buffer]] = []  # of requests in a view that is over

    def receive(self, group: Group) -> None:
        self.staleness = 0
        for server, ticket in self._asked:
            with recorder.PULL:
                answer, _ = group.wait(server, ticket)
            assert isinstance(answer, msg.Pulled)
            self.staleness = max(self.staleness, self.clock - answer.slowest)
            self.updates = max(self.updates, answer.updates)

    def release(self) -> None:
        """Free the answered buffers; and those set aside of links whose servers have answered since.

        Others are never reused: their servers may not know yet that nothing waits for them.
        """
        answered = {id(link) for link, _ in self._held}
        for link, buffer in (*self._held, *(each for each in self._aside if id(each[0]) in answered)):
            link.free(buffer)
        self._held, self._aside = [], []

    def take_along(self, earlier: _Pull) -> None:
        """Let `release` also free buffers of an earlier abandoned pull: its servers answered it before this one."""
        self._aside += [*earlier._held, *earlier._aside]
        earlier._held, earlier._aside = [], []

    def _begin(self) -> None:
        # A server that does not know the new view may still write there.
        self._aside += self._held
        self._held, self._asked = [], []

    def _alloc(self, link: Link, nbytes: int) -> Buffer:
        buffer = link.alloc(nbytes)
        self._held.append((link, buffer))
        return buffer


class RowsPull(_Pull):
    """Rows of one table, for keys that are strictly increasing.

    Those of a primary on this host are read `in_place`, once it has told this worker that the step
    counts which the worker ended last: it cannot update before the next one is ended. Before, and
    where somebody else has changed rows, the server is asked for them.
    """

    def __init__(
        self,
        table: int,
        keys: NDArray[np.int64],
        dim: int,
        dtype: np.dtype[Any],
        *,
        clock: int,
        codec: str = "",
        unpushed: int = 0,
        is_whole: bool = False,
        in_place: msg.TableSpec | None = None,
    ) -> None:
        """With `is_whole` rows are values and state, `dim` numbers together. `in_place`: the table, in exact steps."""
        super().__init__(clock, unpushed)
        self._in_place = in_place
        self._looked: list[
            tuple[int, NDArray[np.int32] | None]
        ] = []  # servers that are asked for nothing yet
        self._codec, self._is_whole = codec, is_whole
        self.table, self.keys, self._dim, self._dtype = table, keys, dim, dtype
        self._wanted = keys  # of the servers
        self._parts: list[tuple[Buffer, NDArray[np.int32] | None]] = []
        self._rows: NDArray[Any] | None = None

    def send(self, group: Group) -> None:
        self._begin()
        self._parts, self._looked, self._rows = [], [], None
        for server, places in by_server(self.table, self._wanted, group, is_pull=True):
            if self._in_place is not None and group.may_share_rows(server, self.table):
                self._looked.append((server, places))
            else:
                self._ask(group, server, places)

    def _ask(self, group: Group, server: int, places: NDArray[np.int32] | None) -> None:
        message = msg.PullRows(
            group.view,
            self.clock,
            self.table,
            self._codec,
            self._unpushed,
            is_nearby=server in group.replicas,
            is_whole=self._is_whole,
        )
        link, num_keys = group.link(server), len(self._wanted if places is None else places)
        name, frame = _key_frame(group, server, self._wanted, places, self._alloc)
        num_bytes = group.compression.pulled_bytes(num_keys, self._dim, self._dtype.itemsize, self._codec)
        into = self._alloc(link, num_bytes)
        if self._codec:
            group.compression.count(num_keys * self.keys.itemsize, len(frame.view))
        asking = msgspec.structs.replace(message, keys=name) if name else message
        self._asked.append((server, group.send(server, asking, [frame], [into])))
        self._parts.append((into, places))

    def _read(self, group: Group, server: int, places: NDArray[np.int32] | None) -> bool:
        """Read rows where a server has them; False where they may change."""
        if self._in_place is None or not group.has_committed(server, self.clock):
            return False
        rows = group.rows_at(server, self._in_place)
        if rows is None:
            return False
        keys = self._wanted if places is None else self._wanted[places]
        into = self._alloc(group.link(server), len(keys) * self._dim * self._dtype.itemsize)
        if not rows.pull(keys, np.frombuffer(into.view, self._dtype).reshape(-1, self._dim)):
            group.forget_rows(server, self.table)
            return False
        self._parts.append((into, places))
        recorder.RECORDER.received += into.nbytes
        return True

    def receive(self, group: Group) -> None:
        looked, self._looked = self._looked, []
        with recorder.PULL:
            for server, places in looked:
                if not self._read(group, server, places):
                    self._ask(group, server, places)
        super().receive(group)
        if looked:
            self.updates = max(self.updates, self.clock)
        arrays = [self._decoded(into, places) for into, places in self._parts]
        if len(arrays) == 1 and self._parts[0][1] is None:
            self._rows = arrays[0]
            return
        whole = np.empty((len(self._wanted), self._dim), self._dtype)
        for rows, (_, places) in zip(arrays, self._parts, strict=True):
            assert places is not None
            row_kernels.put(rows, places, whole)
        self.release()
        self._rows = whole

    def _decoded(self, into: Buffer, places: NDArray[np.int32] | None) -> NDArray[Any]:
        codec = codecs.codec(self._codec)
        if codec is None:
            return np.frombuffer(into.view, self._dtype).reshape(-1, self._dim)
        out = np.empty((len(self._wanted) if places is None else len(places), self._dim), self._dtype)
        codec.decode(into.view, out)
        return out

    @property
    def rows(self) -> NDArray[Any]:
        """One row per key. With one server, memory that is given back by `release`."""
        assert self._rows is not None
        return self._rows

    def release(self) -> None:
        super().release()
        self._rows = None


class DensePull(_Pull):
    """Chunks of dense parameters, each (number, slot, bytes): copied by the servers, or read in place.

    Read `in_place` in exact steps, if the primary is on this host: it cannot update before this
    worker has ended its next step, so the read is consistent, and no server copies for one worker
    after the other. A replica copies: in a new view it may receive the slot once more.
    """

    def __init__(
        self,
        chunks: Sequence[tuple[int, int, int]],
        *,
        clock: int,
        in_place: bool = False,
        codec: str = "",
        dtypes: Mapping[int, str] | None = None,
        unpushed: int = 0,
    ) -> None:
        """With a `codec`, `dtypes` of the chunks by number."""
        super().__init__(clock, unpushed)
        self._chunks, self._in_place = chunks, in_place
        self._codec, self._dtypes = codec, dtypes or {}
        self._looked: list[tuple[int, int, int]] = []  # server, chunk, bytes: of those that copy nothing
        self._awaited: set[int] = set()  # those servers, until they are known to be at `clock`
        self.arrived: dict[int, memoryview] = {}  # bytes by chunk, once received

    def send(self, group: Group) -> None:
        self._begin()
        self.arrived, self._looked = {}, []
        chunks_of: dict[int, list[tuple[int, int]]] = {}
        for number, slot, nbytes in self._chunks:
            server = group.reader(slot)
            if self._in_place and server == group.owner(slot) and not group.link(server).is_remote:
                self._looked.append((server, number, nbytes))
            else:
                chunks_of.setdefault(server, []).append((number, nbytes))
        self._awaited = {server for server, _, _ in self._looked}
        for server, chunks in chunks_of.items():
            self._ask(group, server, chunks)

    def _ask(self, group: Group, server: int, chunks: Sequence[tuple[int, int]]) -> None:
        """Ask a server for chunks; for none, to answer once it is at `clock`."""
        link = group.link(server)
        into = [self._alloc(link, self._pulled_bytes(group, *chunk)) for chunk in chunks]
        message = msg.PullDense(
            group.view,
            self.clock,
            [number for number, _ in chunks],
            self._codec,
            self._unpushed,
            is_nearby=server in group.replicas,
        )
        self._asked.append((server, group.send(server, message, [], into)))
        self.arrived |= {number: buffer.view for (number, _), buffer in zip(chunks, into, strict=True)}

    def receive(self, group: Group) -> None:
        awaited, self._awaited = self._awaited, set()
        for server in sorted(awaited):
            # Most servers have told this worker so in the answer to its last step: they are asked for nothing.
            if not group.has_committed(server, self.clock):
                self._ask(group, server, [])
        super().receive(group)
        if awaited:
            self.updates = max(self.updates, self.clock)
        codec = codecs.codec(self._codec)
        if codec is not None:
            for number, _, nbytes in self._chunks:
                whole = np.empty(nbytes, np.uint8)
                codec.decode(self.arrived[number], whole.view(self._dtypes[number]).reshape(1, -1))
                self.arrived[number] = whole.data
        for server, number, nbytes in self._looked:
            self.arrived[number] = group.chunk_at(server, number)[:nbytes]
            recorder.RECORDER.received += nbytes

    def _pulled_bytes(self, group: Group, number: int, nbytes: int) -> int:
        itemsize = np.dtype(self._dtypes[number]).itemsize if self._codec else 1
        return group.compression.pulled_bytes(1, nbytes // itemsize, itemsize, self._codec)

    def release(self) -> None:
        super().release()
        self.arrived = {}


@dataclass(slots=True)
class Decision:
    """The outcome of a summed step: the same on every rank."""

    factor: float
    apply: bool
    norm: float = 0.0


@dataclass(slots=True)
class _Dense:
    chunk: int
    slot: int
    values: memoryview
    unused: list[int]
    frame: Buffer
    link: Link
    codec: str = ""


@dataclass(slots=True)
class PushStep:
    """An operation that grows while backward runs: `push_*` sends at once, `end` makes it whole."""

    group: Group
    stream: int
    seq: int
    # In two phases: what follows from the vectors' sum and the gradient's norm, of which the square was summed.
    decide: Callable[[NDArray[np.float64], float], Decision] | None = None
    wants_norm: bool = False
    sent_in: int = 0
    # The vectors' sum, once committed.
    vector: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    decision: Decision | None = None
    committed: msg.Committed | None = None  # answer of the server with the fewest updates
    # True where it counts by this push, and not by one before it; relaxed strategies. The owner of slot 0 decides.
    is_new: bool = True
    was_sent_again: bool = False  # then a push before it may have been this one
    # As many as any server has made by then: each counts them all, in its own order; relaxed strategies.
    num_updates: int = 0
    # True where a server had ended the step before this push came; strategies that do not wait for all.
    is_late: bool = False
    _rows: list[tuple[int, NDArray[np.int64], NDArray[Any]]] = field(default_factory=list)
    _whole: list[tuple[int, NDArray[np.int64], Tensor]] = field(default_factory=list)
    _dense: list[_Dense] = field(default_factory=list)
    _end: msg.StepEnd | None = None
    _frames: tuple[bytes, bytes] = (b"", b"")
    _pushed: dict[int, int] = field(default_factory=dict)  # server -> pushes sent in this view
    _tickets: dict[int, int] = field(default_factory=dict)
    _into: dict[int, list[Buffer]] = field(default_factory=dict)
    _held: list[tuple[Link, Buffer]] = field(default_factory=list)
    _is_broken: bool = False

    # ---- while backward runs --------------------------------------------------------------------

    def push_rows(self, table: int, keys: NDArray[np.int64], values: NDArray[Any]) -> None:
        """Gradients of rows; keys strictly increasing. Both must stay as they are until the step is committed."""
        self._rows.append((table, keys, values))
        with recorder.PUSH:
            self._now(lambda: self._send_rows(table, keys, values))

    def push_whole(self, table: int, keys: NDArray[np.int64], rows: Tensor) -> None:
        """Rows as they shall be, values and state side by side on any device; as `push_rows` otherwise."""
        self._whole.append((table, keys, rows))
        with recorder.PUSH:
            self._now(lambda: self._send_whole(table, keys, rows))

    def chunk_memory(self, chunk: int, slot: int, nbytes: int) -> memoryview:
        """Memory for a chunk's gradient, to be written before `push_dense`."""
        link = self.group.link(self.group.owner(slot))
        frame = self._alloc(link, nbytes)
        self._dense.append(_Dense(chunk, slot, frame.view, [], frame, link))
        return frame.view

    def push_dense(self, chunk: int, unused: list[int], dtype: str = "") -> None:
        """`dtype` of its elements, where they can be compressed."""
        dense = next(each for each in reversed(self._dense) if each.chunk == chunk)
        dense.unused = unused
        compression = self.group.compression
        if compression.is_on and dtype:
            dense.codec = compression.dense_codec()
            whole = np.frombuffer(dense.values, dtype).reshape(1, -1)
            dense.frame = self._copied(dense.link, compression.encoded_chunk(chunk, whole))
            dense.values = dense.frame.view
        else:
            compression.count(len(dense.values), len(dense.values))
        with recorder.PUSH:
            self._now(lambda: self._send_dense(dense))

    def flush(self) -> None:
        """Send the pushes so far now; otherwise they are sent with the end."""
        self._now(self.group.flush)

    def end(self, vector: NDArray[np.float64], note: bytes, *, rank: int, **others: Any) -> None:
        """All is pushed; `others` are fields of StepEnd. View and number of pushes are filled in for each server."""
        fields = {"exchange": 0, "anchored_at": 0, **others}
        self._end = msg.StepEnd(view=0, stream=self.stream, seq=self.seq, rank=rank, num_pushes=0, **fields)
        self._frames = (vector.tobytes(), note)
        self.group.compression.traffic.num_sums += 1
        with recorder.PUSH:
            self._now(self._send_end)

    # ---- an operation ---------------------------------------------------------------------------

    def send(self, group: Group) -> None:
        """All of it again, in the present view."""
        self._is_broken = False
        self.was_sent_again = True
        self._pushed, self._tickets = {}, {}
        for rows in self._rows:
            self._send_rows(*rows)
        for whole in self._whole:
            self._send_whole(*whole)
        for dense in self._dense:
            self._send_dense(dense)
        if self._end is not None:
            self._send_end()

    def receive(self, group: Group) -> None:
        if self._is_broken or not self._tickets:
            self.send(group)
        with recorder.WAIT:  # for the slowest worker, and for the servers
            answers = {server: group.wait(server, ticket)[0] for server, ticket in self._tickets.items()}
        summed = [server for server, answer in answers.items() if isinstance(answer, msg.Summed)]
        if summed:
            # A server that answers Committed at once had finished the step in an earlier view.
            if self.decision is None:
                assert self.decide is not None
                norm = self._norm(list(answers)) if self.wants_norm else 0.0
                self.decision = self.decide(self._vector_of(summed[0]), norm)
            decision = self.decision
            commit = msg.Commit(group.view, self.seq, decision.factor, decision.apply, decision.norm)
            # A recovery point is committed with its note first: a replacement that finds the note commits
            # it everywhere.
            first = [server for server in summed if server == group.owner(0)] if self._is_whole else []
            for some in filter(None, (first, [server for server in summed if server not in first])):
                tickets = {server: group.send(server, commit, [], self._into[server][:1]) for server in some}
                with recorder.WAIT:
                    for server, ticket in tickets.items():
                        answers[server] = group.wait(server, ticket)[0]
        done = [answer for answer in answers.values() if isinstance(answer, msg.Committed)]
        assert len(done) == len(answers), answers
        for server, answer in zip(answers, done, strict=True):
            if answer.updates == self.seq and not answer.late:
                group.note_committed(server, self.seq)
        self.committed = min(done, key=lambda answer: answer.updates)
        holder = answers.get(group.owner(0))
        self.is_new = holder.is_new if isinstance(holder, msg.Committed) else True
        self.is_late = any(answer.late for answer in done)
        self.num_updates = max(answer.updates for answer in done)
        self.vector = self._vector_of(min(answers))

    @property
    def _is_whole(self) -> bool:
        return self._end is not None and self._end.whole_after is not None

    def release(self) -> None:
        for link, buffer in self._held:
            link.free(buffer)
        self._held, self._rows, self._whole, self._dense, self._into = [], [], [], [], {}

    # ---- sending --------------------------------------------------------------------------------

    def _now(self, act: Callable[[], None]) -> None:
        """Do it now if the view is still valid; if not, `send` does all of it later."""
        if self._is_broken or (self.sent_in and self.sent_in != self.group.view):
            self._is_broken, self.sent_in = True, 0  # pushes of the previous view are forgotten there
            return
        try:
            act()
            self.sent_in = self.group.view
        except LinkLost:
            self._is_broken, self.sent_in = True, 0

    def _send_rows(self, table: int, keys: NDArray[np.int64], values: NDArray[Any]) -> None:
        compression = self.group.compression
        message = msg.PushRows(self.group.view, self.stream, self.seq, table, compression.push)
        for server, places in by_server(table, keys, self.group):
            link, num_keys = self.group.link(server), len(keys if places is None else places)
            name, of_keys = _key_frame(self.group, server, keys, places, self._alloc)
            compression.count(num_keys * keys.itemsize, len(of_keys.view))
            if compression.push:
                of_rows = self._copied(
                    link, compression.encoded(values if places is None else values[places])
                )
            else:
                of_rows = self._alloc(link, num_keys * values[:1].nbytes)
                compression.count(len(of_rows.view), len(of_rows.view))
                if places is None:
                    of_rows.view[:] = raw_bytes(values)
                else:  # where the server reads it: no copy of its own in between
                    out = np.frombuffer(of_rows.view, values.dtype).reshape(num_keys, -1)
                    row_kernels.take(values, places, out)
            pushed = msgspec.structs.replace(message, keys=name) if name else message
            self._push(server, pushed, [of_keys, of_rows])

    def _send_whole(self, table: int, keys: NDArray[np.int64], rows: Tensor) -> None:
        message = msg.PushRows(self.group.view, self.stream, self.seq, table, is_whole=True)
        for server, places in by_server(table, keys, self.group):
            name, of_keys = _key_frame(self.group, server, keys, places, self._alloc)
            some = rows if places is None else rows[torch.from_numpy(places).to(rows.device)]
            of_rows = self._alloc(self.group.link(server), some.numel() * some.element_size())
            if some.numel():  # straight from the device, without the GIL
                torch.frombuffer(of_rows.view, dtype=some.dtype).view(some.shape).copy_(some)
            pushed = msgspec.structs.replace(message, keys=name) if name else message
            self._push(server, pushed, [of_keys, of_rows])

    def _send_dense(self, dense: _Dense) -> None:
        group = self.group
        server = group.owner(dense.slot)
        link = group.link(server)
        if dense.link is not link:
            frame = self._alloc(link, len(dense.values))
            frame.view[:] = dense.values
            dense.frame, dense.values, dense.link = frame, frame.view, link
        message = msg.PushDense(group.view, self.stream, self.seq, dense.chunk, dense.unused, dense.codec)
        self._push(server, message, [dense.frame])

    def _push(self, server: int, message: msg.PushRows | msg.PushDense, frames: list[Buffer]) -> None:
        self.group.push(server, message, frames)
        self._pushed[server] = self._pushed.get(server, 0) + 1

    def _send_end(self) -> None:
        assert self._end is not None
        group, vector, note = self.group, *self._frames
        for server in group.servers:
            message = msgspec.structs.replace(
                self._end, view=group.view, num_pushes=self._pushed.get(server, 0)
            )
            link = group.link(server)
            into = [self._alloc(link, len(vector) + 16), self._alloc(link, NUM_SLOTS * 8)]
            self._into[server] = into
            frames: list[Buffer | Bytes] = [vector, b""]
            if server == group.owner(0):
                is_large = len(note) > LARGE_NOTE_BYTES
                frames[1] = self._copied(link, np.frombuffer(note, np.uint8)) if is_large else note
            self._tickets[server] = group.send(server, message, frames, into)

    def _vector_of(self, server: int) -> NDArray[np.float64]:
        return np.frombuffer(bytes(self._into[server][0].view), np.float64)

    def _norm(self, servers: list[int]) -> float:
        # By slot, then in slot order: the sum has the same bits under any placement.
        squares = np.zeros(NUM_SLOTS)
        for server in servers:
            squares += np.frombuffer(bytes(self._into[server][1].view), np.float64)
        total = 0.0
        for square in squares.tolist():
            total += square
        return float(np.sqrt(total))

    def _copied(self, link: Link, array: NDArray[Any]) -> Buffer:
        buffer = self._alloc(link, array.nbytes)
        buffer.view[:] = raw_bytes(array)
        return buffer

    def _alloc(self, link: Link, nbytes: int) -> Buffer:
        buffer = link.alloc(nbytes)
        self._held.append((link, buffer))
        return buffer
