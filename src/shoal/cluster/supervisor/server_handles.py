"""A job's servers as their supervisor holds them: their addresses, their logs, and which of them live.

Starts a server and sees it off. When one is started and what its death means
is decided in `fate.py`; who holds what, by the coordinator.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from dataclasses import dataclass
from types import TracebackType

import msgspec

from shoal.cluster.launch.run_directory import RunDirectory
from shoal.cluster.launch.server_spec import MAX_SERVERS, ServerSpec, encode_spec, way_in
from shoal.cluster.supervisor.output import LineCutter, Log, Pipe, Screen
from shoal.cluster.supervisor.sockets import listen_unnamed
from shoal.cluster.supervisor.warm_parent import WarmParent
from shoal.cluster.supervisor.worker_handle import is_stopped
from shoal.cluster.worker.process import WorkerSpec


@dataclass(slots=True, kw_only=True)
class Server:
    """A living server."""

    number: int
    incarnation: int
    pid: int
    pipes: list[Pipe]
    log: Log

    @property
    def name(self) -> str:
        """As faults call it."""
        return f"server-{self.number}"

    def is_stopped(self) -> bool:
        """Whether somebody stopped it (SIGSTOP, a debugger)."""
        return is_stopped(self.pid)


class ServerKeeper:
    """The servers of one job, and an address for every one there may be. Use it as a context manager.

    `spec` is server 0's; the others differ in their number alone.
    """

    def __init__(
        self,
        spec: ServerSpec,
        *,
        run: RunDirectory,
        screen: Screen,
        warm: WarmParent,
        selector: selectors.BaseSelector,
    ) -> None:
        self.living: dict[int, Server] = {}  # by pid
        self._newest: dict[int, int] = {}  # number -> the incarnation that was started last
        self._spec, self._run, self._screen, self._warm, self._selector = spec, run, screen, warm, selector
        self._listeners: list[socket.socket] = []
        self._ways_in: list[int] = []
        try:
            for number in range(max_servers(spec.num_servers)):
                listener, leads_there = listen_unnamed(way_in(number))
                self._listeners.append(listener)
                self._ways_in.append(leads_there)
        except BaseException:
            self.close()
            raise

    @property
    def ways_in(self) -> dict[str, int]:
        """Descriptors that lead to the servers, by the names under which they are handed on."""
        return {way_in(number): fd for number, fd in enumerate(self._ways_in)}

    def start(self, number: int, incarnation: int, *, coordinator: int) -> Server:
        """Fork a server. `coordinator` leads to the coordinator."""
        log = Log(self._run.path / "logs" / f"server-{number}.log")
        (our_out, their_out), (our_err, their_err) = os.pipe(), os.pipe()
        prefix = LineCutter(f"[server {number}] ".encode())
        pipes = [Pipe(our_out, log), Pipe(our_err, log, self._screen.err, prefix)]
        server = Server(number=number, incarnation=incarnation, pid=0, pipes=pipes, log=log)
        try:
            server.pid = self._warm.fork(
                "server",
                title=f"shoal server {number} [{self._spec.job}]",
                spec=encode_spec(msgspec.structs.replace(self._spec, number=number, incarnation=incarnation)),
                fds={
                    "stdout": their_out,
                    "stderr": their_err,
                    "listener": self._listeners[number].fileno(),
                    "coordinator": coordinator,
                    **self.ways_in,
                },
            )
        except BaseException:
            _close(server)
            raise
        finally:
            os.close(their_out)
            os.close(their_err)
        self.living[server.pid] = server
        self._newest[number] = incarnation
        for pipe in pipes:
            self._selector.register(pipe, selectors.EVENT_READ, pipe)
        return server

    def next_incarnation(self, number: int) -> int:
        """The one that was not started yet."""
        return self._newest.get(number, -1) + 1

    def exited(self, pid: int) -> Server | None:
        """A process is gone; the server it was, if it was one. All it wrote has been handed on."""
        server = self.living.pop(pid, None)
        if server is not None:
            for pipe in server.pipes:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(pipe)
            _close(server)
        return server

    def of(self, number: int) -> Server | None:
        """The living server of this number."""
        return next((each for each in self.living.values() if each.number == number), None)

    def close(self) -> None:
        """Let go of everything. The servers must be gone."""
        for pid in list(self.living):
            self.exited(pid)
        for fd in self._ways_in:
            os.close(fd)
        for listener in self._listeners:
            listener.close()
        self._ways_in, self._listeners = [], []

    def __enter__(self) -> ServerKeeper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def spec_for(worker: WorkerSpec) -> ServerSpec:
    """What server 0 is told, in the job of these workers."""
    job = worker.job
    return ServerSpec(
        job=job.name,
        number=0,
        num_workers=job.num_workers,
        num_servers=job.num_servers,
        num_replicas=job.num_replicas,
        strategy=job.strategy,
        run_dir=str(job.run_dir),
        env=worker.env,
        staleness_lr=job.staleness_lr,
        push_norm=job.push_norm,
        step_timeout_s=job.step_timeout_s,
        join_timeout_s=job.join_timeout_s,
        faults=job.faults,
    )


def max_servers(num_servers: int) -> int:
    """To how many servers a group launched with so many can grow."""
    return max(MAX_SERVERS, num_servers) if num_servers else 0


def _close(server: Server) -> None:
    for pipe in server.pipes:
        pipe.close()
    server.log.close()
