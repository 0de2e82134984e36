"""The warm parent: imports torch once, then forks workers in milliseconds.

`python -m shoal.cluster.supervisor.forkserver FD SUPERVISOR_PID JOB [MODULE...]`, started by
`warm_client.WarmParent`. It decides nothing: it forks what it is told to,
reaps at once, and reports. A fork copies only the calling thread, and OpenMP
hangs after one, so this process has exactly one thread, runs no tensor
operation on more than one element (see `threads.choose_vector_code`), and
refuses to fork should it ever find a second thread.

Nobody outlives their parent. Children get SIGKILL from the kernel when this
process ends, however it ends. This process leaves when its socket closes or
the supervisor dies, and takes the children's process groups with it: so the
grandchildren (DataLoader workers) are gone too.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from types import FrameType

from shoal.cluster.launch import protocol_version as dialect
from shoal.cluster.launch import roles, threads
from shoal.cluster.supervisor import forkserver_messages as warm_messages
from shoal.cluster.supervisor.forkserver_messages import Exited, Fork, Forked, NotForked, Ready, Signal

FORK_SAFE_THREADS = {"jemalloc_bg_thd"}
"""jemalloc, which pyarrow brings where it is installed, stops and restarts its thread around a fork."""

PR_SET_PDEATHSIG = 1

HANDLED = (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)
"""What the warm parent has its own mind about. Its children begin with the system's."""

_libc = ctypes.CDLL(None, use_errno=True)


class WarmParentLoop:
    """Forks on command and reports deaths. Single-threaded; runs until the supervisor is gone."""

    def __init__(self, commands: socket.socket) -> None:
        self._commands = commands
        self._selector = selectors.DefaultSelector()
        self._selector.register(commands, selectors.EVENT_READ)
        self._pidfds: dict[int, int] = {}  # child's pid -> pidfd

    def run(self) -> None:
        """Serve until the supervisor is gone; then end every child."""
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.data is not None:
                        self._reap(key.data)
                    elif not self._serve():
                        return
        finally:
            for pid in self._pidfds:
                _kill_group(pid)

    def _serve(self) -> bool:
        received = warm_messages.receive_command(self._commands)
        if received is None:
            return False
        command, fds = received
        match command:
            case Fork():
                try:
                    self._fork(command, fds)
                finally:
                    for fd in fds:
                        os.close(fd)
            case Signal(pid, signum) if pid in self._pidfds:
                if signum == signal.SIGKILL:
                    _kill_group(pid)
                else:
                    signal.pidfd_send_signal(self._pidfds[pid], signum)
        return True

    def _fork(self, command: Fork, fds: list[int]) -> None:
        others = _other_threads()
        if others:
            reason = f"the warm parent has more threads than one ({', '.join(others)}); a fork would leave their locks shut"
            warm_messages.send(self._commands, NotForked(reason))
            return
        me = os.getpid()
        # A signal must not find the child with its parent's handlers: it waits until they are gone.
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
        try:
            pid = os.fork()
            if pid == 0:
                _become_child(me, lambda: self._run_role(command, fds))
        except OSError as error:
            warm_messages.send(self._commands, NotForked(f"the system refused a process: {error}"))
            return
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
        # Opened before anybody can reap the child, so it cannot mean another process.
        self._pidfds[pid] = os.pidfd_open(pid)
        self._selector.register(self._pidfds[pid], selectors.EVENT_READ, pid)
        warm_messages.send(self._commands, Forked(pid))

    def _run_role(self, command: Fork, fds: list[int]) -> int:
        """In the child: let go of what is the parent's, put the descriptors in place, run the role."""
        self._selector.close()
        self._commands.close()
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        named = dict(zip(command.fds, fds, strict=True))
        for name, target in (("stdout", 1), ("stderr", 2)):
            if name in named:
                fd = named.pop(name)
                os.dup2(fd, target, inheritable=True)
                os.close(fd)
        with open(named.pop("spec"), "rb") as file:
            spec = file.read()
        _set_title(command.title)
        return roles.entry(command.role)(spec, named)

    def _reap(self, pid: int) -> None:
        # First the group, while the dead child still holds its number.
        _kill_group(pid)
        pidfd = self._pidfds.pop(pid)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        # The supervisor may be gone by now; the next turn of the loop sees that.
        with contextlib.suppress(OSError):
            warm_messages.send(self._commands, Exited(pid, os.waitstatus_to_exitcode(status)))


def _become_child(parent: int, run: Callable[[], int]) -> None:
    """Run `run` as a child that cannot outlive its parent nor return into its loop."""
    code = 1
    try:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the kernel was told
            os._exit(1)
        os.setsid()  # a terminal's Ctrl-C is for the supervisor alone
        for signum in HANDLED:
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
        code = run()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _other_threads() -> list[str]:
    """Names of threads beside this one that a fork would lose."""
    names = []
    for thread in os.listdir("/proc/self/task"):
        if int(thread) != os.getpid():
            with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/comm") as comm:
                names.append(comm.read().strip())
    return [name for name in names if name not in FORK_SAFE_THREADS]


def _kill_group(pid: int) -> None:
    # ESRCH: forked a moment ago and not yet a group of its own.
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def _set_title(title: str) -> None:
    import setproctitle

    setproctitle.setproctitle(title)


def _leave_with(supervisor: int) -> None:
    """Arrange for this process to leave when the supervisor dies.

    The kernel's signal comes when the *thread* that started us ends, which
    need not be the end of the process: so look who the parent is.
    """

    def on_parent_death(signum: int, frame: FrameType | None) -> None:
        if os.getppid() != supervisor:
            raise SystemExit(0)

    signal.signal(signal.SIGHUP, on_parent_death)
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGHUP)
    if os.getppid() != supervisor:
        raise SystemExit(0)


def _import_everything(more: list[str]) -> float:
    # One thread per library while they load: each would start a pool of its own. Workers set their share later.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    started = time.monotonic()
    for name in (*roles.PRELOAD, *more):
        importlib.import_module(name)
    kernels = sys.modules.get("shoal.runtime.kernel_cache")
    if kernels is not None:
        kernels.warm()  # here and once: no child compiles, nor reads what was compiled from the disk
        importlib.import_module("shoal.cluster.supervisor.prewarm").make()
    threads.choose_vector_code()
    # What is imported stays: the collector need not walk it, nor write to its pages, in any child.
    gc.collect()
    gc.freeze()
    return time.monotonic() - started


def main(argv: list[str]) -> None:
    """Import, say so, and serve."""
    commands = socket.socket(fileno=int(argv[1]))
    commands.set_inheritable(False)
    _leave_with(supervisor=int(argv[2]))
    _set_title(f"shoal warm-parent [{argv[3]}]" if argv[3] else "shoal warm-parent")
    import_s = _import_everything(argv[4:])
    warm_messages.send(commands, Ready(import_s, dialect.dialect()))
    WarmParentLoop(commands).run()


if __name__ == "__main__":
    main(sys.argv)
