"""The coordinator: hears every worker and decides nothing by itself.

A thin shell around `membership.py`, `calls.py` and `store_table.py`: one
thread, sockets that never block, a clock. Each connection asks one thing at a
time. What a stranger sends (bytes that are no message, a message out of
place) closes its own connection, is counted, and reaches none of the three.
How it becomes a process is `coordinator_process.py`'s business.
"""

from __future__ import annotations

import contextlib
import resource
import selectors
import socket
import time
from dataclasses import dataclass, field

from shoal.cluster import calls, store_table
from shoal.cluster.calls import Calls
from shoal.cluster.membership import Membership
from shoal.cluster.store_table import StoreTable
from shoal.core.errors import WireError
from shoal.wire import unix
from shoal.wire.codec import Decoder, encode
from shoal.wire.messages import (
    BeginCall,
    CallGranted,
    CallRefused,
    Join,
    Joined,
    JoinRefused,
    Leave,
    Message,
    ScriptEnded,
    StoreRefused,
    WaitExpired,
)

MAX_UNSENT_BYTES = 32 << 20
"""A client that leaves more than this unread is dropped."""

RECEIVE_BYTES = 64 * 1024


@dataclass(slots=True, eq=False)
class _Connection:
    """One client. `rank` is -1 until it has joined."""

    number: int
    sock: socket.socket
    since: float
    rank: int = -1
    incarnation: int = -1
    has_asked: bool = False  # and was not answered yet
    is_writing: bool = False  # the socket would not take all of `unsent`
    decoder: Decoder = field(default_factory=Decoder)
    unsent: bytearray = field(default_factory=bytearray)


class Coordinator:
    """Moves messages between connections and the pure parts, and deadlines between the clock and them.

    One thread runs everything, so nothing here takes a lock; nothing blocks
    but `select`, and that only until the next deadline.
    """

    def __init__(self, listener: socket.socket, *, num_workers: int, join_timeout_s: float) -> None:
        self.num_refused, self.last_refusal = 0, ""
        self._join_timeout_s = join_timeout_s
        self._membership = Membership(num_workers=num_workers)
        self._calls = Calls(num_workers=num_workers, timeout_s=join_timeout_s)
        self._store = StoreTable()
        self._connections: dict[int, _Connection] = {}
        self._callers: dict[int, int] = {}  # rank -> the connection on which it makes its calls
        self._num_accepted = 0
        num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_connections = (1 << 20 if num_files == resource.RLIM_INFINITY else num_files) - 32
        self._listener = listener
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def serve(self, *, until_readable: socket.socket) -> None:
        """Answer everybody until there is something to read on `until_readable`."""
        self._selector.register(until_readable, selectors.EVENT_READ)
        while True:
            for key, mask in self._selector.select(self._wait_s()):
                if key.fileobj is until_readable:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data.number in self._connections:  # not dropped earlier in this round
                    self._attend(key.data, mask)
            self._tick()

    def close(self) -> None:
        """Close every socket."""
        for connection in self._connections.values():
            connection.sock.close()
        self._connections.clear()
        self._selector.close()
        self._listener.close()

    # ---- sockets --------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            sock, _ = unix.accept(self._listener)
        except WireError as error:
            self._count_refusal(error.problem)
            return
        except OSError:
            return  # it was gone before we looked
        if len(self._connections) >= self._max_connections:
            # Without a descriptor to spare, accept would fail and select would spin on the listener.
            sock.close()
            self._count_refusal(f"there are {len(self._connections)} connections already")
            return
        sock.setblocking(False)
        self._num_accepted += 1
        connection = _Connection(self._num_accepted, sock, time.monotonic())
        self._connections[connection.number] = connection
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _attend(self, connection: _Connection, mask: int) -> None:
        try:
            if mask & selectors.EVENT_WRITE:
                self._flush(connection)
            if mask & selectors.EVENT_READ:
                data = connection.sock.recv(RECEIVE_BYTES)
                if not data:
                    self._drop(connection)
                    return
                for message, _ in connection.decoder.feed(data):
                    if connection.number in self._connections:  # an answer may have ended it
                        self._hear(connection, message)
        except WireError as error:
            self._count_refusal(error.problem)
            self._drop(connection)
        except BlockingIOError:
            pass  # woken for nothing
        except OSError:
            self._drop(connection)

    def _answer(self, number: int, message: Message) -> None:
        connection = self._connections.get(number)
        if connection is None:
            return
        connection.has_asked = False
        try:
            connection.unsent += b"".join(encode(message))
        except WireError as error:
            connection.unsent += b"".join(encode(StoreRefused(f"the answer is too large: {error.problem}")))
        try:
            self._flush(connection)
        except OSError:
            self._drop(connection)

    def _flush(self, connection: _Connection) -> None:
        with contextlib.suppress(BlockingIOError):
            while connection.unsent:
                del connection.unsent[: connection.sock.send(connection.unsent)]
        if len(connection.unsent) > MAX_UNSENT_BYTES:
            raise ConnectionError("it does not read its answers")
        if connection.is_writing != bool(connection.unsent):
            connection.is_writing = bool(connection.unsent)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.is_writing else 0)
            self._selector.modify(connection.sock, events, connection)

    def _drop(self, connection: _Connection) -> None:
        if self._connections.pop(connection.number, None) is None:
            return
        self._selector.unregister(connection.sock)
        connection.sock.close()
        self._store.handle(store_table.Gone(connection.number))
        if self._callers.get(connection.rank) == connection.number:
            del self._callers[connection.rank]
            self._calls.handle(calls.Gone(connection.rank))

    def _count_refusal(self, reason: str) -> None:
        self.num_refused += 1
        self.last_refusal = reason

    # ---- messages -------------------------------------------------------------------------------

    def _hear(self, connection: _Connection, message: Message) -> None:
        if connection.has_asked:
            raise WireError("it asks before it was answered")
        connection.has_asked = True
        now = time.monotonic()
        match message:
            case Join():
                self._join(connection, message)
            case _ if connection.rank < 0:
                raise WireError(f"it says {type(message).__name__} before it has joined")
            case BeginCall(rank, number, kind, detail) if rank == connection.rank:
                self._callers[rank] = connection.number
                self._carry_out(self._calls.handle(calls.Began(rank, number, kind, detail, now)))
            case ScriptEnded(rank, num_calls) if rank == connection.rank:
                self._callers[rank] = connection.number
                self._carry_out(self._calls.handle(calls.Ended(rank, num_calls, now)))
            case _ if isinstance(message, store_table.Request):
                self._pass_on(self._store.handle(store_table.Asked(connection.number, message, now)))
            case _:
                raise WireError(f"rank {connection.rank} says {message}, which is not for it to say")

    def _join(self, connection: _Connection, join: Join) -> None:
        if connection.rank >= 0:
            raise WireError(f"it joins a second time, as rank {join.rank}")
        reason = self._membership.admit(join)
        if reason is not None:
            self._count_refusal(reason)
            self._answer(connection.number, JoinRefused(reason))
            self._drop(connection)
            return
        connection.rank, connection.incarnation = join.rank, join.incarnation
        for other in list(self._connections.values()):
            if self._membership.is_fenced(other.rank, other.incarnation):
                self._drop(other)
        self._calls.handle(calls.Joined(join.rank))
        self._answer(connection.number, Joined(self._membership.view))

    def _carry_out(self, actions: list[calls.Action]) -> None:
        for action in actions:
            number = self._callers.get(action.rank, 0)
            match action:
                case calls.Grant():
                    self._answer(number, CallGranted(action.number))
                case calls.Refuse():
                    self._answer(number, CallRefused(action.number, action.calls))
                case calls.Expire():
                    self._answer(number, WaitExpired(action.operation, action.waited_s, list(action.missing)))
                case calls.LetGo():
                    self._answer(number, Leave())

    def _pass_on(self, answers: list[store_table.Answer]) -> None:
        for answer in answers:
            self._answer(answer.client, answer.message)

    # ---- time -----------------------------------------------------------------------------------

    def _wait_s(self) -> float | None:
        """How long nothing can happen of itself."""
        joins = [each.since + self._join_timeout_s for each in self._connections.values() if each.rank < 0]
        deadlines = [
            each for each in (self._calls.deadline, self._store.deadline, *joins) if each is not None
        ]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _tick(self) -> None:
        now = time.monotonic()
        self._carry_out(self._calls.handle(calls.Tick(now)))
        self._pass_on(self._store.handle(store_table.Tick(now)))
        for each in list(self._connections.values()):
            if each.rank < 0 and now >= each.since + self._join_timeout_s:
                self._count_refusal(f"it was connected for {now - each.since:.0f} s and never joined")
                self._drop(each)
