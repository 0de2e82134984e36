"""A server's links to the other servers: what its core sends to them, and what they answer.

Never waits. Frames are copied into the memory shared with that server; where
there is no room, what is to be sent waits here, in order, until answers have
given some back. Which server holds what is not decided here.
"""

from __future__ import annotations

import selectors
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shoal.errors import ArenaFull, LinkLost
from shoal.ps.server.actions import Send
from shoal.runtime.transport.arena import ArenaConfig, Buffer
from shoal.runtime.transport.framing import Bytes
from shoal.runtime.transport.messages.client_server import Hello
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.server_coordinator import ServerView
from shoal.runtime.transport.shared_client import INLINE_BYTES, Link


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
