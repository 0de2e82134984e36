"""The near end of benchmarks/ps_channel.py: told what to move how often on stdin, tells the median seconds of it."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch.distributed import rpc

from benchmarks.scripts import channel_server
from shoal.runtime.transport.messages.client_server import Hello, PullRows, PushRows
from shoal.runtime.transport.shared_client import INLINE_BYTES, Link

PUSH = PushRows(view=1, stream=0, seq=1, table=0)
PULL = PullRows(view=1, clock=0, table=0)
WAIT_S = 60.0


class Shoal:
    def __init__(self, path: str) -> None:
        self._link = Link.connect(path, Hello(name="bench", incarnation=0))

    def push(self, tensor: torch.Tensor) -> None:
        if tensor.nbytes <= INLINE_BYTES:
            self._link.wait(self._link.send(PUSH, [memoryview(tensor.numpy())]), WAIT_S)
            return
        buffer = self._link.alloc(tensor.nbytes)
        torch.frombuffer(buffer.view, dtype=torch.float32).copy_(tensor)
        self._link.wait(self._link.send(PUSH, [buffer]), WAIT_S)
        self._link.free(buffer)

    def pull(self, tensor: torch.Tensor) -> None:
        """Into the arena, where it can be used."""
        buffer = self._link.alloc(tensor.nbytes)
        self._link.wait(self._link.send(PULL, into=[buffer]), WAIT_S)
        torch.frombuffer(buffer.view, dtype=torch.float32)
        self._link.free(buffer)

    def pull_copied(self, tensor: torch.Tensor) -> None:
        """Into a tensor that the client has already."""
        buffer = self._link.alloc(tensor.nbytes)
        self._link.wait(self._link.send(PULL, into=[buffer]), WAIT_S)
        tensor.copy_(torch.frombuffer(buffer.view, dtype=torch.float32))
        self._link.free(buffer)

    def close(self) -> None:
        self._link.close()


class Rpc:
    def __init__(self, port: str) -> None:
        rpc.init_rpc("client", rank=0, world_size=2, rpc_backend_options=channel_server.rpc_options(port))

    def push(self, tensor: torch.Tensor) -> None:
        rpc.rpc_sync("server", channel_server.push, args=(tensor,))

    def pull(self, tensor: torch.Tensor) -> None:
        rpc.rpc_sync("server", channel_server.pull, args=(tensor.nbytes,))

    def pull_copied(self, tensor: torch.Tensor) -> None:
        tensor.copy_(rpc.rpc_sync("server", channel_server.pull, args=(tensor.nbytes,)))

    def close(self) -> None:
        rpc.shutdown()


def median_s(call: Callable[[], None], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main(kind: str, where: str) -> None:
    torch.set_num_threads(1)
    side = Shoal(where) if kind == "shoal" else Rpc(where)
    print("ready", flush=True)
    for line in sys.stdin:
        what, num_bytes, repeats = line.split()
        tensor = torch.randn(int(num_bytes) // 4)
        move = getattr(side, what)
        print(median_s(lambda move=move, tensor=tensor: move(tensor), int(repeats)), flush=True)  # type: ignore[misc]
    side.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
