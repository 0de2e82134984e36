"""Host agent, `shoal join`: a warm parent on one host of a job, under the head's command.

It forks, reaps, forwards output and status, and sends heartbeats. It makes one decision of its own:
when the head has been silent for too long, or hangs up, it kills its children and exits, because by
then the head counts them as dead and has started replacements.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from shoal import system
from shoal.cluster.hosts.joining import Admission, retried
from shoal.cluster.hosts.run_copy import RunCopy
from shoal.cluster.launch import roles
from shoal.cluster.supervisor.sockets import listen_unnamed
from shoal.cluster.supervisor.supervisor import SignalInbox
from shoal.cluster.supervisor.warm_parent import WarmParent
from shoal.cluster.supervisor.worker_handle import MAX_STATUS_BYTES
from shoal.cluster.worker import process as worker_process
from shoal.config.launch import RunConfig
from shoal.errors import ClusterError, ShoalError, WireError
from shoal.runtime.health import Health
from shoal.runtime.transport import tls
from shoal.runtime.transport.framing import Decoder, encode, read_message, send_message
from shoal.runtime.transport.messages.hosts import (
    AgentEnds,
    AgentLeaves,
    AgentListens,
    AgentReady,
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

CREDIT_BYTES = 256 << 10
"""Output per pipe that the head may leave unacknowledged; beyond it the child blocks, as on a full local pipe."""

CONNECT_TIMEOUT_S, TRY_TO_CONNECT_S = 15.0, 30.0
"""Of one connection to the head, and of all: what the measurement of a very slow link has put into its queues comes first."""

COPY_EVERY_S = 3.0
"""Interval for copying the journal and other files that change without a checkpoint."""

RECEIVE_BYTES = 256 << 10


@dataclass(slots=True, eq=False)
class _Child:
    """A process of the job on this host."""

    serial: int
    pid: int
    pipes: dict[int, str]  # descriptor -> name
    status: socket.socket | None
    credit: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Reader:
    """One descriptor of a child, in the selector."""

    child: _Child
    fd: int


@dataclass(slots=True)
class _ServerSeat:
    """Listening sockets of a server that may run here: they outlive its process."""

    listener: socket.socket
    way_in: int
    tcp: socket.socket


class HostAgent:
    """Serves one head until the job is over; `run` returns the exit code of the job."""

    def __init__(
        self,
        admission: Admission,
        head: str,
        warm: WarmParent,
        *,
        run_dir: Path,
        folder: Path | None,
        copy: RunCopy | None = None,
        role: str = "",
        link: float = 0.0,
        health: Health | None = None,
    ) -> None:
        """`folder`: copy of the script's folder; None: same path as on the head.

        `copy`: copy of the run directory; None: it is the head's own. `role`: the only role that
        may run here, for a service. `link`: bytes per second from the head; 0: not known. `health`
        is called in every turn.
        """
        self._role, self._link, self._health = role, link, health or Health(role or "host")
        self._admission, self._head, self._warm = admission, head, warm
        self._copy, self._has_news, self._is_over = copy, threading.Event(), False
        self._run_dir, self._folder = run_dir, folder
        self._children: dict[int, _Child] = {}  # by serial
        self._by_pid: dict[int, _Child] = {}
        self._servers: dict[int, _ServerSeat] = {}
        self._selector = selectors.DefaultSelector()
        self._decoder = Decoder()
        self._unsent: deque[bytes] = deque()
        self._stream: TlsStream
        self._start: AgentStart
        self._heard_at = self._beat_at = 0.0
        self._has_listened = self.is_leaving = False
        self.leaving_code = 0  # exit code for the signal by which this host was asked to leave
        self._ending: EndAgent | None = None
        self.reason = ""
        self.is_head_lost = False
        self._copied: deque[tuple[ForkChild, str]] = deque()  # ready to be forked, or the reason why not
        self._wake, self._waker = socket.socketpair()

    def run(self, inbox: SignalInbox) -> int:
        with contextlib.ExitStack() as stack:
            stack.callback(self._close)
            self._connect()
            self._selector.register(self._stream, selectors.EVENT_READ, self._stream)
            self._selector.register(self._warm, selectors.EVENT_READ, self._warm)
            self._selector.register(inbox, selectors.EVENT_READ, inbox)
            self._selector.register(self._wake, selectors.EVENT_READ, self._wake)
            self._heard_at = self._beat_at = time.monotonic()
            if self._copy is not None:
                threading.Thread(target=self._keep_copy, name="copy of the run", daemon=True).start()
            while self._ending is None:
                try:
                    self._turn(inbox)
                except ClusterError as error:  # from the warm parent
                    self._leave(3, str(error))
        self.reason = self._ending.reason
        return self._ending.exit_code

    # ---- the head -------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Present the certificate and receive this host's assignment.

        Done before the warm parent is ready, so that from here on the head notices when this host
        is lost.
        """
        admission = self._admission
        number, incarnation = admission.number, admission.credentials.incarnation

        def connect() -> tuple[TlsStream, Message]:
            stream = admission.credentials.connect(
                self._head,
                expect="head",
                timeout_s=CONNECT_TIMEOUT_S,
                source=admission.own_address if admission.interfaces else None,
            )
            assert isinstance(stream, TlsStream)
            try:
                send_message(stream, AgentReady(number, incarnation, os.getpid()))
                return stream, read_message(stream)[0]
            except BaseException:
                stream.close()
                raise

        self._stream, start = retried(connect, TRY_TO_CONNECT_S)
        if not isinstance(start, AgentStart):
            raise ClusterError(f"the head at {self._head} did not say what this host is to do ({start}).")
        self._start = start
        for server in start.servers:
            listener, way_in = listen_unnamed(roles.way_in(server))
            self._servers[server] = _ServerSeat(listener, way_in, tls.listen(admission.own_address))
        self._stream.setblocking(False)

    def _listen(self) -> None:
        """Report that this host can fork, and the addresses of its servers."""
        self._has_listened = True
        self._health.waits_for = ""
        ports = {server: seat.tcp.getsockname()[1] for server, seat in self._servers.items()}
        self._say(AgentListens(self._admission.advertised, ports, self._link))

    def _turn(self, inbox: SignalInbox) -> None:
        now = time.monotonic()
        self._health.beat(
            shoal_service_joins=self._admission.credentials.incarnation + 1,
            shoal_service_coordinator_silent_seconds=round(now - self._heard_at, 3),
        )
        if not self._has_listened:
            self._warm.seconds_to_start()
        if now >= self._heard_at + self._start.dead_after_s:
            self.is_head_lost = True
            self._leave(3, f"the head was silent for {self._start.dead_after_s:g} s")
            return
        if now >= self._beat_at + self._start.heartbeat_interval_s:
            self._beat_at = now
            stopped = [child.serial for child in self._children.values() if system.is_stopped(child.pid)]
            self._say(Heartbeat(stopped))
        wait_s = (
            min(self._heard_at + self._start.dead_after_s, self._beat_at + self._start.heartbeat_interval_s)
            - now
        )
        for key, mask in self._selector.select(max(0.0, wait_s)):
            if key.data is self._stream:
                if mask & selectors.EVENT_WRITE:
                    self._flush()
                if mask & selectors.EVENT_READ:
                    self._hear()
            elif isinstance(key.data, _Reader):
                self._forward(key.data)
            elif key.data is self._wake:
                self._wake.recv(4096)
                while self._copied:
                    command, problem = self._copied.popleft()
                    if problem:
                        self._say(ChildNotForked(command.serial, problem[:4000]))
                    else:
                        self._fork(command)
            elif key.data is inbox:
                for signum in inbox.take():
                    self._asked(signum)
        for exited in self._warm.exits():
            self._exited(exited.pid, exited.code)
        if self._warm.is_ready and not self._has_listened:
            self._listen()

    def _hear(self) -> None:
        try:
            while True:
                data = self._stream.recv(RECEIVE_BYTES)
                if not data:
                    self.is_head_lost = True
                    self._end(3, "the head hung up")
                    return
                self._heard_at = time.monotonic()
                for message, _ in self._decoder.feed(data):
                    self._obey(message)
        except BlockingIOError:
            pass
        except (OSError, WireError) as error:
            self.is_head_lost = True
            self._end(3, f"the connection to the head was lost ({error})")

    def _obey(self, message: Message) -> None:
        match message:
            case ForkChild():
                self._begin_fork(message)
            case SignalChild(serial, signum):
                if (child := self._children.get(serial)) is not None:
                    self._warm.signal(child.pid, signal.Signals(signum))
            case OutputTaken(serial, name, nbytes):
                if (child := self._children.get(serial)) is not None and name in child.credit:
                    self._give_credit(child, name, nbytes)
            case EndAgent(exit_code, reason):
                self._end(exit_code, reason)
            case RunSaved():
                self._has_news.set()
            case Heartbeat():
                pass
            case _:
                raise WireError(f"the head said {type(message).__name__}, which is not for an agent")

    def _say(self, message: Message) -> None:
        self._unsent.append(b"".join(encode(message)))
        self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                sent = self._stream.sendmsg(list(self._unsent)[:64])
                while sent:
                    first = self._unsent.popleft()
                    if sent < len(first):
                        self._unsent.appendleft(first[sent:])
                        break
                    sent -= len(first)
        except BlockingIOError:
            pass
        except OSError as error:
            self.is_head_lost = True
            self._end(3, f"the connection to the head was lost ({error})")
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.modify(self._stream, events, self._stream)

    def _leave(self, exit_code: int, reason: str) -> None:
        """Leave without a request from the head; report the reason if the head can still be reached."""
        self._say(AgentEnds(reason[:4000]))
        self._end(exit_code, reason)

    def _asked(self, signum: signal.Signals) -> None:
        """Leave the job as by `shoal leave`; a second request leaves at once."""
        self.leaving_code = 128 + signum
        if self.is_leaving or not self._has_listened:
            self._leave(128 + signum, f"it was stopped by {signum.name}")
            return
        self.is_leaving = True
        say(
            "leaving: all workers save, and those of this host go on on the others; Ctrl-C again to end now (the others then "
            "repeat what was not saved)"
        )
        self._say(AgentLeaves(signum))

    def _end(self, exit_code: int, reason: str) -> None:
        if self._ending is None:
            self._ending = EndAgent(exit_code, reason)

    # ---- children -------------------------------------------------------------------------------

    def _begin_fork(self, command: ForkChild) -> None:
        """Fork at once, or after the copy is complete if the child may read saved state that this host lacks."""
        copy = self._copy
        if copy is None or not _reads_saved(command):
            self._fork(command)
            return

        def sync() -> None:
            problem = ""
            try:
                copy.sync(self._head, self._admission.credentials, in_background=False)
            except (ShoalError, OSError, EOFError) as error:
                problem = f"what the run has saved could not be copied to {copy.path}: {error}"
            self._copied.append((command, problem))
            with contextlib.suppress(OSError):  # the agent has ended
                self._waker.send(b"\0")

        threading.Thread(target=sync, name="copy of saved files", daemon=True).start()

    def _keep_copy(self) -> None:
        """Copy new checkpoints as soon as the head announces them, and its journal at intervals."""
        assert self._copy is not None
        told = ""
        while not self._is_over:
            self._has_news.clear()
            try:
                self._copy.sync(self._head, self._admission.credentials, in_background=True)
                told = ""
            except (ShoalError, OSError, EOFError) as error:
                # Training goes on: the copy serves a lost head, and the next attempt may succeed.
                if str(error) != told and not self._is_over and self._ending is None:
                    say(f"the run could not be copied to {self._copy.path}: {error}; it is tried again")
                told = str(error)
            self._has_news.wait(COPY_EVERY_S)

    def _fork(self, command: ForkChild) -> None:
        theirs: dict[str, int] = {}
        pipes: dict[int, str] = {}
        status: socket.socket | None = None
        their_status: socket.socket | None = None
        try:
            for name in command.outputs:
                ours, theirs[name] = os.pipe()
                os.set_blocking(ours, False)
                pipes[ours] = name
            if command.has_status:
                status, their_status = system.packet_pair()
                status.setblocking(False)
                theirs["status"] = their_status.fileno()
            fds = dict(theirs)
            for number, seat in self._servers.items():
                fds[roles.way_in(number)] = seat.way_in
            if command.server >= 0:
                seat = self._servers[command.server]
                fds.update(listener=seat.listener.fileno(), tcp_listener=seat.tcp.fileno())
            if self._role and command.role != self._role:
                raise ClusterError(
                    f"a {self._role} service was asked for a {command.role}, which it does not run."
                )
            spec = self._localised(command)
            pid = self._warm.fork(command.role, title=command.title, spec=spec, fds=fds)
        except (ClusterError, OSError, KeyError, msgspec.MsgspecError) as error:
            for fd in pipes:
                os.close(fd)
            if status is not None:
                status.close()
            self._say(ChildNotForked(command.serial, str(error)[:4000]))
            return
        finally:
            for name in command.outputs:
                if name in theirs:
                    os.close(theirs[name])
            if their_status is not None:
                their_status.close()
        child = _Child(command.serial, pid, pipes, status, dict.fromkeys(command.outputs, CREDIT_BYTES))
        self._children[child.serial] = self._by_pid[pid] = child
        self._health.processes = {**self._health.processes, _name(command.title): pid}
        for fd in pipes:
            self._selector.register(fd, selectors.EVENT_READ, _Reader(child, fd))
        if status is not None:
            self._selector.register(status, selectors.EVENT_READ, _Reader(child, status.fileno()))
        self._say(ChildForked(child.serial, pid))

    def _localised(self, command: ForkChild) -> bytes:
        """Spec adapted to this host: environment, run directory, and the script's location."""
        environment, admission = dict(os.environb), self._admission
        if command.role == "server":
            server = roles.decode_spec(command.spec)
            return roles.encode_spec(
                msgspec.structs.replace(
                    server, env=environment, run_dir=str(self._run_dir), interfaces=admission.interfaces
                )
            )
        worker = worker_process.decode_spec(command.spec)
        script, cwd = _places(worker.script, worker.cwd, self._folder)
        return worker_process.encode_spec(
            msgspec.structs.replace(
                worker,
                job=replace(
                    worker.job,
                    run_dir=self._run_dir,
                    host_address=admission.advertised,
                    bind_address=admission.own_address,
                    interfaces=admission.interfaces,
                ),
                env=environment,
                cwd=cwd,
                script=script,
            )
        )

    def _forward(self, reader: _Reader) -> None:
        child = reader.child
        if child.status is not None and reader.fd == child.status.fileno():
            try:
                packet = child.status.recv(MAX_STATUS_BYTES)
            except OSError:
                packet = b""
            if packet:
                self._say(ChildStatus(child.serial, packet))
            else:
                self._selector.unregister(reader.fd)
            return
        name = child.pipes[reader.fd]
        if not child.credit[name]:
            self._selector.unregister(reader.fd)  # until the head has acknowledged earlier output
            return
        data = _read(reader.fd, child.credit[name])
        if data:
            child.credit[name] -= len(data)
            self._say(ChildOutput(child.serial, name, data))
        elif data is not None:
            self._selector.unregister(reader.fd)

    def _give_credit(self, child: _Child, name: str, nbytes: int) -> None:
        child.credit[name] += nbytes
        for fd, each in child.pipes.items():
            if each == name and fd not in self._selector.get_map():
                self._selector.register(fd, selectors.EVENT_READ, _Reader(child, fd))

    def _exited(self, pid: int, code: int) -> None:
        child = self._by_pid.pop(pid, None)
        if child is None:
            return
        del self._children[child.serial]
        self._health.processes = {name: each for name, each in self._health.processes.items() if each != pid}
        # Forward remaining output first; unread output is bounded by the size of a pipe.
        if child.status is not None:
            with contextlib.suppress(OSError):
                while packet := child.status.recv(MAX_STATUS_BYTES):
                    self._say(ChildStatus(child.serial, packet))
            self._unregister(child.status.fileno())
            child.status.close()
        for fd, name in child.pipes.items():
            for _ in range(16):
                data = _read(fd, 64 << 10)
                if not data:
                    break
                self._say(ChildOutput(child.serial, name, data))
            self._unregister(fd)
            os.close(fd)
        self._say(ChildEnded(child.serial, code))

    def _unregister(self, fd: int) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(fd)

    def _close(self) -> None:
        """End every process of the job on this host."""
        self._is_over = True
        self._health.waits_for, self._health.processes = "it is not part of a job", {}
        self._health.rests()
        self._has_news.set()
        self._warm.close()
        if hasattr(self, "_stream"):
            self._stream.close()
        for child in self._children.values():
            for fd in child.pipes:
                os.close(fd)
            if child.status is not None:
                child.status.close()
        for seat in self._servers.values():
            seat.listener.close()
            seat.tcp.close()
            system.close_way(seat.way_in)
        self._selector.close()
        self._wake.close()
        self._waker.close()


def localised_config(text: bytes, folder: Path | None) -> bytes:
    """config.json with the script's place on this host."""
    config = msgspec.json.decode(text, type=RunConfig)
    script, cwd = _places(config.script, config.cwd, folder)
    return msgspec.json.encode(replace(config, script=script, cwd=cwd))


def _places(script: str, cwd: str, folder: Path | None) -> tuple[str, str]:
    """Script and working directory on this host, from those on the head."""
    if folder is not None:
        below = os.path.relpath(cwd, os.path.dirname(script))
        script = str(folder / os.path.basename(script))
        cwd = str(folder if below.startswith("..") else folder / below)
    return script, cwd if os.path.isdir(cwd) else os.path.dirname(script)


def _name(title: str) -> str:
    """Name of a process by its title: `shoal worker 1 [click]` is worker-1."""
    return "-".join(title.split()[1:3])


def _reads_saved(command: ForkChild) -> bool:
    """Whether a process continues from the run's saved state."""
    if command.role != "worker":
        return False
    job = worker_process.decode_spec(command.spec).job
    return job.resume or job.incarnation > 0


def _read(fd: int, nbytes: int) -> bytes | None:
    """Empty at the end of the pipe, None where there is nothing yet."""
    try:
        return os.read(fd, min(nbytes, 64 << 10))
    except BlockingIOError:
        return None


def say(text: str) -> None:
    with contextlib.suppress(OSError):  # started by ssh from a head that was lost
        print(f"shoal: {text}", file=sys.stderr, flush=True)
