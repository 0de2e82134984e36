"""Files of the head for hosts without a shared file system: the script's folder (`--ship`) and the run's saved state.

The head serves them read-only, to hosts of the job alone, over separate connections; paths outside
the two folders are refused. The journal is served as one complete file, unlike the coordinator's
two.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from shoal.cluster.coordinator import journal, journal_reader
from shoal.errors import ClusterError, ConfigError, WireError
from shoal.runtime import own_files
from shoal.runtime.transport.framing import read_message, send_message
from shoal.runtime.transport.messages.hosts import (
    FileData,
    FileEntry,
    FileList,
    ListFiles,
    MeasureLink,
    ReadFile,
)
from shoal.runtime.transport.tls import Credentials, TlsStream

MAX_SHIPPED_FILES = 2000
MAX_SHIPPED_BYTES = 64 << 20
CHUNK_BYTES = 1 << 20
IDLE_S = 60.0

FIRST_TIMED_BYTES, MEASURE_LINK_S, LINK_TIMEOUT_S = 64 << 10, 0.1, 3.0
"""Of a link: the first message, the time after which none is requested, and the longest for all. A bucket of tokens at the
link, as clouds and `tbf` have, lets the first ones through at once, so the sizes double.
"""

SHIP_TRIES, SHIP_RETRY_S = 5, 1.0
"""Connections for copying the script's folder, and the pause between two: a host joins once, a connection breaks now and then."""

NOT_SHIPPED = {"__pycache__", "node_modules", "runs", "venv"}

SAVED = ("checkpoints", "best", "calls", "loop", "trained")
"""Folders of a run directory that another host copies."""

APPENDED = ("metrics.jsonl", "events.jsonl")
"""Files of it that only grow, line by line."""

CONFIG = "config.json"

NUM_CHECKPOINTS = 2
"""Newest checkpoints to copy: the second in case the first is damaged."""


class FileService:
    """The head's side."""

    def __init__(self, run_dir: Path, shipped: Path | None) -> None:
        """ConfigError where `shipped` is more than a folder of scripts."""
        self._run_dir = run_dir
        self._journal: tuple[object, bytes] = (None, b"")
        self._shipped = list(shippable(shipped)) if shipped is not None else []
        self._shipped_from = shipped

    def serve(self, stream: TlsStream, request: ListFiles | MeasureLink) -> None:
        """Answer one host until it hangs up."""
        stream.settimeout(IDLE_S)
        message: object = request
        held: dict[str, bytes] = {}  # contents as listed: files may change before they are read
        with contextlib.suppress(EOFError, OSError):
            while True:
                match message:
                    case ListFiles(is_shipped):
                        held = {} if is_shipped else self._hold()
                        entries = self._shipped if is_shipped else list(_saved(self._run_dir, held))
                        send_message(stream, FileList(entries))
                    case ReadFile(False, path, offset) if path in held:
                        send_message(stream, FileData(held[path][offset : offset + CHUNK_BYTES]))
                    case ReadFile(is_shipped, path, offset):
                        send_message(stream, FileData(self._read(is_shipped, path, offset)))
                    case MeasureLink(num_bytes):
                        send_message(stream, FileData(bytes(num_bytes)))
                    case _:
                        raise WireError(f"{type(message).__name__} instead of a request for a file")
                message = read_message(stream)[0]

    def _hold(self) -> dict[str, bytes]:
        version, whole = self._journal
        now = journal_reader.version(self._run_dir)
        if now is not None and now != version:
            whole = journal_reader.snapshot(self._run_dir) or whole
            self._journal = (now, whole)
        held = {journal.FILE_NAME: whole} if whole else {}
        with contextlib.suppress(OSError):
            held[CONFIG] = own_files.read(self._run_dir / CONFIG)
        return held

    def _read(self, is_shipped: bool, path: str, offset: int) -> bytes:
        root = self._shipped_from if is_shipped else self._run_dir
        if root is None:
            raise WireError("nothing is shipped")
        if is_shipped and path not in {entry.path for entry in self._shipped}:
            raise WireError(f"{path!r} was not shipped")
        if (
            not is_shipped
            and path not in APPENDED
            and PurePosixPath(path).parts[:1] not in {(name,) for name in SAVED}
        ):
            raise WireError(f"{path!r} is not for other hosts")
        found = Path(os.path.realpath(root / path))
        if not found.is_relative_to(os.path.realpath(root)) or not found.is_file():
            return b""  # deleted since it was listed, or never there
        with open(found, "rb") as file:
            file.seek(offset)
            return file.read(CHUNK_BYTES)


class HeadFiles:
    """A host's connection to the head's `FileService`."""

    def __init__(
        self, stream: TlsStream, *, is_shipped: bool, pause: Callable[[float], None] | None = None
    ) -> None:
        """`pause` is called with the seconds that each piece took."""
        self._stream, self._is_shipped, self._pause = stream, is_shipped, pause

    @classmethod
    @contextlib.contextmanager
    def opened(
        cls,
        head: str,
        credentials: Credentials,
        *,
        is_shipped: bool,
        pause: Callable[[float], None] | None = None,
    ) -> Iterator[HeadFiles]:
        with credentials.connect(head, expect="head", timeout_s=IDLE_S) as stream:
            assert isinstance(stream, TlsStream)
            yield cls(stream, is_shipped=is_shipped, pause=pause)

    def interrupt(self) -> None:
        """Interrupt another thread's read or wait."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._stream, socket.SHUT_RDWR)  # that of TLS is for the thread that reads

    def listed(self) -> list[FileEntry]:
        send_message(self._stream, ListFiles(self._is_shipped))
        listed = read_message(self._stream)[0]
        if not isinstance(listed, FileList):
            raise ClusterError(f"the head sent {type(listed).__name__} instead of its files.")
        for entry in listed.files:
            place = PurePosixPath(entry.path)
            if place.is_absolute() or ".." in place.parts:
                raise ClusterError(f"the head lists a file outside of its folder: {entry.path}.")
        return listed.files

    def read(self, path: str, offset: int) -> bytes:
        """Next piece; empty at the file's end, and if the file is gone."""
        began = time.monotonic()
        send_message(self._stream, ReadFile(self._is_shipped, path, offset))
        answer = read_message(self._stream)[0]
        if not isinstance(answer, FileData):
            raise ClusterError(f"the head sent {type(answer).__name__} instead of {path}.")
        if self._pause is not None:
            self._pause(time.monotonic() - began)
        return answer.data

    def timed(self, num_bytes: int) -> float:
        """Bytes per second of one message."""
        began = time.monotonic()
        send_message(self._stream, MeasureLink(num_bytes))
        answer = read_message(self._stream)[0]
        if not isinstance(answer, FileData) or len(answer.data) != num_bytes:
            raise ClusterError(f"the head sent {type(answer).__name__} instead of {num_bytes:,} bytes.")
        return num_bytes / max(time.monotonic() - began, 1e-6)

    def fetch(self, entry: FileEntry, target: Path) -> str | None:
        """Write a file as it was listed, and sync it; returns its SHA-256, or None if it is gone or has shrunk."""
        digest, num_bytes = hashlib.sha256(), 0
        with open(target, "wb") as file:
            while num_bytes < entry.nbytes:
                data = self.read(entry.path, num_bytes)[: entry.nbytes - num_bytes]
                if not data:
                    return None
                file.write(data)
                digest.update(data)
                num_bytes += len(data)
            file.flush()
            os.fsync(file.fileno())
        if entry.mtime_ns:
            os.utime(target, ns=(entry.mtime_ns, entry.mtime_ns))
        return digest.hexdigest()


def measured_link(head: str, credentials: Credentials) -> float:
    """Bytes per second from the head over one connection, by the fastest of the largest messages; 0 where it cannot be measured.

    Over TLS the cipher is part of it, so of a fast link it is less than the link passes.
    """
    fastest: dict[int, float] = {}  # by size
    try:
        with credentials.connect(head, expect="head", timeout_s=LINK_TIMEOUT_S) as stream:
            assert isinstance(stream, TlsStream)
            files = HeadFiles(stream, is_shipped=False)
            watchdog = threading.Timer(LINK_TIMEOUT_S, files.interrupt)  # also where bytes trickle in
            watchdog.start()
            try:
                num_bytes, deadline = FIRST_TIMED_BYTES, time.monotonic() + MEASURE_LINK_S
                while time.monotonic() < deadline:
                    fastest[num_bytes] = max(files.timed(num_bytes), fastest.get(num_bytes, 0.0))
                    num_bytes = min(2 * num_bytes, CHUNK_BYTES)
            finally:
                watchdog.cancel()
    except (OSError, EOFError, WireError, ClusterError):
        return 0.0  # what went through before may have been a bucket's content
    return fastest[max(fastest)]


def copy_shipped(head: str, credentials: Credentials, into: Path) -> None:
    """Copy the script's folder, over another connection where one is dropped.

    ClusterError where a file is not what the head listed, or every connection was dropped.
    """
    copied: set[FileEntry] = set()
    for left in reversed(range(SHIP_TRIES)):
        try:
            with HeadFiles.opened(head, credentials, is_shipped=True) as files:
                for entry in files.listed():
                    if entry not in copied:
                        _copy_one(files, entry, into)
                        copied.add(entry)
            return
        except (OSError, EOFError, WireError) as error:
            if not is_dropped(error):
                raise
            if not left:
                raise ClusterError(
                    f"the script's folder could not be copied from the head at {head}: {SHIP_TRIES} connections were dropped, the "
                    f"last by {str(error) or type(error).__name__!r}; files copied: {len(copied)}. Nothing was started here, and "
                    "the head waits; look at the network between the hosts, and join again."
                ) from error
        time.sleep(SHIP_RETRY_S)


def _copy_one(files: HeadFiles, entry: FileEntry, into: Path) -> None:
    target = into / entry.path
    target.parent.mkdir(parents=True, exist_ok=True)
    if files.fetch(entry, target) != entry.sha256:
        raise ClusterError(
            f"{entry.path} changed on the head while it was sent here. Nothing was started; join again."
        )


def is_dropped(error: Exception) -> bool:
    """Whether a connection was at fault, and not this host's disk."""
    if isinstance(error, ConnectionError | TimeoutError | ssl.SSLError) or not isinstance(error, OSError):
        return True
    return error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH)


def shippable(folder: Path) -> Iterator[FileEntry]:
    """Files of a script's folder; ConfigError where there is more than a folder of scripts."""
    num_files = num_bytes = 0
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name not in NOT_SHIPPED
            and not os.path.exists(os.path.join(root, name, "pyvenv.cfg"))
        )
        for name in sorted(names):
            path = Path(root, name)
            if path.is_symlink() or not path.is_file() or name.startswith("."):
                continue
            num_files, num_bytes = num_files + 1, num_bytes + path.stat().st_size
            if num_files > MAX_SHIPPED_FILES or num_bytes > MAX_SHIPPED_BYTES:
                raise ConfigError(
                    f"--ship: {folder} holds more than {MAX_SHIPPED_FILES:,} files or {MAX_SHIPPED_BYTES >> 20} MiB, which is more "
                    "than a script and its modules. Nothing was started; keep the script in a folder of its own, and data "
                    "elsewhere."
                )
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            yield FileEntry(path.relative_to(folder).as_posix(), path.stat().st_size, digest)


def _saved(run_dir: Path, held: dict[str, bytes]) -> Iterator[FileEntry]:
    for name, content in held.items():
        yield FileEntry(name, len(content), hashlib.sha256(content).hexdigest())
    for name in APPENDED:
        with contextlib.suppress(OSError):
            yield FileEntry(name, (run_dir / name).stat().st_size)
    for name in SAVED:
        folders = [run_dir / name]
        if name == "checkpoints":
            steps = [path for path in folders[0].glob("step-*") if path.name[5:].isdecimal()]
            folders = sorted(steps, key=lambda path: int(path.name[5:]))[-NUM_CHECKPOINTS:]
        for folder in folders:
            for path in sorted(folder.rglob("*")):
                with contextlib.suppress(OSError):
                    if path.is_file() and not path.is_symlink() and not path.name.startswith("."):
                        at, found = path.relative_to(run_dir).as_posix(), path.stat()
                        yield FileEntry(at, found.st_size, mtime_ns=found.st_mtime_ns)
