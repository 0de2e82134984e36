"""The block server of a host: serves blocks of files that lie here and fetches those that lie elsewhere.

One per host, in whichever of its workers took the leader lock first; when that
worker dies the lock is free, and the next process that needs a block takes it.
It holds nothing that cannot be told again: the cache is on disk, and workers
introduce their files anew over each new connection.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import queue
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from shoal.data.files import FileInfo, SharedFiles
from shoal.data.remote.block_client import LIMITS, BlockConnection, ConnectionPool, Hosts
from shoal.data.remote.blocks import BLOCK_BYTES, FileBlock, HostCache, num_blocks, routes
from shoal.errors import DataError, FileLost, ShoalError, WireError
from shoal.runtime import events
from shoal.runtime.transport import framing, tcp
from shoal.runtime.transport.framing import Bytes
from shoal.runtime.transport.messages.blocks import (
    AskBlock,
    AskFiles,
    BlockAt,
    BlockIs,
    BlockKept,
    BlockRefused,
    BlocksNoted,
    FetchBlock,
    FilesAre,
    NeedBlocks,
    ShareFiles,
    SpreadFiles,
    TakeBlock,
    WantBlocks,
    WhichBlocks,
)
from shoal.runtime.transport.messages.message import Message

FETCH_TIMEOUT_S = 60.0
"""How long a block is asked for anywhere before the reader is told that it cannot be had."""

WINDOW = 16
"""Blocks that hosts are asked about at once while files are spread: what they got otherwise meanwhile is not sent."""

_COMING_TIMEOUT_S = 10.0  # two hosts that send each other for one block end it here, and ask its source
_RELAYS = 8  # blocks that wait to be given on; more make the sender wait


class BlockServer:
    """Serves until it is closed. All methods but `close` run in its own threads."""

    def __init__(self, hosts: Hosts, cache: HostCache) -> None:
        self._hosts, self._cache = hosts, cache
        self._files = SharedFiles()
        self._shared: dict[str, list[FileInfo]] = {}
        self._own: dict[tuple[str, str], FileInfo] = {}  # by url and stamp: what may be read from here
        self._needed: dict[tuple[str, str], set[int]] = {}
        self._given: dict[FileBlock, list[int]] = {}  # to which hosts, the newest last
        self._coming: dict[FileBlock, Future[str]] = {}
        self._spread: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        self._lines = ConnectionPool()
        self._relays: queue.Queue[tuple[FileBlock, Bytes, list[int]] | None] = queue.Queue(_RELAYS)
        self._is_closed = False
        self._connections: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self.sent_bytes = 0
        self._listener = tcp.listen()
        self._start(self._accept)
        self._start(self._relay)
        hosts.publish(self._listener.getsockname()[:2])

    def close(self) -> None:
        """Stop serving; returns when all threads are gone."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(queue.Full):
            self._relays.put(None, timeout=1.0)
        for thread in self._threads:
            thread.join(5.0)
        self._lines.close()

    def release_after_fork(self) -> None:
        """In a forked child: the sockets are the parent's, and must not outlive it here."""
        self._listener.close()
        for connection in self._connections:
            connection.close()

    def _start(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name="shoal-block-server", daemon=True)  # type: ignore[arg-type]  # a method
        self._threads = [each for each in self._threads if each.is_alive()]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection = tcp.accept(self._listener, timeout_s=5.0)
            except WireError:
                continue  # a stranger
            except OSError:
                return
            self._connections.add(connection)
            self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(None)
            try:
                while True:
                    message, frames = framing.read_message(connection, limits=LIMITS)
                    answer, frame = self._answer(message, frames[0] if frames else b"")
                    framing.send_message(connection, answer, () if frame is None else (frame,), limits=LIMITS)
                    self.sent_bytes += 0 if frame is None else len(frame)
            except (EOFError, WireError, OSError):
                pass  # whoever asked is gone, or makes no sense
            finally:
                self._connections.discard(connection)

    def _answer(self, message: Message, frame: Bytes) -> tuple[Message, Bytes | None]:
        try:
            match message:
                case ShareFiles(where, files):
                    self._share(where, [FileInfo(*each) for each in files])
                    return BlocksNoted(), None
                case AskFiles(where):
                    if where not in self._shared:
                        return BlockRefused("nobody at this host has opened them yet"), None
                    return FilesAre([(*info,) for info in self._shared[where]]), None
                case NeedBlocks(url, stamp, numbers):
                    self._needed[url, stamp] = set(numbers)
                    return BlocksNoted(), None
                case FetchBlock(url, stamp, number, sources):
                    return BlockKept(self._fetch(FileBlock(url, stamp, number), sources)), None
                case AskBlock():
                    return self._give(message)
                case WhichBlocks(url, stamp, first, last):
                    return WantBlocks(self._wanted(url, stamp, first, last)), None
                case TakeBlock(url, stamp, number, route):
                    self._take(FileBlock(url, stamp, number), frame, list(route))
                    return BlocksNoted(), None
                case SpreadFiles(how, where):
                    self._begin_spreading(how, where)
                    return BlocksNoted(), None
        except (ShoalError, OSError) as error:
            return BlockRefused(str(error)), None
        return BlockRefused(f"a block server does not answer {type(message).__name__}"), None

    def _share(self, where: str, files: list[FileInfo]) -> None:
        with self._lock:
            self._shared[where] = files
            self._own |= {(info.url, info.stamp): info for info in files}
        if where.startswith("central"):  # the stamps of resident files are fingerprints, not the disk's
            for info in files:
                self._files.remember(info)

    def _give(self, ask: AskBlock) -> tuple[Message, Bytes | None]:
        block = FileBlock(ask.url, ask.stamp, ask.number)
        with self._lock:
            given = self._given.setdefault(block, [])
            others = [host for host in given if host != ask.asker]
            is_own = (ask.url, ask.stamp) in self._own
            if is_own and others and not ask.insist:
                # It has left here once; whoever has it gives it on.
                given.append(ask.asker)
                return BlockAt(others[-1]), None
            if is_own:
                given.append(ask.asker)
            coming = None if is_own else self._coming.get(block)
        if coming is not None:
            # On its way to us: whoever was sent here came a moment too early.
            with contextlib.suppress(Exception):
                coming.result(_COMING_TIMEOUT_S)
        data = self._cache.read_all(block)
        if data is None and is_own:
            data = self._read(block)
        if data is None:
            return BlockRefused(
                f"host {self._hosts.mine} does not hold block {ask.number} of {ask.url}"
            ), None
        return BlockIs(), data

    def _read(self, block: FileBlock) -> bytes:
        info = self._own[block.url, block.stamp]
        begin = block.number * BLOCK_BYTES
        return self._files.read(block.url, begin, min(begin + BLOCK_BYTES, info.num_bytes))

    def _fetch(self, block: FileBlock, sources: Sequence[int]) -> str:
        """Have the block in the cache; returns where it was. Several who ask at once wait for one answer."""
        with self._lock:
            coming = self._coming.get(block)
            if coming is None:
                if self._cache.has(block):
                    return "cache"
                mine = self._coming[block] = Future()
        if coming is not None:
            return coming.result(FETCH_TIMEOUT_S + 5.0)
        try:
            data, origin = self._get(block, sources)
            self._cache.keep(block, data)
        except BaseException as error:
            mine.set_exception(error)
            raise
        else:
            mine.set_result(origin)
            return origin
        finally:
            with self._lock:
                del self._coming[block]

    def _get(self, block: FileBlock, sources: Sequence[int]) -> tuple[Bytes, str]:
        deadline, pause_s = time.monotonic() + FETCH_TIMEOUT_S, 0.01
        while True:
            reasons = []
            for source in sources:
                data, told = self._get_from(source, block)
                if data is not None:
                    return data, told
                reasons.append(f"host {source}: {told}")
            if time.monotonic() > deadline or self._is_closed:
                raise FileLost(
                    url=block.url, reason=f"block {block.number} could not be had from {'; '.join(reasons)}"
                )
            time.sleep(pause_s)  # a host's block server may have died, and a new one come
            pause_s = min(2 * pause_s, 0.5)

    def _get_from(self, source: int, block: FileBlock) -> tuple[Bytes | None, str]:
        """The block and who gave it; or None and why not."""
        answer, data = self._ask(source, AskBlock(self._hosts.mine, *block))
        match answer:
            case BlockIs():
                return data, "source"
            case BlockAt(host):
                answer, data = self._ask(host, AskBlock(self._hosts.mine, *block))
                if isinstance(answer, BlockIs):
                    return data, f"host {host}"
                answer, data = self._ask(source, AskBlock(self._hosts.mine, *block, insist=True))
                if isinstance(answer, BlockIs):
                    return data, "source"
        return None, answer.reason if isinstance(answer, BlockRefused) else str(answer)

    def _ask(self, host: int, message: Message, frame: Bytes | None = None) -> tuple[Message, Bytes]:
        address = self._hosts.address(host)
        if address is None:
            return BlockRefused("its block server is not there yet"), b""
        try:
            return self._lines.ask(address, message, frame)
        except (OSError, WireError) as error:
            return BlockRefused(f"its block server does not answer ({error})"), b""

    def _wanted(self, url: str, stamp: str, first: int, last: int) -> list[int]:
        if (url, stamp) in self._own:
            return []
        needed = self._needed.get((url, stamp))
        return [
            number
            for number in range(first, last + 1)
            if (needed is None or number in needed) and not self._cache.has(FileBlock(url, stamp, number))
        ]

    def _take(self, block: FileBlock, data: Bytes, route: list[int]) -> None:
        if not self._cache.has(block):
            self._cache.keep(block, data)
        if route:
            self._relays.put((block, data, route))

    def _relay(self) -> None:
        while (relay := self._relays.get()) is not None:
            self._send_along(*relay)

    def _send_along(self, block: FileBlock, data: Bytes, route: list[int]) -> None:
        """To the first on the route that takes it. Whoever is left out asks for it when it needs it."""
        while route and not self._is_closed:
            answer, _ = self._ask(route[0], TakeBlock(*block, route[1:]), data)
            if isinstance(answer, BlocksNoted):
                self.sent_bytes += len(data)
                return
            route = route[1:]

    def _begin_spreading(self, how: str, where: str) -> None:
        with self._lock:
            if (how, where) in self._spread:
                return
            self._spread.add((how, where))
        self._start(self._spread_files, how, self._shared.get(where, []))

    def _spread_files(self, how: str, files: list[FileInfo]) -> None:
        for info in files:
            total = num_blocks(info.num_bytes)
            for first in range(0, total, WINDOW):
                last = min(first + WINDOW, total) - 1
                wanted = {host: self._ask_wanted(host, info, first, last) for host in self._hosts.others}
                for number, ways in routes(how, wanted):
                    block = FileBlock(info.url, info.stamp, number)
                    for way in ways:
                        if self._is_closed:
                            return
                        with self._lock:
                            self._given.setdefault(block, []).extend(way)
                        self._send_along(block, self._read(block), way)
        events.emit("files-spread", how=how, num_files=len(files), sent_bytes=self.sent_bytes)

    def _ask_wanted(self, host: int, info: FileInfo, first: int, last: int) -> Sequence[int]:
        deadline = time.monotonic() + FETCH_TIMEOUT_S
        while not self._is_closed and time.monotonic() < deadline:
            answer, _ = self._ask(host, WhichBlocks(info.url, info.stamp, first, last))
            if isinstance(answer, WantBlocks):
                return answer.numbers
            time.sleep(0.02)  # that host's script is not there yet
        return ()


_servers: dict[
    Path, tuple[BlockServer, int]
] = {}  # of this process, by their host's folder: the block server and its lock


def connect_block_server(hosts: Hosts, cache: HostCache, *, timeout_s: float) -> BlockConnection:
    """A line to my host's block server, which may become this process."""
    deadline, pause_s = time.monotonic() + timeout_s, 0.001
    while True:
        address = hosts.address(hosts.mine)
        if address is not None:
            try:
                return BlockConnection(address)
            except (OSError, WireError):
                pass  # it died; its lock is free
        if not _become_block_server(hosts, cache):
            if time.monotonic() > deadline:
                raise DataError(
                    f"host {hosts.mine} has a block server of its data that has not listened for {timeout_s:g} s, and nobody can "
                    "take its place while it lives. Nothing was lost; look for a worker of this job that is stopped or "
                    "very busy, and end it."
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.1)


def close_block_servers() -> None:
    """End the block servers of this process. At exit, and in tests."""
    for folder in list(_servers):
        close_block_server(folder)


def close_block_server(folder: Path) -> None:
    """End one of them, and let another process take its place."""
    server, lock = _servers.pop(folder)
    server.close()
    os.close(lock)


def _become_block_server(hosts: Hosts, cache: HostCache) -> bool:
    folder = hosts.folder()
    if folder in _servers:
        return False  # it is starting, or closing
    lock = os.open(folder / "keeper.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return False
    _servers[folder] = BlockServer(hosts, cache), lock
    return True


def _close_in_child() -> None:
    # A lock that a child inherits would outlive its parent, and so would a socket nobody serves.
    for server, lock in _servers.values():
        server.release_after_fork()
        os.close(lock)
    _servers.clear()


os.register_at_fork(after_in_child=_close_in_child)
atexit.register(close_block_servers)
