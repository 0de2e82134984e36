"""Files: finding, reading and opening, in one place for all sources, and derived facts that take a pass to compute.

`Files` finds, reads and opens; `SharedFiles` does so where every host sees the same paths: plain
system calls for local ones, fsspec for URLs. A file that has changed since it was found is refused,
so that no epoch mixes two versions of it. Facts (line ends, number of rows that a condition keeps)
are kept by the identity of the files: in this process, and in a launched job in its scratch
directory, where the other workers of a host find them.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import io
import json
import os
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from shoal.config import job as jobs
from shoal.data.arguments import paths
from shoal.errors import ConfigError, FileLost, NoFiles, ShoalError
from shoal.runtime import scratch
from shoal.runtime.file_systems import open_file_system, open_to_read

Where = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A path, a directory, a pattern with * or ?, a URL that fsspec knows, or several of them."""

_BUFFER_BYTES = 1 << 20
_NUM_THREADS = 4

Item = TypeVar("Item")
Result = TypeVar("Result")


class FileInfo(NamedTuple):
    """A file as it was found."""

    url: str
    num_bytes: int
    stamp: str
    """Changes with the content: time of change, ETag or checksum, whatever the file system offers."""


class Files(ABC):
    """Finding and reading files. By default every host has all of them."""

    @abstractmethod
    def expand(self, where: Where, endings: Sequence[str] = ()) -> list[FileInfo]:
        """Files behind paths, patterns, directories and URLs; never none.

        Files of one pattern or directory are sorted; a directory gives files with one of the
        `endings`, recursively, without hidden names.
        """

    @abstractmethod
    def read(self, url: str, begin: int, end: int) -> bytes:
        """Bytes begin..end-1 of a file."""

    @abstractmethod
    def open(self, url: str) -> BinaryIO:
        """A file to read and seek in, buffered."""

    def narrow(self, url: str, ranges: Iterable[tuple[int, int]]) -> None:  # noqa: B027  may make no difference
        """Restrict future reads of a file to these byte ranges."""

    def stage(self) -> None:  # noqa: B027  may make no difference
        """Copy all files to this host, before anything is read."""

    def is_here(self, url: str) -> bool:
        """True where this host has the file itself, and others may not."""
        return True


class SharedFiles(Files):
    """Files that every host sees at the same place. Records what it found, to refuse changed files."""

    def __init__(self) -> None:
        self._found: dict[str, FileInfo] = {}

    def expand(self, where: Where, endings: Sequence[str] = ()) -> list[FileInfo]:
        places = paths("the files to read", where)
        if not places:
            raise NoFiles(where="an empty list", problem="no path was given")
        found: list[FileInfo] = []
        for url in places:
            found += _expand_url(url, endings) if _is_url(url) else _expand_local(_local_path(url), endings)
        urls = [info.url for info in found]
        if len(set(urls)) < len(urls):
            twice = next(url for number, url in enumerate(urls) if url in urls[:number])
            raise ConfigError(
                f"the file {twice} is named twice, so its samples would be too. Nothing was read; give each file once."
            )
        self._found |= {info.url: info for info in found}
        return found

    def remember(self, info: FileInfo) -> None:
        """Record a file's present state; refuse it if it changes."""
        self._found[info.url] = info

    def read(self, url: str, begin: int, end: int) -> bytes:
        if _is_url(url):
            data = self._read_remote(url, begin, end)
        else:
            data = self._read_local(url, begin, end)
        if len(data) != end - begin:
            raise FileLost(
                url=url, reason=f"it gave {len(data)} bytes of the {end - begin} wanted from byte {begin} on"
            )
        return data

    def open(self, url: str) -> BinaryIO:
        try:
            if _is_url(url):
                system, path = open_file_system(url)
                with _foreign_errors():
                    self._check(_remote_info(url, system.info(path)))
                    return open_to_read(system, path)
            raw = io.FileIO(url)
        except OSError as error:
            raise FileLost(url=url, reason=_reason(error)) from error
        try:
            self._check(_local_info(url, os.fstat(raw.fileno())))
        except BaseException:
            raw.close()
            raise
        return io.BufferedReader(raw, _BUFFER_BYTES)

    def _read_local(self, url: str, begin: int, end: int) -> bytes:
        try:
            descriptor = os.open(url, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise FileLost(url=url, reason=_reason(error)) from error
        try:
            self._check(_local_info(url, os.fstat(descriptor)))
            parts = []
            while begin < end:
                # One call gives at most 2 GiB.
                part = os.pread(descriptor, min(end - begin, 1 << 30), begin)
                if not part:
                    break
                parts.append(part)
                begin += len(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)
        except OSError as error:
            raise FileLost(url=url, reason=_reason(error)) from error
        finally:
            os.close(descriptor)

    def _read_remote(self, url: str, begin: int, end: int) -> bytes:
        try:
            system, path = open_file_system(url)
            with _foreign_errors():
                self._check(_remote_info(url, system.info(path)))
                data: bytes = system.cat_file(path, start=begin, end=end)
            return data
        except OSError as error:
            raise FileLost(url=url, reason=_reason(error)) from error

    def _check(self, now: FileInfo) -> None:
        known = self._found.get(now.url)
        if known is None or known == now:
            return
        if known.num_bytes != now.num_bytes:
            reason = f"it changed since it was found: {known.num_bytes} bytes then, {now.num_bytes} now"
        else:
            reason = "it was written again since it was found (its time of change is another)"
        raise FileLost(url=now.url, reason=reason)


def in_threads(fn: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """`fn` of each; several at a time, since reads wait for disks and networks."""
    if len(items) < 2:
        return [fn(item) for item in items]
    with ThreadPoolExecutor(min(_NUM_THREADS, len(items)), thread_name_prefix="shoal-files") as pool:
        return list(pool.map(fn, items))


def ending_of(url: str) -> str:
    """From the first dot of the last part on: `.csv.gz` of `a/b.csv.gz`; "" without one."""
    name = url.rpartition("/")[2]
    return name[name.index(".", 1) :].lower() if "." in name[1:] else ""


def _is_url(place: str) -> bool:
    return ("://" in place and not place.startswith("file://")) or "::" in place


def _local_path(place: str) -> str:
    return os.path.expanduser(place.removeprefix("file://"))


def _expand_local(path: str, endings: Sequence[str]) -> list[FileInfo]:
    if os.path.isdir(path):
        inside = [
            str(file)
            for file in sorted(Path(path).rglob("*"))
            if file.is_file()
            and not any(part.startswith((".", "_")) for part in file.relative_to(path).parts)
        ]
        paths = _with_ending(path, inside, endings)
    elif os.path.lexists(path) or not glob.has_magic(path):
        paths = [path]
    else:
        paths = sorted(match for match in glob.glob(path, recursive=True) if os.path.isfile(match))
        if not paths:
            raise NoFiles(where=path, problem=_nearest(path))
    found = []
    for name in paths:
        try:
            found.append(_local_info(name, os.stat(name)))
        except FileNotFoundError:
            raise NoFiles(where=name, problem=_nearest(name)) from None
        except OSError as error:
            raise NoFiles(where=name, problem=_reason(error)) from error
    return found


def _expand_url(url: str, endings: Sequence[str]) -> list[FileInfo]:
    system, path = open_file_system(url)
    rest = url.partition("::")[2]

    def full(name: str) -> str:
        named: str = system.unstrip_protocol(name)
        return f"{named}::{rest}" if rest else named

    try:
        with _foreign_errors():
            if glob.has_magic(path) and not system.exists(path):
                matches = system.glob(path, detail=True)
                infos = {name: info for name, info in matches.items() if info["type"] == "file"}
                if not infos:
                    raise NoFiles(where=url, problem="the pattern matches no file")
            elif system.isdir(path):
                inside = {
                    name: info
                    for name, info in system.find(path, detail=True).items()
                    if not any(part.startswith((".", "_")) for part in name.removeprefix(path).split("/"))
                }
                infos = {name: inside[name] for name in _with_ending(url, sorted(inside), endings)}
            else:
                return [_remote_info(url, system.info(path))]
    except FileNotFoundError:
        raise NoFiles(where=url, problem="there is no such file") from None
    except OSError as error:
        raise NoFiles(where=url, problem=_reason(error)) from error
    found = [_remote_info(full(name), infos[name]) for name in sorted(infos)]
    # A listing may have fewer details than a request for one file.
    return [
        info if info.stamp else _remote_info(info.url, system.info(name))
        for info, name in zip(found, sorted(infos), strict=True)
    ]


def _with_ending(directory: str, inside: list[str], endings: Sequence[str]) -> list[str]:
    chosen = [name for name in inside if not endings or name.lower().endswith(tuple(endings))]
    if chosen:
        return chosen
    if not inside:
        raise NoFiles(where=directory, problem="the directory holds no file")
    others = sorted({ending_of(name) or "none" for name in inside})
    raise NoFiles(
        where=directory,
        problem=f"of its {len(inside)} files none ends in {' or '.join(endings)} (endings there: {', '.join(others)})",
    )


def _nearest(path: str) -> str:
    what = "the pattern matches no file" if glob.has_magic(path) else "there is no such file"
    parent = Path(path).absolute().parent
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    if str(parent) == str(Path(path).absolute().parent):
        num_inside = sum(1 for _ in parent.iterdir()) if parent.is_dir() and os.access(parent, os.R_OK) else 0
        return f"{what}; its directory {parent} is there and holds {num_inside} entries"
    return f"{what}; of its path only {parent} is there"


def _local_info(url: str, stat: os.stat_result) -> FileInfo:
    return FileInfo(url, stat.st_size, str(stat.st_mtime_ns))


def _remote_info(url: str, info: dict[str, Any]) -> FileInfo:
    changed = ("mtime", "LastModified", "last_modified", "modification_time", "created")
    stamps = ("ETag", "etag", "md5Hash", "checksum", *changed)
    stamp = next((info[name] for name in stamps if info.get(name) is not None), "")
    if hasattr(stamp, "timestamp"):
        stamp = stamp.timestamp()
    # A listing may give a number and a file's request a date, for the same time.
    stamp = f"{stamp:.6f}" if isinstance(stamp, float) else str(stamp)
    return FileInfo(url, int(info.get("size") or 0), stamp)


@contextlib.contextmanager
def _foreign_errors() -> Iterator[None]:
    """Convert errors of a store's client to OSError: botocore's and Google's have classes of their own."""
    try:
        yield
    except (OSError, ShoalError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def _reason(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "it is not there any more"
    if isinstance(error, PermissionError):
        return "this user may not read it"
    return f"{error.strerror or error} ({type(error).__name__})"


_MOST_REMEMBERED = 256

_lock = threading.Lock()
_known: OrderedDict[str, Any] = OrderedDict()


def identity_of(files: Iterable[FileInfo], **options: Any) -> str:
    """Hash that changes with the files, or with the way they are read."""
    said = json.dumps([[list(info) for info in files], options], sort_keys=True, default=str)
    return hashlib.blake2b(said.encode(), digest_size=16).hexdigest()


def remembered(identity: str, find_out: Callable[[], Any]) -> Any:
    """Result of `find_out` (fit for JSON), kept under this identity."""
    with _lock:
        if identity in _known:
            _known.move_to_end(identity)
            return _known[identity]
    found = _in_the_job(identity, find_out) if jobs.current().launched else find_out()
    with _lock:
        _known[identity] = found
        while len(_known) > _MOST_REMEMBERED:
            _known.popitem(last=False)
    return found


def _in_the_job(identity: str, find_out: Callable[[], Any]) -> Any:
    path = scratch.directory("tables") / f"{identity}.json"
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the process ends, in any way
        if path.exists():
            return json.loads(path.read_text())
        found = find_out()
        unfinished = f"{path}.{os.getpid()}"
        with open(unfinished, "w") as file:
            json.dump(found, file)
        os.replace(unfinished, path)
        return found
