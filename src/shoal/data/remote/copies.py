"""Second copies of files, with hashes of their blocks: a lost or corrupted file is read from a copy.

A copy is made once, by whichever worker comes first, and its hashes are written last: a copy
without hashes is made again. Every block is compared with its hash when it is first read, and again
when its file has changed.
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import hashlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from shoal.data.arguments import directory, paths
from shoal.data.files import FileInfo, Files, SharedFiles, Where
from shoal.data.remote import blocks
from shoal.data.remote.blocks import BlockReader
from shoal.errors import ConfigError, FileLost, NoFiles
from shoal.runtime import events, scratch


class _Hashes(msgspec.Struct, frozen=True):
    """hashes.json beside a copy."""

    url: str
    num_bytes: int
    stamp: str
    blocks: list[str]


def copies(
    where: Where, num_copies: int = 2, *, at: Sequence[str | os.PathLike[str]] | None = None
) -> CopiedFiles:
    """Keep `num_copies` of each file, the original among them, and read on from another when one is lost.

    `at` says in which directories, best on other disks or hosts; without it
    they last as long as the job. Give the result to any `from_...` that takes
    files.

        Dataset.from_parquet(shoal.data.copies("clicks/*.parquet", 2, at=["/mnt/other/copies"]))
    """
    if isinstance(num_copies, bool) or not isinstance(num_copies, int) or num_copies < 1:
        raise ConfigError(
            f"copies takes a whole number of at least 1, got {num_copies!r}. Nothing was copied."
        )
    where = where if isinstance(where, (str, os.PathLike)) and where else paths("copies", where)
    if not where:
        raise NoFiles(where="an empty list", problem="copies was given no path")
    if at is not None:
        if isinstance(at, (str, os.PathLike)):
            raise ConfigError(
                f"copies(at=) takes a list of directories, got {at!r}: write [{os.fspath(at)!r}]"
            )
        at = [directory("copies(at=)", each) for each in paths("copies(at=)", at)]
    if at is not None and len(at) < num_copies - 1:
        raise ConfigError(
            f"{num_copies} copies are the original and {num_copies - 1} more, and at= names {len(at)} directories for them. "
            "Nothing was copied; name one for each."
        )
    places = (
        [Path(each) for each in at[: num_copies - 1]]
        if at is not None
        else [scratch.directory("copies", str(number)) for number in range(1, num_copies)]
    )
    return CopiedFiles(where, places)


class CopiedFiles(Files):
    """Files that have copies. Usable from several threads, and in forked children."""

    def __init__(self, where: Where, places: Sequence[Path]) -> None:
        self.where = where
        self._places = places
        self._files = SharedFiles()
        self._hashes: dict[str, _Hashes] = {}
        self._sound: dict[str, tuple[str, set[int]]] = {}  # by path: the stamp, and the blocks compared since
        self._lost: dict[str, str] = {}  # by path: why it is not read any more

    def expand(self, where: Where, endings: Sequence[str] = ()) -> list[FileInfo]:
        """Files behind `where`, each copied already; a copy replaces a file that is gone."""
        try:
            found = self._files.expand(where, endings)
        except NoFiles:
            found = []
            if not self._copied_before(where, endings):
                raise
        for info in found:
            for place in self._places:
                self._hashes[info.url] = self._copied(info, place)
        gone = [each for each in self._copied_before(where, endings) if each.url not in self._hashes]
        for hashes in gone:
            self._hashes[hashes.url] = hashes
            self._lost[hashes.url] = "it is not there"
            self._report_loss(hashes.url, hashes.url)
        return sorted([*found, *(FileInfo(each.url, each.num_bytes, each.stamp) for each in gone)])

    def _copied_before(self, where: Where, endings: Sequence[str]) -> list[_Hashes]:
        places = [where] if isinstance(where, (str, os.PathLike)) else where
        wanted = [os.path.abspath(os.fspath(place)) for place in places]
        found: dict[str, _Hashes] = {}
        for place in self._places:
            for path in place.glob("*.hashes.json"):
                hashes = _hashes_beside(path.with_name(path.name.removesuffix(".hashes.json")))
                if hashes is None:
                    continue
                url = os.path.abspath(hashes.url)
                is_below = url.endswith(tuple(endings) or ("",)) and any(
                    url.startswith(f"{each}/") for each in wanted
                )
                if is_below or any(fnmatch.fnmatch(url, each) for each in wanted):
                    found[hashes.url] = hashes
        return list(found.values())

    def read(self, url: str, begin: int, end: int) -> bytes:
        reasons: list[str] = []
        for path in self._paths(url):
            if path in self._lost:
                reasons.append(f"{path}: {self._lost[path]}")
                continue
            try:
                return self._read_sound(url, path, begin, end)
            except (OSError, FileLost) as error:
                self._lost[path] = _why(error)
                reasons.append(f"{path}: {self._lost[path]}")
                self._report_loss(url, path)
        raise FileLost(
            url=url, reason=f"none of its {len(reasons)} copies can be read ({'; '.join(reasons)})"
        )

    def open(self, url: str) -> BinaryIO:
        num_bytes = self._hashes[url].num_bytes if url in self._hashes else os.stat(url).st_size
        return io.BufferedReader(BlockReader(self.read, url, num_bytes), blocks.BLOCK_BYTES)

    def _paths(self, url: str) -> list[str]:
        return [url, *(str(_copy_of(url, place)) for place in self._places)]

    def _report_loss(self, url: str, path: str) -> None:
        left = next((each for each in self._paths(url) if each not in self._lost), None)
        if left is None:
            return
        events.emit("file-lost", file=path, reason=self._lost[path], read_from=left)
        print(
            f"shoal: {path} cannot be read any more ({self._lost[path]}); from now on its copy is: {left}",
            file=sys.stderr,
        )

    def _read_sound(self, url: str, path: str, begin: int, end: int) -> bytes:
        hashes = self._hashes.get(url)
        if "://" in path:
            return self._files.read(path, begin, end)  # which compares what the store says of the file
        stat = os.stat(path)
        stamp = f"{stat.st_mtime_ns}-{stat.st_size}"
        if hashes is not None and stat.st_size != hashes.num_bytes:
            raise FileLost(url=path, reason=f"it has {stat.st_size} bytes instead of {hashes.num_bytes}")
        known, sound = self._sound.get(path, ("", set()))
        if known != stamp:
            known, sound = self._sound[path] = stamp, set()
        parts = []
        with open(path, "rb", buffering=0) as file:
            for number, first, last in blocks.pieces(begin, end):
                if hashes is None or number in sound:
                    file.seek(number * blocks.BLOCK_BYTES + first)
                    parts.append(file.read(last - first))
                    continue
                file.seek(number * blocks.BLOCK_BYTES)
                block = file.read(blocks.BLOCK_BYTES)
                if _hash(block) != hashes.blocks[number]:
                    raise FileLost(
                        url=path,
                        reason=f"the hash of its bytes from {number * blocks.BLOCK_BYTES} on is not what it was when it was "
                        "copied",
                    )
                sound.add(number)
                parts.append(block[first:last])
        data = b"".join(parts)
        if len(data) != end - begin:
            raise FileLost(url=path, reason=f"it gave {len(data)} bytes of {end - begin}")
        return data

    def _copied(self, info: FileInfo, place: Path) -> _Hashes:
        """Ensure a complete copy of this version of the file there; returns its hashes."""
        copy = _copy_of(info.url, place)
        known = _hashes_of(copy, info)
        if known is not None:
            return known
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            with _locked(copy):
                return _hashes_of(copy, info) or self._copy(info, copy)
        except OSError as error:
            raise ConfigError(
                f"{info.url} could not be copied to {place}: {error.strerror or error}. The file itself is as it was; give "
                f"copies a directory with {info.num_bytes} bytes free that may be written to."
            ) from error

    def _copy(self, info: FileInfo, copy: Path) -> _Hashes:
        half = copy.with_name(f"{copy.name}.half")
        hashes = []
        try:
            with half.open("wb") as file:
                for number in range(blocks.num_blocks(info.num_bytes)):
                    begin = number * blocks.BLOCK_BYTES
                    block = self._files.read(info.url, begin, min(begin + blocks.BLOCK_BYTES, info.num_bytes))
                    hashes.append(_hash(block))
                    file.write(block)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            half.unlink(missing_ok=True)
            raise
        half.rename(copy)
        made = _Hashes(info.url, info.num_bytes, info.stamp, hashes)
        temporary = copy.with_name(f"{copy.name}.hashes.half")
        temporary.write_bytes(msgspec.json.encode(made))
        temporary.rename(_hashes_path(copy))
        return made


def _copy_of(url: str, place: Path) -> Path:
    digest = hashlib.blake2b(os.path.abspath(url).encode(), digest_size=8).hexdigest()
    return place / f"{digest}-{Path(url).name}"


def _hashes_path(copy: Path) -> Path:
    return copy.with_name(f"{copy.name}.hashes.json")


def _hashes_beside(copy: Path) -> _Hashes | None:
    try:
        return msgspec.json.decode(_hashes_path(copy).read_bytes(), type=_Hashes)
    except (OSError, msgspec.MsgspecError):
        return None


def _hashes_of(copy: Path, info: FileInfo) -> _Hashes | None:
    """Hashes of a copy of just this version of a file."""
    hashes = _hashes_beside(copy)
    return hashes if hashes is not None and (hashes.url, hashes.num_bytes, hashes.stamp) == info else None


def _hash(block: bytes) -> str:
    return hashlib.sha256(block).hexdigest()


def _why(error: OSError | FileLost) -> str:
    if isinstance(error, FileLost):
        return error.reason
    return (error.strerror or str(error)).lower()


@contextlib.contextmanager
def _locked(copy: Path) -> Iterator[None]:
    """Lock held by one process at a time; it dies with its process."""
    descriptor = os.open(copy.with_name(f"{copy.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
