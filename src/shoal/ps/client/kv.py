"""The parameter server without a model: `kv = shoal.ps.connect()`, then tables, `push`, `pull`, `wait`.

    kv = shoal.ps.connect()
    weights = kv.table("weights", dim=1, rule="ftrl", l1=1.0)
    pulled = kv.pull(weights, keys)           # a handle, at once
    w = kv.wait(pulled)                       # one row per key, in the order of the keys
    pushed = kv.push(weights, keys, gradient) # one update, however often it has to be sent
    kv.pull(weights, keys, after=[pushed])

Requests of one `kv` are carried out in the order in which they were made: a
pull sees all pushes before it. A push is acknowledged when every copy of its
rows has it. It is named by the worker's rank and how many there were before
it, so a worker that was killed and runs again from the top repeats its names,
and what counted once is not counted again.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from shoal.cluster.worker import session
from shoal.cluster.worker.coordinator_client import LeaseClient
from shoal.config import job as jobs
from shoal.config import strategy as strategies
from shoal.config.job import Job
from shoal.embedding.kernels import sum_back, unique
from shoal.embedding.rules import rule_named
from shoal.errors import ConfigError, LinkLost, PsError
from shoal.ps.client.bulk_transfer import read_marks
from shoal.ps.client.kv_requests import Keys, KvRequest, Pull, Push, RequestQueue
from shoal.ps.client.server_group import Group
from shoal.ps.kernels import first_wrong_key
from shoal.ps.layout import FIRST_NAMED
from shoal.runtime.seeds import mix
from shoal.runtime.transport.messages.client_server import (
    DeclareMode,
    DeclareTable,
    TableSpec,
)

Arrays: TypeAlias = ArrayLike | torch.Tensor

Init: TypeAlias = Literal["zeros", "normal", "uniform"]
Dtype: TypeAlias = Literal["float32", "float64"]


_INT64 = np.iinfo(np.int64)


def spec_of(
    name: str,
    dim: int,
    rule: str,
    settings: dict[str, float],
    *,
    num_rows: int | None,
    init: Init,
    scale: float,
    seed: int,
    dtype: Dtype,
) -> TableSpec:
    """The table as servers know it; refused where there is no such."""
    for what, value, least in (("dim", dim, 1), ("num_rows", num_rows, 1)):
        if value is not None and (not isinstance(value, int) or value < least):
            raise _wrong(name, f"{what} must be an integer of at least {least}, got {value!r}")
    for what, given, known in (("dtype", dtype, get_args(Dtype)), ("init", init, get_args(Init))):
        if given not in known:
            raise _wrong(name, f"{what} must be one of {', '.join(known)}, got {given!r}")
    if not np.isfinite(scale) or scale < 0:
        raise _wrong(name, f"scale must be a finite number of at least 0, got {scale!r}")
    number = FIRST_NAMED + int.from_bytes(hashlib.blake2b(name.encode(), digest_size=5).digest(), "little")
    return TableSpec(
        number=number,
        name=name,
        dim=dim,
        dtype=dtype,
        rule=rule,
        settings=rule_named(rule).complete(settings),
        num_rows=num_rows,
        init=init,
        scale=float(scale),
        seed=mix(seed, number),  # tables of one seed have different rows
    )


def keys_of(table: TableSpec, keys: Arrays) -> NDArray[np.int64]:
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


def values_of(table: TableSpec, values: Arrays, shape: tuple[int, ...]) -> NDArray[Any]:
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
    table: TableSpec, keys: Keys, values: NDArray[Any], *, merge: bool
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


FIRST_STREAM = 1 << 62
"""Leases of training are streams below it."""

_numbers = itertools.count()


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
        self._kv._look()
        return self._request.is_done


class Kv:
    """This process's tables on the servers of its job. Threads may share it; close it, or use it in a `with`."""

    def __init__(self, job: Job, group: Group, mode: DeclareMode, number: int) -> None:
        """`number`: how many this process connected before."""
        self._group, self._line = group, RequestQueue(group)
        self._stream = FIRST_STREAM | (job.rank << 32) | number
        self._rank = mode.num_workers
        self._seq = 0
        self._tables: dict[str, TableSpec] = {}
        self._lock = threading.RLock()
        self._is_closed = False
        self._lines: LeaseClient | None = None
        group.declare(mode)
        self._counted = self._last_counted() if job.incarnation else 0

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
        **settings: float,
    ) -> str:
        """Declare a table, in the same words on every worker; gives its name back.

        `rule` says what a push does to a row: "store" sets it, "add" adds to it, "sgd", "adagrad",
        "rowwise-adagrad", "adam" and "ftrl" take it for a gradient, with `settings` such as lr=0.1. A row that
        nobody pushed yet is `init`: zeros, or drawn from (seed, table, key) with standard deviation or half width
        `scale`. Keys are any int64, or 0..num_rows-1 where `num_rows` is given, which is quicker.
        """
        spec = spec_of(
            name, dim, rule, settings, num_rows=num_rows, init=init, scale=scale, seed=seed, dtype=dtype
        )
        with self._lock:
            self._check_open()
            try:
                self._group.declare(DeclareTable(spec))
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
        self,
        table: str,
        keys: Arrays,
        values: Arrays,
        *,
        after: Sequence[Handle] = (),
        merge: bool = True,
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
                # A replacement has caught up. What its predecessor said after this push nobody knows: it is said, if
                # need be, twice.
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
                    self._tell(request)
                return None
            if handle._kv is not self:
                return handle._kv.wait(handle)
            request = handle._request
            if not request.is_done:
                self._check_open()
                self._line.finish(request)
            self._tell(request)
            return request.result if isinstance(request, Pull) else None

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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

    def _look(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._line.advance()

    def _declared(self, table: str) -> TableSpec:
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

    def _tell(self, request: KvRequest) -> None:
        self._line.failed = [each for each in self._line.failed if each is not request]
        if request.error is not None:
            raise request.error

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigError("this kv is closed. Nothing was sent; shoal.ps.connect() makes another one.")

    def _last_counted(self) -> int:
        """The last push of this stream that counts anywhere."""
        marks = read_marks(self._group)
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
        ask_view=lines.ask_servers,
        timeout_s=job.liveness.step_timeout_s,
    )
    is_bounded = name.bound is not None
    mode = DeclareMode(job.num_workers, "ssp" if is_bounded else "async", name.bound or 0)
    try:
        kv = Kv(job, group, mode, number)
    except BaseException:
        group.close()
        lines.close()
        raise
    kv._lines = lines
    return kv
