"""The far end of benchmarks/ps_channel.py: keeps one array and gives it back, over shoal's channel or torch's rpc."""

from __future__ import annotations

import selectors
import sys

import numpy as np
import torch
from torch.distributed import rpc

from shoal.runtime.transport import unix
from shoal.runtime.transport.messages.client_server import (
    Committed,
    Hello,
    Pulled,
    PullRows,
    PushRows,
    Welcome,
)
from shoal.runtime.transport.shared_server import Listener, Request

STORED: dict[int, torch.Tensor] = {}
"""By size in bytes."""


def push(pushed: torch.Tensor) -> int:
    """Called by torch's rpc: take it over, as a server would."""
    _stored(pushed.nbytes).copy_(pushed)
    return 1


def pull(num_bytes: int) -> torch.Tensor:
    """Called by torch's rpc."""
    return _stored(num_bytes)


def _stored(num_bytes: int) -> torch.Tensor:
    if num_bytes not in STORED:
        STORED[num_bytes] = torch.zeros(num_bytes // 4)
    return STORED[num_bytes]


def serve_shoal(path: str) -> None:
    selector = selectors.DefaultSelector()

    def hear(request: Request) -> None:
        match request.message:
            case PushRows():
                pushed = np.frombuffer(request.frames[0], np.float32)
                np.copyto(_stored(pushed.nbytes).numpy(), pushed)
                listener.reply(request.peer, request.ticket, Committed(1, 1, 1))
            case PullRows():
                into = np.frombuffer(request.into[0], np.float32)
                np.copyto(into, _stored(into.nbytes).numpy())
                listener.reply(request.peer, request.ticket, Pulled(1, 1))
            case Hello(name):
                listener.reply(request.peer, request.ticket, Welcome(name, 0, 1))

    listener = Listener(unix.listen(path), selector, hear=hear, gone=lambda peer: sys.exit())
    print("ready", flush=True)
    while True:
        for key, mask in selector.select():
            listener.attend(key, mask)


def rpc_options(port: str) -> rpc.TensorPipeRpcBackendOptions:
    return rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", num_worker_threads=4)


def serve_rpc(port: str) -> None:
    print("ready", flush=True)
    rpc.init_rpc("server", rank=1, world_size=2, rpc_backend_options=rpc_options(port))
    rpc.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"shoal": serve_shoal, "rpc": serve_rpc}[sys.argv[1]](sys.argv[2])
