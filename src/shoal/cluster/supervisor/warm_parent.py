"""The supervisor's handle on its warm parent: start, fork, signal, exits.

The supervisor decides when to fork and how to react to a death. One warm parent may serve many
launches, one after the other: everything a child needs comes with the fork, so the import of torch
is paid once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import shoal
from shoal import system
from shoal.cluster.launch import roles
from shoal.errors import ClusterError, WaitTimedOut
from shoal.runtime.forkserver.client import ForkClient, ForkRefused, ForkServerGone
from shoal.runtime.forkserver.messages import ChildExited, ServerReady, file_with
from shoal.runtime.signal_names import signal_name

START_TIMEOUT_S = 300.0
"""Kernels are compiled the first time on a machine: some 20 s of one core, and a minute under load."""

FORK_TIMEOUT_S = 30.0

KILL_TIMEOUT_S = 60.0
"""From the request to kill a child to the report of its end: it takes as long where the warm parent was stopped."""


class WarmParent:
    """A process that has imported torch and forks on demand.

    Importing takes seconds and starts at once; `fork` waits for its end. Use it as a context
    manager, or `close` it: closing ends all its children.
    """

    def __init__(self, job: str = "", *, preload: Sequence[str] = ()) -> None:
        """`preload`: modules to import beside the usual ones; see `roles.preload_for`."""
        self._start_by = time.monotonic() + START_TIMEOUT_S
        self._in_use = threading.Lock()
        self._children: set[int] = set()
        self._killed: dict[int, float] = {}  # of these: by when their end must be reported
        # Its own error output matters only if it does not come up: `_gone` quotes it.
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115  closed in close()
        ours, theirs = system.packet_pair()
        self._server = ForkClient(ours)
        command = [sys.executable, *_interpreter_flags(), "-m", "shoal.cluster.supervisor.warm_parent_main"]
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
        return self._process.pid

    @property
    def is_ready(self) -> bool:
        """Whether it has imported everything, as far as `exits` or `fork` have read."""
        return self._server.ready is not None

    @property
    def has_exits(self) -> bool:
        """Exits read while waiting for an answer: a selector does not report those."""
        return self._server.has_exits

    @property
    def import_s(self) -> float:
        """Seconds of its imports, once it is ready."""
        return self._server.ready.import_s if self._server.ready else 0.0

    def fileno(self) -> int:
        """Descriptor for a selector: readable when there is something for `exits`, or when the process is gone."""
        return self._server.fileno()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Held by a launch: exits of its children must not reach another one."""
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
        """Time left for its imports; WaitTimedOut when they took too long."""
        left_s = self._start_by - time.monotonic()
        if left_s <= 0:
            raise _timed_out("starting a process that has torch imported", START_TIMEOUT_S)
        return left_s

    def wait_ready(self) -> None:
        """Wait until it can fork; at once when it already could."""
        with self._errors_told():
            while not self.is_ready:
                heard = self._server.hear(self.seconds_to_start())
                if isinstance(heard, ServerReady):
                    check_same_files(heard)

    def fork(self, role: str, *, title: str, spec: bytes, fds: Mapping[str, int]) -> int:
        """Fork a child into `role` and return its pid. It gets copies of `fds`; the caller's stay open."""
        self.wait_ready()
        memory = file_with(spec)
        try:
            with self._errors_told():
                child = self._server.fork(
                    role, title=title, fds={"spec": memory, **fds}, timeout_s=FORK_TIMEOUT_S
                )
        except ForkRefused as refused:
            raise ClusterError(f"could not fork {title}: {refused}.") from None
        except TimeoutError:
            raise _timed_out(f"forking {title}", FORK_TIMEOUT_S) from None
        finally:
            os.close(memory)
        os.close(child.ended)
        self._children.add(child.pid)
        return child.pid

    def signal(self, pid: int, signum: signal.Signals) -> None:
        """Signal one child; SIGKILL takes everything in its process group. A child that is gone is no error."""
        if signum == signal.SIGKILL and pid in self._children:
            self._killed.setdefault(pid, time.monotonic() + KILL_TIMEOUT_S)
        with contextlib.suppress(ForkServerGone):
            self._server.signal(pid, signum)

    def exits(self) -> list[ChildExited]:
        """Exits since the last call, in order. ClusterError when the warm parent itself is gone, or kills no child any more."""
        was_ready = self.is_ready
        with self._errors_told():
            exited = self._server.exits()
        if self._server.ready is not None and not was_ready:
            check_same_files(self._server.ready)
        for each in exited:
            self._children.discard(each.pid)
            self._killed.pop(each.pid, None)
        late = [pid for pid, by in self._killed.items() if time.monotonic() > by]
        if late:
            raise _timed_out(f"the end of process {late[0]}, which was to be killed,", KILL_TIMEOUT_S)
        return exited

    def close(self) -> None:
        """End the process and every child it has. Safe to call twice."""
        self._server.close()
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

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _errors_told(self) -> Iterator[None]:
        try:
            yield
        except ForkServerGone:
            raise self._gone() from None

    def _gone(self) -> ClusterError:
        try:
            code = self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            code = None
        self._complaints.seek(0)
        said = self._complaints.read().decode(errors="replace").strip()
        how = f"was killed by {signal_name(-code)}" if code and code < 0 else f"ended with code {code}"
        quoted = "\n  ".join(["\nIts last lines:", *said.splitlines()[-8:]]) if said else ""
        return ClusterError(
            f"the warm parent (process {self.pid}), which forks the workers, {how}; its children ended with it. "
            f"Start the job again; if it happens at once, try `python -c 'import torch'`.{quoted}"
        )


def check_same_files(ready: ServerReady) -> None:
    """Refuse a warm parent that imported other files of shoal than this process."""
    if ready.protocol_version == roles.protocol_version():
        return
    home = os.path.dirname(os.path.abspath(shoal.__file__))
    raise ClusterError(
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
    """This interpreter's own flags, without the current folder on the path: a `random.py` there must
    not shadow the library.
    """
    own: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
    return own if "-P" in own else [*own, "-P"]


def _environment() -> dict[str, str]:
    """This environment; with the path of shoal if it runs from its sources."""
    # shoal reports a lost peer itself; torch's C++ would print pages from every worker.
    ours = {"TORCH_CPP_LOG_LEVEL": "FATAL", **os.environ}
    home = os.path.dirname(os.path.dirname(os.path.abspath(shoal.__file__)))
    if os.path.basename(home) in ("site-packages", "dist-packages"):
        return ours
    return {**ours, "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), home]))}
