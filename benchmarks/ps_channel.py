"""The channel to a parameter server against torch's rpc: a small push, a large push, a large pull.

Aims: 1 KiB at least 3 times quicker; 64 MiB pushed at 2.5 times and pulled at
3 times the bandwidth. Both servers run all the time, in a process each, and
one client speaks to them in turn. A push is the client's tensor taken over
by the server into memory of its own; a pull is the server's tensor in the
client's hands, where it lies, or copied into a tensor that it has already.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.distributed import rpc

from benchmarks.harness import Report, alternate
from benchmarks.scripts import channel_server
from shoal.wire.ps_messages import Hello, PullRows, PushRows
from shoal.wire.shared import INLINE_BYTES, Link

PUSH = PushRows(view=1, stream=0, seq=1, table=0)
PULL = PullRows(view=1, clock=0, table=0)
WAIT_S = 60.0


@contextmanager
def far_end(kind: str, where: str) -> Iterator[None]:
    command = [sys.executable, "-m", "benchmarks.scripts.channel_server", kind, where]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Ours:
    def __init__(self, link: Link) -> None:
        self._link = link

    def push(self, tensor: torch.Tensor) -> None:
        if tensor.nbytes <= INLINE_BYTES:
            self._link.wait(self._link.send(PUSH, [memoryview(tensor.numpy())]), WAIT_S)
            return
        buffer = self._link.alloc(tensor.nbytes)
        torch.frombuffer(buffer.view, dtype=torch.float32).copy_(tensor)
        self._link.wait(self._link.send(PUSH, [buffer]), WAIT_S)
        self._link.free(buffer)

    def pull(self, tensor: torch.Tensor, *, copies: bool) -> None:
        buffer = self._link.alloc(tensor.nbytes)
        self._link.wait(self._link.send(PULL, into=[buffer]), WAIT_S)
        pulled = torch.frombuffer(buffer.view, dtype=torch.float32)
        if copies:
            tensor.copy_(pulled)
        self._link.free(buffer)


class Theirs:
    def push(self, tensor: torch.Tensor) -> None:
        rpc.rpc_sync("server", channel_server.push, args=(tensor,))

    def pull(self, tensor: torch.Tensor, *, copies: bool) -> None:
        pulled = rpc.rpc_sync("server", channel_server.pull, args=(tensor.nbytes,))
        if copies:
            tensor.copy_(pulled)


def median_s(call: Callable[[], None], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def compare(report: Report, ours: Ours, theirs: Theirs, *, quick: bool) -> None:
    small, large = torch.randn(256), torch.randn(16 << 20)
    rounds, many, few = (4, 100, 3) if quick else (12, 400, 8)
    values = alternate(
        lambda: 1e6 * median_s(lambda: ours.push(small), many),
        lambda: 1e6 * median_s(lambda: theirs.push(small), many),
        rounds=rounds,
    )
    for side in ("ours", "theirs"):
        values[f"{side}_us"] = round(values.pop(f"{side}_s"), 1)
    report.add(
        "push of 1 KiB, median time: shoal / torch rpc",
        values,
        aim="ratio <= 0.333",
        repeats=many,
    )
    turns: list[tuple[str, str, Callable[[Ours | Theirs], None]]] = [
        ("push of 64 MiB", "ratio <= 0.4", lambda side: side.push(large)),
        ("pull of 64 MiB, used where it lies", "ratio <= 0.333", lambda side: side.pull(large, copies=False)),
        (
            "pull of 64 MiB, copied into a tensor",
            "ratio <= 0.333",
            lambda side: side.pull(large, copies=True),
        ),
    ]
    for name, aim, turn in turns:
        values = alternate(
            lambda turn=turn: median_s(lambda: turn(ours), few),  # type: ignore[misc]
            lambda turn=turn: median_s(lambda: turn(theirs), few),  # type: ignore[misc]
            rounds=rounds,
        )
        bandwidth = {
            f"{side}_gb_per_s": round(large.nbytes / values[f"{side}_s"] / 1e9, 2)
            for side in ("ours", "theirs")
        }
        report.add(f"{name}, median time: shoal / torch rpc", {**values, **bandwidth}, aim=aim, repeats=few)


def main(quick: bool = False) -> None:
    torch.set_num_threads(1)
    report = Report("ps_channel")
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "server")
        with far_end("shoal", path), far_end("rpc", str(port)):
            options = rpc.TensorPipeRpcBackendOptions(
                init_method=f"tcp://127.0.0.1:{port}", num_worker_threads=4
            )
            rpc.init_rpc("client", rank=0, world_size=2, rpc_backend_options=options)
            with Link.connect(path, Hello(name=f"bench-{os.getpid()}", incarnation=0)) as link:
                compare(report, Ours(link), Theirs(), quick=quick)
            rpc.shutdown()
    report.save()


if __name__ == "__main__":
    main()
