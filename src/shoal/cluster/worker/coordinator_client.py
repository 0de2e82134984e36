"""A worker's connections to the coordinator: request and answer, a deadline on each, reconnect and retry.

`CoordinatorClient` is one connection, for calls and views. `LeaseClient` asks
for servers and leases on connections of its own, because those requests may
wait long; so does `CoordinatorAddressBook`, which must not wait behind them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any, TypeVar

from shoal.config import job as jobs
from shoal.config.job import Job
from shoal.config.liveness import LivenessConfig
from shoal.errors import CallsDiffer, ClusterError, CoordinatorLost, WaitTimedOut, WireError
from shoal.runtime.transport import endpoint
from shoal.runtime.transport.framing import encode, read_message
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.server_coordinator import ServerView
from shoal.runtime.transport.messages.worker_coordinator import (
    AskLease,
    AskServers,
    BeginCall,
    CallGranted,
    CallRefused,
    EnterView,
    Join,
    Joined,
    JoinRefused,
    Late,
    LeaseRefused,
    Leases,
    Leave,
    NoMoreLeases,
    Regroup,
    ScriptEnded,
    StoreCheck,
    StoreDone,
    StoreFlag,
    StoreGet,
    StoreRefused,
    StoreSet,
    StoreValues,
    ViewFormed,
    ViewRefused,
    WaitExpired,
)

GRACE_S = 5.0
"""The coordinator ends a wait at its deadline; a client without an answer this much later gives up on it.

No liveness time-out: it need only outlast the delay of a busy coordinator. Whether it lives is decided by its supervisor
(`coordinator_dead_after_s`).
"""

RETRY_S = 0.02

A = TypeVar("A", bound=Message)


class Regrouping(Exception):
    """Internal: a view is being formed. Leave `view`, enter the next one, and ask again."""

    def __init__(self, view: int) -> None:
        self.view = view
        super().__init__(f"somebody waits for this rank to leave view {view}")


class JobOver(Exception):
    """Internal: all ranks had ended their scripts when this process started as a replacement."""


class CoordinatorClient:
    """One connection, joined at construction. Threads may share it; their requests queue up.

    A killed coordinator comes back at the same address, with all its promises: so when the
    connection breaks, the client reconnects and repeats the request, which is safe for every
    message. A connection with an outstanding answer is never used again: a late answer must not be
    taken for the answer to the next request.
    """

    def __init__(
        self,
        path: str,
        rank: int,
        incarnation: int = 0,
        *,
        num_workers: int,
        liveness: LivenessConfig = LivenessConfig(),  # noqa: B008  frozen
    ) -> None:
        self.path, self.rank, self.incarnation = path, rank, incarnation
        self.num_workers, self.liveness = num_workers, liveness
        self.view = 0
        self._lock = threading.Lock()
        self._is_closed = False
        self._sock: socket.socket | None = None
        with self._lock:
            self._connect(f"rank {rank}'s join", max(liveness.reconnect_timeout_s, liveness.join_timeout_s))

    def request(self, message: Message, timeout_s: float | None) -> Message:
        """Send a request and return the answer. Raises WaitTimedOut, CallsDiffer or CoordinatorLost if there is none.

        Without `timeout_s` the coordinator ends the wait. Its supervisor checks that it is at work,
        and not stuck.
        """
        operation = f"rank {self.rank}'s {type(message).__name__}"
        packet = b"".join(encode(message))  # first: an encoding error leaves the connection usable
        started = time.monotonic()
        with self._lock:
            while True:
                if self._sock is None:
                    self._connect(operation, self.liveness.reconnect_timeout_s)
                try:
                    return _plain(self._exchange(packet, timeout_s), operation, self.liveness.join_timeout_s)
                except TimeoutError:
                    raise WaitTimedOut(
                        operation=operation,
                        waited_s=time.monotonic() - started,
                        missing=["the coordinator"],
                        setting=f"its timeout of {timeout_s:g} s",
                    ) from None
                except (OSError, EOFError, _Garbled):
                    continue

    def _exchange(self, packet: bytes, timeout_s: float | None) -> Message:
        """Send and receive; on any failure the connection is dropped."""
        assert self._sock is not None
        try:
            self._sock.settimeout(timeout_s)
            self._sock.sendall(packet)
            return read_message(self._sock)[0]
        except BaseException as error:
            self._drop()
            if isinstance(error, WireError):
                raise _Garbled from error
            raise

    def _connect(self, operation: str, timeout_s: float) -> None:
        """Connect and join; retry for `timeout_s` while the coordinator is being restarted."""
        deadline = time.monotonic() + timeout_s
        join = b"".join(encode(Join(self.rank, self.incarnation, os.getpid(), self.num_workers)))
        while True:
            left_s = deadline - time.monotonic()
            try:
                if self._is_closed:
                    raise ConnectionRefusedError("the connection is closed")
                if left_s <= 0:
                    raise ConnectionRefusedError(f"it did not answer within {timeout_s:g} s")
                # While it is down, the supervisor keeps its socket open: connecting succeeds, the answer
                # comes later.
                self._sock = endpoint.connect(self.path, expect="coordinator", timeout_s=left_s)
                answer = self._exchange(join, left_s)
            except (FileNotFoundError, ConnectionRefusedError, WireError) as error:
                raise CoordinatorLost(path=self.path, operation=operation, reason=str(error)) from None
            except (OSError, EOFError, _Garbled):
                time.sleep(min(RETRY_S, max(0.0, left_s)))
                continue
            if isinstance(answer, Joined):
                self.view = answer.view
                return
            self._drop()
            if isinstance(answer, Leave):
                raise JobOver
            _plain(answer, f"rank {self.rank}'s join", self.liveness.join_timeout_s)
            raise WireError(f"Join was answered by {type(answer).__name__}")

    def begin_call(self, number: int, kind: str, detail: str) -> None:
        """Return once all ranks have begun this call, the `number`-th (from 1) of their scripts.

        Raises Regrouping if a rank waits to enter a view: enter it, then ask again.
        """
        self._wait(BeginCall(self.rank, number, kind, detail), CallGranted)

    def end_script(self, num_calls: int) -> None:
        """Return once all ranks have reached the end of their scripts, after as many calls. Raises Regrouping too."""
        self._wait(ScriptEnded(self.rank, num_calls), Leave)

    def enter_view(
        self, *, view_left: int, finished: int, call: int, waited_s: float = 0.0, waited_in: str = ""
    ) -> ViewFormed:
        """Wait until every rank has come to the next view, and return it.

        `view_left` is 0 and `finished` -1 for a process that was in no view yet; `call` is the
        newest call it has begun, `waited_s` the time it waited for the others in the exchange that
        broke, and `waited_in` the name of that exchange.
        """
        enter = EnterView(self.rank, self.incarnation, view_left, finished, call, waited_s, waited_in)
        return self._wait(enter, ViewFormed)

    def close(self) -> None:
        """Close the connection and wake a thread that waits for an answer. Closing twice is safe."""
        self._is_closed = True
        sock = self._sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _wait(self, message: Message, expected: type[A]) -> A:
        return _expect(self.request(message, None), expected)


class _Garbled(Exception):
    """The answer was no message; nothing after it on that connection can be trusted."""


def _plain(answer: Message, operation: str, join_timeout_s: float) -> Message:
    """The answer, or the error that it encodes."""
    match answer:
        case CallRefused(number, calls):
            raise CallsDiffer(number=number, calls=calls)
        case WaitExpired(waited_for, waited_s, missing):
            setting = f"join_timeout_s (now {join_timeout_s:g} s)"
            raise WaitTimedOut(operation=waited_for, waited_s=waited_s, missing=missing, setting=setting)
        case Regroup(view):
            raise Regrouping(view)
        case JoinRefused(reason) | StoreRefused(reason) | ViewRefused(reason):
            raise ClusterError(f"the coordinator refused {operation}: {reason}. Nothing was changed by it.")
    return answer


class LeaseClient:
    """A worker's connections for servers and leases, opened when they are first used."""

    def __init__(self, job: Job) -> None:
        jobs.share()  # leases divide the script's work
        self._job = job
        self._clients: dict[str, CoordinatorClient] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self._view = 0

    def ask_servers(self, after_view: int, timeout_s: float) -> ServerView:
        """The newest view of the servers, once there is one after `after_view`.

        Raises WaitTimedOut, naming the servers that have not joined, and CoordinatorLost.
        """
        answer = self._client("servers").request(AskServers(after_view, timeout_s), None)
        view = _expect(answer, ServerView)
        self._view = max(self._view, view.view)
        return view

    def ask_lease(
        self,
        *,
        call: int,
        finished: Sequence[int],
        num_samples: int,
        samples_per_lease: int,
        num_epochs: int,
        num_ahead: int = 2,
        first_epoch: int = 0,
        done: Sequence[int] = (),
        timeout_s: float | None = None,
        below: int = 0,
        is_last: bool = False,
        busy_s: Sequence[float] = (),
        num_workers: int = 0,
        **how: Any,
    ) -> Leases | NoMoreLeases:
        """Report finished leases (all their pushes acknowledged), and return all leases that this worker holds now.

        Ask for the servers first: requests that name a lost view are not answered.

        Waits at the end of an epoch, until others' leases are done or come back. `first_epoch` and
        `done` (leases of that epoch) are the position of a checkpoint; the first worker to ask
        decides them for the call. `below`: all leases below it are done, as far as known here; if
        an epoch has ended since, the answer may have no lease. `is_last` ends the call for all.
        `timeout_s` is step_timeout_s unless given. Raises WaitTimedOut, naming the holders of the
        remaining leases. `busy_s` is the time each finished lease took; `how` holds the other
        fields of AskLease.
        """
        job = self._job
        question = AskLease(
            call=call,
            rank=job.rank,
            incarnation=job.incarnation,
            view=self._view,
            finished=list(finished),
            num_samples=num_samples,
            samples_per_lease=samples_per_lease,
            num_epochs=num_epochs,
            num_ahead=num_ahead,
            timeout_s=job.liveness.step_timeout_s if timeout_s is None else timeout_s,
            first_epoch=first_epoch,
            done=list(done),
            below=below,
            is_last=is_last,
            busy_s=list(busy_s),
            num_workers=num_workers,
            **how,
        )
        # Another thread may be waiting on the lease connection.
        answer = self._client("last lease" if is_last else "leases").request(question, None)
        if isinstance(answer, LeaseRefused):
            raise ClusterError(
                f"the coordinator refused rank {job.rank} a lease: {answer.reason}. Nothing was changed by it."
            )
        return answer if isinstance(answer, NoMoreLeases) else _expect(answer, Leases)

    def tell_late(self, ranks: Sequence[int], waited_s: float) -> None:
        """Report ranks that this worker waits for."""
        self._client("late").request(Late(list(ranks), waited_s, "a step or an exchange"), None)

    def close(self) -> None:
        """Close all connections and wake their threads. Closing twice is safe."""
        self._is_closed = True
        for client in list(self._clients.values()):
            client.close()

    def _client(self, purpose: str) -> CoordinatorClient:
        if self._is_closed:
            raise ClusterError("the line to the coordinator is closed.")
        with self._lock:
            client = self._clients.get(purpose)
            if client is None:
                client = self._clients[purpose] = _joined(self._job)
            return client


class CoordinatorAddressBook:
    """Addresses of workers, in the coordinator's store; its connection is opened when it is first used."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._opened: CoordinatorClient | None = None
        self._lock = threading.Lock()

    def publish(self, name: str, address: str) -> None:
        _expect(self._client().request(StoreSet({name: address.encode()}), None), StoreDone)

    def lookup(self, name: str) -> str | None:
        """Address of a rank; None if it was never published."""
        client = self._client()
        if not _expect(client.request(StoreCheck([name]), None), StoreFlag).value:
            return None
        return _expect(client.request(StoreGet([name], GRACE_S), None), StoreValues).values[0].decode()

    def _client(self) -> CoordinatorClient:
        with self._lock:
            if self._opened is None:
                self._opened = _joined(self._job)
            return self._opened


def _joined(job: Job) -> CoordinatorClient:
    return CoordinatorClient(
        str(job.coordinator), job.rank, job.incarnation, num_workers=job.num_workers, liveness=job.liveness
    )


def _expect(answer: Message, expected: type[A]) -> A:
    if not isinstance(answer, expected):
        raise WireError(f"a {expected.__name__} was expected, and a {type(answer).__name__} came")
    return answer
