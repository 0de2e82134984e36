"""The dashboard as a process: its socket, its addresses, and the child of a `shoal run --dashboard`.

The parent binds the socket, so the address is known and taken before the child has imported
anything. The token goes through a pipe: arguments and environment are visible to others. When the
parent ends, the pipe closes and the child ends too.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from shoal.errors import ConfigError

PORT = 8265
TRIED_PORTS = 64
"""Ports that are tried after the one asked for."""

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a dashboard, with its secret."""

    listener: socket.socket
    host: str
    port: int
    token: str
    note: str = ""
    """Note for the user about this address: another port than requested, or open to the network."""

    def url(self, path: str = "/") -> str:
        shown = f"[{self.host}]" if ":" in self.host else self.host
        if self.host in ("0.0.0.0", "::"):
            shown = socket.gethostname()
        return f"http://{shown}:{self.port}{path}?token={self.token}"

    def hosts(self) -> set[str]:
        """Accepted values of the Host header; others come from a foreign page that points here."""
        names = {self.host, "localhost", LOOPBACK, "[::1]"}
        if not _is_loopback(self.host):
            import psutil

            names |= {socket.gethostname(), socket.getfqdn()}
            for addresses in psutil.net_if_addrs().values():
                names |= {
                    each.address.partition("%")[0]
                    for each in addresses
                    if each.family in (socket.AF_INET, socket.AF_INET6)
                }
        bracketed = {f"[{name}]" if ":" in name and not name.startswith("[") else name for name in names}
        return {f"{name}:{self.port}" for name in bracketed} | (bracketed if self.port == 80 else set())


def listen(host: str = LOOPBACK, port: int | None = None, *, option: str = "--port") -> Address:
    """Bind the port asked for, or the next free one. `option`: by which the user chooses one."""
    first = PORT if port is None else port
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    except ValueError:
        host, family = socket.gethostbyname(host) if host == "localhost" else host, socket.AF_INET
    error: OSError | None = None
    tried = first
    for tried in range(first, min(first + TRIED_PORTS, 65536)) if first else [0]:
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, tried))
            listener.listen(64)
        except OSError as failed:
            listener.close()
            error = failed
            if not isinstance(failed, PermissionError) and failed.errno not in (98, 13):  # EADDRINUSE, EACCES
                break
            continue
        found = listener.getsockname()[1]
        note = f"port {first} is in use, so the dashboard has {found}. " if first not in (0, found) else ""
        if not _is_loopback(host):
            note += f"The dashboard listens on {host}, over HTTP without encryption: anyone who can read the traffic has its token. "
        return Address(listener, host, found, secrets.token_urlsafe(24), note.strip())
    which = f"ports {first} to {tried} were" if tried > first else f"port {first} was"
    raise ConfigError(
        f"the dashboard cannot listen on {host}: {error.strerror or error if error else 'no port'} ({which} tried). Nothing was started; choose another with {option}, or an "
        "address of this machine."
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def serve(root: Path, address: Address) -> None:
    """Serve until the process is asked to end. SIGINT and SIGTERM end it."""
    import uvicorn
    from starlette.concurrency import run_in_threadpool

    from shoal.observe.dashboard.server import application

    asyncio.run(run_in_threadpool(int))  # loads what the first request would wait for

    app = application(root, token=address.token, hosts=address.hosts())
    config = uvicorn.Config(
        app,
        log_level="error",
        access_log=False,  # the first request has the token in its address
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=1,
        limit_concurrency=256,
        ws="none",
        loop="asyncio",
    )
    uvicorn.Server(config).run(sockets=[address.listener])


@contextlib.contextmanager
def beside(root: Path, *, host: str = LOOPBACK, port: int | None = None) -> Iterator[str]:
    """A dashboard of one run in a process of its own, for as long as the context lasts. Gives what to tell the user."""
    address = listen(host, port, option="--dashboard-port")
    command = [sys.executable, "-m", "shoal.observe.dashboard", str(root), str(address.listener.fileno())]
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=[address.listener.fileno()],
        start_new_session=True,  # Ctrl-C is for the job; the dashboard ends with it
    )
    address.listener.close()
    pipe = child.stdin
    assert pipe is not None
    try:
        with contextlib.suppress(OSError):
            said = {"token": address.token, "host": address.host, "port": address.port}
            pipe.write(json.dumps(said).encode() + b"\n")
            pipe.flush()
        note = f"{address.note} " if address.note else ""
        page = f"/run/{quote(root.name, safe='')}"
        yield f"{note}dashboard: {address.url(page)}"
    finally:
        with contextlib.suppress(OSError):
            pipe.close()
        try:
            child.wait(5)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def main(root: str, fd: str) -> None:
    """The child: its socket by number, its secret by stdin."""
    import setproctitle

    setproctitle.setproctitle(f"shoal dashboard [{Path(root).name}]")
    with contextlib.suppress(OSError):
        os.nice(3)  # training comes first
    said = json.loads(sys.stdin.readline())
    address = Address(socket.socket(fileno=int(fd)), said["host"], said["port"], said["token"])

    def end_with_parent() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=end_with_parent, daemon=True).start()
    serve(Path(root), address)
