"""Connections to block servers, and the addresses at which they listen.

Hosts find each other in a folder that all of them see, with a file per host.
On one machine that may be treated as several (`shoal run --pretend-hosts 3`)
it is the job's scratch directory.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import TracebackType

from shoal.config import job as jobs
from shoal.data.remote.blocks import BLOCK_BYTES
from shoal.errors import WireError
from shoal.runtime import scratch
from shoal.runtime.transport import framing, tcp
from shoal.runtime.transport.framing import Bytes, FrameLimits
from shoal.runtime.transport.messages.message import Message

LIMITS = FrameLimits(num_frames=1, frames_bytes=BLOCK_BYTES)
"""A message about blocks carries one of them, or none."""

ANSWER_TIMEOUT_S = 60.0
"""For one block between two hosts. A block server that is busy for longer is asked again, or another is."""


class BlockConnection:
    """A connection to a block server. Not for two threads at once."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._socket = tcp.connect(*address, timeout_s=5.0)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            self._socket.close()
            raise

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
        """Hang up."""
        self._socket.close()

    def __enter__(self) -> BlockConnection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ConnectionPool:
    """Lines to other hosts, kept for the next question. For several threads."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, int], list[BlockConnection]] = {}
        self._is_closed = False

    def ask(
        self, address: tuple[str, int], message: Message, frame: Bytes | None = None
    ) -> tuple[Message, Bytes]:
        """Ask whoever listens there; OSError where nobody answers."""
        idle = self._idle.setdefault(address, [])
        line = idle.pop() if idle else None  # a pop is atomic: no two threads get one line
        if line is not None:
            try:
                answer = line.ask(message, frame)
                self._keep(line, idle)
                return answer
            except OSError:
                line.close()  # it may only have been idle for too long; a fresh one tells
        line = BlockConnection(address)
        try:
            answer = line.ask(message, frame)
        except BaseException:
            line.close()
            raise
        self._keep(line, idle)
        return answer

    def _keep(self, line: BlockConnection, idle: list[BlockConnection]) -> None:
        if self._is_closed:
            line.close()  # whoever asked outlived us
        else:
            idle.append(line)

    def close(self) -> None:
        """Hang up everywhere."""
        self._is_closed = True
        for lines in self._idle.values():
            while lines:
                lines.pop().close()


class Hosts:
    """The hosts of this job, and which of them is this process's."""

    def __init__(self, directory: Path, *, mine: int, num_hosts: int) -> None:
        self._directory = directory
        self.mine, self.num_hosts = mine, num_hosts
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    @classmethod
    def of_job(cls) -> Hosts:
        """Those of the job that this process belongs to."""
        job = jobs.current()
        return cls(scratch.directory("hosts"), mine=job.host, num_hosts=job.num_hosts)

    @property
    def others(self) -> list[int]:
        """All but mine."""
        return [host for host in range(self.num_hosts) if host != self.mine]

    def folder(self) -> Path:
        """My host's own folder: its block server's lock, and its cache."""
        path = self._directory / f"host-{self.mine}"
        path.mkdir(exist_ok=True, mode=0o700)
        return path

    def publish(self, address: tuple[str, int]) -> None:
        """My block server listens there from now on."""
        path = self._directory / f"{self.mine}.address"
        half = path.with_suffix(f".{os.getpid()}")
        half.write_text(f"{address[0]} {address[1]}")
        half.rename(path)

    def address(self, host: int) -> tuple[str, int] | None:
        """Where a host's block server listened last; None before it first did."""
        try:
            name, port = (self._directory / f"{host}.address").read_text().split()
        except (FileNotFoundError, ValueError):
            return None
        return name, int(port)
