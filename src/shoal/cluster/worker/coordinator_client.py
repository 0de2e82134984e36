"""A worker's side of its conversation with the coordinator: one question, one answer, a deadline on each."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from typing import TypeVar

from shoal.errors import CallsDiffer, ClusterError, CoordinatorLost, WaitTimedOut, WireError
from shoal.runtime.transport import unix
from shoal.runtime.transport.framing import encode, read_message
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.worker_coordinator import (
    BeginCall,
    CallGranted,
    CallRefused,
    EnterView,
    Join,
    Joined,
    JoinRefused,
    Leave,
    Regroup,
    ScriptEnded,
    StoreRefused,
    ViewFormed,
    ViewRefused,
    WaitExpired,
)

GRACE_S = 5.0
"""The coordinator ends a wait at its deadline; a client that hears nothing for so much longer gives up on it."""

RECONNECT_S = 30.0
"""A coordinator that was killed is back within a second; one that is not back after so long is lost."""

RETRY_S = 0.02

A = TypeVar("A", bound=Message)


class Regrouping(Exception):
    """Not an error: somebody waits to enter a view. Leave `view`, enter the next one, and ask again."""

    def __init__(self, view: int) -> None:
        self.view = view
        super().__init__(f"somebody waits for this rank to leave view {view}")


class JobOver(Exception):
    """Not an error: all ranks had ended their scripts when this process came to replace one of them."""


class CoordinatorClient:
    """One conversation, joined at birth. Threads may share it; their questions queue up.

    A coordinator that is killed comes back at the same address, with all it
    has promised: so where the connection breaks, another one is made and the
    question repeated, which is safe for every message. A connection on which
    an answer is outstanding is never used again: an answer that comes late
    must not be taken for the answer to the next question.
    """

    def __init__(
        self,
        path: str,
        rank: int,
        incarnation: int = 0,
        *,
        num_workers: int,
        join_timeout_s: float = 120.0,
        reconnect_s: float = RECONNECT_S,
    ) -> None:
        self.path, self.rank, self.incarnation = path, rank, incarnation
        self.num_workers, self.join_timeout_s, self.reconnect_s = num_workers, join_timeout_s, reconnect_s
        self.view = 0
        self._lock = threading.Lock()
        self._is_closed = False
        self._sock: socket.socket | None = None
        with self._lock:
            self._connect(f"rank {rank}'s join", max(reconnect_s, join_timeout_s))

    def request(self, message: Message, timeout_s: float | None) -> Message:
        """Ask, and return the answer. Raises WaitTimedOut, CallsDiffer or CoordinatorLost where there is none.

        Without `timeout_s` the wait ends when the coordinator says so. That it
        is at work, and not stuck, is its supervisor's to see to.
        """
        operation = f"rank {self.rank}'s {type(message).__name__}"
        packet = b"".join(encode(message))  # first: what cannot be said leaves the connection as it is
        started = time.monotonic()
        with self._lock:
            while True:
                if self._sock is None:
                    self._connect(operation, self.reconnect_s)
                try:
                    return _plain(self._exchange(packet, timeout_s), operation, self.join_timeout_s)
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
        """Say it and hear the answer, whole; else the connection is gone."""
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
        """Connect and join; try again for `timeout_s` if the one at the other end is killed meanwhile."""
        deadline = time.monotonic() + timeout_s
        join = b"".join(encode(Join(self.rank, self.incarnation, os.getpid(), self.num_workers)))
        while True:
            left_s = deadline - time.monotonic()
            try:
                if self._is_closed:
                    raise ConnectionRefusedError("the connection is closed")
                if left_s <= 0:
                    raise ConnectionRefusedError(f"it did not answer within {timeout_s:g} s")
                # While it is down, the supervisor keeps its socket open: connecting succeeds, the answer comes later.
                self._sock = unix.connect(self.path, timeout_s=left_s)
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
            _plain(answer, f"rank {self.rank}'s join", self.join_timeout_s)
            raise WireError(f"Join was answered by {type(answer).__name__}")

    def begin_call(self, number: int, kind: str, detail: str) -> None:
        """Return once all ranks have begun this call, the `number`-th (from 1) of their scripts.

        Raises Regrouping where somebody waits to enter a view: enter it, then ask again.
        """
        self._wait(BeginCall(self.rank, number, kind, detail), CallGranted)

    def end_script(self, num_calls: int) -> None:
        """Return once all ranks have reached the end of their scripts, after as many calls. Raises Regrouping too."""
        self._wait(ScriptEnded(self.rank, num_calls), Leave)

    def enter_view(
        self, *, view_left: int, finished: int, call: int, waited_s: float = 0.0, waited_in: str = ""
    ) -> ViewFormed:
        """Wait until every rank has come to the next view, and return it.

        `view_left` is 0 and `finished` -1 for a process that was in no view yet;
        `call` is the newest call it has begun, `waited_s` how long it waited for
        the others in the exchange that broke, and `waited_in` which one that was.
        """
        enter = EnterView(self.rank, self.incarnation, view_left, finished, call, waited_s, waited_in)
        return self._wait(enter, ViewFormed)

    def close(self) -> None:
        """Leave the conversation; a thread that waits for an answer is woken by it. Closing twice is fine."""
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
        answer = self.request(message, None)
        if not isinstance(answer, expected):
            raise WireError(f"{type(message).__name__} was answered by {type(answer).__name__}")
        return answer


class _Garbled(Exception):
    """The answer was no message; what comes after it on that connection has no meaning either."""


def _plain(answer: Message, operation: str, join_timeout_s: float) -> Message:
    """The answer, or the error it stands for."""
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
