"""Connections between the workers of several hosts that exchange files: addresses, identities, requests.

A block server listens where the other hosts reach it, and all connections to it are authenticated
on both ends (`runtime/transport/tls.py`), those of its own host too. Workers of a host find their
block server by a file in the host's folder, those of other hosts through the coordinator
(`runtime/transport/endpoint.py`).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from shoal.config import job as jobs
from shoal.data.remote.blocks import BLOCK_BYTES
from shoal.errors import WireError
from shoal.runtime import scratch
from shoal.runtime.transport import endpoint, framing, tls
from shoal.runtime.transport.endpoint import AddressBook
from shoal.runtime.transport.framing import Bytes, FrameLimits
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.tls import Credentials, Identity

LIMITS = FrameLimits(num_frames=1, frames_bytes=BLOCK_BYTES)
"""A message about blocks carries one of them, or none."""

CONNECT_TIMEOUT_S = 5.0

ANSWER_TIMEOUT_S = 60.0
"""Time-out of one block between two hosts. A block server that is busy for longer is asked again, or another is."""

_ADDRESS = "address"  # file in a host's folder


class ServerAddress(NamedTuple):
    """A block server: the rank of its process, and where that listens."""

    rank: int
    address: str


class BlockConnection:
    """A connection to a block server. Not for two threads at once."""

    def __init__(self, server: ServerAddress, credentials: Credentials) -> None:
        self._socket = credentials.connect(
            server.address, expect=f"worker-{server.rank}", timeout_s=CONNECT_TIMEOUT_S
        )

    def ask(
        self, message: Message, frame: Bytes | None = None, *, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> tuple[Message, Bytes]:
        """Its answer, and the block that came with it. OSError where the line is dead: make a new one."""
        try:
            self._socket.settimeout(timeout_s)
            framing.send_message(self._socket, message, () if frame is None else (frame,), limits=LIMITS)
            answer, frames = framing.read_message(self._socket, limits=LIMITS, timeout_s=timeout_s)
        except (EOFError, WireError) as error:
            raise ConnectionError(str(error)) from error
        return answer, frames[0] if frames else b""

    def close(self) -> None:
        self._socket.close()


class ConnectionPool:
    """Connections to other hosts, kept for the next request. For several threads."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._idle: dict[ServerAddress, list[BlockConnection]] = {}
        self._is_closed = False

    def ask(
        self, server: ServerAddress, message: Message, frame: Bytes | None = None
    ) -> tuple[Message, Bytes]:
        idle = self._idle.setdefault(server, [])
        is_fresh = False
        while True:
            try:
                line = idle.pop()  # atomic: no two threads get the same connection
            except IndexError:
                line, is_fresh = BlockConnection(server, self._credentials), True
            try:
                answer = line.ask(message, frame)
            except BaseException as error:
                line.close()
                if is_fresh or not isinstance(error, OSError):
                    raise
                continue  # it may only have been idle for too long; a fresh one tells
            if self._is_closed:
                line.close()  # the client outlived this process
            else:
                idle.append(line)
            return answer

    def close(self) -> None:
        self._is_closed = True
        for lines in self._idle.values():
            while lines:
                lines.pop().close()


class PeerHosts:
    """The hosts of this job, by the homes of their ranks, and this process's place among them.

    A rank that runs elsewhere for a while stands for its home there.
    """

    def __init__(
        self,
        directory: Path,
        *,
        rank: int,
        homes: Sequence[int],
        bind: str = "",
        address: str = "",
        credentials: Credentials | None = None,
        book: AddressBook | None = None,
        launch: int = 1,
    ) -> None:
        """`bind` is where a block server listens and `address` where others reach it, unless there is one host."""
        self._directory, self._rank, self._homes = directory, rank, tuple(homes)
        self._bind, self._address = bind, address or bind
        self._credentials, self._book, self._launch = credentials, book, launch
        self._known: dict[int, ServerAddress] = {}
        self._pid = os.getpid()
        self.mine = self._homes[rank]
        self.all = sorted(set(self._homes))
        self.central = self._homes[0]
        """Host of rank 0."""
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    @classmethod
    def of_job(cls) -> PeerHosts:
        job = jobs.current()
        directory = scratch.directory("hosts")
        if not job.is_on_several_hosts:
            return cls(directory, rank=0, homes=(0,))
        return cls(
            directory,
            rank=job.rank,
            homes=job.rank_hosts,
            bind=job.bind_address,
            address=job.host_address,
            credentials=tls.mine(),
            book=endpoint.address_book(),
            launch=job.launch,
        )

    @property
    def others(self) -> list[int]:
        return [host for host in self.all if host != self.mine]

    @property
    def may_serve(self) -> bool:
        """False in a forked child, which cannot ask the coordinator and may end before its parent."""
        return os.getpid() == self._pid

    @property
    def credentials(self) -> Credentials:
        assert self._credentials is not None, "on one host nothing is sent"
        return self._credentials

    def folder(self) -> Path:
        """My host's own folder: its block server's lock and address, and its cache."""
        path = self._directory / f"host-{self.mine}"
        path.mkdir(exist_ok=True, mode=0o700)
        return path

    def home_of(self, caller: Identity) -> int:
        """Host of a worker of this job. WireError where the caller is none."""
        if caller.role != "worker" or not 0 <= caller.number < len(self._homes):
            raise WireError(f"{caller.name} is no worker of this job")
        return self._homes[caller.number]

    def listen(self) -> socket.socket:
        return tls.listen(self._bind)

    def publish(self, listener: socket.socket) -> None:
        """Make this process's block server known as that of its host."""
        address = tls.join_address(self.credentials.scheme, self._address, listener.getsockname()[1])
        said = f"{self._rank} {address}"
        half = self.folder() / f"{_ADDRESS}.{self._rank}"
        half.write_text(said)
        half.rename(self.folder() / _ADDRESS)
        assert self._book is not None
        self._book.publish(self._name(self.mine), said)

    def server_of(self, host: int) -> ServerAddress | None:
        """The block server of a host as it was last known; None before there was one."""
        if host == self.mine:
            try:
                return self._parsed(host, (self.folder() / _ADDRESS).read_text())
            except FileNotFoundError:
                return None
        if host not in self._known and host in self.all:
            assert self._book is not None
            said = self._book.lookup(self._name(host))
            found = self._parsed(host, said) if said is not None else None
            if found is not None:
                self._known[host] = found
        return self._known.get(host)

    def forget(self, host: int) -> None:
        """Look up a host's block server again: it did not answer at its last address."""
        self._known.pop(host, None)

    def _name(self, host: int) -> str:
        return f"launch-{self._launch}/block-server-{host}"

    def _parsed(self, host: int, said: str) -> ServerAddress | None:
        rank, _, address = said.partition(" ")
        if not rank.isdecimal() or int(rank) >= len(self._homes) or self._homes[int(rank)] != host:
            return None  # only a rank of that host can be it
        return ServerAddress(int(rank), address)
