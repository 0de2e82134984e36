"""Further connections of a link between hosts: large frames are divided into blocks, one for each connection.

Messages, tables and small frames stay on the first connection, and with them the order of
everything: the n-th connection carries nothing but the n-th blocks of large frames, in the order in
which the first one announces them. Each has a thread, because a TLS connection encrypts on one
core, and OpenSSL releases the GIL meanwhile. The loss of one ends the link.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence

from shoal import system
from shoal.runtime.transport.framing import Bytes

STRIPE_BYTES = 1 << 20
"""Frames from this size on are cut."""

WAKE_BYTES, WAKE_MARGIN_BYTES = 256 << 10, 64 << 10
_MOVE_BYTES = 1 << 20  # at one look
_DROPPED_AT_ONCE = 256 << 10


def bounds(nbytes: int, count: int) -> list[int]:
    """Where the blocks of a frame begin, and its end."""
    return [nbytes * number // count for number in range(count + 1)]


def wake_after(sock: socket.socket, missing: int, before: int) -> int:
    """Make a poll of a TCP socket report when much of what is missing has arrived, not every packet.

    A margin is left for what TLS has read of a record and not returned yet. Returns the setting,
    `before` the last one.
    """
    enough = min(WAKE_BYTES, max(1, missing - WAKE_MARGIN_BYTES))
    if enough != before:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, enough)
    return enough


class Stripes:
    """All connections of one link but the first. `share` and `expect` are each for one thread at a time."""

    def __init__(
        self,
        first: socket.socket,
        others: Sequence[socket.socket],
        on_sent: Callable[[], None] | None = None,
    ) -> None:
        """`first` is shut down when one of the others is lost: a thread that waits for it finds `error`.

        `on_sent` is called by a connection's thread whenever nothing is left to send.
        """
        self.num_connections = 1 + len(others)
        self.error: Exception | None = None
        self.is_closed = False
        self.lock = threading.Lock()
        self.num_unsent_bytes = 0
        self._first = first
        self._on_sent = on_sent
        self._num_missing = 0  # blocks
        self._ready = system.Wakeup()
        self._connections = [_Connection(self, sock) for sock in others]

    def __del__(self) -> None:
        """Not in `close`: another thread may be about to poll it, and the number could soon be another file's."""
        self._ready.close()

    def fileno(self) -> int:
        """Readable once all blocks of the expected frame have arrived, or none will any more."""
        return self._ready.fileno()

    def connections_for(self, nbytes: int) -> int:
        """Over how many connections a frame goes, as its table says; 0: the first alone."""
        return self.num_connections if nbytes >= STRIPE_BYTES else 0

    def share(self, frames: Sequence[Bytes]) -> list[Bytes]:
        """Send all blocks but the first of large frames; returns what is left for the first connection."""
        left: list[Bytes] = []
        for frame in frames:
            if not self.connections_for(len(frame)):
                left.append(frame)
                continue
            view, at = memoryview(frame), bounds(len(frame), self.num_connections)
            left.append(view[: at[1]])
            with self.lock:
                self.num_unsent_bytes += len(frame) - at[1]
            for number, connection in enumerate(self._connections, 1):
                connection.send(view[at[number] : at[number + 1]])
        return left

    def expect(self, frame: memoryview | None, nbytes: int) -> int:
        """Receive all blocks but the first into `frame` (None: drop them); returns the bytes of the first."""
        at = bounds(nbytes, self.num_connections)
        with self.lock:
            self._num_missing += len(self._connections)
        for number, connection in enumerate(self._connections, 1):
            begin, end = at[number], at[number + 1]
            connection.receive(frame[begin:end] if frame is not None else None, end - begin)
        return at[1]

    def is_complete(self) -> bool:
        """Whether all blocks of the expected frame have arrived."""
        with contextlib.suppress(BlockingIOError):
            self._ready.clear()
        with self.lock:
            return self._num_missing == 0

    def close(self) -> None:
        """End all connections. Afterwards nothing is written into any frame."""
        self._end(None)
        for connection in self._connections:
            connection.join()
        # Reference to the owning peer: a cycle would keep its descriptors until garbage collection.
        self._connections, self._on_sent = [], None

    # ---- called by threads of the connections --------------------------------------------------------

    def sent(self, nbytes: int) -> None:
        with self.lock:
            self.num_unsent_bytes -= nbytes
            is_all = not self.num_unsent_bytes
        if is_all and self._on_sent is not None:
            self._on_sent()

    def arrived(self) -> None:
        with self.lock:
            self._num_missing -= 1
            if self._num_missing:
                return
        self._ready.set()

    def lost(self, error: Exception) -> None:
        self._end(error)
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._first, socket.SHUT_RDWR)

    def _end(self, error: Exception | None) -> None:
        with self.lock:
            if not self.is_closed:
                self.is_closed, self.error = True, error
            for connection in self._connections:
                connection.wake()
        self._ready.set()


class _Connection:
    """One connection and its thread, which begins with the first block."""

    def __init__(self, stripes: Stripes, sock: socket.socket) -> None:
        self._stripes, self._sock = stripes, sock
        self._outgoing: deque[memoryview] = deque()
        self._incoming: deque[tuple[memoryview | None, int]] = deque()  # where to, and how much is missing
        self._wake = system.Wakeup()
        self._is_open = True
        self._wake_bytes = 1
        self._thread: threading.Thread | None = None

    def send(self, block: memoryview) -> None:
        self._outgoing.append(block)
        self._begin()

    def receive(self, into: memoryview | None, nbytes: int) -> None:
        self._incoming.append((into, nbytes))
        self._begin()

    def wake(self) -> None:
        """With the lock held."""
        if self._is_open:
            self._wake.set()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()
        elif self._is_open:
            self._close()

    def _begin(self) -> None:
        with self._stripes.lock:
            if self._thread is None and not self._stripes.is_closed:
                self._thread = threading.Thread(target=self._run, name="shoal-stripe", daemon=True)
                self._thread.start()
            self.wake()

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        try:
            while not self._stripes.is_closed:
                # A poll does not report bytes that TLS has already decrypted: read first, until there was
                # less than asked for.
                if self._incoming and self._receive_some():
                    continue
                events = select.POLLOUT if self._outgoing else 0
                if self._incoming:
                    self._wake_bytes = wake_after(self._sock, self._incoming[0][1], self._wake_bytes)
                    events |= select.POLLIN
                if events:
                    poller.register(self._sock, events)
                ready = dict(poller.poll())
                if self._wake.fileno() in ready:
                    self._wake.clear()
                if events:
                    # While idle: bytes that the peer sends ahead need no wake-up.
                    poller.unregister(self._sock)
                if self._outgoing:
                    self._send_some()
        except Exception as error:
            self._stripes.lost(error)
        finally:
            self._close()

    def _send_some(self) -> None:
        left = _MOVE_BYTES
        with contextlib.suppress(BlockingIOError):
            while self._outgoing and left > 0:
                view = self._outgoing[0]
                count = self._sock.send(view)
                left -= count
                self._stripes.sent(count)
                if count == len(view):
                    self._outgoing.popleft()
                else:
                    self._outgoing[0] = view[count:]

    def _receive_some(self) -> bool:
        """Was there as much as was asked for?"""
        into, missing = self._incoming[0]
        target = (
            into[:_MOVE_BYTES] if into is not None else memoryview(bytearray(min(missing, _DROPPED_AT_ONCE)))
        )
        try:
            count = self._sock.recv_into(target)
        except BlockingIOError:
            return False
        if not count:
            raise ConnectionError("one of several connections was closed")
        if count == missing:
            self._incoming.popleft()
            self._stripes.arrived()
        else:
            self._incoming[0] = (into[count:] if into is not None else None, missing - count)
        return count == len(target)

    def _close(self) -> None:
        with self._stripes.lock:
            self._is_open = False
            self._sock.close()
            self._wake.close()
        # Views of frames: their memory is reused once none is held.
        self._outgoing.clear()
        self._incoming.clear()
