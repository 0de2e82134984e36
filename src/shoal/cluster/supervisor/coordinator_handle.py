"""Coordinator as its supervisor sees it: process, listening socket, log, heartbeat and messages both ways.

The listening socket is the supervisor's, so a restarted coordinator serves the same address, and
clients that connect meanwhile wait. `job_lifecycle.py` decides whether it is restarted.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from pathlib import Path

import msgspec

from shoal import system
from shoal.cluster.coordinator.journal import Journal
from shoal.cluster.coordinator.process import CoordinatorSpec
from shoal.cluster.supervisor.activity_files import ActivityFiles, StatusLine
from shoal.cluster.supervisor.output import Log, Pipe
from shoal.cluster.supervisor.sockets import listen_unnamed
from shoal.cluster.supervisor.warm_parent import WarmParent
from shoal.errors import JournalFailed, WireError
from shoal.runtime.transport import unix
from shoal.runtime.transport.framing import Decoder, encode
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.supervisor import (
    Noted,
    Reaped,
    ReapedServer,
    Saved,
    ScaleServers,
    Watch,
    Watching,
)

CONNECT_TIMEOUT_S = 1.0


class CoordinatorHandle:
    """Successive coordinators of one job, at one address."""

    def __init__(
        self,
        spec: CoordinatorSpec,
        *,
        title: str,
        log: Path,
        warm: WarmParent,
        selector: selectors.BaseSelector,
        activity: ActivityFiles,
        tcp_listener: socket.socket | None = None,
    ) -> None:
        """`tcp_listener` accepts processes of other hosts."""
        self._tcp_listener = tcp_listener
        self.pid: int | None = None  # while it lives
        self._spec, self._title, self._warm, self._selector = spec, title, warm, selector
        self._activity = activity
        self._status: StatusLine | None = None
        self._liveness = spec.config.liveness
        self._log = Log(log)
        self._listener, self.way_in = listen_unnamed("coordinator")
        self._pipe: Pipe | None = None
        self._line: socket.socket | None = None
        self._decoder = Decoder()
        self._facts: dict[object, Message] = {}  # newest of each kind, for a restarted coordinator
        self._notes: list[Noted] = []  # for the ledger, and not acknowledged as written
        self._num_notes = 0
        self._heard_at = self._heartbeat_at = 0.0

    def start(self) -> int:
        """Fork it and begin to watch it; returns its pid."""
        ours, theirs = os.pipe()
        self._pipe = Pipe(ours, self._log)
        self._status = StatusLine(
            self._activity,
            self._selector,
            process="coordinator",
            incarnation=self._spec.incarnation,
            host=0,
        )
        try:
            self.pid = self._warm.fork(
                "coordinator",
                title=self._title,
                spec=msgspec.msgpack.encode(self._spec),
                fds={
                    "stdout": theirs,
                    "stderr": theirs,
                    "status": self._status.theirs.fileno(),
                    "listener": self._listener.fileno(),
                    **({"tcp_listener": self._tcp_listener.fileno()} if self._tcp_listener else {}),
                },
            )
        finally:
            os.close(theirs)
            self._status.theirs.close()
        self._selector.register(self._pipe, selectors.EVENT_READ, self._pipe)
        self._spec = msgspec.structs.replace(self._spec, incarnation=self._spec.incarnation + 1)
        self._heard_at = time.monotonic()
        self._watch()
        return self.pid

    def exited(self) -> list[str]:
        """Close what belongs to the exited process; returns the last lines of its log."""
        self.pid = None
        self._hang_up()
        if self._status is not None:
            self._status.close()
            self._status = None
        if self._pipe is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._pipe)
            self._pipe.close()
            self._pipe = None
        return self._log.last_lines()

    def tell(self, fact: Reaped | Saved | ReapedServer) -> None:
        """Send a fact, now and again to every restarted coordinator."""
        match fact:
            case Reaped(rank):
                self._facts[("reaped", rank)] = fact
            case ReapedServer(number):
                self._facts[("reaped-server", number)] = fact
            case Saved():
                self._facts["saved"] = fact
        self._say(fact)

    def note(self, note: Noted) -> None:
        """Send a ledger entry; it is kept until the coordinator has written it."""
        self._num_notes += 1
        self._notes.append(msgspec.structs.replace(note, serial=self._num_notes))
        self._say(self._notes[-1])

    def ask_to_scale(self, num_servers: int) -> bool:
        """Ask for another number of servers; False without a connection."""
        self._say(ScaleServers(num_servers))
        return self._line is not None

    def hear(self) -> list[Message]:
        """Messages received since the last call."""
        received: list[Message] = []
        try:
            while self._line is not None:
                data = self._line.recv(64 * 1024)
                if not data:
                    raise ConnectionResetError
                received += [message for message, _ in self._decoder.feed(data)]
        except BlockingIOError:
            pass
        except (OSError, WireError):
            self._hang_up()
        if received:
            self._heard_at = time.monotonic()
        for message in received:
            if isinstance(message, Watching):
                self._notes = [note for note in self._notes if note.serial > message.num_noted]
        return received

    def tick(self) -> float | None:
        """Send the heartbeat when due, kill a silent coordinator; returns the seconds until the next call."""
        if self.pid is None:
            return None
        now = time.monotonic()
        if now >= self._heard_at + self._liveness.coordinator_dead_after_s:
            self._warm.signal(self.pid, signal.SIGKILL)
            self._heard_at = now
        if now >= self._heartbeat_at + self._liveness.heartbeat_interval_s:
            self._heartbeat_at = now
            if self._line is None:
                self._watch()
            else:
                self._say(Watch())
        return max(0.0, self._heartbeat_at + self._liveness.heartbeat_interval_s - now)

    def signal(self, signum: signal.Signals) -> None:
        if self.pid is not None:
            self._warm.signal(self.pid, signum)

    def close(self) -> None:
        """Close everything. The coordinator must have exited."""
        self.exited()
        self._write_notes()
        self._log.close()
        system.close_way(self.way_in)
        self._listener.close()
        if self._tcp_listener is not None:
            self._tcp_listener.close()

    def __enter__(self) -> CoordinatorHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write_notes(self) -> None:
        """Write entries that the coordinator did not: the journal is free now."""
        if not self._notes or not self._spec.journal:
            return
        with contextlib.suppress(JournalFailed):  # for example a full disk: the job has ended all the same
            journal = Journal(Path(self._spec.journal), launch=self._spec.launch)
            try:
                num_noted = journal.load().num_noted
                journal.write([note for note in self._notes if note.serial > num_noted])
            finally:
                journal.close()

    def _watch(self) -> None:
        self._heartbeat_at = time.monotonic()
        # If the listener's queue is full, the next tick tries again.
        with contextlib.suppress(OSError):
            self._line = unix.connect(system.path_of_way(self.way_in), timeout_s=CONNECT_TIMEOUT_S)
            self._line.setblocking(False)
            self._decoder = Decoder()
            self._selector.register(self._line, selectors.EVENT_READ, self)
            self._say(Watch(), *self._facts.values(), *self._notes)

    def _say(self, *messages: Message) -> None:
        if self._line is not None:
            try:
                self._line.sendall(b"".join(b"".join(encode(message)) for message in messages))
            except OSError:
                self._hang_up()

    def _hang_up(self) -> None:
        if self._line is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._line)
            self._line.close()
            self._line = None
