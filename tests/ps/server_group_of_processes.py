"""Servers as processes, with whoever a test wants as their coordinator and clients."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from shoal.cluster.hosts.authority import Authority
from shoal.cluster.launch.roles import ServerSpec, encode_spec
from shoal.runtime.transport import tls, unix
from shoal.runtime.transport.framing import read_message, send_message
from shoal.runtime.transport.messages.client_server import Hello
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.shared_client import Link

HELLO = Hello(name="worker-0", incarnation=0)
FAKE = Path(__file__).parent / "fake_server.py"
REAL = (
    "import sys; from shoal.ps.server import process as server_process; sys.exit(server_process.main(bytes.fromhex(sys.argv[1]), "
    "{name: int(fd) for name, _, fd in (each.partition('=') for each in sys.argv[2:])}))"
)


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
        self._program = ["-c", REAL] if is_real else [str(FAKE)]
        self.path, self.number = folder / f"server-{number}", number
        self.listener = unix.listen(self.path)
        self._told, self._coordinator, self._authority = told, coordinator, authority
        self.address = str(self.path)
        if authority is not None:
            self._tcp = tls.listen("127.0.0.1")
            scheme = authority.issue("server-0").scheme
            self.address = tls.join_address(scheme, *self._tcp.getsockname()[:2])
        self.process: subprocess.Popen[str]
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
        self.process = subprocess.Popen(
            [sys.executable, *self._program, encode_spec(spec).hex(), *(f"{n}={fd}" for n, fd in fds.items())],
            pass_fds=list(fds.values()), stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        for fd in ways.values():
            os.close(fd)

    def close(self) -> None:
        self.listener.close()
        if self._authority is not None:
            self._tcp.close()
        for link in self._links:
            link.close()

    def end(self) -> tuple[int, str]:
        _, said = self.process.communicate(timeout=60.0)
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
