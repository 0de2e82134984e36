"""A worker's side of its conversation with the coordinator: one question, one answer, a deadline on each."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from typing import TypeVar

from shoal.core.errors import CallsDiffer, ClusterError, CoordinatorLost, WaitTimedOut, WireError
from shoal.wire import unix
from shoal.wire.codec import encode, read_message
from shoal.wire.messages import (
    BeginCall,
    CallGranted,
    CallRefused,
    EnterView,
    Join,
    Joined,
    JoinRefused,
    Leave,
    Message,
    Regroup,
    ScriptEnded,
    StoreRefused,
    ViewFormed,
    ViewRefused,
    WaitExpired,
)

GRACE_S = 5.0
"""The coordinator ends a wait at its deadline; a client that hears nothing for so much longer gives up on it."""

A = TypeVar("A", bound=Message)


class Regrouping(Exception):
    """Not an error: somebody waits to enter a view. Leave `view`, enter the next one, and ask again."""

    def __init__(self, view: int) -> None:
        self.view = view
        super().__init__(f"somebody waits for this rank to leave view {view}")


class CoordinatorClient:
    """One connection, joined at birth. Threads may share it; their questions queue up.

    After any failure the connection is closed for good: an answer that comes
    late must not be taken for the answer to the next question.
    """

    def __init__(
        self, path: str, rank: int, incarnation: int = 0, *, num_workers: int, join_timeout_s: float = 120.0
    ) -> None:
        self.path, self.rank, self.incarnation = path, rank, incarnation
        self.num_workers, self.join_timeout_s = num_workers, join_timeout_s
        self._lock = threading.Lock()
        self._is_closed = False
        try:
            self._sock = unix.connect(path, timeout_s=join_timeout_s)
        except (OSError, WireError) as error:
            raise CoordinatorLost(path=path, operation=f"rank {rank}'s join", reason=str(error)) from None
        try:
            join = Join(rank, incarnation, os.getpid(), num_workers)
            self.view = self._ask(join, Joined, join_timeout_s).view
        except BaseException:
            self.close()
            raise

    def request(self, message: Message, timeout_s: float) -> Message:
        """Ask, and return the answer. Raises WaitTimedOut, CallsDiffer or CoordinatorLost where there is none."""
        operation = f"rank {self.rank}'s {type(message).__name__}"
        packet = b"".join(encode(message))  # first: what cannot be said leaves the connection as it is
        with self._lock:
            if self._is_closed:
                raise CoordinatorLost(path=self.path, operation=operation, reason="the connection is closed")
            started = time.monotonic()
            try:
                self._sock.settimeout(timeout_s)
                self._sock.sendall(packet)
                answer, _ = read_message(self._sock)
            except BaseException as error:
                self._is_closed = True
                self._sock.close()
                if isinstance(error, TimeoutError):
                    raise WaitTimedOut(
                        operation=operation,
                        waited_s=time.monotonic() - started,
                        missing=["the coordinator"],
                        setting=f"its timeout of {timeout_s:g} s",
                    ) from None
                if isinstance(error, (OSError, EOFError, WireError)):
                    raise CoordinatorLost(path=self.path, operation=operation, reason=str(error)) from None
                raise
        match answer:
            case CallRefused(number, calls):
                raise CallsDiffer(number=number, calls=calls)
            case WaitExpired(waited_for, waited_s, missing):
                setting = f"join_timeout_s (now {self.join_timeout_s:g} s)"
                raise WaitTimedOut(operation=waited_for, waited_s=waited_s, missing=missing, setting=setting)
            case Regroup(view):
                raise Regrouping(view)
            case JoinRefused(reason) | StoreRefused(reason) | ViewRefused(reason):
                raise ClusterError(
                    f"the coordinator refused {operation}: {reason}. Nothing was changed by it."
                )
        return answer

    def begin_call(self, number: int, kind: str, detail: str) -> None:
        """Return once all ranks have begun this call, the `number`-th (from 1) of their scripts.

        Raises Regrouping where somebody waits to enter a view: enter it, then ask again.
        """
        self._ask(BeginCall(self.rank, number, kind, detail), CallGranted, self.join_timeout_s + GRACE_S)

    def end_script(self, num_calls: int) -> None:
        """Return once all ranks have reached the end of their scripts, after as many calls. Raises Regrouping too."""
        self._ask(ScriptEnded(self.rank, num_calls), Leave, self.join_timeout_s + GRACE_S)

    def enter_view(self, *, view_left: int, finished: int, call: int) -> ViewFormed:
        """Wait until every rank has come to the next view, and return it.

        `view_left` is 0 and `finished` -1 for a process that was in no view yet;
        `call` is the newest call it has begun.
        """
        enter = EnterView(self.rank, self.incarnation, view_left, finished, call)
        return self._ask(enter, ViewFormed, self.join_timeout_s + GRACE_S)

    def close(self) -> None:
        """Leave the conversation; a thread that waits for an answer is woken by it. Closing twice is fine."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._sock.close()

    def _ask(self, message: Message, expected: type[A], timeout_s: float) -> A:
        answer = self.request(message, timeout_s)
        if not isinstance(answer, expected):
            self.close()
            raise WireError(f"{type(message).__name__} was answered by {type(answer).__name__}")
        return answer
