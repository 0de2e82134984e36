"""Health endpoints of a service: /healthz, /readyz and /metrics over HTTP, for its supervisor and Prometheus.

Read-only and without a secret: probes of Kubernetes have none. So it listens on loopback unless
another interface was named, and reveals no path and no key. A thread answers, so a stuck loop is
reported as stuck.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import psutil

from shoal.errors import ConfigError
from shoal.observe.dashboard import prometheus
from shoal.observe.dashboard.prometheus import Figure
from shoal.runtime.health import Health
from shoal.runtime.transport import interfaces

MAX_CONNECTIONS = 16
REQUEST_TIMEOUT_S = 5.0
LOOPBACK = "127.0.0.1"

More = Callable[[], list[Figure]]


def parse(said: str) -> tuple[str, int]:
    """`9090`, `127.0.0.1:9090`, `eth0:9090` or `[::1]:9090`: address and port."""
    where, _, port = said.rpartition(":")
    if not port.isdecimal() or int(port) >= 1 << 16:
        raise ConfigError(
            f"--health {said} is no address; one reads {LOOPBACK}:9090, eth0:9090, or 9090 for loopback. Nothing was started."
        )
    where = where.strip("[]") or LOOPBACK
    try:
        address = ipaddress.ip_address(where)
    except ValueError:
        there = interfaces.addresses()
        if where not in there and where != "localhost":
            known = ", ".join(f"{name} ({each})" for name, each in there.items())
            raise ConfigError(
                f"--health {said}: {where!r} is neither an address nor a network interface of this machine. Nothing was started; "
                f"there are {known}."
            ) from None
        return there.get(where, LOOPBACK), int(port)
    if (getattr(address, "ipv4_mapped", None) or address).is_unspecified:
        raise ConfigError(
            f"--health {said} is every address of this machine, and its answers are for whoever asks. Nothing was started; name "
            "loopback, an address or an interface."
        )
    return where, int(port)


@contextlib.contextmanager
def serving(health: Health, at: str | None, more: More = list) -> Iterator[str]:
    """Answer at this address for as long as the context lasts; gives its URL. `more` are figures of the run."""
    if at is None:
        yield ""
        return
    host, port = parse(at)

    class Handler(_Handler):
        pass

    Handler.health, Handler.more = health, staticmethod(more)
    try:
        server = _Server((host, port), Handler)
    except OSError as error:
        raise ConfigError(
            f"--health {at}: {host}:{port} cannot be listened on ({error.strerror}). Nothing was started; choose another."
        ) from None
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="health", daemon=True)
    thread.start()
    try:
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a client that does not hang up must not keep the service from ending
    request_queue_size = 32

    def __init__(self, address: tuple[str, int], handler: type[_Handler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._free = threading.Semaphore(MAX_CONNECTIONS)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            try:
                super().process_request(request, client_address)
            except BaseException:
                self._free.release()  # no thread could be started, which would release it
                raise
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that hang up in the middle."""


class _Handler(BaseHTTPRequestHandler):
    health: Health
    more: More
    timeout = REQUEST_TIMEOUT_S
    server_version, sys_version = "shoal", ""

    def do_GET(self) -> None:  # the name is http.server's
        status, text = _answer(self.path.partition("?")[0], self.health, self.more)
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Probes come every few seconds."""


def _answer(path: str, health: Health, more: More) -> tuple[int, str]:
    stalled_s = health.stalled_s(time.monotonic())
    stuck = f"its loop has not turned for {stalled_s:.0f} s" if stalled_s else ""
    match path:
        case "/healthz":
            return (503, f"{stuck}\n") if stuck else (200, f"{health.role}: alive\n")
        case "/readyz":
            why = stuck or health.waits_for
            return (503, f"{health.role}: not ready, {why}\n") if why else (200, f"{health.role}: ready\n")
        case "/metrics":
            return 200, prometheus.text([figures(health, stuck=bool(stuck)), more()])
        case _:
            return 404, "there are /healthz, /readyz and /metrics\n"


def figures(health: Health, *, stuck: bool = False) -> list[Figure]:
    """Figures of the service itself."""
    role = {"role": health.role}
    found: list[Figure] = [
        ("shoal_service_ready", role, float(not health.waits_for and not stuck)),
        ("shoal_service_up_seconds", role, round(time.monotonic() - health.started_at, 3)),
        ("shoal_service_processes", role, float(len(health.processes))),
        *((name, role, float(value)) for name, value in health.figures.items()),
    ]
    for name, pid in list(health.processes.items()):
        with contextlib.suppress(psutil.Error):
            process = {"process": name, **role}
            found.append(("shoal_process_rss_bytes", process, float(psutil.Process(pid).memory_info().rss)))
    return found
