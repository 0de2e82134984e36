"""The supervisor's handle on its warm parent: fork, signal, hear of deaths.

It starts the process and speaks `warm_messages` with it; who is forked when,
and what a death means, is the supervisor's business. One warm parent may
serve many launches, one after the other: everything a child needs comes with
the fork, so importing torch is paid once.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType

import shoal
from shoal.cluster.launch import protocol_version as dialect
from shoal.cluster.supervisor import forkserver_messages as warm_messages
from shoal.cluster.supervisor.forkserver_messages import Exited, Fork, Forked, NotForked, Ready, Signal
from shoal.errors import ClusterError, WaitTimedOut

START_TIMEOUT_S = 300.0
"""Kernels are compiled the first time on a machine: some 20 s of one core, and a minute where it is busy."""

FORK_TIMEOUT_S = 30.0


class WarmParent:
    """A process that has imported torch and forks on demand.

    Importing takes seconds and starts at once; `fork` waits for its end. Use
    it as a context manager, or `close` it: closing ends every child there is.
    """

    def __init__(self, job: str = "", *, preload: Sequence[str] = ()) -> None:
        """`preload`: modules to import beside the usual ones; see `roles.preload_for`."""
        self._exited: deque[Exited] = deque()
        self._ready: Ready | None = None
        self._start_by = time.monotonic() + START_TIMEOUT_S
        self._in_use = threading.Lock()
        # Its own complaints matter only where it does not come up: `_gone` quotes them.
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115  closed in close()
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, *_interpreter_flags(), "-m", "shoal.cluster.supervisor.forkserver"]
        arguments = [str(theirs.fileno()), str(os.getpid()), job, *preload]
        with theirs:
            self._process = subprocess.Popen(
                [*command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=self._complaints,
                stderr=self._complaints,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=_environment(),
            )

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    @property
    def is_ready(self) -> bool:
        """Whether it has imported everything, as far as `exits` or `fork` have heard."""
        return self._ready is not None

    @property
    def has_exits(self) -> bool:
        """Whether deaths were heard of while an answer was waited for: a selector does not tell of those."""
        return bool(self._exited)

    @property
    def import_s(self) -> float:
        """How long its imports took, once it is ready."""
        return self._ready.import_s if self._ready else 0.0

    def fileno(self) -> int:
        """For a selector: readable when there is something for `exits`, or when the process is gone."""
        return self._sock.fileno()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Held by a launch: the deaths of its children must not reach another one."""
        if not self._in_use.acquire(blocking=False):
            raise ClusterError(
                "this warm parent already serves a launch, and serves one at a time. Nothing was started; wait for "
                "that launch to end, or give each its own warm parent."
            )
        try:
            yield
        finally:
            self._in_use.release()

    def seconds_to_start(self) -> float:
        """How much longer its imports may take; WaitTimedOut when they took too long."""
        left_s = self._start_by - time.monotonic()
        if left_s <= 0:
            raise _timed_out("starting a process that has torch imported", START_TIMEOUT_S)
        return left_s

    def wait_ready(self) -> None:
        """Wait until it can fork; at once when it already could."""
        while not self.is_ready:
            if self._has_news(self.seconds_to_start()):
                self._receive()

    def fork(self, role: str, *, title: str, spec: bytes, fds: Mapping[str, int]) -> int:
        """Fork a child into `role` and return its pid. It gets copies of `fds`; the caller's stay open."""
        self.wait_ready()
        memory = warm_messages.memfd_with(spec)
        try:
            self._send(Fork(role, title, ["spec", *fds]), [memory, *fds.values()])
        finally:
            os.close(memory)
        answer = self._await(FORK_TIMEOUT_S, f"forking {title}")
        if isinstance(answer, NotForked):
            raise ClusterError(f"could not fork {title}: {answer.reason}.")
        return answer.pid

    def signal(self, pid: int, signum: signal.Signals) -> None:
        """Signal one child; SIGKILL takes everything in its process group. A child that is gone is no error."""
        with contextlib.suppress(ClusterError):
            self._send(Signal(pid, signum))

    def exits(self) -> list[Exited]:
        """Deaths since the last look, in order. ClusterError when the warm parent itself is gone."""
        while self._has_news(0.0):
            self._receive()
        exited = list(self._exited)
        self._exited.clear()
        return exited

    def close(self) -> None:
        """End the process and every child it has. Safe to call twice."""
        self._sock.close()
        if not self.is_ready:
            self._process.kill()  # busy importing, and without children yet
        try:
            self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._complaints.close()

    def __enter__(self) -> WarmParent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, message: Fork | Signal, fds: list[int] | None = None) -> None:
        try:
            warm_messages.send(self._sock, message, fds)
        except OSError:
            raise self._gone() from None

    def _await(self, timeout_s: float, operation: str) -> Forked | NotForked:
        """The answer to a fork. Deaths that come before it are kept for `exits`."""
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            if self._has_news(left_s) and (answer := self._receive()):
                return answer
        raise _timed_out(operation, timeout_s)

    def _has_news(self, timeout_s: float) -> bool:
        poll = select.poll()  # unlike select(), it takes descriptors of any number
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(1000 * timeout_s))

    def _receive(self) -> Forked | NotForked | None:
        report = warm_messages.receive_report(self._sock)
        match report:
            case None:
                raise self._gone()
            case Ready():
                if report.dialect != dialect.dialect():
                    raise _from_other_files()
                self._ready = report
            case Exited():
                self._exited.append(report)
            case _:
                return report
        return None

    def _gone(self) -> ClusterError:
        try:
            code = self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            code = None
        self._complaints.seek(0)
        said = self._complaints.read().decode(errors="replace").strip()
        how = (
            f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with code {code}"
        )
        quoted = "\n  ".join(["\nIts last lines:", *said.splitlines()[-8:]]) if said else ""
        return ClusterError(
            f"the warm parent (process {self.pid}), which forks the workers, {how}; its children ended with it. "
            f"Start the job again; if it happens at once, try `python -c 'import torch'`.{quoted}"
        )


def _from_other_files() -> ClusterError:
    home = os.path.dirname(os.path.abspath(shoal.__file__))
    return ClusterError(
        f"the files of shoal in {home} were replaced while the job started: the process that forks the workers has other "
        "ones than this process, and the two would not understand each other. Nothing was started; start the job again."
    )


def _timed_out(operation: str, waited_s: float) -> WaitTimedOut:
    return WaitTimedOut(
        operation=operation,
        waited_s=waited_s,
        missing=["the warm parent"],
        setting="what this machine has to give",
    )


def _interpreter_flags() -> list[str]:
    """This interpreter's own flags, and none of the folder we happen to be in: a `random.py` there is not ours."""
    own: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
    return own if "-P" in own else [*own, "-P"]


def _environment() -> dict[str, str]:
    """Ours; with the way to shoal where it runs from its sources and not from an installation."""
    # What torch's C++ would print when a peer is lost (pages, from every worker) is told by us in words.
    ours = {"TORCH_CPP_LOG_LEVEL": "FATAL", **os.environ}
    home = os.path.dirname(os.path.dirname(os.path.abspath(shoal.__file__)))
    if os.path.basename(home) in ("site-packages", "dist-packages"):
        return ours
    return {**ours, "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), home]))}
