"""A server that holds nothing: it joins, answers pings, and fills slots at once. For tests of who starts and ends it.

Importing it (in the warm parent, as a preload) puts it in the place of the real one.
"""

from __future__ import annotations

import os
import socket

from shoal import system
from shoal.cluster.launch import roles
from shoal.cluster.launch.roles import decode_spec
from shoal.runtime import failpoints
from shoal.runtime.transport import unix
from shoal.runtime.transport.framing import encode, read_message
from shoal.runtime.transport.messages.message import Message
from shoal.runtime.transport.messages.server_coordinator import (
    JoinServer,
    PingServer,
    ServerAlive,
    ServerView,
    SlotsFilled,
)
from shoal.runtime.transport.messages.worker_coordinator import JoinRefused

roles.ROLES["server"] = "stub_server:main"


def main(spec_bytes: bytes, fds: dict[str, int]) -> int:
    spec = decode_spec(spec_bytes)
    failpoints.arm(spec.faults, process=f"server-{spec.number}", incarnation=spec.incarnation)
    assert socket.socket(fileno=fds["listener"]).getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    print(f"server {spec.number} incarnation {spec.incarnation}", flush=True)
    if b"SERVER_FAILS" in spec.env and spec.number == 0:
        raise SystemExit("no room for anything")
    while True:
        try:
            _serve(spec.number, spec.incarnation, system.path_of_way(fds["coordinator"]))
        except (OSError, EOFError):
            continue  # the coordinator was killed


def _serve(number: int, incarnation: int, path: str) -> None:
    with unix.connect(path, timeout_s=30.0) as sock:

        def say(message: Message) -> None:
            sock.sendall(b"".join(encode(message)))

        say(JoinServer(number, incarnation, os.getpid()))
        sock.settimeout(None)
        while True:
            message, _ = read_message(sock)
            if isinstance(message, JoinRefused):
                raise SystemExit(f"refused: {message.reason}")
            if isinstance(message, PingServer):
                say(ServerAlive(number))
            if isinstance(message, ServerView):
                slots = [slot for slot, joining in message.joining.items() if number in joining]
                if slots:
                    say(SlotsFilled(message.view, slots))
