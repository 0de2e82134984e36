"""The parameter server's connections between hosts against a bare Python socket, torch's rpc and gRPC.

Between two network namespaces joined by a bridge where this machine and user
may have them, else over loopback. Aims: 64 MiB pushed and pulled without
encryption at 0.9 of the bandwidth of a bare socket, over TLS at 0.5 of it per
connection (and at 0.9 of a bare socket over Python's own TLS) and more over several (2 and 4 against one); 1 KiB pushed and
acknowledged sooner than by either of the others.
A push is received where the server reads it; a pull is a copy that the server
makes of one version, received where the client reads it. Sides are alternated,
and stopped while another is measured.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.harness import Report, alternate
from shoal.cluster.hosts.authority import Authority

LARGE = 64 << 20
Start = Callable[[int, list[str]], "subprocess.Popen[str]"]
"""(which host, command)"""


class Ends:
    """A server on one host and its client on the other."""

    def __init__(self, kind: str, address: str, start: Start) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.scripts.hosts_ends"]
        self._server = start(0, [*command, "server", kind, address])
        port = self._hear(self._server)
        self._client = start(1, [*command, "client", kind, address, port])
        self._hear(self._client)
        self.stop()
        self.processor_s: list[float] = []
        """Of one operation, by measurement; the first of a kind has one more in it."""

    def median_s(self, what: str, num_bytes: int, times: int) -> float:
        self._signal(signal.SIGCONT)
        assert self._client.stdin is not None
        before_s = self._processor_s()
        self._client.stdin.write(f"{what} {num_bytes} {times}\n")
        self._client.stdin.flush()
        seconds = float(self._hear(self._client))
        self.processor_s.append((self._processor_s() - before_s) / times)
        self.stop()
        return seconds

    def _processor_s(self) -> float:
        """Time that all threads of both ends have run; exact where the machine is busy with other things."""
        stats = [path for process in (self._server, self._client) for path in _threads(process.pid)]
        return sum(int(path.read_text().split()[0]) for path in stats) / 1e9

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        for process in (self._client, self._server):
            assert process.stdin is not None
            process.stdin.close()
        for process in (self._client, self._server):
            try:
                process.wait(timeout=20.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()

    def _signal(self, signum: signal.Signals) -> None:
        for process in (self._server, self._client):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signum)

    def _hear(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line:
            raise SystemExit(f"{process.args} ended with {process.wait()}")
        return line


def _threads(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/task").glob("*/schedstat"))


@contextlib.contextmanager
def hosts(folder: Path) -> Iterator[tuple[str, str, Start]]:
    """(what it is, address of the first, how to start a process): namespaces where they can be had."""
    root = Path(__file__).parents[1]
    options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    options |= {
        "env": {
            **os.environ,
            "PYTHONPATH": f"{root / 'src'}:{root}:{os.environ.get('PYTHONPATH', '')}",
            "GLOO_SOCKET_IFNAME": "eth0",
        }
    }
    try:
        from tests.hosts.namespaces import Cluster, unsupported

        reason = unsupported()
    except ImportError as error:
        reason = str(error)
    if reason is None:
        (folder / "hosts").mkdir()
        with Cluster(2, folder / "hosts") as cluster:
            options["env"]["TP_SOCKET_IFNAME"] = "eth0"
            yield (
                "two network namespaces",
                cluster[0].address,
                lambda host, command: cluster[host].popen(command, cwd=folder, **options),
            )
        return
    print(f"over loopback: {reason}", file=sys.stderr)
    yield (
        "loopback",
        "127.0.0.1",
        lambda host, command: subprocess.Popen(command, cwd=folder, start_new_session=True, **options),
    )


def load() -> float:
    """Of the whole machine, this benchmark's own (about 2) included."""
    return round(os.getloadavg()[0], 1)


def compare(
    report: Report, address: str, start: Start, between: str, *, rounds: int, few: int, many: int
) -> None:
    with contextlib.ExitStack() as stack:

        def ends(kind: str) -> Ends:
            return stack.enter_context(contextlib.closing(Ends(kind, address, start)))

        bare, over_ssl = ends("bare"), ends("ssl")
        ours = {kind: ends(kind) for kind in ("plain", "tls", "plain-2", "plain-4", "tls-2", "tls-4")}
        for kind, other, aim in (
            ("plain", bare, 1 / 0.9),
            ("tls", bare, 1 / 0.5),
            ("tls", over_ssl, 1 / 0.9),
        ):
            for what in ("push", "pull"):
                ours[kind].processor_s.clear()
                other.processor_s.clear()
                values = alternate(
                    lambda what=what, side=ours[kind]: side.median_s(what, LARGE, few),  # type: ignore[misc]
                    lambda what=what, side=other: side.median_s(what, LARGE, few),  # type: ignore[misc]
                    rounds=rounds,
                )
                for name, ends_of_it in (("ours", ours[kind]), ("theirs", other)):
                    values[f"{name}_processor_ms"] = round(1e3 * statistics.median(ends_of_it.processor_s), 1)
                for side in ("ours", "theirs"):
                    values[f"{side}_gb_per_s"] = round(LARGE / values[f"{side}_s"] / 1e9, 2)
                socket = "bare socket" if other is bare else "bare socket over Python's TLS"
                figure = f"{what} of 64 MiB, median time: shoal over {kind} / {socket}"
                report.add(
                    figure, values, aim=f"ratio <= {aim:.2f}", between=between, repeats=few, load=load()
                )
        for kind in ("plain", "tls"):
            for count in (2, 4):
                for what in ("push", "pull"):
                    values = alternate(
                        lambda what=what, side=ours[f"{kind}-{count}"]: side.median_s(what, LARGE, few),  # type: ignore[misc]
                        lambda what=what, side=ours[kind]: side.median_s(what, LARGE, few),  # type: ignore[misc]
                        rounds=rounds,
                    )
                    figure = f"{what} of 64 MiB over {kind}, median time: {count} connections / one"
                    report.add(figure, values, between=between, repeats=few, load=load())
        for other in ("bare", "rpc", *(("grpc",) if importlib.util.find_spec("grpc") else ())):
            theirs = bare if other == "bare" else ends(other)
            for kind in ("plain", "tls"):
                values = alternate(
                    lambda side=ours[kind]: 1e6 * side.median_s("push", 1024, many),  # type: ignore[misc]
                    lambda side=theirs: 1e6 * side.median_s("push", 1024, many),  # type: ignore[misc]
                    rounds=rounds,
                )
                for side in ("ours", "theirs"):
                    values[f"{side}_us"] = round(values.pop(f"{side}_s"), 1)
                name = {"bare": "bare socket", "rpc": "torch rpc", "grpc": "gRPC"}[other]
                figure = f"push of 1 KiB and its answer, median time: shoal over {kind} / {name}"
                report.add(figure, values, between=between, repeats=many, load=load())


def main(quick: bool = False, rounds: int = 10, few: int = 7, many: int = 300) -> None:
    report = Report("hosts_transport")
    if quick:
        rounds, few, many = 3, 3, 100
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:  # hosts have a /tmp of their own
        folder = Path(name)
        for kind in ("tls", "plain"):
            authority = Authority("benchmark", plaintext=kind == "plain")
            for role in ("server-0", "worker-0"):
                (folder / f"{kind}.{role}").write_bytes(msgspec.msgpack.encode(authority.issue(role)))
        with hosts(folder) as (between, address, start):
            compare(report, address, start, between, rounds=rounds, few=few, many=many)
    if not quick:
        report.save()
