"""Files located at one host, or partly at each, read at all of them.

A host gets missing blocks into its cache, from which all its workers read: on demand by the first
reader, or spread in advance.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from shoal.config import job as jobs
from shoal.data.files import FileInfo, Files, SharedFiles, Where
from shoal.data.remote import blocks
from shoal.data.remote.block_server import OwnBlockServer
from shoal.data.remote.blocks import BlockReader, FileBlock, HostCache
from shoal.data.remote.copies import CopiedFiles
from shoal.data.remote.peers import BlockConnection, PeerHosts
from shoal.errors import ConfigError, DataError, FileLost, NoFiles, WireError
from shoal.runtime.transport.messages.blocks import (
    AskFiles,
    BlockKept,
    BlockRefused,
    FetchBlock,
    FilesAre,
    NeedBlocks,
    ShareFiles,
    SpreadFiles,
    UseCache,
)

_STALLED_S = 1.0  # nothing arrived for this long: the forwarding host may be dead, so blocks are requested


@dataclass(frozen=True, slots=True, kw_only=True)
class LocationConfig:
    """Location of files, and their way to hosts that lack them."""

    kind: Literal["central", "resident"]
    """One host has all, or each has some."""

    spread: Literal["on-demand", "broadcast", "chain"] = "on-demand"
    """Fetched by the first reader; or sent by the host that has them, to each host, or along a chain of hosts."""

    cache_directory: str | None = None
    """Directory of a host's copies. None: the job's scratch, removed with it."""

    cache_bytes: int | None = None
    """Limit of them in bytes. None: half of the free space there."""

    timeout_s: float = 60.0
    """How long other hosts are waited for."""


class LocatedFiles(Files):
    """Files over several hosts. Usable from several threads, and in forked children."""

    def __init__(self, config: LocationConfig, hosts: PeerHosts | None = None) -> None:
        self._config = config
        self._hosts = hosts or PeerHosts.of_job()
        directory = (
            Path(config.cache_directory) / f"host-{self._hosts.mine}"
            if config.cache_directory is not None
            else self._hosts.folder() / "blocks"
        )
        self._cache = HostCache(directory, max_bytes=config.cache_bytes)
        self._local = SharedFiles()
        self._infos: dict[str, FileInfo] = {}
        self._holders: dict[str, list[int]] = {}
        self._wheres: list[str] = []
        self._server = OwnBlockServer(self._hosts, timeout_s=config.timeout_s)
        self._server.introduce(("cache", ""), UseCache(str(directory), config.cache_bytes))
        self._needed: dict[str, list[int]] = {}
        self.origins: Counter[str] = Counter()
        """Where the blocks that this process asked for came from: the cache, another host, the source."""

    def expand(self, where: Where, endings: Sequence[str] = ()) -> list[FileInfo]:
        """The files behind `where`: as the central host sees them, or of all hosts together."""
        key = f"{self._config.kind}: {_as_text(where)} {tuple(endings)}"
        hosts = [self._hosts.central] if self._config.kind == "central" else self._hosts.all
        found: dict[str, FileInfo] = {}
        for host in hosts:
            mine = self._find(where, endings, key) if host == self._hosts.mine else self._ask_files(host, key)
            for info in mine:
                known = found.setdefault(info.url, info)
                if known != info:
                    raise DataError(
                        f"{info.url} is not the same file on all hosts: {known.num_bytes} bytes at host "
                        f"{self._holders[info.url][0]} and {info.num_bytes} at host {host}, or other bytes in them. Nothing "
                        "was read; make them the same, or give them different names."
                    )
                holders = self._holders.setdefault(info.url, [])
                if host not in holders:
                    holders.append(host)
        if not found:
            raise NoFiles(where=_as_text(where), problem=f"none of {len(hosts)} hosts has such a file")
        self._infos |= found
        if key not in self._wheres:
            self._wheres.append(key)
            self._begin_spreading(key)
        if self._hosts.others:
            self._server.ensure_connected()  # it must be there to be sent anything
        return sorted(found.values())

    def read(self, url: str, begin: int, end: int) -> bytes:
        if self.is_here(url):
            return self._local.read(url, begin, end)
        parts = [self._read_piece(url, *piece) for piece in blocks.pieces(begin, end)]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def open(self, url: str) -> BinaryIO:
        if self.is_here(url):
            return self._local.open(url)
        return io.BufferedReader(BlockReader(self.read, url, self._infos[url].num_bytes), blocks.BLOCK_BYTES)

    def is_here(self, url: str) -> bool:
        return self._hosts.mine in self._holders.get(url, ())

    def narrow(self, url: str, ranges: Iterable[tuple[int, int]]) -> None:
        """Only these byte ranges of a file will be read: no other block needs to be sent here."""
        if self.is_here(url):
            return
        numbers = self._needed[url] = blocks.numbers_of(ranges)
        self._server.tell(("need", url), NeedBlocks(url, self._infos[url].stamp, numbers))

    def stage(self) -> None:
        """Copy everything that will be read to this host, before anything is read."""
        for key in self._wheres:
            self._begin_spreading(key)
        missing = [block for url in self._infos if not self.is_here(url) for block in self._blocks(url)]
        num_missing, since = len(missing) + 1, time.monotonic()
        while missing:
            missing = [block for block in missing if not self._cache.has(block)]
            if len(missing) < num_missing:
                num_missing, since = len(missing), time.monotonic()
            if self._config.spread == "on-demand" or time.monotonic() - since > _STALLED_S:
                for block in missing[:1]:
                    self._fetch(block)
            elif missing:
                time.sleep(0.005)

    def close(self) -> None:
        """Hang up. The host's block server stays as long as its process."""
        self._server.close()

    def _find(self, where: Where, endings: Sequence[str], key: str) -> list[FileInfo]:
        try:
            found = self._local.expand(where, endings)
        except NoFiles:
            if self._config.kind == "central":
                raise
            found = []
        if self._config.kind == "resident":
            # Modification times differ between hosts that hold the same file; its ends and length hardly
            # coincide by accident.
            found = [info._replace(stamp=self._fingerprint(info)) for info in found]
        if self._hosts.others:
            self._server.tell(("share", key), ShareFiles(key, [(*info,) for info in found]))
        return found

    def _fingerprint(self, info: FileInfo) -> str:
        ends = (0, min(info.num_bytes, 65536)), (max(info.num_bytes - 65536, 0), info.num_bytes)
        digest = hashlib.blake2b(digest_size=8)
        for begin, end in ends:
            digest.update(self._local.read(info.url, begin, end))
        return f"{info.num_bytes}-{digest.hexdigest()}"

    def _ask_files(self, host: int, key: str) -> list[FileInfo]:
        deadline, reason = time.monotonic() + self._config.timeout_s, "its block server is not there"
        pause_s = 0.01
        while time.monotonic() < deadline:
            server = self._hosts.server_of(host)
            if server is not None:
                try:
                    with contextlib.closing(BlockConnection(server, self._hosts.credentials)) as line:
                        answer, _ = line.ask(AskFiles(key))
                except (OSError, WireError) as error:
                    self._hosts.forget(host)
                    answer = BlockRefused(str(error))
                if isinstance(answer, FilesAre):
                    return [FileInfo(*each) for each in answer.files]
                reason = answer.reason if isinstance(answer, BlockRefused) else reason
            time.sleep(pause_s)  # all ranks run the same script, and will come to the same line
            pause_s = min(2 * pause_s, 0.2)
        raise DataError(
            f"host {host} has not opened the files of {key} within {self._config.timeout_s:g} s ({reason}). Nothing was "
            "read; every host must open the same dataset, so look for one that is slow, or does not come to that line."
        )

    def _begin_spreading(self, key: str) -> None:
        if (
            self._config.spread != "on-demand"
            and self._hosts.others
            and self._server.has_told(("share", key))
        ):
            self._server.tell(("spread", key), SpreadFiles(self._config.spread, key))

    def _blocks(self, url: str) -> list[FileBlock]:
        info = self._infos[url]
        numbers = self._needed.get(url, range(blocks.num_blocks(info.num_bytes)))
        return [FileBlock(url, info.stamp, number) for number in numbers]

    def _read_piece(self, url: str, number: int, begin: int, end: int) -> bytes:
        block = FileBlock(url, self._infos[url].stamp, number)
        for _ in range(10):
            data = self._cache.read(block, begin, end)
            if data is not None:
                return data
            self._fetch(block)  # it may have been evicted again, if the cache is far too small
        raise FileLost(
            url=url,
            reason=f"the host's cache of {self._cache.max_bytes} bytes is too small to hold a block until it is read",
        )

    def _fetch(self, block: FileBlock) -> None:
        try:
            answer = self._server.ask(FetchBlock(*block, self._holders[block.url]))
        except OSError as error:
            raise FileLost(
                url=block.url, reason=f"the block server of this host does not answer: {error}"
            ) from error
        if not isinstance(answer, BlockKept):
            reason = answer.reason if isinstance(answer, BlockRefused) else f"its block server said {answer}"
            raise FileLost(url=block.url, reason=reason)
        self.origins[answer.origin] += 1


def files_at(
    where: Where | CopiedFiles,
    location: str = "shared",
    spread: str = "on-demand",
    *,
    cache_directory: str | os.PathLike[str] | None = None,
    cache_bytes: int | None = None,
) -> tuple[Files, Where]:
    """How a source reads its files, by where the user says that they are, and what to look for there."""
    if isinstance(where, CopiedFiles):
        return where, where.where
    if location not in ("shared", "central", "resident"):
        raise ConfigError(
            f"location='{location}' is not known: 'shared' (every host sees the path), 'central' (rank 0's host serves "
            "the files) or 'resident' (each host has some). Nothing was read."
        )
    if spread not in ("on-demand", "broadcast", "chain"):
        raise ConfigError(
            f"spread='{spread}' is not known: 'on-demand', 'broadcast' or 'chain'. Nothing was read."
        )
    if location == "shared":
        return SharedFiles(), where
    config = LocationConfig(
        kind=location,  # type: ignore[arg-type]  # looked at above
        spread=spread,  # type: ignore[arg-type]
        cache_directory=None if cache_directory is None else os.fspath(cache_directory),
        cache_bytes=cache_bytes,
        timeout_s=jobs.current().liveness.join_timeout_s,
    )
    return LocatedFiles(config), where


def _as_text(where: Where) -> str:
    places = [where] if isinstance(where, (str, os.PathLike)) else where
    return ", ".join(os.fspath(place) for place in places)
