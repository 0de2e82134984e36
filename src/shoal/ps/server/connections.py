"""Connections that a server makes: one to every other server it replicates to, one to the coordinator.

Neither blocks; both are made anew where they break. They decide when to retry
and when to give up, not what is said.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shoal.errors import ArenaFull, CoordinatorLost, LinkLost, WireError
from shoal.ps.server.actions import Send
from shoal.runtime.transport import unix
from shoal.runtime.transport.arena import ArenaConfig, Buffer
from shoal.runtime.transport.framing import Bytes, Decoder, encode
from shoal.runtime.transport.messages.client_server import Hello
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.server_coordinator import JoinServer, ServerView
from shoal.runtime.transport.shared_client import INLINE_BYTES, Link

# ---- other servers -------------------------------------------------------------------------------


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
    """One link per server, made when there is something to say and closed when its server is another one."""

    def __init__(
        self,
        paths: Mapping[int, str],
        hello: Hello,
        selector: selectors.BaseSelector,
        *,
        answered: Callable[[int, Message], None],
        lost: Callable[[int], None],
        arena: ArenaConfig | None = None,
    ) -> None:
        self._paths, self._hello, self._selector, self._arena = paths, hello, selector, arena
        self._answered, self._lost = answered, lost
        self._ways: dict[int, _Way] = {}
        self._incarnations: dict[int, int] = {}

    @property
    def bytes_reserved(self) -> int:
        """Address space of all that is shared with other servers."""
        return sum(way.link.arena.bytes_reserved for way in self._ways.values())

    def owns(self, key: selectors.SelectorKey) -> bool:
        """Is this key for `attend`?"""
        return isinstance(key.data, _Way)

    def view(self, view: ServerView) -> None:
        """Servers that are gone, or are another incarnation, are not spoken to any more."""
        self._incarnations = dict(view.incarnations)
        for way in list(self._ways.values()):
            if self._incarnations.get(way.server) != way.incarnation:
                self._close(way)

    def send(self, action: Send) -> None:
        """Send, or keep until there is room."""
        way = self._ways.get(action.server) or self._connect(action.server)
        if way is None:
            self._lost(action.server)
            return
        way.waiting.append(action)
        self._push(way)

    def attend(self, key: selectors.SelectorKey) -> None:
        """Take answers in, send what is left."""
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
        """End all of them."""
        for way in list(self._ways.values()):
            self._close(way)

    def _connect(self, server: int) -> _Way | None:
        if server not in self._paths:
            return None
        try:
            link = Link(self._paths[server], peer=f"server-{server}", arena=self._arena)
            hello = link.send(self._hello, is_blocking=False)
        except LinkLost:
            return None
        way = _Way(server, self._incarnations.get(server, 0), link, hello)
        self._ways[server] = way
        self._selector.register(link, way.events, way)
        return way

    def _push(self, way: _Way) -> None:
        """Send what waits, as far as there is room for it."""
        try:
            while way.waiting and not way.link.has_unsent:
                self._send_one(way, way.waiting[0])
                way.waiting.popleft()
        except ArenaFull:
            if not way.buffers:
                raise  # there is nothing whose answer could make room
        except LinkLost:
            self._close(way)
            self._lost(way.server)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if way.link.has_unsent else 0)
        if events != way.events:
            way.events = events
            self._selector.modify(way.link, events, way)

    def _send_one(self, way: _Way, action: Send) -> None:
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
    """One connection at a time; JoinServer is the first sentence on each.

    What could not be said before a line broke is said on the next one: the
    coordinator takes every sentence of a server twice without harm.
    """

    def __init__(
        self,
        path: str,
        selector: selectors.BaseSelector,
        *,
        number: int,
        incarnation: int,
        reconnect_timeout_s: float,
    ) -> None:
        self._path, self._selector, self._reconnect_timeout_s = path, selector, reconnect_timeout_s
        self._join = JoinServer(number=number, incarnation=incarnation, pid=os.getpid())
        self._sock: socket.socket | None = None
        self._decoder = Decoder()
        self._unsent = bytearray()
        self._untold: list[Message] = []  # said since the line broke
        self._broken_since = time.monotonic()
        self._try_at = 0.0
        self._connect()

    def owns(self, key: selectors.SelectorKey) -> bool:
        """Is this key for `attend`?"""
        return key.data is self

    def tell(self, message: Message) -> None:
        """Say it as soon as there is somebody to hear it."""
        if self._sock is None:
            self._untold.append(message)
            return
        self._unsent += b"".join(encode(message))
        self._flush()

    def attend(self, mask: int) -> list[Message]:
        """Read; the messages of the coordinator."""
        heard: list[Message] = []
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
        """Try again, now and then; CoordinatorLost where that has lasted too long."""
        now = time.monotonic()
        if self._sock is not None or now < self._try_at:
            return
        self._connect()
        if self._sock is None and now - self._broken_since > self._reconnect_timeout_s:
            raise CoordinatorLost(
                path=self._path,
                operation=f"server-{self._join.number}",
                reason=f"nobody answered for {now - self._broken_since:.0f} s",
            )

    @property
    def wait_s(self) -> float | None:
        """Seconds until `tick` has something to do; None: nothing."""
        return None if self._sock is not None else max(0.0, self._try_at - time.monotonic())

    def close(self) -> None:
        """End it."""
        if self._sock is not None:
            self._break()

    def _connect(self) -> None:
        self._try_at = time.monotonic() + RETRY_S
        try:
            sock = unix.connect(self._path, timeout_s=CONNECT_TIMEOUT_S)
        except (OSError, WireError):
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
