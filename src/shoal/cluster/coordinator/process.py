"""Coordinator process: sockets, clock and journal around the pure `state.py`.

One thread, sockets that never block, and a journal that is written before any
answer. A protocol violation (bytes that are no message, a message out of place)
closes its own connection, is counted, and reaches nothing else.

The listening socket is the supervisor's: workers may connect before the
coordinator runs, and a restarted one goes on at the same address, from its
journal.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from shoal.cluster.coordinator.actions import Answer, DropClient
from shoal.cluster.coordinator.journal import Journal
from shoal.cluster.coordinator.journal_entries import Entry, Granted, JournalState, Persist
from shoal.cluster.coordinator.state import Action, Coordination, CoordinationConfig
from shoal.config.faults import Fault
from shoal.errors import JournalFailed, WireError
from shoal.runtime import failpoints, recorder
from shoal.runtime.failpoints import failpoint
from shoal.runtime.transport import unix
from shoal.runtime.transport.framing import Decoder, encode
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.server_coordinator import JoinServer
from shoal.runtime.transport.messages.worker_coordinator import Join, StoreRefused, ViewFormed
from shoal.runtime.transport.tls import Credentials, Identity

MAX_UNSENT_BYTES = 32 << 20
"""A client that leaves more than this unread is dropped."""

RECEIVE_BYTES = 64 * 1024

MAX_SLEEP_S = 3600.0
"""epoll accepts at most 24 days, and a client may ask for a longer wait."""


@dataclass(slots=True, eq=False)
class _ClientConnection:
    """One client's socket."""

    number: int
    sock: socket.socket
    since: float
    identity: Identity | None = None  # from its certificate, if it connects from another host
    is_remote: bool = False
    is_writing: bool = False  # the socket did not take all of `unsent`
    decoder: Decoder = field(default_factory=Decoder)
    unsent: bytearray = field(default_factory=bytearray)


class Coordinator:
    """Moves messages between connections and `Coordination`, and deadlines between the clock and it.

    One thread runs everything, so nothing here takes a lock. Only `select` blocks, until the next
    deadline. All promises of one turn are journaled in one write, then answered.
    """

    def __init__(
        self,
        listener: socket.socket,
        config: CoordinationConfig,
        *,
        journaled: JournalState | None = None,
        write: Callable[[Sequence[Entry]], None] | None = None,
        supervisor: int = 0,
        remote: tuple[socket.socket, Credentials] | None = None,
    ) -> None:
        """`write` is the journal's; without it nothing is persisted. `supervisor` is the pid that may watch.

        `remote` is the listening socket for other hosts, with its credentials.
        """
        self.num_refused, self.last_refusal = 0, ""
        self._config, self._write, self._supervisor = config, write, supervisor
        self._coordination = Coordination(config, journaled, now=time.monotonic())
        self._due: deque[Action] = deque()  # decided in this turn, not yet carried out
        self._connections: dict[int, _ClientConnection] = {}
        self._strangers: deque[_ClientConnection] = deque()  # in order of arrival
        # Last message: a view is sent to thousands of clients.
        self._encoded: tuple[Message | None, bytes] = (None, b"")
        self._num_accepted = 0
        num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_connections = (1 << 20 if num_files == resource.RLIM_INFINITY else num_files) - 32
        self._listener = listener
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._remote = remote
        if remote is not None:
            remote[0].setblocking(False)
            self._selector.register(remote[0], selectors.EVENT_READ)

    def serve(self, *, until_readable: socket.socket) -> None:
        """Serve until `until_readable` is readable."""
        self._selector.register(until_readable, selectors.EVENT_READ)
        while True:
            with recorder.WAIT:
                ready = self._selector.select(self._wait_s())
            for key, mask in ready:
                if key.fileobj is until_readable:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                elif self._remote is not None and key.fileobj is self._remote[0]:
                    self._accept_remote(*self._remote)
                elif key.data.number in self._connections:  # not dropped earlier in this round
                    self._attend(key.data, mask)
            self._tick()
            self._carry_out()

    def close(self) -> None:
        for connection in self._connections.values():
            connection.sock.close()
        self._connections.clear()
        self._selector.close()
        self._listener.close()

    # ---- sockets --------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            sock, peer = unix.accept(self._listener)
        except WireError as error:
            self._count_refusal(error.problem)
            return
        except OSError:
            return  # it was gone before the accept
        if self._supervisor and not unix.is_descendant(peer.pid, self._supervisor):
            self._count_refusal(f"process {peer.pid} is none of this job's")
            sock.close()  # after the count: whoever sees the end of the connection finds its reason
            return
        self._take_in(sock, pid=peer.pid if self._supervisor else 0)

    def _accept_remote(self, listener: socket.socket, credentials: Credentials) -> None:
        try:
            sock = credentials.accept(listener)
        except OSError as error:
            self._count_refusal(str(error))
            return
        self._take_in(sock, is_remote=True)

    def _take_in(self, sock: socket.socket, *, pid: int = 0, is_remote: bool = False) -> None:
        """Register a connection. `pid` is the peer's process by the kernel; 0: not checked."""
        if len(self._connections) >= self._max_connections:
            # Without a descriptor to spare, accept would fail and select would spin on the listener.
            self._count_refusal(f"there are {len(self._connections)} connections already")
            sock.close()
            return
        sock.setblocking(False)
        self._num_accepted += 1
        connection = _ClientConnection(self._num_accepted, sock, time.monotonic(), is_remote=is_remote)
        self._connections[connection.number] = connection
        self._strangers.append(connection)
        self._selector.register(sock, selectors.EVENT_READ, connection)
        self._coordination.connected(
            connection.number, is_supervisor=bool(pid) and pid == self._supervisor, pid=pid
        )

    def _attend(self, connection: _ClientConnection, mask: int) -> None:
        try:
            if mask & selectors.EVENT_WRITE:
                self._flush(connection)
            if mask & selectors.EVENT_READ:
                data = connection.sock.recv(RECEIVE_BYTES)
                if not data:
                    self._drop(connection)
                    return
                if connection.is_remote and connection.identity is None:
                    connection.identity = connection.sock.identity  # type: ignore[attr-defined]  # of tls.py
                for message, _ in connection.decoder.feed(data):
                    if connection.identity is not None:
                        _check_speaker(connection.identity, message)
                    self._due += self._coordination.hear(connection.number, message, time.monotonic())
        except WireError as error:
            self._count_refusal(error.problem)
            self._drop(connection)
        except BlockingIOError:
            pass  # spurious wake-up
        except OSError:
            self._drop(connection)

    def _answer(self, number: int, message: Message) -> None:
        connection = self._connections.get(number)
        if connection is None:
            return
        try:
            if self._encoded[0] is not message:
                self._encoded = (message, b"".join(encode(message)))
            connection.unsent += self._encoded[1]
        except WireError as error:
            connection.unsent += b"".join(encode(StoreRefused(f"the answer is too large: {error.problem}")))
        try:
            self._flush(connection)
        except OSError:
            self._drop(connection)

    def _flush(self, connection: _ClientConnection) -> None:
        with contextlib.suppress(BlockingIOError):
            while connection.unsent:
                del connection.unsent[: connection.sock.send(connection.unsent)]
        if len(connection.unsent) > MAX_UNSENT_BYTES:
            raise ConnectionError("it does not read its answers")
        if connection.is_writing != bool(connection.unsent):
            connection.is_writing = bool(connection.unsent)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.is_writing else 0)
            self._selector.modify(connection.sock, events, connection)

    def _drop(self, connection: _ClientConnection) -> None:
        if connection.number not in self._connections:
            return
        self._due += self._coordination.gone(connection.number)
        self._selector.unregister(connection.sock)
        connection.sock.close()
        del self._connections[connection.number]

    def _count_refusal(self, reason: str) -> None:
        self.num_refused += 1
        self.last_refusal = reason

    # ---- decisions ------------------------------------------------------------------------------

    def _carry_out(self) -> None:
        """Carry out this turn's actions: first the journal, then the answers."""
        while self._due:
            actions, self._due = self._due, deque()
            entries = [action.entry for action in actions if isinstance(action, Persist)]
            if entries and self._write is not None:
                _pass("before", entries)
                with recorder.APPLY:
                    self._write(entries)
                _pass("after", entries)
            for action in actions:
                match action:
                    case Answer(client, message):
                        self._answer(client, message)
                    case DropClient(client, problem) if client in self._connections:
                        if problem is not None:
                            self._count_refusal(problem)
                        self._drop(self._connections[client])

    def _wait_s(self) -> float | None:
        """Time until the next deadline."""
        stranger = self._oldest_stranger()
        deadlines = [] if stranger is None else [stranger.since + self._config.liveness.join_timeout_s]
        if self._coordination.deadline is not None:
            deadlines.append(self._coordination.deadline)
        if not deadlines:
            return None
        return min(max(0.0, min(deadlines) - time.monotonic()), MAX_SLEEP_S)

    def _tick(self) -> None:
        now = time.monotonic()
        self._due += self._coordination.tick(now)
        timeout_s = self._config.liveness.join_timeout_s
        while (each := self._oldest_stranger()) is not None and now >= each.since + timeout_s:
            self._count_refusal(f"it was connected for {now - each.since:.0f} s and never joined")
            self._drop(each)

    def _oldest_stranger(self) -> _ClientConnection | None:
        """The oldest connection that has not identified itself. Drops those that have from the list."""
        while self._strangers:
            each = self._strangers[0]
            if each.number in self._connections and not self._coordination.has_introduced_itself(each.number):
                return each
            self._strangers.popleft()
        return None


def _check_speaker(identity: Identity, message: Message) -> None:
    """Refuse messages that the certificate's role and number do not permit."""
    match message:
        case Join(rank, incarnation):
            said = ("worker", rank, incarnation)
        case JoinServer(number, incarnation):
            said = ("server", number, incarnation)
        case _:
            return  # the coordinator's state checks members that have joined
    if said != (identity.role, identity.number, identity.incarnation):
        raise WireError(f"{identity.name} wants to join as {said[0]} {said[1]}, incarnation {said[2]}")


def _pass(moment: str, entries: Sequence[Entry]) -> None:
    for kind, what in ((Granted, "call"), (ViewFormed, "view")):
        if any(isinstance(entry, kind) for entry in entries):
            failpoint(f"coordinator: {moment} writing a {what}")


CANNOT_GO_ON = JournalFailed.exit_code
"""Exit code for errors that a restart would not cure. The reason is the last output on stderr."""


class CoordinatorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a coordinator is started with."""

    config: CoordinationConfig
    supervisor: int = 0
    """The process that may watch."""

    journal: str | None = None
    """Path of the journal. None: nothing is persisted, and this coordinator must not die."""

    launch: int = 0
    """Number of the launch, by `journal.begin_launch`."""

    incarnation: int = 0
    """Number of restarts."""

    faults: tuple[Fault, ...] = ()
    """Injected faults, by failpoint."""

    credentials: Credentials | None = None
    """Credentials for processes of other hosts, which connect through the descriptor `tcp_listener`."""


def main(spec: bytes, fds: dict[str, int]) -> int:
    """Serve until SIGTERM."""
    told = msgspec.msgpack.decode(spec, type=CoordinatorSpec)
    failpoints.arm(told.faults, process="coordinator", incarnation=told.incarnation)
    wake, stop = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    # The byte in the wake-up socket carries the signal.
    signal.signal(signal.SIGTERM, lambda signum, frame: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor handles Ctrl-C
    if "status" in fds:
        run_dir = os.path.dirname(told.journal) if told.journal else None
        recorder.start("coordinator", told.incarnation, run_dir=run_dir, send=recorder.over(fds["status"]))
    try:
        remote = None
        if told.credentials is not None:
            remote = socket.socket(fileno=fds["tcp_listener"]), told.credentials
        _serve(told, socket.socket(fileno=fds["listener"]), stop, remote)
    except JournalFailed as error:
        print(error, file=sys.stderr)
        return CANNOT_GO_ON
    finally:
        recorder.stop()
    return 0


def _serve(
    told: CoordinatorSpec,
    listener: socket.socket,
    stop: socket.socket,
    remote: tuple[socket.socket, Credentials] | None,
) -> None:
    journal = Journal(Path(told.journal), launch=told.launch) if told.journal else None
    coordinator = Coordinator(
        listener,
        told.config,
        journaled=journal.load() if journal else None,
        write=journal.write if journal else None,
        supervisor=told.supervisor,
        remote=remote,
    )
    coordinator.serve(until_readable=stop)
    coordinator.close()
    if journal:
        journal.close()
    if coordinator.num_refused:
        print(
            f"shoal: the coordinator closed {coordinator.num_refused} connections of processes that are no worker of "
            f"this job; the last because {coordinator.last_refusal}",
            file=sys.stderr,
        )
