"""The supervisor: starts a job's processes, carries their words, and sees every one of them off.

One thread, one selector, nothing that blocks for long. It decides nothing
about the job's end: what workers say and how they die goes to `fate.py`, and
what comes back is done. Whatever happens in here, `supervise` returns or
raises only when no process of the job is left.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec

from shoal.cluster import failure, fate, output
from shoal.cluster.coordination import CoordinationConfig
from shoal.cluster.coordinator_process import CoordinatorSpec
from shoal.cluster.display import Display
from shoal.cluster.fate import LEAVE_SIGNALS, Fate, Patience
from shoal.cluster.outcome import Outcome
from shoal.cluster.output import Log, Pipe
from shoal.cluster.run_directory import RunDirectory
from shoal.cluster.signals import SignalInbox
from shoal.cluster.warm_client import WarmParent
from shoal.cluster.worker import WorkerSpec, encode_spec
from shoal.core.errors import ClusterError, WireError
from shoal.wire import codec, unix
from shoal.wire.messages import Failed, Finished, Message, Progress, Saved

REAP_TIMEOUT_S = 5.0
"""From a signal to the news of a death. Longer only where the kernel itself is stuck, in a dead disk say."""

MAX_STATUS_BYTES = 256 * 1024

NUM_LAST_LINES = 8
"""Of a dead worker's log, shown with the news of its death."""


@dataclass(slots=True, kw_only=True)
class Worker:
    """A living worker, as its supervisor holds it."""

    rank: int
    pid: int
    status: socket.socket
    pipes: list[Pipe]
    log: Log


class Supervisor:
    """Runs one job in the processes of one host."""

    def __init__(
        self, spec: WorkerSpec, *, patience: Patience, run: RunDirectory, display: Display, warm: WarmParent
    ) -> None:
        """`spec` is rank 0's; the other ranks differ from it in their number alone."""
        self._spec, self._run, self._display, self._warm = spec, run, display, warm
        self._fate = Fate(num_workers=spec.job.num_workers, patience=patience)
        self.outcome = Outcome(self._fate)
        self._workers: dict[int, Worker] = {}  # by pid, while they live
        self._coordinator: int | None = None  # its pid, while it lives
        self._selector = selectors.DefaultSelector()

    def supervise(self) -> None:
        """Start everything, watch it, and return when all of it is gone."""
        with self._selector, self._warm.in_use(), _listening() as (listener, way_in), SignalInbox() as inbox:
            self._selector.register(inbox, selectors.EVENT_READ, inbox)
            self._selector.register(self._warm, selectors.EVENT_READ, self._warm)
            try:
                # With an ear for Ctrl-C: the imports take seconds.
                while not self._warm.is_ready and not self._has_ended:
                    self._turn(self._warm.seconds_to_start())
                if not self._has_ended:
                    self._start_coordinator(listener)
                    for rank in range(self._spec.job.num_workers):
                        self._start_worker(rank, way_in)
                while not self._has_ended:
                    self._turn(self._wait_s())
            finally:
                self._end_everything()

    @property
    def _has_ended(self) -> bool:
        return self._fate.phase is fate.Phase.ENDED

    # ---- starting -------------------------------------------------------------------------------

    def _start_coordinator(self, listener: socket.socket) -> None:
        job = self._spec.job
        config = CoordinationConfig(num_workers=job.num_workers, join_timeout_s=job.join_timeout_s)
        told = CoordinatorSpec(config=config)
        with open(self._run.path / "logs" / "coordinator.log", "ab") as log:
            self._coordinator = self._warm.fork(
                "coordinator",
                title=f"shoal coordinator [{job.name}]",
                spec=msgspec.msgpack.encode(told),
                fds={"stdout": log.fileno(), "stderr": log.fileno(), "listener": listener.fileno()},
            )
        self._run.event("coordinator-started", pid=self._coordinator)

    def _start_worker(self, rank: int, way_in: int) -> None:
        job = replace(self._spec.job, rank=rank)
        stdout_fd, their_stdout = os.pipe()
        stderr_fd, their_stderr = os.pipe()
        status, their_status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        status.setblocking(False)
        log = Log(self._run.log_path(rank))
        pipes = [
            output.stdout_pipe(stdout_fd, log, self._display, rank=rank),
            output.stderr_pipe(stderr_fd, log, self._display, rank=rank, num_workers=job.num_workers),
        ]
        worker = Worker(rank=rank, pid=0, status=status, pipes=pipes, log=log)
        try:
            worker.pid = self._warm.fork(
                "worker",
                title=f"shoal worker {rank} [{job.name}]",
                spec=encode_spec(msgspec.structs.replace(self._spec, job=job)),
                fds={
                    "stdout": their_stdout,
                    "stderr": their_stderr,
                    "status": their_status.fileno(),
                    "coordinator": way_in,
                },
            )
        except BaseException:
            _close(worker)
            raise
        finally:
            os.close(their_stdout)
            os.close(their_stderr)
            their_status.close()
        self._workers[worker.pid] = worker
        for pipe in pipes:
            self._selector.register(pipe, selectors.EVENT_READ, pipe)
        self._selector.register(status, selectors.EVENT_READ, worker)
        self._run.event("worker-started", rank=rank, pid=worker.pid)
        self._feed(fate.Started(rank))

    # ---- watching -------------------------------------------------------------------------------

    def _wait_s(self) -> float | None:
        """How long nothing can happen of itself."""
        waits = [self._display.tick()]
        if self._fate.deadline is not None:
            waits.append(max(0.0, self._fate.deadline - time.monotonic()))
        return min((wait for wait in waits if wait is not None), default=None)

    def _turn(self, timeout_s: float | None) -> None:
        """Wait for something to happen, at most so long, and attend to it."""
        for key, _ in self._selector.select(timeout_s):
            if self._selector.get_map().get(key.fd) is not key:
                continue  # closed earlier in this turn, with its worker
            match key.data:
                case Pipe() as pipe:
                    if not pipe.pump():
                        self._selector.unregister(pipe)  # its writers are gone
                case Worker() as worker:
                    if not self._hear(worker):
                        self._selector.unregister(worker.status)
                case SignalInbox() as inbox:
                    for signum in inbox.take():
                        self._asked(signum)
                case WarmParent() as warm:
                    for exited in warm.exits():
                        self._exited(exited.pid, exited.code)
        self._feed(fate.Tick())

    def _hear(self, worker: Worker) -> bool:
        """One message of a worker; False when there is none left."""
        try:
            packet = worker.status.recv(MAX_STATUS_BYTES)
        except OSError:
            return False
        if not packet:
            return False
        # What is no message comes from a script that wrote to a descriptor it did not open.
        with contextlib.suppress(WireError):
            self._told(worker, codec.decode(packet)[0])
        return True

    def _told(self, worker: Worker, message: Message) -> None:
        match message:
            case Progress():
                self.outcome.progress[message.rank] = message
                self._display.update(message)
            case Saved():
                self.outcome.checkpoint = message
                self._run.event("saved", rank=message.rank, path=message.path, step=message.step)
            case Failed():
                worker.log.write(message.traceback.encode(errors="replace"))
                kind = "worker-left" if message.error == "Interrupted" else "worker-failed"
                self._run.event(kind, rank=message.rank, error=message.error)
                self._feed(message)
            case Finished():
                self._feed(message)

    def _exited(self, pid: int, code: int) -> None:
        if pid == self._coordinator:
            self._coordinator = None
            self._run.event("coordinator-exited", code=code)
            self._feed(fate.CoordinatorExited(code))
        elif worker := self._workers.pop(pid, None):
            while self._hear(worker):  # its last words first
                pass
            for fd in [worker.status.fileno(), *(pipe.fileno() for pipe in worker.pipes)]:
                with contextlib.suppress(KeyError):  # its other end may have been closed before
                    self._selector.unregister(fd)
            _close(worker)
            last_lines = failure.without_launcher(worker.log.last_lines())
            self.outcome.last_lines[worker.rank] = last_lines[-NUM_LAST_LINES:]
            self._run.event("worker-exited", rank=worker.rank, code=code)
            self._feed(fate.Exited(worker.rank, code))

    def _asked(self, signum: signal.Signals) -> None:
        self._run.event("asked-to-leave", signal=signum.name)
        if self._fate.phase is fate.Phase.RUNNING and self._workers:
            self._display.note("finishing the step and saving; Ctrl-C again to leave now")
        self._feed(fate.Asked(signum))

    def _feed(self, event: fate.Event) -> None:
        """Tell the job's fate what happened, and do what it asks for."""
        for action in self._fate.handle(event, time.monotonic()):
            match action:
                case fate.AskToLeave(ranks, signum):
                    self._signal(ranks, LEAVE_SIGNALS[signum])
                case fate.Kill(ranks):
                    self._signal(ranks, signal.SIGKILL)

    def _signal(self, ranks: tuple[int, ...], signum: signal.Signals) -> None:
        for pid, worker in self._workers.items():
            if worker.rank in ranks:
                self._warm.signal(pid, signum)

    # ---- ending ---------------------------------------------------------------------------------

    def _end_everything(self) -> None:
        """Nobody is left behind, whatever brought us here."""
        for pid in self._workers:
            self._warm.signal(pid, signal.SIGKILL)
        # Where the warm parent is gone, so are all its children.
        with contextlib.suppress(ClusterError):
            for signum in (
                signal.SIGTERM,
                signal.SIGKILL,
            ):  # the coordinator may have something to write down
                if self._coordinator is not None:
                    self._warm.signal(self._coordinator, signum)
                deadline = time.monotonic() + REAP_TIMEOUT_S
                while (self._workers or self._coordinator) and (left_s := deadline - time.monotonic()) > 0:
                    self._turn(left_s)
        for worker in self._workers.values():
            _close(worker)


@contextlib.contextmanager
def _listening() -> Iterator[tuple[socket.socket, int]]:
    """A socket for the coordinator to listen on, and a descriptor that leads there.

    Its name is gone before anybody uses it, so nothing is left in the file
    system however the job ends; `/proc/self/fd/N` still leads to it, for
    processes that were given the descriptor, and for nobody else.
    """
    directory = unix.runtime_dir()
    try:
        listener = unix.listen(directory / "coordinator")
        way_in = os.open(directory / "coordinator", os.O_PATH | os.O_CLOEXEC)
    finally:
        shutil.rmtree(directory)
    try:
        yield listener, way_in
    finally:
        os.close(way_in)
        listener.close()


def _close(worker: Worker) -> None:
    for pipe in worker.pipes:
        pipe.close()
    worker.status.close()
    worker.log.close()
