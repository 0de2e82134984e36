"""Servers as processes, with a test's own coordinator and clients."""

from __future__ import annotations

import atexit
import functools
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import msgspec

from shoal.cluster.hosts.authority import Authority
from shoal.cluster.launch.roles import PRELOAD_WITH_SERVERS, ServerSpec, encode_spec
from shoal.cluster.supervisor.warm_parent import WarmParent
from shoal.runtime.transport import tls, unix
from shoal.runtime.transport.framing import read_message, send_message
from shoal.runtime.transport.messages.client_server import Hello
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.shared_client import Link
from waiting import wait_until

HELLO = Hello(name="worker-0", incarnation=0)
FAKE = Path(__file__).parent / "fake_server.py"


@functools.cache
def _warm_parent() -> WarmParent:
    """Imports torch and the kernels once for all servers of the session."""
    warm = WarmParent("servers", preload=PRELOAD_WITH_SERVERS)
    atexit.register(warm.close)
    return warm


class Forked:
    """A server forked from the warm parent, with what these tests use of a Popen."""

    _codes: ClassVar[dict[int, int]] = {}

    def __init__(self, spec: bytes, fds: dict[str, int]) -> None:
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with its server
        self.pid = _warm_parent().fork(
            "server", title="shoal server", spec=spec, fds={**fds, "stderr": self._said.fileno()}
        )

    @property
    def returncode(self) -> int | None:
        self._codes.update((each.pid, each.code) for each in _warm_parent().exits())
        return self._codes.get(self.pid)

    def send_signal(self, signum: signal.Signals) -> None:
        _warm_parent().signal(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float) -> tuple[None, str]:
        assert wait_until(lambda: self.returncode is not None, timeout)
        self._said.seek(0)
        return None, self._said.read()

    def close(self) -> None:
        self._said.close()


class Coordinator:
    """Whoever a server takes for the coordinator."""

    def __init__(self, path: Path, authority: Authority | None = None) -> None:
        """With an authority it is on another host."""
        self.path, self._credentials = path, authority and authority.issue("coordinator")
        self._listener = unix.listen(path) if authority is None else tls.listen("127.0.0.1")
        self._listener.settimeout(60.0)
        self.lines: list[socket.socket] = []

    @property
    def address(self) -> str:
        if self._credentials is None:
            return ""
        return tls.join_address(self._credentials.scheme, *self._listener.getsockname()[:2])

    def accept(self) -> Message:
        if self._credentials is None:
            self.lines.append(unix.accept(self._listener)[0])
        else:
            self.lines.append(self._credentials.accept(self._listener))
            self.lines[-1].settimeout(60.0)
        return self.hear()

    def say(self, *messages: Message) -> None:
        for message in messages:
            send_message(self.lines[-1], message)

    def hear(self) -> Message:
        return read_message(self.lines[-1], timeout_s=60.0)[0]

    def close(self) -> None:
        for sock in (*self.lines, self._listener):
            sock.close()


class Server:
    """A server process and the socket it listens at."""

    def __init__(
        self,
        folder: Path,
        number: int,
        coordinator: Coordinator,
        is_real: bool,
        authority: Authority | None = None,
        **told: int,
    ) -> None:
        self._is_real = is_real
        self.path, self.number = folder / f"server-{number}", number
        self.listener = unix.listen(self.path)
        self._told, self._coordinator, self._authority = told, coordinator, authority
        self.address = str(self.path)
        if authority is not None:
            self._tcp = tls.listen("127.0.0.1")
            scheme = authority.issue("server-0").scheme
            self.address = tls.join_address(scheme, *self._tcp.getsockname()[:2])
        self.process: subprocess.Popen[str] | Forked
        self._links: list[Link] = []

    def link(self) -> Link:
        """A client's link; closed with the group."""
        self._links.append(Link.connect(self.address, HELLO, 60.0, peer=f"server-{self.number}"))
        return self._links[-1]

    def start(self, others: list[Server]) -> None:
        spec = ServerSpec(
            job="test", number=self.number, num_workers=1, num_servers=len(others), num_replicas=1, strategy="ps",
            run_dir="", **self._told,
        )  # fmt: skip
        ways: dict[str, int] = {}
        fds = {"listener": self.listener.fileno()}
        if self._authority is None:
            ways = {"coordinator": os.open(self._coordinator.path, os.O_PATH)}
            ways |= {f"server-{other.number}": os.open(other.path, os.O_PATH) for other in others}
        else:
            spec = msgspec.structs.replace(
                spec,
                credentials=self._authority.issue(f"server-{self.number}"),
                coordinator=self._coordinator.address,
                address=self.address,
            )
            fds["tcp_listener"] = self._tcp.fileno()
        fds |= ways
        if self._is_real:
            self.process = Forked(encode_spec(spec), fds)
        else:
            self.process = subprocess.Popen(
                [sys.executable, str(FAKE), encode_spec(spec).hex(), *(f"{n}={fd}" for n, fd in fds.items())],
                pass_fds=list(fds.values()), stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
        for fd in ways.values():
            os.close(fd)

    def close(self) -> None:
        if isinstance(self.process, Forked):
            self.process.close()
        self.listener.close()
        if self._authority is not None:
            self._tcp.close()
        for link in self._links:
            link.close()

    def end(self) -> tuple[int, str]:
        _, said = self.process.communicate(timeout=60.0)
        assert self.process.returncode is not None
        return self.process.returncode, said


@contextmanager
def group(
    folder: Path,
    num_servers: int = 1,
    *,
    is_real: bool = False,
    authority: Authority | None = None,
    **told: int,
) -> Iterator[tuple[Coordinator, list[Server]]]:
    """That many servers, with the core of `fake_server.py` or, `is_real`, their own.

    With an authority all of them, and the coordinator, are on different hosts, as far as they know.
    """
    coordinator = Coordinator(folder / "coordinator", authority)
    servers = [
        Server(folder, number, coordinator, is_real, authority, **told) for number in range(num_servers)
    ]
    for server in servers:
        server.start(servers)
    try:
        yield coordinator, servers
    finally:
        for server in servers:
            server.process.kill()
            server.end()
            server.close()
        coordinator.close()
