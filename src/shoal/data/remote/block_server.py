"""Block server: serves the files of one host to the others, and fills its host's cache from theirs.

There is one per host, in whichever of its workers took the lock first; when that worker dies the
lock is free, and the next worker that needs a block takes it. It holds no state that cannot be
rebuilt: the cache is on disk, and workers introduce their files anew over each new connection.

Only workers of the job are served, by their certificates. A host's own workers declare its files; a
worker of another host may ask for blocks of those files, and for the outputs of map-reduce tasks,
and for nothing else.
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
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from shoal.data.files import FileInfo, SharedFiles
from shoal.data.remote import blocks
from shoal.data.remote.blocks import FileBlock, HostCache, num_blocks, routes
from shoal.data.remote.peers import LIMITS, BlockConnection, ConnectionPool, PeerHosts
from shoal.data.remote.runs import SharedRuns
from shoal.errors import DataError, FileLost, ShoalError, WireError
from shoal.runtime import events
from shoal.runtime.transport import framing
from shoal.runtime.transport.framing import Bytes
from shoal.runtime.transport.messages.blocks import (
    AskBlock,
    AskFiles,
    AskRun,
    BlockAt,
    BlockIs,
    BlockKept,
    BlockRefused,
    BlocksNoted,
    FetchBlock,
    FetchRun,
    FilesAre,
    NeedBlocks,
    ShareFiles,
    ShareRun,
    SpreadFiles,
    TakeBlock,
    UseCache,
    WantBlocks,
    WhichBlocks,
)
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.tls import Identity, PlainStream, TlsStream

FETCH_TIMEOUT_S = 60.0
"""Time for which a block is requested from any host before the reader gets an error."""

WINDOW = 16
"""Blocks requested from hosts at once while files are spread: blocks obtained otherwise meanwhile are not sent."""

_COMING_TIMEOUT_S = 10.0  # two hosts that wait for each other's block stop here, and ask its source
_RELAYS = 8  # blocks waiting to be forwarded; more block the sender

INTRODUCTION_TIMEOUT_S = 10.0
"""Time-out of the handshake and the first message of a connection."""

MAX_STRANGERS = 64
"""Connections that have not identified themselves; of more the oldest is closed."""

MAX_AWAITED = 1 << 14
"""Blocks expected from others; beyond this all are forgotten, and fetched when needed."""

_OF_OWN_HOST = (UseCache, ShareFiles, NeedBlocks, FetchBlock, SpreadFiles, ShareRun, FetchRun)
_OF_ANY_HOST = (AskFiles, AskBlock, WhichBlocks, TakeBlock, AskRun)


class BlockServer:
    """Serves until it is closed. All methods but `close` run in its own threads."""

    def __init__(self, hosts: PeerHosts) -> None:
        self._hosts = hosts
        self._cache = HostCache(hosts.folder() / "blocks")
        self._cache_use: UseCache | None = None
        self._files = SharedFiles()
        self._runs = SharedRuns()
        self._shared: dict[str, list[FileInfo]] = {}
        self._own: dict[tuple[str, str], FileInfo] = {}  # by url and stamp: what may be read from here
        self._needed: dict[tuple[str, str], set[int]] = {}
        self._awaited: set[FileBlock] = set()  # that others were told to send
        self._given: dict[FileBlock, list[int]] = {}  # to which hosts, the newest last
        self._coming: dict[FileBlock, Future[str]] = {}
        self._spread: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        self._lines = ConnectionPool(hosts.credentials)
        self._incarnations: dict[int, int] = {}  # by rank: the newest that spoke
        self._relays: queue.Queue[tuple[FileBlock, Bytes, list[int]] | None] = queue.Queue(_RELAYS)
        self._is_closed = False
        self._connections: set[TlsStream | PlainStream] = set()
        self._strangers: deque[TlsStream | PlainStream] = deque()
        self._threads: list[threading.Thread] = []
        self.sent_bytes = 0
        self._listener = hosts.listen()
        self._start(self._accept)
        self._start(self._relay)
        hosts.publish(self._listener)

    def close(self) -> None:
        """Stop serving; returns when all threads are gone."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in list(self._connections):
            _hang_up(connection)
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
        while True:
            try:
                connection = self._hosts.credentials.accept(self._listener)
            except OSError:
                if self._is_closed:
                    return
                time.sleep(0.01)  # out of descriptors, or the connection is gone already
                continue
            with self._lock:
                self._connections.add(connection)
                self._strangers.append(connection)
                if len(self._strangers) > MAX_STRANGERS:
                    _hang_up(self._strangers.popleft())
            self._start(self._serve, connection)

    def _serve(self, connection: TlsStream | PlainStream) -> None:
        with connection:
            try:
                received = framing.read_message(connection, limits=LIMITS, timeout_s=INTRODUCTION_TIMEOUT_S)
                caller = connection.identity
                self._admit(caller)
                with self._lock, contextlib.suppress(ValueError):
                    self._strangers.remove(connection)
                connection.settimeout(None)
                while True:
                    message, frames = received
                    answer, frame = self.answer(caller, message, frames[0] if frames else b"")
                    framing.send_message(connection, answer, () if frame is None else (frame,), limits=LIMITS)
                    self.sent_bytes += 0 if frame is None else len(frame)
                    received = framing.read_message(connection, limits=LIMITS)
            except (EOFError, WireError, OSError):
                pass  # the client is gone, invalid, or of another job
            finally:
                with self._lock, contextlib.suppress(ValueError):
                    self._connections.discard(connection)
                    self._strangers.remove(connection)

    def _admit(self, caller: Identity) -> None:
        """Refuse, by WireError, what is no worker of this job, and one that was replaced."""
        self._hosts.home_of(caller)
        with self._lock:
            newest = max(self._incarnations.get(caller.number, 0), caller.incarnation)
            self._incarnations[caller.number] = newest
        if caller.incarnation < newest:
            raise WireError(f"{caller.name} was replaced: incarnation {newest} has spoken")

    def answer(self, caller: Identity, message: Message, frame: Bytes) -> tuple[Message, Bytes | None]:
        """Answer one request. A host's own workers have more rights than others'."""
        home = self._hosts.home_of(caller)
        try:
            if isinstance(message, _OF_OWN_HOST) and home == self._hosts.mine:
                return self._answer_own(message), None
            if isinstance(message, _OF_ANY_HOST):
                return self._answer_any(home, message, frame)
        except (ShoalError, OSError) as error:
            return BlockRefused(str(error)[:4000]), None
        return BlockRefused(
            f"the block server of host {self._hosts.mine} does not answer {type(message).__name__} of {caller.name}"
        ), None

    def _answer_own(self, message: Message) -> Message:
        match message:
            case UseCache():
                self._use_cache(message)
            case ShareFiles(where, files):
                self._share(where, [FileInfo(*each) for each in files])
            case NeedBlocks(url, stamp, numbers):
                self._needed[url, stamp] = set(numbers)
            case FetchBlock(url, stamp, number, sources):
                return BlockKept(self._fetch(FileBlock(url, stamp, number), sources))
            case SpreadFiles(how, where):
                self._begin_spreading(how, where)
            case ShareRun():
                self._runs.share(message)
            case FetchRun(_, host):
                return self._runs.fetch(message, lambda asked: self._ask(host, asked))
        return BlocksNoted()

    def _answer_any(self, home: int, message: Message, frame: Bytes) -> tuple[Message, Bytes | None]:
        match message:
            case AskFiles(where):
                if where not in self._shared:
                    return BlockRefused("nobody at this host has opened them yet"), None
                return FilesAre([(*info,) for info in self._shared[where]]), None
            case AskBlock():
                return self._serve_block(home, message)
            case WhichBlocks(url, stamp, first, last):
                return WantBlocks(self._wanted(url, stamp, first, min(last, first + WINDOW - 1))), None
            case TakeBlock(url, stamp, number, route):
                self._accept_block(FileBlock(url, stamp, number), frame, list(route))
            case AskRun():
                return self._runs.serve(message)
        return BlocksNoted(), None

    def _use_cache(self, asked: UseCache) -> None:
        with self._lock:
            if self._cache_use is None:
                self._cache = HostCache(Path(asked.directory), max_bytes=asked.max_bytes)
                self._cache_use = asked
        if asked != self._cache_use:
            raise DataError(
                f"blocks of this host are kept in {self._cache_use.directory}, and a second dataset wants them in "
                f"{asked.directory}, or another limit. Nothing was read; give all datasets of a job the same cache_directory= "
                "and cache_bytes=."
            )

    def _share(self, where: str, files: list[FileInfo]) -> None:
        with self._lock:
            self._shared[where] = files
            self._own |= {(info.url, info.stamp): info for info in files}
        if where.startswith("central"):  # the stamps of resident files are fingerprints, not the disk's
            for info in files:
                self._files.remember(info)

    def _serve_block(self, home: int, ask: AskBlock) -> tuple[Message, Bytes | None]:
        block = FileBlock(ask.url, ask.stamp, ask.number)
        with self._lock:
            info = self._own.get((ask.url, ask.stamp))
            is_own = info is not None and ask.number < num_blocks(info.num_bytes)
            if is_own:
                given = self._given.setdefault(block, [])
                others = [host for host in given if host != home]
                if home in given:
                    given.remove(home)
                given.append(home)
                if others and not ask.insist:
                    # It was sent once already; its holder passes it on.
                    return BlockAt(others[-1]), None
            coming = None if is_own else self._coming.get(block)
        if coming is not None:
            # Still in transfer to this host: the redirected client came too early.
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
        begin = block.number * blocks.BLOCK_BYTES
        return self._files.read(block.url, begin, min(begin + blocks.BLOCK_BYTES, info.num_bytes))

    def _fetch(self, block: FileBlock, sources: Sequence[int]) -> str:
        """Fetch the block into the cache; returns its source. Concurrent requests share one fetch."""
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
        """The block and its giver; or None and the reason."""
        answer, data = self._ask(source, AskBlock(*block))
        match answer:
            case BlockIs():
                return data, "source"
            case BlockAt(host):
                answer, data = self._ask(host, AskBlock(*block))
                if isinstance(answer, BlockIs):
                    return data, f"host {host}"
                answer, data = self._ask(source, AskBlock(*block, insist=True))
                if isinstance(answer, BlockIs):
                    return data, "source"
        return None, answer.reason if isinstance(answer, BlockRefused) else str(answer)

    def _ask(self, host: int, message: Message, frame: Bytes | None = None) -> tuple[Message, Bytes]:
        try:
            server = self._hosts.server_of(host)
            if server is None:
                return BlockRefused("its block server is not there yet"), b""
            return self._lines.ask(server, message, frame)
        except (OSError, ShoalError) as error:
            self._hosts.forget(host)
            return BlockRefused(f"its block server does not answer ({error})"), b""

    def _wanted(self, url: str, stamp: str, first: int, last: int) -> list[int]:
        if (url, stamp) in self._own:
            return []
        needed = self._needed.get((url, stamp))
        wanted = [
            number
            for number in range(first, last + 1)
            if (needed is None or number in needed) and not self._cache.has(FileBlock(url, stamp, number))
        ]
        with self._lock:
            if len(self._awaited) > MAX_AWAITED:
                self._awaited.clear()
            self._awaited |= {FileBlock(url, stamp, number) for number in wanted}
        return wanted

    def _accept_block(self, block: FileBlock, data: Bytes, route: list[int]) -> None:
        with self._lock:
            if block not in self._awaited:
                raise DataError(
                    f"host {self._hosts.mine} has not asked for block {block.number} of {block.url}"
                )
            self._awaited.remove(block)
        if not self._cache.has(block):
            self._cache.keep(block, data)
        if route := [host for host in dict.fromkeys(route) if host in self._hosts.others]:
            self._relays.put((block, data, route))

    def _relay(self) -> None:
        while (relay := self._relays.get()) is not None:
            self._send_along(*relay)

    def _send_along(self, block: FileBlock, data: Bytes, route: list[int]) -> None:
        """Send to the first host on the route that accepts it. A skipped host asks when it needs it."""
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
            time.sleep(0.02)  # that host's script has not come here yet
        return ()


# Of this process, by their host's folder: the block server and its lock.
_servers: dict[Path, tuple[BlockServer, int]] = {}


def connect_block_server(hosts: PeerHosts, *, timeout_s: float) -> BlockConnection:
    """Connection to this host's block server, which this process may become."""
    deadline, pause_s = time.monotonic() + timeout_s, 0.001
    while True:
        server = hosts.server_of(hosts.mine)
        if server is not None:
            try:
                return BlockConnection(server, hosts.credentials)
            except (OSError, WireError):
                pass  # it died; its lock is free
        if not (hosts.may_serve and _become_block_server(hosts)):
            if time.monotonic() > deadline:
                raise DataError(
                    f"host {hosts.mine} has a block server of its data that has not listened for {timeout_s:g} s, and nobody can "
                    "take its place while it lives. Nothing was lost; look for a worker of this job that is stopped or "
                    "very busy, and end it."
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.1)


class OwnBlockServer:
    """The block server of this host, as its workers and their children use it. Thread-safe.

    Introductions are repeated to a new one that took over.
    """

    def __init__(self, hosts: PeerHosts, *, timeout_s: float) -> None:
        self._hosts, self._timeout_s = hosts, timeout_s
        self._told: dict[tuple[str, str], Message] = {}
        self._line: tuple[int, BlockConnection] | None = None  # with the process that made it
        self._lock = threading.Lock()

    def introduce(self, what: tuple[str, str], message: Message) -> None:
        """Say this before anything else, on every new connection."""
        self._told[what] = message

    def tell(self, what: tuple[str, str], message: Message) -> None:
        """Say something new."""
        if self._told.get(what) != message:
            self._told[what] = message
            answer = self.ask(message)
            if isinstance(answer, BlockRefused):
                raise DataError(answer.reason)

    def has_told(self, what: tuple[str, str]) -> bool:
        return what in self._told

    def ask(self, message: Message) -> Message:
        """Its answer, or that of its successor; OSError if none answers in time."""
        deadline = time.monotonic() + self._timeout_s
        with self._lock:
            while True:
                try:
                    return self._connected().ask(message, timeout_s=self._timeout_s + 10.0)[0]
                except OSError:
                    self.close()
                    if time.monotonic() > deadline:
                        raise

    def ensure_connected(self) -> None:
        with self._lock:
            self._connected()

    def close(self) -> None:
        if self._line is not None:
            self._line[1].close()
            self._line = None

    def _connected(self) -> BlockConnection:
        if self._line is None or self._line[0] != os.getpid():
            line = connect_block_server(self._hosts, timeout_s=self._timeout_s)
            self._line = os.getpid(), line
            for message in list(self._told.values()):
                answer, _ = line.ask(message)
                if isinstance(answer, BlockRefused):
                    raise DataError(answer.reason)
        return self._line[1]


def close_block_servers() -> None:
    """End the block servers of this process. At exit, and in tests."""
    for folder in list(_servers):
        close_block_server(folder)


def close_block_server(folder: Path) -> None:
    """End one of them, and let another process take its place."""
    server, lock = _servers.pop(folder)
    server.close()
    os.close(lock)


def _become_block_server(hosts: PeerHosts) -> bool:
    folder = hosts.folder()
    if folder in _servers:
        return False  # it is starting, or closing
    lock = os.open(folder / "keeper.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return False
    _servers[folder] = BlockServer(hosts), lock
    return True


def _hang_up(connection: TlsStream | PlainStream) -> None:
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # TLS's own would drop its state under a reader


def _close_in_child() -> None:
    # A lock inherited by a child would outlive its parent, and so would an unserved socket.
    for server, lock in _servers.values():
        server.release_after_fork()
        os.close(lock)
    _servers.clear()


os.register_at_fork(after_in_child=_close_in_child)
atexit.register(close_block_servers)
