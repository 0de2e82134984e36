"""A server's line to the coordinator: never waits, and is made anew where it breaks.

Decides when to try again and when to give up. What is said on it, and what
follows from it, is for whoever owns it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time

from shoal.errors import CoordinatorLost, WireError
from shoal.runtime.transport import unix
from shoal.runtime.transport.framing import Decoder, encode
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.server_coordinator import JoinServer

RECONNECT_S = 30.0
"""A coordinator that was killed is back within a second; one that is not back after so long is lost."""

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
        reconnect_s: float = RECONNECT_S,
    ) -> None:
        self._path, self._selector, self._reconnect_s = path, selector, reconnect_s
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
        """What the coordinator has said."""
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
        if self._sock is None and now - self._broken_since > self._reconnect_s:
            raise CoordinatorLost(
                path=self._path,
                operation=f"server-{self._join.number}",
                reason=f"nobody answered for {now - self._broken_since:.0f} s",
            )

    @property
    def wait_s(self) -> float | None:
        """How long until `tick` has something to do."""
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
