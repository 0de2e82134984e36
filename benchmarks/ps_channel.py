"""The channel to a parameter server against torch's rpc: a small push, a large push, a large pull.

Aims: 1 KiB at least 3 times quicker; 64 MiB pushed at 2.5 times and pulled at
3 times the bandwidth. A push is the client's tensor taken over by the server
into memory of its own; a pull is the server's tensor in the client's hands,
where it lies, or copied into a tensor that it has already. Each side is a
client and a server; while one is measured the other is stopped, for torch's
rpc polls without rest and would take both cores from whoever runs beside it.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness import Report, alternate

LARGE = 64 << 20


class Pair:
    """A client and a server of one kind."""

    def __init__(self, kind: str, where: str) -> None:
        self._server = self._start("server", kind, where)
        self._client = self._start("client", kind, where)

    def median_s(self, what: str, num_bytes: int, repeats: int) -> float:
        """Seconds of one `what`, with nobody else at work."""
        self._signal(signal.SIGCONT)
        assert self._client.stdin is not None
        self._client.stdin.write(f"{what} {num_bytes} {repeats}\n")
        self._client.stdin.flush()
        seconds = float(self._hear(self._client))
        self._signal(signal.SIGSTOP)
        return seconds

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        for process in (self._client, self._server):
            process.communicate(timeout=60.0)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def _signal(self, signum: signal.Signals) -> None:
        for process in (self._client, self._server):
            process.send_signal(signum)

    def _start(self, end: str, kind: str, where: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.scripts.channel_{end}", kind, where]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._hear(process)
        return process

    def _hear(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"{process.args} ended with {process.wait()}")
        return line


@contextmanager
def pair(kind: str, where: str) -> Iterator[Pair]:
    running = Pair(kind, where)
    running.pause()
    try:
        yield running
    finally:
        running.close()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def compare(report: Report, ours: Pair, theirs: Pair, *, quick: bool) -> None:
    rounds, many, few = (4, 100, 3) if quick else (12, 400, 8)

    def both(what: str, num_bytes: int, repeats: int, *, unit: float = 1.0) -> dict[str, Any]:
        return alternate(
            lambda: unit * ours.median_s(what, num_bytes, repeats),
            lambda: unit * theirs.median_s(what, num_bytes, repeats),
            rounds=rounds,
        )

    values = both("push", 1024, many, unit=1e6)
    for side in ("ours", "theirs"):
        values[f"{side}_us"] = round(values.pop(f"{side}_s"), 1)
    report.add("push of 1 KiB, median time: shoal / torch rpc", values, aim="ratio <= 0.333", repeats=many)
    for what, name, aim in (
        ("push", "push of 64 MiB", 0.4),
        ("pull", "pull of 64 MiB, used where it lies", 0.333),
        ("pull_copied", "pull of 64 MiB, copied into a tensor", 0.333),
    ):
        values = both(what, LARGE, few)
        for side in ("ours", "theirs"):
            values[f"{side}_gb_per_s"] = round(LARGE / values[f"{side}_s"] / 1e9, 2)
        report.add(f"{name}, median time: shoal / torch rpc", values, aim=f"ratio <= {aim}", repeats=few)


def main(quick: bool = False) -> None:
    report = Report("ps_channel")
    with (
        tempfile.TemporaryDirectory() as folder,
        pair("shoal", str(Path(folder) / "server")) as ours,
        pair("rpc", str(free_port())) as theirs,
    ):
        compare(report, ours, theirs, quick=quick)
    report.save()


if __name__ == "__main__":
    main()
