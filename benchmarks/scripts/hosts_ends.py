"""Both ends of benchmarks/hosts_transport.py: a server that keeps what is pushed and gives it back, and its client.

    server KIND HOST        says its port on stdout
    client KIND HOST PORT   told "push|pull BYTES TIMES" on stdin, says the median seconds of it

Kinds: bare (a Python socket, the bytes alone), ssl (the same over Python's TLS), tls and plain (shoal's; tls-2 and tls-4 over several connections),
rpc (torch) and grpc. Every buffer exists before a measurement begins, at both ends.
"""

from __future__ import annotations

import selectors
import socket
import ssl
import statistics
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shoal.runtime.transport import tls, unix
from shoal.runtime.transport.messages.client_server import (
    Committed,
    Hello,
    Pulled,
    PullRows,
    PushRows,
    Welcome,
)
from shoal.runtime.transport.shared_client import Link
from shoal.runtime.transport.shared_server import Listener, Request

PUSH = PushRows(view=1, stream=0, seq=1, table=0)
PULL = PullRows(view=1, clock=0, table=0)
WAIT_S = 120.0
_HEAD = struct.Struct("<cQ")
_STORED: dict[int, np.ndarray[Any, Any]] = {}


def stored(num_bytes: int) -> np.ndarray[Any, Any]:
    if num_bytes not in _STORED:
        _STORED[num_bytes] = np.full(num_bytes, 1, np.uint8)
    return _STORED[num_bytes]


def credentials(kind: str, role: str) -> tls.Credentials:
    """What the benchmark has left for this role in the present folder."""
    kind = kind.partition("-")[0]
    return msgspec.msgpack.decode(Path(f"{kind}.{role}").read_bytes(), type=tls.Credentials)


def fill(sock: socket.socket, view: memoryview) -> None:
    while view:
        count = sock.recv_into(view)
        if not count:
            sys.exit()
        view = view[count:]


def wrapped(sock: socket.socket, role: str) -> socket.socket:
    """The same connection over Python's own TLS, with the certificates that shoal would present."""
    is_server = role == "server-0"
    purpose = ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT
    context = tls.context(credentials("tls", role), purpose)
    context.sslsocket_class = ssl.SSLSocket
    return context.wrap_socket(sock, server_side=is_server)


# ---- servers ------------------------------------------------------------------------------------


def serve_bare(host: str, kind: str) -> None:
    with socket.create_server((host, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if kind == "ssl":
        sock = wrapped(sock, "server-0")
    head = bytearray(_HEAD.size)
    while True:
        fill(sock, memoryview(head))
        what, num_bytes = _HEAD.unpack(head)
        if what == b">":
            fill(sock, stored(num_bytes).data)
            sock.sendall(b"x")
        else:
            sock.sendall(stored(num_bytes).data)


def serve_shoal(host: str, kind: str) -> None:
    selector = selectors.DefaultSelector()

    def hear(request: Request) -> None:
        match request.message:
            case PushRows():  # it lies where a server would read it
                listener.reply(request.peer, request.ticket, Committed(1, 1, 1))
            case PullRows():  # a copy of one version, as a server's answer is
                np.copyto(np.frombuffer(request.into[0], np.uint8), stored(len(request.into[0])))
                listener.reply(request.peer, request.ticket, Pulled(1, 1))
            case Hello(name):
                listener.reply(request.peer, request.ticket, Welcome(name, 0, 1))

    sock = tls.listen(host)
    listener = Listener(
        unix.listen(f"{kind}.socket"),
        selector,
        hear=hear,
        gone=lambda peer: sys.exit(),
        remote=(sock, credentials(kind, "server-0")),
    )
    print(sock.getsockname()[1], flush=True)
    while True:
        for key, mask in selector.select():
            listener.attend(key, mask)


def serve_rpc(host: str, kind: str) -> None:
    from torch.distributed import rpc

    with socket.create_server((host, 0)) as free:
        port = free.getsockname()[1]
    print(port, flush=True)
    rpc.init_rpc("server", rank=0, world_size=2, rpc_backend_options=rpc_options(host, port))
    rpc.shutdown()


def rpc_options(host: str, port: int) -> Any:
    from torch.distributed import rpc

    return rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://{host}:{port}", num_worker_threads=4)


def take(pushed: Any) -> int:
    """Called by torch's rpc."""
    return len(pushed)


def serve_grpc(host: str, kind: str) -> None:
    from concurrent import futures

    import grpc

    server = grpc.server(futures.ThreadPoolExecutor(1), options=GRPC)
    handler = grpc.unary_unary_rpc_method_handler(lambda request, context: b"x")
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("bench", {"push": handler})])
    print(server.add_insecure_port(f"{host}:0"), flush=True)
    server.start()
    sys.stdin.read()


GRPC = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


# ---- clients ------------------------------------------------------------------------------------


def client_bare(host: str, port: int, kind: str) -> dict[str, Callable[[int], Callable[[], None]]]:
    sock = socket.create_connection((host, port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if kind == "ssl":
        sock = wrapped(sock, "worker-0")

    def push(num_bytes: int) -> Callable[[], None]:
        head, answer = _HEAD.pack(b">", num_bytes), bytearray(1)

        def once() -> None:
            sock.sendall(head)
            sock.sendall(stored(num_bytes).data)
            fill(sock, memoryview(answer))

        return once

    def pull(num_bytes: int) -> Callable[[], None]:
        def once() -> None:
            sock.sendall(_HEAD.pack(b"<", num_bytes))
            fill(sock, stored(num_bytes).data)

        return once

    return {"push": push, "pull": pull}


def client_shoal(host: str, port: int, kind: str) -> dict[str, Callable[[int], Callable[[], None]]]:
    mine = credentials(kind, "worker-0")
    tls.use(mine, tls.Connections(int(kind.partition("-")[2] or 1)))
    link = Link.connect(
        tls.join_address(mine.scheme, host, port), Hello("worker-0", 0), WAIT_S, peer="server-0"
    )

    def push(num_bytes: int) -> Callable[[], None]:
        frame = link.alloc(num_bytes)
        frame.view[:] = stored(num_bytes).data
        return lambda: check(link.wait(link.send(PUSH, [frame]), WAIT_S)[0], Committed)

    def pull(num_bytes: int) -> Callable[[], None]:
        into = link.alloc(num_bytes)
        return lambda: check(link.wait(link.send(PULL, into=[into]), WAIT_S)[0], Pulled)

    return {"push": push, "pull": pull}


def check(answer: object, kind: type) -> None:
    if not isinstance(answer, kind):
        raise SystemExit(f"the server answered {answer}")


def client_rpc(host: str, port: int, kind: str) -> dict[str, Callable[[int], Callable[[], None]]]:
    import torch
    from torch.distributed import rpc

    from benchmarks.scripts import hosts_ends

    rpc.init_rpc("client", rank=1, world_size=2, rpc_backend_options=rpc_options(host, port))

    def push(num_bytes: int) -> Callable[[], None]:
        tensor = torch.ones(num_bytes, dtype=torch.uint8)
        return lambda: check(rpc.rpc_sync("server", hosts_ends.take, args=(tensor,)), int)

    return {"push": push, "close": lambda _: rpc.shutdown}


def client_grpc(host: str, port: int, kind: str) -> dict[str, Callable[[int], Callable[[], None]]]:
    import grpc

    call = grpc.insecure_channel(f"{host}:{port}", options=GRPC).unary_unary("/bench/push")
    return {"push": lambda num_bytes: lambda: check(call(bytes(num_bytes)), bytes)}


SERVERS = {
    "bare": serve_bare,
    "ssl": serve_bare,
    "tls": serve_shoal,
    "plain": serve_shoal,
    "rpc": serve_rpc,
    "grpc": serve_grpc,
}
CLIENTS = {
    "bare": client_bare,
    "ssl": client_bare,
    "tls": client_shoal,
    "plain": client_shoal,
    "rpc": client_rpc,
    "grpc": client_grpc,
}


def main() -> None:
    end, kind, host, *port = sys.argv[1:]
    if end == "server":
        SERVERS[kind.partition("-")[0]](host, kind)
        return
    made = CLIENTS[kind.partition("-")[0]](host, int(port[0]), kind)
    calls: dict[tuple[str, int], Callable[[], None]] = {}
    print("ready", flush=True)
    for line in sys.stdin:
        what, num_bytes, times = line.split()
        asked = what, int(num_bytes)
        if asked not in calls:
            calls[asked] = made[what](int(num_bytes))
            calls[asked]()
        seconds = []
        for _ in range(int(times)):
            began = time.perf_counter()
            calls[asked]()
            seconds.append(time.perf_counter() - began)
        print(statistics.median(seconds), flush=True)
    if "close" in made:
        made["close"](0)()


if __name__ == "__main__":
    main()
