"""The parameter server without a model: `kv = shoal.ps.connect()`, then tables, `push`, `pull`, `wait`.

    kv = shoal.ps.connect()
    weights = kv.table("weights", dim=1, rule="ftrl", l1=1.0)
    pulled = kv.pull(weights, keys)           # a handle, at once
    w = kv.wait(pulled)                       # one row per key, in the order of the keys
    pushed = kv.push(weights, keys, gradient) # one update, however often it has to be sent
    kv.pull(weights, keys, after=[pushed])

Requests of one `kv` are executed in the order in which they were made: a pull sees all pushes
before it. A push is acknowledged when every copy of its rows has it. It is named by the worker's
rank and the number of pushes before it, so a killed worker that runs again from the top repeats its
names, and a push is not applied twice. Servers deduplicate by the last applied seq, so a push must
never overtake another: to retry one, all unacknowledged ones are sent again, in order. There is no
background thread; every call advances requests as far as it can without waiting.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from shoal.cluster.worker import session
from shoal.cluster.worker.coordinator_client import LeaseClient
from shoal.config import job as jobs
from shoal.config import strategy as strategies
from shoal.config.job import Job
from shoal.config.row_policy import RowPolicy
from shoal.embedding.kernels import expand, sum_back, unique
from shoal.embedding.rules import rule_named
from shoal.errors import ArenaFull, ConfigError, LinkLost, PsError
from shoal.ps.client.bulk_transfer import read_applied_seqs
from shoal.ps.client.saved_tables import SaveResult, load_tables, save_tables
from shoal.ps.client.server_group import Group, ViewChanged, check_answer
from shoal.ps.client.step import by_server
from shoal.ps.layout import FIRST_NAMED, first_wrong_key
from shoal.runtime.seeds import mix
from shoal.runtime.serialization import raw_bytes
from shoal.runtime.transport.arena import Buffer
from shoal.runtime.transport.messages import client_server as msg
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.shared_client import Link

Keys: TypeAlias = NDArray[np.int64]


class KvRequest:
    """A push or a pull: its tickets, answers and buffers."""

    def __init__(self, table: msg.TableSpec, num_bytes: int) -> None:
        self.table, self.num_bytes = table, num_bytes
        self.is_done = False
        self.error: PsError | None = None  # why it does not count, where it was refused
        self._left: dict[int, tuple[Link, int]] = {}  # server -> its ticket, where the answer is not here yet
        self._held: list[tuple[Link, Buffer]] = []

    def send(self, group: Group) -> None:
        """Ask, in the group's present view; nothing was asked where ArenaFull is raised."""
        raise NotImplementedError

    def keep(self) -> None:
        """Copy what is still needed: the caller may change its arrays afterwards."""

    def receive(self, group: Group) -> None:
        """Wait for the answers; raises ViewChanged or LinkLost where there will be none."""
        for server, (link, ticket) in list(self._left.items()):
            if group.link(server) is not link:
                raise ViewChanged(0)  # asked on a connection that is over: ask again
            self._settle(server, lambda server=server, ticket=ticket: group.wait(server, ticket))  # type: ignore[misc]
        self._finish()

    def poll(self) -> bool:
        """True once all answers are here; does not wait, and raises as `receive` does."""
        for server, (link, ticket) in list(self._left.items()):
            answer = link.take(ticket)
            if answer is None:
                return False
            self._settle(server, lambda link=link, answer=answer: check_answer(link, answer[0]))  # type: ignore[misc]
        self._finish()
        return True

    def _settle(self, server: int, answer: Callable[[], object]) -> None:
        try:
            answer()
        except (LinkLost, ArenaFull):
            raise
        except PsError as error:
            self.error = self.error or error
        del self._left[server]

    def fail(self, error: PsError) -> None:
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
        """Before a retry. Memory of an earlier view stays until this one answers, on the same
        connection: only then can nothing write into it, or read it, any more. Memory of other
        connections is left to them.
        """
        self._left = {}
        links = {id(group.link(server)) for server in group.servers}
        self._held = [(link, buffer) for link, buffer in self._held if id(link) in links]


class Push(KvRequest):
    """Rows for one table, under a name; keys strictly increasing."""

    def __init__(
        self, table: msg.TableSpec, keys: Keys, values: NDArray[Any], *, stream: int, seq: int, rank: int
    ) -> None:
        """`rank` is one that no worker has: clocks of workers do not count these pushes."""
        super().__init__(table, keys.nbytes + values.nbytes)
        self._stream, self._seq, self._rank = stream, seq, rank
        self._source: tuple[Keys, NDArray[Any]] | None = (keys, values)
        self._parts: list[tuple[int, Buffer, Buffer]] = []

    def keep(self) -> None:
        if self._source is not None:
            keys, values = self._source
            self._source = keys.copy(), values.copy()

    def send(self, group: Group) -> None:
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
            group.push(server, msg.PushRows(*name, self.table.number), [key_frame, value_frame])
        holders = {server for server, _, _ in parts}
        for server in group.servers:
            num_pushes = int(server in holders)
            # Named, because a server without any of the keys counts it too: as an update of this table, not
            # of a model.
            end = msg.StepEnd(
                *name,
                rank=self._rank,
                num_pushes=num_pushes,
                exchange=0,
                anchored_at=0,
                model=self.table.number,
            )
            self._ask(group, server, end, [b"", b""])

    def _finish(self) -> None:
        super()._finish()
        self._parts = []

    def _copied(self, group: Group, keys: Keys, values: NDArray[Any]) -> list[tuple[int, Buffer, Buffer]]:
        parts = []
        dim, dtype = self.table.dim, np.dtype(self.table.dtype)
        for server, places in by_server(self.table.number, keys, group) if len(keys) else ():
            link, num_keys = group.link(server), len(keys) if places is None else len(places)
            key_frame = self._alloc(link, num_keys * 8)
            value_frame = self._alloc(link, num_keys * dim * dtype.itemsize)
            if places is None:
                key_frame.view[:], value_frame.view[:] = raw_bytes(keys), raw_bytes(values)
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
        self, table: msg.TableSpec, keys: Keys, inverse: NDArray[np.int32] | None, shape: tuple[int, ...]
    ) -> None:
        """`keys` strictly increasing and owned by this pull; `inverse`: position among them of each
        requested key, None: identity.
        """
        self._dtype = np.dtype(table.dtype)
        super().__init__(table, keys.nbytes + len(keys) * table.dim * self._dtype.itemsize)
        self._keys, self._inverse, self._shape = keys, inverse, shape
        self._parts: list[tuple[Buffer, NDArray[np.int32] | None]] = []
        self.result: NDArray[Any] | None = None

    def send(self, group: Group) -> None:
        self._forget(group)
        self._parts = []
        message = msg.PullRows(group.view, 0, self.table.number)
        asked = []
        for server, places in by_server(self.table.number, self._keys, group) if len(self._keys) else ():
            link, num_keys = group.link(server), len(self._keys) if places is None else len(places)
            frame = self._alloc(link, num_keys * 8)
            into = self._alloc(link, num_keys * self.table.dim * self._dtype.itemsize)
            frame.view[:] = raw_bytes(self._keys if places is None else self._keys[places])
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


# ---- the queue -----------------------------------------------------------------------------------


MAX_REQUESTS = 64
"""Limit of requests in progress; one more waits for the oldest. Far fewer than a server keeps of a
view that it does not know yet.
"""

MAX_BYTES = 1 << 30  # the same for what they carry


class RequestQueue:
    """Operation of the group: all requests in progress, up to the awaited one."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.sent_in = 0
        self._sent: deque[KvRequest] = deque()
        self._held: deque[tuple[KvRequest, list[KvRequest]]] = deque()
        self._target: KvRequest | None = None
        self._is_behind = False
        self.failed: list[KvRequest] = []  # refused, and not reported yet

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

    # ---- Operation ------------------------------------------------------------------------------

    def send(self, group: Group) -> None:
        for request in self._sent:
            request.send(group)
        self._flush()

    def receive(self, group: Group) -> None:
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
            self.sent_in = 0  # an unknown part of it was sent
            raise
        finally:
            request.keep()

    def _flush(self) -> None:
        """Send buffered requests: they must not wait for long."""
        for server in self._group.servers:
            self._group.link(server).flush()

    def _end(self, request: KvRequest) -> None:
        if request.error is not None:
            self.failed.append(request)


Arrays: TypeAlias = ArrayLike | torch.Tensor

Init: TypeAlias = Literal["zeros", "normal", "uniform"]
Dtype: TypeAlias = Literal["float32", "float64"]


_INT64 = np.iinfo(np.int64)


def table_number(name: str) -> int:
    """Number of a table that is declared by name."""
    return FIRST_NAMED + int.from_bytes(hashlib.blake2b(name.encode(), digest_size=5).digest(), "little")


def check_spec(spec: msg.TableSpec) -> None:
    """Refuse a table that cannot be."""
    for what, value in (("dim", spec.dim), ("num_rows", spec.num_rows)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise _wrong(spec.name, f"{what} must be an integer of at least 1, got {value!r}")
    for what, given, known in (("dtype", spec.dtype, get_args(Dtype)), ("init", spec.init, get_args(Init))):
        if given not in known:
            raise _wrong(spec.name, f"{what} must be one of {', '.join(known)}, got {given!r}")
    if spec.policy is not None and not isinstance(spec.policy, RowPolicy):
        raise _wrong(spec.name, f"policy must be a shoal.nn.RowPolicy, got {spec.policy!r}")
    if not np.isfinite(spec.scale) or spec.scale < 0:
        raise _wrong(spec.name, f"scale must be a finite number of at least 0, got {spec.scale!r}")


def keys_of(table: msg.TableSpec, keys: Arrays) -> NDArray[np.int64]:
    """The keys as int64, in the shape in which they were given; refused where a table cannot have them."""
    array = _array(keys)
    if array.size == 0 and not isinstance(keys, np.ndarray | torch.Tensor):
        array = array.astype(np.int64)  # numpy takes an empty list for floats
    if array.dtype.kind not in "iu":
        raise _wrong(table.name, f"keys must be integers, got {array.dtype}", "convert them to int64")
    if array.dtype == np.uint64 and array.size and int(array.max()) > _INT64.max:
        raise _wrong(table.name, f"keys must fit into int64, the largest is {int(array.max())}")
    array = np.ascontiguousarray(array, np.int64)
    if table.num_rows is not None and array.size:
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= table.num_rows:
            wrong = low if low < 0 else high
            raise _wrong(
                table.name,
                f"keys must be in 0..{table.num_rows - 1} (num_rows={table.num_rows}), got {wrong}",
            )
    return array


def values_of(table: msg.TableSpec, values: Arrays, shape: tuple[int, ...]) -> NDArray[Any]:
    """One row of values per key of an array of this shape, as a matrix; refused where it is something else."""
    array = _array(values)
    if not isinstance(values, np.ndarray | torch.Tensor) and array.dtype.kind in "iuf":
        array = array.astype(table.dtype)  # plain numbers have no precision of their own
    if array.dtype != np.dtype(table.dtype):
        raise _wrong(
            table.name,
            f"values must be {table.dtype}, got {array.dtype}",
            f"convert them, or declare the table with dtype={str(array.dtype)!r}"
            if str(array.dtype) in get_args(Dtype)
            else f"convert them to {table.dtype}",
        )
    expected = [(*shape, table.dim)]
    if table.dim == 1:
        expected.append(shape)
    if array.shape not in expected:
        raise _wrong(
            table.name,
            f"keys of shape {shape} need values of shape {' or '.join(map(str, expected))}, got {array.shape}",
        )
    return np.ascontiguousarray(array).reshape(-1, table.dim)


def once_each(
    table: msg.TableSpec, keys: Keys, values: NDArray[Any], *, merge: bool
) -> tuple[Keys, NDArray[Any]]:
    """Every key once, in increasing order: rows of the same key summed, or the last of them where rows are stored.

    What is right already is given back as it is.
    """
    if first_wrong_key(keys, int(_INT64.min), int(_INT64.max)) < 0:
        return keys, values
    found, inverse = unique(keys)
    if len(found) < len(keys) and not merge:
        counts = np.bincount(inverse)
        raise _wrong(
            table.name,
            f"{len(keys)} keys were pushed with merge=False, and {len(keys) - len(found)} of them are repeats: key "
            f"{int(found[counts.argmax()])} is there {int(counts.max())} times",
            "push each key once, or leave merge=False out",
        )
    out = np.empty((len(found), table.dim), table.dtype)
    if table.rule == "store":
        out[inverse] = values  # of repeats the last stays
    else:
        sum_back(values, inverse, out)
    return found, out


def _array(given: Arrays) -> NDArray[Any]:
    if isinstance(given, torch.Tensor):
        given = given.detach().cpu()
        if given.dtype == torch.bfloat16:
            raise ConfigError(
                "a bfloat16 tensor was given, and tables hold float32 or float64. Nothing was sent; convert it."
            )
        return given.numpy()
    return np.asarray(given)


def _wrong(table: str, problem: str, remedy: str = "") -> ConfigError:
    return ConfigError(f"table '{table}': {problem}. Nothing was sent{f'; {remedy}' if remedy else ''}.")


FIRST_STREAM = 1 << 62  # leases of training are streams below it

_numbers = itertools.count()
_connected: weakref.WeakSet[Kv] = weakref.WeakSet()


def declared_tables() -> list[msg.TableSpec]:
    """Tables that this process declared and has not left, each once, by name."""
    found = {name: spec for kv in _connected if not kv._is_closed for name, spec in kv._tables.items()}
    return [found[name] for name in sorted(found)]


class Handle:
    """A request under way."""

    def __init__(self, kv: Kv, request: KvRequest) -> None:
        self._kv, self._request = kv, request

    def result(self) -> Any:
        """Wait for it: the rows of a pull; None once a push is acknowledged."""
        return self._kv.wait(self)

    @property
    def is_done(self) -> bool:
        """True once it was answered; does not wait."""
        self._kv._advance()
        return self._request.is_done


class Kv:
    """This process's tables on the servers of its job. Threads may share it; close it, or use it in a `with`."""

    def __init__(self, job: Job, group: Group, mode: msg.DeclareMode, number: int) -> None:
        """`number`: how many this process connected before."""
        self._group, self._line = group, RequestQueue(group)
        self._stream = FIRST_STREAM | (job.rank << 32) | number
        self._rank = mode.num_workers
        self._writes = job.rank == 0
        self._seq = 0
        self._tables: dict[str, msg.TableSpec] = {}
        self._lock = threading.RLock()
        self._is_closed = False
        self._lines: LeaseClient | None = None
        group.declare(mode)
        self._counted = self._last_counted() if job.incarnation else 0
        _connected.add(self)

    # ---- tables ---------------------------------------------------------------------------------

    def table(
        self,
        name: str,
        dim: int,
        rule: str = "store",
        *,
        init: Init = "zeros",
        scale: float = 1.0,
        num_rows: int | None = None,
        dtype: Dtype = "float32",
        seed: int = 0,
        policy: RowPolicy | None = None,
        **settings: float,
    ) -> str:
        """Declare a table, in the same words on every worker; gives its name back.

        `rule` says what a push does to a row: "store" sets it, "add" adds to it, "sgd", "adagrad",
        "rowwise-adagrad", "adam" and "ftrl" take it for a gradient, with `settings` such as lr=0.1. A row that
        nobody pushed yet is `init`: zeros, or drawn from (seed, table, key) with standard deviation or half width
        `scale`. Keys are any int64, or 0..num_rows-1 where `num_rows` is given, which is quicker. With a `policy`
        (`shoal.nn.RowPolicy`) rows are admitted and dropped again; its steps are pushes to this table.
        """
        number, completed = table_number(name), rule_named(rule).complete(settings)
        own_seed = mix(seed, number)  # tables of one seed have different rows
        spec = msg.TableSpec(
            number, name, dim, dtype, rule, completed, num_rows, init, float(scale), own_seed, policy
        )
        check_spec(spec)
        with self._lock:
            self._check_open()
            try:
                self._group.declare(msg.DeclareTable(spec))
            except LinkLost:
                raise
            except PsError as error:
                raise ConfigError(
                    f"table '{name}' is there already, and otherwise: {error}. Nothing was changed; declare it in the same "
                    "words everywhere, or under another name."
                ) from None
            self._tables[name] = spec
        return name

    # ---- requests -------------------------------------------------------------------------------

    def push(
        self, table: str, keys: Arrays, values: Arrays, *, after: Sequence[Handle] = (), merge: bool = True
    ) -> Handle:
        """One update of these rows, exactly once; the arrays may be changed as soon as this returns.

        Keys in any order, of any shape; values have that shape with the table's dim behind it (or without, where
        that is 1). Of keys that occur several times the rows are summed (in a table that stores, the last one
        counts), or with merge=False refused. With `after` it is sent when those requests are acknowledged.
        """
        with self._lock:
            spec = self._declared(table)
            given = keys_of(spec, keys)
            rows = values_of(spec, values, given.shape)
            flat, rows = once_each(spec, given.reshape(-1), rows, merge=merge)
            waits_for = self._requests(after)
            self._seq += 1
            if self._seq >= self._counted:
                # A replacement has caught up. Whether its predecessor printed after this push is unknown:
                # output may be repeated.
                session.live()
            push = Push(spec, flat, rows, stream=self._stream, seq=self._seq, rank=self._rank)
            self._line.add(push, waits_for)
            return Handle(self, push)

    def pull(self, table: str, keys: Arrays, *, after: Sequence[Handle] = ()) -> Handle:
        """Rows of these keys, which may be in any order and of any shape; the table's dim comes behind it."""
        with self._lock:
            spec = self._declared(table)
            given = keys_of(spec, keys)
            found, inverse = unique(given)
            is_sorted = len(found) == given.size and bool((inverse[1:] > inverse[:-1]).all())
            pull = Pull(spec, found, None if is_sorted else inverse, given.shape)
            self._line.add(pull, self._requests(after))
            return Handle(self, pull)

    def wait(self, handle: Handle | None = None) -> NDArray[Any] | None:
        """See a request to its end: the rows of a pull, None for a push; without a handle, all of them.

        Raises PsError where it was refused.
        """
        with self._lock:
            if handle is None:
                for request in self._line.all:
                    self._line.finish(request)
                for request in self._line.failed[:1]:
                    self._raise_if_refused(request)
                return None
            if handle._kv is not self:
                return handle._kv.wait(handle)
            request = handle._request
            if not request.is_done:
                self._check_open()
                self._line.finish(request)
            self._raise_if_refused(request)
            return request.result if isinstance(request, Pull) else None

    # ---- on disk --------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> SaveResult | None:
        """Save the rows of all tables declared here, with their rules' state, in a directory.

        Saved there again, only rows that changed are written; whatever is killed meanwhile, the directory holds
        what was saved before, or all of it. Every worker may call it: each waits for its own pushes, rank 0 writes.
        """
        with self._lock:
            self._check_open()
            self.wait()
            if self._writes:
                return save_tables(self._group, list(self._tables.values()), Path(path))
            return None

    def load(self, path: str | os.PathLike[str]) -> list[str]:
        """Set rows to those that `save` wrote, on any number of servers; names of the tables there were.

        Declare the tables first. Every worker may call it: rank 0 reads, and the others see the rows once it is through.
        """
        with self._lock:
            self._check_open()
            self.wait()
            if self._writes:
                return load_tables(self._group, list(self._tables.values()), Path(path))
            return []

    # ---- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait until all pushes are acknowledged, and leave. Closing twice is fine."""
        with self._lock:
            if self._is_closed:
                return
            try:
                self.wait()
            finally:
                self._leave()

    def __enter__(self) -> Kv:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            self._leave()

    def _leave(self) -> None:
        self._is_closed = True
        self._group.close()
        if self._lines is not None:
            self._lines.close()

    # ---- inside ---------------------------------------------------------------------------------

    def _advance(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._line.advance()

    def _declared(self, table: str) -> msg.TableSpec:
        self._check_open()
        spec = self._tables.get(table)
        if spec is None:
            known = ", ".join(map(repr, self._tables)) or "none"
            raise ConfigError(
                f"table {table!r} was not declared in this process; there are: {known}. Nothing was sent; "
                f"kv.table({table!r}, dim=...) comes first, on every worker."
            )
        return spec

    def _requests(self, after: Sequence[Handle]) -> list[KvRequest]:
        for handle in after:
            if handle._kv is not self:
                handle._kv.wait(handle)
        return [handle._request for handle in after if handle._kv is self]

    def _raise_if_refused(self, request: KvRequest) -> None:
        self._line.failed = [each for each in self._line.failed if each is not request]
        if request.error is not None:
            raise request.error

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigError("this kv is closed. Nothing was sent; shoal.ps.connect() makes another one.")

    def _last_counted(self) -> int:
        """The last push of this stream that counts anywhere."""
        marks = read_applied_seqs(self._group)
        return int(marks[marks[:, 1] == self._stream, 2].max(initial=0))


def connect() -> Kv:
    """This worker's way to the servers of its job, for tables of its own.

    For scripts launched with servers: `shoal run -n 2 --servers 2 --strategy ps:async script.py`. Every worker
    connects equally often and in the same order.
    """
    job = jobs.share()
    name = strategies.parse(job.strategy)
    launch = "launch the script with `shoal run -n 2 --servers 2 --strategy ps:async SCRIPT`"
    if not job.launched or not job.servers:
        where = f"runs under '{job.strategy}'" if job.launched else "was started without `shoal run`"
        raise ConfigError(
            f"shoal.ps.connect() needs servers, and this process {where}. Nothing was sent; {launch}."
        )
    if name.mode not in ("async", "ssp", "hybrid"):
        raise ConfigError(
            f"shoal.ps.connect() needs a strategy under which every push is an update of its own, and under "
            f"'{job.strategy}' an update is a step of all workers. Nothing was sent; {launch}, or with ps:ssp=K."
        )
    number = next(_numbers)
    lines = LeaseClient(job)
    group = Group(
        name=f"kv-{job.rank}-{number}",
        incarnation=job.incarnation,
        ways_in=job.servers,
        own_host=job.host_address,
        ask_view=lines.ask_servers,
        timeout_s=job.liveness.step_timeout_s,
    )
    is_bounded = name.bound is not None
    mode = msg.DeclareMode(job.num_workers, "ssp" if is_bounded else "async", name.bound or 0)
    try:
        kv = Kv(job, group, mode, number)
    except BaseException:
        group.close()
        lines.close()
        raise
    kv._lines = lines
    return kv
