"""Remote host as the supervisor sees it: a warm parent on another machine.

Forks, signals and exits go through the host's agent. A child's pipes and status socket are the
supervisor's own, as for a local child: forwarded output is written into them here. A host that
falls silent is lost: all its children count as killed, and its later messages are ignored.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shoal.config.liveness import LivenessConfig
from shoal.errors import WireError
from shoal.runtime.forkserver.messages import ChildExited
from shoal.runtime.transport.framing import Decoder, encode
from shoal.runtime.transport.messages.hosts import (
    AgentEnds,
    AgentLeaves,
    AgentListens,
    AgentStart,
    ChildEnded,
    ChildForked,
    ChildNotForked,
    ChildOutput,
    ChildStatus,
    EndAgent,
    ForkChild,
    Heartbeat,
    OutputTaken,
    RunSaved,
    SignalChild,
)
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.tls import TlsStream

OUTPUTS = ("stdout", "stderr", "live_stdout", "live_stderr")

MAX_UNSENT_BYTES = 64 << 20
"""An agent that leaves this much unread counts as lost."""

LAST_OUTPUT_BYTES = 1 << 20
"""Pipe capacity for output of a lost host's child: more than an agent may send unacknowledged."""

STATUS_BYTES = 16 << 20
"""The same for status packets, which the agent does not count: the supervisor reads them in every turn."""

READS_PER_TURN = 64
"""Reads per turn from one agent, so that a busy one does not starve the others."""

_ADDRESS = re.compile(r"[0-9A-Za-z:][0-9A-Za-z.:%_-]{0,252}")

_serials = itertools.count(1 << 32)
"""Numbers of remote children, in place of pids: larger than any pid, and unique over all hosts."""


@dataclass(slots=True, eq=False)
class _RemoteChild:
    serial: int
    fds: dict[str, int]  # name -> our copy of the descriptor that a local child would have
    unwritten: dict[str, deque[bytes]] = field(default_factory=dict)
    unwritten_bytes: dict[str, int] = field(default_factory=dict)
    tell_pid: Callable[[int | None], None] | None = None  # until it was called
    ended: int | None = None  # exit code, once all output is forwarded


class RemoteHost:
    """One agent's connection, registered with the supervisor's selector."""

    def __init__(
        self,
        number: int,
        incarnation: int,
        stream: TlsStream,
        *,
        address: str,
        servers: list[int],
        liveness: LivenessConfig,
        selector: selectors.BaseSelector,
    ) -> None:
        self.number, self.incarnation, self.address = number, incarnation, address
        self.ports: dict[int, int] | None = None  # of its servers, once it listens
        self.link = 0.0  # bytes per second from the head, as its agent measured them; 0: not known
        self.lost = ""  # reason, once it is lost
        self.leaves = 0  # the signal by which its agent was asked to leave
        self._ending = ""  # reason why it was told to end
        self.stopped: frozenset[int] = frozenset()
        self._stream, self._liveness, self._selector = stream, liveness, selector
        self._servers = sorted(servers)
        self._children: dict[int, _RemoteChild] = {}
        self._exits: deque[ChildExited] = deque()
        self._decoder = Decoder()
        self._unsent: deque[bytes] = deque()
        self._num_unsent = 0
        self._heard_at = self._beat_at = time.monotonic()
        stream.setblocking(False)
        selector.register(stream, selectors.EVENT_READ, self)
        self._say(AgentStart(liveness.host_heartbeat_s, liveness.host_dead_after_s, servers))

    @property
    def is_ready(self) -> bool:
        """Whether its agent has reported where it listens."""
        return self.ports is not None and not self.lost

    @property
    def has_exits(self) -> bool:
        return bool(self._exits)

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def fileno(self) -> int:
        return self._stream.fileno()

    def fork(
        self,
        role: str,
        *,
        title: str,
        spec: bytes,
        fds: Mapping[str, int],
        server: int = -1,
    ) -> int:
        """Fork a child on that host; returns its number at once. `fds` are connected as described at `OUTPUTS`."""
        serial = next(_serials)
        ours = {name: os.dup(fd) for name, fd in fds.items() if name in OUTPUTS or name == "status"}
        for fd in ours.values():
            os.set_blocking(fd, False)
        self._children[serial] = _RemoteChild(serial, ours)
        outputs = [name for name in ours if name != "status"]
        self._say(ForkChild(serial, role, title, spec, outputs, "status" in ours, server))
        return serial

    def signal(self, pid: int, signum: signal.Signals) -> None:
        if pid in self._children:
            self._say(SignalChild(pid, signum))

    def exits(self) -> list[ChildExited]:
        """Deaths since the last call, in order."""
        self._flush_outputs()
        exited = list(self._exits)
        self._exits.clear()
        return exited

    def tick(self) -> float:
        """Send the heartbeat when due, give up a silent host; returns the seconds until the next call."""
        now = time.monotonic()
        if self.lost:
            return 3600.0
        if now >= self._heard_at + self._liveness.host_dead_after_s:
            self.lose(f"nothing was heard of it for {self._liveness.host_dead_after_s:g} s")
            return 0.0
        if now >= self._beat_at + self._liveness.host_heartbeat_s:
            self._beat_at = now
            self._say(Heartbeat())
        due = min(
            self._beat_at + self._liveness.host_heartbeat_s, self._heard_at + self._liveness.host_dead_after_s
        )
        return max(0.0, due - now)

    def attend(self, mask: int) -> None:
        """Handle the selector's events for this connection."""
        if mask & selectors.EVENT_WRITE:
            self._flush()
        if self.lost or not mask & selectors.EVENT_READ:
            return
        try:
            num_reads = 0
            # The selector does not report bytes that TLS has already decrypted.
            while not self.lost and (num_reads < READS_PER_TURN or self._stream.pending()):
                num_reads += 1
                data = self._stream.recv(256 << 10)
                if not data:
                    self.lose(self._ending or "its agent hung up")
                    return
                self._heard_at = time.monotonic()
                for message, _ in self._decoder.feed(data):
                    if not self.lost:
                        self._told(message)
        except BlockingIOError:
            pass
        except (OSError, WireError) as error:
            self.lose(f"the connection to its agent broke ({error})")

    def lose(self, reason: str) -> None:
        """Give the host up: its children count as killed. Output that has arrived is forwarded."""
        if self.lost:
            return
        self.lost = reason
        num_dropped = 0
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._stream)
        self._stream.close()
        for child in list(self._children.values()):
            child.ended = -signal.SIGKILL if child.ended is None else child.ended
            _enlarge(child)
        self._flush_outputs()
        for child in list(self._children.values()):
            num_dropped += sum(len(data) for waiting in child.unwritten.values() for data in waiting)
            self._bury(child)
        if num_dropped:
            self.lost += f"; {num_dropped:,} bytes of output that nobody read in time are not in the logs"

    def when_forked(self, serial: int, tell: Callable[[int | None], None]) -> None:
        """Call with the pid of a child on its host, once known; None if the fork failed."""
        if serial in self._children:
            self._children[serial].tell_pid = tell

    def tell_saved(self) -> None:
        """Tell the agent that there is a new checkpoint to copy."""
        self._say(RunSaved())

    def end(self, exit_code: int, reason: str) -> None:
        """Tell the agent that the job is over. It hangs up when none of the job's processes is left there."""
        self._ending = reason
        self._say(EndAgent(exit_code, reason[:4000]))

    # ---- messages -------------------------------------------------------------------------------

    def _told(self, message: Message) -> None:
        match message:
            case Heartbeat(stopped):
                self.stopped = frozenset(stopped)
            case AgentEnds(reason):
                self.lose(f"its agent ends: {reason}")
                return
            case AgentLeaves(signum):
                self.leaves = signum
            case AgentListens(address, ports, link):
                self._listens(address, ports)
                self.link = link
            case ChildForked(serial, pid):
                if (child := self._children.get(serial)) is not None:
                    _tell_pid(child, pid)
            case ChildNotForked(serial, reason):
                if (child := self._children.get(serial)) is not None:
                    self._output(
                        child, "stderr", f"could not be forked on host {self.number}: {reason}\n".encode()
                    )
                    child.ended = 1
            case ChildOutput(serial, name, data):
                if (child := self._children.get(serial)) is not None:
                    self._output(child, name, data)
            case ChildStatus(serial, packet):
                if (child := self._children.get(serial)) is not None:
                    self._output(child, "status", packet)
            case ChildEnded(serial, code):
                if (child := self._children.get(serial)) is not None:
                    child.ended = code
            case _:
                raise WireError(f"an agent said {type(message).__name__}")
        self._flush_outputs()

    def _listens(self, address: str, ports: Mapping[int, int]) -> None:
        """Validate the reported ports: they become part of addresses, and every server must be among them."""
        if self.ports is not None:
            raise WireError("an agent said twice where it listens")
        if not _ADDRESS.fullmatch(address):
            raise WireError(f"an agent listens at {address[:60]!r}, which is no address")
        if sorted(ports) != self._servers or not all(0 < port < 1 << 16 for port in ports.values()):
            raise WireError("an agent listens for other servers than it was told, or at no port")
        self.address, self.ports = address, dict(ports)

    def _output(self, child: _RemoteChild, name: str, data: bytes) -> None:
        if name not in child.fds:
            return
        waiting = child.unwritten_bytes.get(name, 0) + len(data)
        if waiting > (STATUS_BYTES if name == "status" else LAST_OUTPUT_BYTES):
            raise WireError(f"an agent sent {waiting:,} bytes of {name} before any of it was taken")
        child.unwritten_bytes[name] = waiting
        child.unwritten.setdefault(name, deque()).append(data)

    def _flush_outputs(self) -> None:
        """Write as much as the supervisor's own pipes take; a child counts as gone once all its output is forwarded."""
        for child in list(self._children.values()):
            for name, waiting in child.unwritten.items():
                while waiting:
                    try:
                        count = os.write(child.fds[name], waiting[0])
                    except BlockingIOError:
                        break
                    except OSError:  # the reader is gone
                        count = len(waiting[0])
                    child.unwritten_bytes[name] -= len(waiting[0]) if name == "status" else count
                    if name == "status" or count == len(waiting[0]):
                        waiting.popleft()
                    else:
                        waiting[0] = waiting[0][count:]
                    if name != "status" and not self.lost:
                        self._say(OutputTaken(child.serial, name, count))
            if child.ended is not None and not any(child.unwritten.values()):
                self._bury(child)

    def _bury(self, child: _RemoteChild) -> None:
        if self._children.pop(child.serial, None) is None:
            return
        for fd in child.fds.values():
            os.close(fd)
        assert child.ended is not None
        _tell_pid(child, None)
        self._exits.append(ChildExited(child.serial, child.ended))

    def _say(self, message: Message) -> None:
        if self.lost:
            return
        packet = b"".join(encode(message))
        self._unsent.append(packet)
        self._num_unsent += len(packet)
        self._flush()
        if self._num_unsent > MAX_UNSENT_BYTES:
            self.lose("its agent does not read")

    def _flush(self) -> None:
        try:
            while self._unsent:
                sent = self._stream.sendmsg(list(itertools.islice(self._unsent, 64)))
                self._num_unsent -= sent
                while sent:
                    first = self._unsent.popleft()
                    if sent < len(first):
                        self._unsent.appendleft(first[sent:])
                        break
                    sent -= len(first)
        except BlockingIOError:
            pass
        except OSError as error:
            self.lose(f"the connection to its agent broke ({error})")
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.modify(self._stream, events, self)


def _tell_pid(child: _RemoteChild, pid: int | None) -> None:
    tell, child.tell_pid = child.tell_pid, None
    if tell is not None:
        tell(pid)


def _enlarge(child: _RemoteChild) -> None:
    """Enlarge pipes that are not read before the child is reaped, so that all received output fits."""
    for name, waiting in child.unwritten.items():
        if waiting and name != "status":
            with contextlib.suppress(OSError):  # more than this user may have
                fcntl.fcntl(child.fds[name], fcntl.F_SETPIPE_SZ, LAST_OUTPUT_BYTES)
