"""A server as a process: its memory limit, its connections, its event loop around the core, its start and end.

One thread, one selector, sockets that never block. The loop only decides priorities: requests
first, then a piece of filling new replicas. The process listens on a socket that the supervisor
owns, so clients may connect before it runs, and a restarted server serves the same address with
empty memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import selectors
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from shoal import system
from shoal.cluster.launch import threads
from shoal.cluster.launch.roles import ServerSpec, decode_spec
from shoal.config import placement
from shoal.errors import ArenaFull, ConfigError, CoordinatorLost, LinkLost, TablesFull, WireError
from shoal.ps.server.actions import Action, DropPeer, Reply, Request, Send, Tell
from shoal.runtime import failpoints, page_lock, recorder
from shoal.runtime.memory import available_bytes
from shoal.runtime.transport import endpoint, interfaces, tls
from shoal.runtime.transport.arena import Buffer
from shoal.runtime.transport.framing import Bytes, Decoder, encode
from shoal.runtime.transport.messages import client_server as msg
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.server_coordinator import (
    JoinedServer,
    JoinServer,
    PingServer,
    RankDead,
    RankJoined,
    ServerAlive,
    ServerView,
)
from shoal.runtime.transport.messages.worker_coordinator import JoinRefused, Leave
from shoal.runtime.transport.shared_client import INLINE_BYTES, Link
from shoal.runtime.transport.shared_server import Listener

if TYPE_CHECKING:
    from shoal.ps.server.core import ServerCore

LOOK_EVERY_S = 0.02  # at what this process holds: one file of the kernel's, 20 µs

LOOK_AROUND_EVERY_S = 0.2
"""Interval of reading what all others have left, through every control group: 300 µs. In between, this
process's own growth is subtracted.
"""

SHARE = 0.8  # of the memory that is available when a server starts

RESERVE_SHARE = 0.05
"""Reserve. Once less than this is available, whichever process uses the rest, no more memory is taken."""

GROWING = (msg.DeclareTable, msg.DeclareDense, msg.PushRows, msg.PushDense, msg.WriteRows, msg.WriteChunk)
"""Requests of clients that may make a server hold more than before."""

BULKY = (msg.ReadRows, msg.ReadChunk, msg.WriteRows, msg.WriteChunk, msg.CopySlot)
"""Requests that move whole tables, with copies on the way that no step needs again."""

GIVE_BACK_AFTER_S = 0.2  # without any of those: then they are over for now

T = TypeVar("T")


class MemoryGuard:
    """Tracks the memory of this process, and refuses growth beyond the limit."""

    def __init__(
        self, name: str, limit_bytes: int = 0, *, shared_bytes: Callable[[], int] = lambda: 0
    ) -> None:
        """`limit_bytes` 0: a share of what is available now. `shared_bytes()` counts what others read besides its own."""
        self.name, self._shared_bytes = name, shared_bytes
        available = available_bytes()
        self.limit_bytes = limit_bytes or int(SHARE * available) + private_bytes()
        self.reserve_bytes = int(RESERVE_SHARE * available)
        self._held, self._looked_at = 0, float("-inf")
        self._available, self._looked_around_at = available, float("-inf")
        self._bulky_at: float | None = None

    def problem(self, nbytes: int = 0) -> str | None:
        """Reason why `nbytes` more cannot be taken, as a paragraph."""
        self._measure()
        if self._held + nbytes > self.limit_bytes:
            return (
                f"{self.name} holds {self._held:,} bytes of its own and was to take {nbytes:,} more, where its limit is "
                f"{self.limit_bytes:,} (server_memory_bytes). Nothing of this request was done, and all that is held is "
                "whole; use more servers (--servers), smaller tables or optimizer state, or raise server_memory_bytes where "
                "the machine has room."
            )
        if self._available < self.reserve_bytes:
            return (
                f"{self.name} holds {self._held:,} bytes, and this machine has only {self._available:,} left, less than the "
                f"{self.reserve_bytes:,} that must stay free lest the system ends a process. Nothing of this request was "
                "done, and all that is held is whole; end what else uses the memory, use smaller tables, or a larger machine."
            )
        return None

    def refusal(self, message: Message) -> str | None:
        """Reason why this request is refused, as a paragraph."""
        if isinstance(message, BULKY):
            self._bulky_at = time.monotonic()
        return self.problem() if isinstance(message, GROWING) else None

    def tick(self, now: float) -> None:
        if self._bulky_at is not None and now - self._bulky_at >= GIVE_BACK_AFTER_S:
            self._bulky_at = None
            give_back()

    def _measure(self) -> None:
        now = time.monotonic()
        if now - self._looked_at < LOOK_EVERY_S:
            return
        held = private_bytes() + self._shared_bytes()
        if now - self._looked_around_at >= LOOK_AROUND_EVERY_S:
            self._available, self._looked_around_at = available_bytes(), now
        else:
            self._available -= held - self._held
        self._held, self._looked_at = held, now


def private_bytes() -> int:
    """Memory that only this process has: neither files nor what clients share with it."""
    return system.private_bytes()


def give_back() -> None:
    """Make malloc return freed pages to the system, also those between used ones."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; others do so by themselves, or cannot
    if trim is not None:
        trim(0)


# ---- other servers -------------------------------------------------------------------------------


class Dial(Generic[T]):
    """A connection to another host, made in a thread while the loop goes on.

    Two servers that waited for each other's handshakes in their loops would deadlock.
    """

    def __init__(self, make: Callable[[], T], discard: Callable[[T], None]) -> None:
        self._make, self._discard = make, discard
        self._ours, self._theirs = socket.socketpair()
        self._made: T | None = None
        self._lock = threading.Lock()
        self._is_over = False
        threading.Thread(target=self._run, name="shoal-dial", daemon=True).start()

    def fileno(self) -> int:
        """Readable once it is made, or failed."""
        return self._ours.fileno()

    def take(self) -> T | None:
        """The connection; None where it could not be made."""
        with self._lock:
            self._is_over = True
            self._ours.close()
            return self._made

    def cancel(self) -> None:
        made = self.take()
        if made is not None:
            self._discard(made)

    def _run(self) -> None:
        made: T | None = None
        with contextlib.suppress(OSError, WireError, LinkLost):
            made = self._make()
        with self._lock:
            self._made = made
            if self._is_over and made is not None:
                self._discard(made)
        self._theirs.close()


@dataclass(slots=True, eq=False)
class _Dialled:
    """A server on another host to which a connection is being made."""

    server: int
    incarnation: int
    dial: Dial[Link]
    waiting: deque[Send] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class _Way:
    """The connection to one server."""

    server: int
    incarnation: int
    link: Link
    hello: int  # its ticket
    waiting: deque[Send] = field(default_factory=deque)
    buffers: dict[int, list[Buffer]] = field(default_factory=dict)  # ticket -> what its frames lie in
    events: int = selectors.EVENT_READ


class ServerLinks:
    """One link per server, made on first use and closed when its server is replaced."""

    def __init__(
        self,
        addresses: Mapping[int, str],
        hello: msg.Hello,
        selector: selectors.BaseSelector,
        *,
        answered: Callable[[int, Message], None],
        lost: Callable[[int], None],
        own_host: str = "",
    ) -> None:
        self._ways_in, self._hello, self._selector = addresses, hello, selector
        self._addresses, self._own_host = dict(addresses), own_host
        self._answered, self._lost = answered, lost
        self._ways: dict[int, _Way] = {}
        self._dialled: dict[int, _Dialled] = {}
        self._incarnations: dict[int, int] = {}

    def owns(self, key: selectors.SelectorKey) -> bool:
        return isinstance(key.data, _Way | _Dialled)

    def view(self, view: ServerView) -> None:
        """Drop links to servers that are gone or replaced."""
        self._incarnations = dict(view.incarnations)
        self._addresses = endpoint.of_servers(self._ways_in, view, self._own_host)
        for way in list(self._ways.values()):
            if self._incarnations.get(way.server) != way.incarnation:
                self._close(way)
        for dialled in list(self._dialled.values()):
            if self._incarnations.get(dialled.server) != dialled.incarnation:
                self._hang_up(dialled)

    def send(self, action: Send) -> None:
        """Send, or queue until there is room."""
        if action.server not in self._ways and tls.is_remote(self._addresses.get(action.server, "")):
            self._dial(action.server).waiting.append(action)
            return
        way = self._ways.get(action.server) or self._connect(action.server)
        if way is None:
            self._lost(action.server)
            return
        way.waiting.append(action)
        self._push(way)

    def attend(self, key: selectors.SelectorKey) -> None:
        if isinstance(key.data, _Dialled):
            if self._dialled.get(key.data.server) is key.data:
                self._answer_dial(key.data)
            return
        way: _Way = key.data
        if self._ways.get(way.server) is not way:
            return  # closed earlier in this round
        try:
            replies = way.link.poll()
        except LinkLost:
            self._close(way)
            self._lost(way.server)
            return
        for reply in replies:
            for buffer in way.buffers.pop(reply.ticket, ()):
                way.link.free(buffer)
        self._push(way)
        for reply in replies:
            if reply.ticket != way.hello:
                self._answered(way.server, reply.message)

    def close(self) -> None:
        for way in list(self._ways.values()):
            self._close(way)
        for dialled in list(self._dialled.values()):
            self._hang_up(dialled)

    def _dial(self, server: int) -> _Dialled:
        if server not in self._dialled:
            dial = Dial(lambda: self._link(server), Link.close)
            dialled = _Dialled(server, self._incarnations.get(server, 0), dial)
            self._dialled[server] = dialled
            self._selector.register(dial, selectors.EVENT_READ, dialled)
        return self._dialled[server]

    def _answer_dial(self, dialled: _Dialled) -> None:
        del self._dialled[dialled.server]
        self._selector.unregister(dialled.dial)
        link = dialled.dial.take()
        way = None if link is None else self._greet(dialled.server, link)
        if way is None:
            self._lost(dialled.server)
            return
        way.waiting = dialled.waiting
        self._push(way)

    def _hang_up(self, dialled: _Dialled) -> None:
        del self._dialled[dialled.server]
        self._selector.unregister(dialled.dial)
        dialled.dial.cancel()

    def _connect(self, server: int) -> _Way | None:
        if server not in self._addresses:
            return None
        try:
            return self._greet(server, self._link(server))
        except LinkLost:
            return None

    def _link(self, server: int) -> Link:
        return Link(self._addresses[server], peer=f"server-{server}")

    def _greet(self, server: int, link: Link) -> _Way | None:
        try:
            hello = link.send(self._hello, is_blocking=False)
        except LinkLost:
            return None
        way = _Way(server, self._incarnations.get(server, 0), link, hello)
        self._ways[server] = way
        self._selector.register(link, way.events, way)
        return way

    def _push(self, way: _Way) -> None:
        """Send queued messages, as far as there is room."""
        try:
            while way.waiting and not way.link.has_unsent:
                self._send_one(way, way.waiting[0])
                way.waiting.popleft()
        except ArenaFull:
            if not way.buffers:
                raise  # no pending answer could make room
        except LinkLost:
            self._close(way)
            self._lost(way.server)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if way.link.has_unsent else 0)
        if events != way.events:
            way.events = events
            self._selector.modify(way.link, events, way)

    def _send_one(self, way: _Way, action: Send) -> None:
        if way.link.is_remote:
            # They stay unchanged until the answer: sent without a copy.
            way.link.send(action.message, action.frames, is_blocking=False, is_lent=True)
            return
        frames: list[Buffer | Bytes] = []
        held: list[Buffer] = []
        try:
            for frame in action.frames:
                view = memoryview(frame)
                if view.nbytes <= INLINE_BYTES:
                    frames.append(view.cast("B") if view.nbytes else b"")
                    continue
                held.append(way.link.alloc(view.nbytes))
                held[-1].view[:] = view.cast("B")
                frames.append(held[-1])
        except ArenaFull:
            for buffer in held:
                way.link.free(buffer)
            raise
        ticket = way.link.send(action.message, frames, is_blocking=False)
        if held:
            way.buffers[ticket] = held

    def _close(self, way: _Way) -> None:
        if self._ways.get(way.server) is way:
            del self._ways[way.server]
            self._selector.unregister(way.link)
            way.link.close()


# ---- the coordinator -----------------------------------------------------------------------------


RETRY_S = 0.05
CONNECT_TIMEOUT_S = 1.0
RECEIVE_BYTES = 64 * 1024


class CoordinatorLine:
    """One connection at a time; JoinServer is the first message on each.

    Messages that could not be sent before a connection broke are sent on the next one: the
    coordinator accepts every message of a server twice without harm.
    """

    def __init__(self, address: str, selector: selectors.BaseSelector, spec: ServerSpec) -> None:
        self._address, self._selector = address, selector
        self._reconnect_timeout_s = spec.liveness.reconnect_timeout_s
        self._dial: Dial[socket.socket] | None = None
        self._join = JoinServer(spec.number, spec.incarnation, pid=os.getpid(), address=spec.address)
        self._sock: socket.socket | None = None
        self._decoder = Decoder()
        self._unsent = bytearray()
        self._untold: list[Message] = []  # said since the line broke
        self._broken_since = time.monotonic()
        self._try_at = 0.0
        self._connect()

    def owns(self, key: selectors.SelectorKey) -> bool:
        return key.data is self

    def tell(self, message: Message) -> None:
        """Report it as soon as the coordinator is connected."""
        if self._sock is None:
            self._untold.append(message)
            return
        self._unsent += b"".join(encode(message))
        self._flush()

    def attend(self, mask: int) -> list[Message]:
        heard: list[Message] = []
        if self._dial is not None:
            self._selector.unregister(self._dial)
            dial, self._dial = self._dial, None
            self._begin(dial.take())
            return []
        if mask & selectors.EVENT_WRITE:
            self._flush()
        if mask & selectors.EVENT_READ and self._sock is not None:
            try:
                data = self._sock.recv(RECEIVE_BYTES)
                if not data:
                    raise ConnectionError("it closed the line")
                heard = [message for message, _ in self._decoder.feed(data)]
            except BlockingIOError:
                pass
            except (OSError, WireError):
                self._break()
        return heard

    def tick(self) -> None:
        """Reconnect at intervals; CoordinatorLost if that has lasted too long."""
        now = time.monotonic()
        if self._sock is not None or now < self._try_at:
            return
        if self._dial is None:
            self._connect()
        if self._sock is None and now - self._broken_since > self._reconnect_timeout_s:
            raise CoordinatorLost(
                path=self._address,
                operation=f"server-{self._join.number}",
                reason=f"nobody answered for {now - self._broken_since:.0f} s",
            )

    @property
    def wait_s(self) -> float | None:
        """Seconds until `tick` has something to do; None: nothing."""
        is_at_rest = self._sock is not None or self._dial is not None
        return None if is_at_rest else max(0.0, self._try_at - time.monotonic())

    def close(self) -> None:
        if self._sock is not None:
            self._break()
        if self._dial is not None:
            self._selector.unregister(self._dial)
            self._dial.cancel()

    def _connect(self) -> None:
        self._try_at = time.monotonic() + RETRY_S
        if tls.is_remote(self._address):
            self._dial = Dial(self._reach, socket.socket.close)
            self._selector.register(self._dial, selectors.EVENT_READ, self)
            return
        with contextlib.suppress(OSError, WireError):
            self._begin(self._reach())

    def _reach(self) -> socket.socket:
        return endpoint.connect(self._address, expect="coordinator", timeout_s=CONNECT_TIMEOUT_S)

    def _begin(self, sock: socket.socket | None) -> None:
        if sock is None:
            return
        sock.setblocking(False)
        self._sock, self._decoder = sock, Decoder()
        untold, self._untold = self._untold, []
        self._unsent = bytearray(b"".join(part for each in (self._join, *untold) for part in encode(each)))
        self._selector.register(sock, selectors.EVENT_READ, self)
        self._flush()

    def _flush(self) -> None:
        if self._sock is None:
            return
        try:
            with contextlib.suppress(BlockingIOError):
                while self._unsent:
                    del self._unsent[: self._sock.send(self._unsent)]
        except OSError:
            self._break()
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        self._selector.modify(self._sock, events, self)

    def _break(self) -> None:
        assert self._sock is not None
        self._selector.unregister(self._sock)
        self._sock.close()
        self._sock, self._broken_since = None, time.monotonic()
        self._try_at = self._broken_since


_SPANS = {
    **dict.fromkeys((msg.PullRows, msg.PullDense, msg.ReadRows, msg.ReadChunk), recorder.PULL),
    **dict.fromkeys((msg.PushRows, msg.PushDense, msg.WriteRows, msg.WriteChunk), recorder.PUSH),
    **dict.fromkeys((msg.StepEnd, msg.Commit, msg.Replicate), recorder.APPLY),
}
"""Span kind by request. The last StepEnd of a step includes its update."""

TICK_S = 0.1
SHIP_SHARE = 0.25  # largest share of a busy server's time spent on shipping pushes to other holders
WORK_EVERY_S = 0.004  # A busy server works on new replicas at least so often


class ServerLoop:
    """Moves messages between sockets and the core. One thread, so nothing here takes a lock."""

    def __init__(self, core: ServerCore, spec: ServerSpec, fds: Mapping[str, int]) -> None:
        """`fds`: what to listen on, and where to connect to those of this host."""
        self.refusal: str | None = None  # reason why the coordinator refuses this server, if it does
        memory = MemoryGuard(
            f"server-{spec.number}", spec.server_memory_bytes, shared_bytes=lambda: core.shared_bytes
        )
        paths = endpoint.ways(fds)
        servers = {
            int(name.removeprefix("server-")): path
            for name, path in paths.items()
            if name.startswith("server-")
        }
        remote = (socket.socket(fileno=fds["tcp_listener"]), tls.mine()) if "tcp_listener" in fds else None
        self._core, self._memory = core, memory
        core.ships_at_once, self._ship_at = False, 0.0
        self._is_over = False
        self._due: deque[Action] = deque()
        self._is_at_it = False
        self._turn_ns = self._num_requests = self._queued_ns = 0
        self._selector = selectors.DefaultSelector()
        self._listener = Listener(
            socket.socket(fileno=fds["listener"]),
            self._selector,
            hear=self._handle_request,
            gone=lambda peer: self._carry_out(core.gone(peer)),
            memory_problem=lambda nbytes: memory.problem(self._listener.bytes_mapped + nbytes),
            remote=remote,
            also=_listen_at_others(spec) if remote is not None else (),
        )
        self._links = ServerLinks(
            servers,
            msg.Hello(name=f"server-{spec.number}", incarnation=spec.incarnation),
            self._selector,
            answered=lambda server, message: self._carry_out(core.answered(server, message)),
            lost=lambda server: self._carry_out(core.lost(server)),
            own_host=tls.split_address(spec.address)[0] if spec.address else "",
        )
        self._line = CoordinatorLine(paths.get("coordinator", spec.coordinator), self._selector, spec)

    def run(self, *, until_readable: socket.socket) -> None:
        """Serve until `until_readable` is readable, or the coordinator dismisses it."""
        self._selector.register(until_readable, selectors.EVENT_READ)
        has_more, worked_at, ticked_at = True, 0.0, 0.0
        while not self._is_over:
            with recorder.WAIT:
                ready = self._selector.select(0 if has_more else self._wait_s(ticked_at))
            self._turn_ns = time.monotonic_ns()
            for key, mask in ready:
                if key.fileobj is until_readable:
                    return
                self._attend(key, mask)
                self._listener.flush()
            self._ship(is_idle=not ready)
            now = time.monotonic()
            if not ready or now - worked_at >= WORK_EVERY_S:
                actions, has_more = self._core.work()
                self._carry_out(actions)
                self._listener.flush()
                worked_at = now
            if now - ticked_at >= TICK_S:
                self._tick(now)
                self._listener.flush()
                ticked_at = now

    def lock_memory(self, device: str) -> None:
        """Page-lock clients' memory, so that a device copies from and to it by DMA."""
        self._listener.lock = page_lock.lock if device.startswith("cuda") else None

    def close(self) -> None:
        """Close every socket; report rejected peers on stderr."""
        self._is_at_it = True  # further actions of the core for this are ignored
        self._line.close()
        self._links.close()
        self._listener.close()
        self._selector.close()
        if self._listener.num_refused:
            print(
                f"shoal: this server closed {self._listener.num_refused} connections that broke its rules; the last "
                f"because {self._listener.last_refusal}",
                file=sys.stderr,
            )

    def _wait_s(self, ticked_at: float) -> float:
        wait_s = max(0.0, ticked_at + TICK_S - time.monotonic())
        if self._core.has_pushes:
            return 0.0  # to see that nothing else is to be done, and ship
        return wait_s if self._line.wait_s is None else min(wait_s, self._line.wait_s)

    def _ship(self, *, is_idle: bool) -> None:
        """Ship pushes, unless requests wait and the last shipment took long: then more are batched."""
        began_at = time.monotonic()
        if not self._core.has_pushes or (began_at < self._ship_at and not is_idle):
            return
        self._carry_out(self._core.ship())
        now = time.monotonic()
        self._ship_at = now + (now - began_at) * (1 / SHIP_SHARE - 1)

    def _attend(self, key: selectors.SelectorKey, mask: int) -> None:
        if self._listener.owns(key):
            self._listener.attend(key, mask)
        elif self._links.owns(key):
            self._links.attend(key)
        elif self._line.owns(key):
            for message in self._line.attend(mask):
                self._hear_coordinator(message)

    def _tick(self, now: float) -> None:
        self._listener.tick()
        self._line.tick()
        self._memory.tick(now)
        self._carry_out(self._core.tick())

    # ---- messages -----------------------------------------------------------------------------------

    def _handle_request(self, asked: Request) -> None:
        refusal = self._memory.refusal(asked.message)
        if refusal is not None:
            self._listener.reply(asked.peer, asked.ticket, msg.PsRefused(refusal))
            return
        counts = recorder.RECORDER
        counts.received += sum(map(len, asked.frames))
        counts.sent += sum(map(len, asked.into))
        self._num_requests += 1
        self._queued_ns += time.monotonic_ns() - self._turn_ns
        with _SPANS.get(type(asked.message), recorder.WAIT):
            self._carry_out(self._core.hear(asked))

    def figures(self) -> dict[str, object]:
        """Server-specific figures of the activity record since the last call. From another thread."""
        num_requests, queued_ns = self._num_requests, self._queued_ns
        staleness, self._core.staleness = self._core.staleness, Counter()
        self._num_requests, self._queued_ns = 0, 0
        queue_s = queued_ns / num_requests / 1e9 if num_requests else 0.0
        figures = {**self._core.figures(), "requests": num_requests, "queue_s": round(queue_s, 7)}
        return figures | (
            {"staleness": {str(k): n for k, n in sorted(staleness.items())}} if staleness else {}
        )

    def _hear_coordinator(self, message: Message) -> None:
        match message:
            case ServerView():
                self._links.view(message)
                self._carry_out(self._core.view(message))
            case PingServer(number):
                self._line.tell(ServerAlive(number))
            case RankJoined(rank, incarnation):
                self._carry_out(self._core.rank_joined(rank, incarnation))
            case RankDead(rank, incarnation):
                self._carry_out(self._core.rank_dead(rank, incarnation))
            case JoinRefused(reason):
                self.refusal, self._is_over = reason, True
            case Leave():
                self._is_over = True
            case JoinedServer():
                pass  # the view itself follows
            case _:
                print(f"shoal: the coordinator said {type(message).__name__} to a server", file=sys.stderr)

    def _carry_out(self, actions: Iterable[Action]) -> None:
        """Execute actions after all earlier ones, and never inside of a decision."""
        self._due += actions
        if self._is_at_it:
            return
        self._is_at_it = True
        while self._due:
            match action := self._due.popleft():
                case Reply(peer, ticket, message, frames, fds):
                    self._listener.reply(peer, ticket, message, frames, fds)
                case Send():
                    self._links.send(action)
                case Tell(message):
                    self._line.tell(message)
                case DropPeer(peer, problem):
                    self._listener.flush()  # why it is dropped
                    self._listener.close_peer(peer, problem)
        self._is_at_it = False


# ---- the process ---------------------------------------------------------------------------------


CANNOT_GO_ON = CoordinatorLost.exit_code
"""Exit code for a server that is not wanted or has no coordinator. The reason is the last output on stderr."""


def main(spec: bytes, fds: dict[str, int]) -> int:
    """Serve until SIGTERM, or until the coordinator dismisses it."""
    told = decode_spec(spec)
    name = f"server-{told.number}"
    if told.env:
        os.environb.clear()
        os.environb.update(told.env)
    if told.server_device == placement.CPU:
        # torch's optimizers would otherwise query for a device at their first step, which takes the driver
        # a while.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    threads.use(told.num_threads)
    failpoints.arm(told.faults, process=name, incarnation=told.incarnation)
    faulthandler.enable()
    # Every segment of a client's holds a descriptor.
    system.raise_open_files()
    wake, stop = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    # The byte in the wake-up socket carries the signal.
    signal.signal(signal.SIGTERM, lambda signum, frame: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor handles Ctrl-C
    tls.use(told.credentials)
    try:
        device = placement.of_server(told.server_device, told.number)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return CANNOT_GO_ON
    loop = ServerLoop(make_core(told, device), told, fds)
    loop.lock_memory(device)
    if "status" in fds:
        recorder.RECORDER.facts = loop.figures
        recorder.start(name, told.incarnation, run_dir=told.run_dir, send=recorder.over(fds["status"]))
    try:
        loop.run(until_readable=stop)
    except (CoordinatorLost, TablesFull) as error:
        print(error, file=sys.stderr)
        return CANNOT_GO_ON
    finally:
        loop.close()
        recorder.stop()
    if loop.refusal is not None:
        print(f"shoal: the coordinator does not want {name}: {loop.refusal}", file=sys.stderr)
        return CANNOT_GO_ON
    return 0


def _listen_at_others(spec: ServerSpec) -> list[socket.socket]:
    """Sockets at the host's further interfaces, for the further connections of a link; none behind NAT."""
    if "," not in spec.interfaces:
        return []
    there = interfaces.addresses()
    own, *others = [there[name] for name in spec.interfaces.split(",") if name in there] or [""]
    if own != tls.split_address(spec.address)[0]:
        return []
    is_plain = tls.mine().scheme == tls.PLAIN
    return [tls.listen(address) for address in others if not (is_plain and tls.is_public(address))]


def make_core(told: ServerSpec, device: str = placement.CPU) -> ServerCore:
    import torch

    from shoal.config import strategy as strategies
    from shoal.config.parallel_options import TABLE_KEEP, parse_size
    from shoal.embedding.shared_rows import can_share_rows
    from shoal.embedding.tiered_rows import RowBudget
    from shoal.ps.server.core import ServerCore
    from shoal.ps.server.dense import DenseStore
    from shoal.ps.server.steps import PushFilters

    filters = PushFilters(norm_bound=told.push_norm, divides_by_staleness=told.staleness_lr)
    core = ServerCore(number=told.number, incarnation=told.incarnation, filters=filters)
    memory = MemoryGuard(
        f"server-{told.number}", told.server_memory_bytes, shared_bytes=lambda: core.shared_bytes
    )
    core.state.contents.memory_problem = memory.problem
    core.state.contents.shares_rows = can_share_rows() and strategies.parse(told.strategy).mode == "exact"
    if told.server_device != placement.CPU:
        core.state.contents.dense = DenseStore(torch.device(device))
    if told.table_memory is not None:
        directory = told.table_dir or (told.run_dir if os.path.isdir(told.run_dir) else tempfile.gettempdir())
        core.state.contents.row_budget = RowBudget(
            parse_size(told.table_memory), directory, most_uses=TABLE_KEEP[told.table_keep or "balanced"]
        )
    return core
