"""The forking side: one thread that forks on command, reaps at once and reports.

It decides nothing. A fork copies only the calling thread, and OpenMP hangs after one, so this
process starts no thread, and a server that was started as a program refuses to fork if it ever
finds a second one.

No child outlives its parent: children get SIGKILL from the kernel when the server ends, in any way.
A server whose children lead sessions of their own also kills their process groups, so that
grandchildren (the processes of a DataLoader) are gone too.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator

from setproctitle import setproctitle

from shoal import system
from shoal.runtime.forkserver.messages import (
    ChildExited,
    Close,
    Fork,
    Forked,
    NotForked,
    Signal,
    receive_command,
    send,
)

ChildMain = Callable[[str, dict[str, int]], int]
"""Runs in the child: takes the role of the command and its descriptors by name, and returns the exit code."""

FORK_SAFE_THREADS = {"jemalloc_bg_thd"}
"""jemalloc, which pyarrow brings where it is installed, stops and restarts its thread around a fork."""


class ForkServer:
    """Serves until its owner closes the socket, dies, or asks for the end; then ends every child."""

    def __init__(
        self, commands: socket.socket, child_main: ChildMain, *, own_sessions: bool, allow_threads: bool
    ) -> None:
        """`own_sessions`: each child leads a session, out of reach of a terminal's Ctrl-C, and its group dies with it.

        `allow_threads`: in a fork of a process that has used torch's thread
        pools there are threads that their libraries restart after every fork.
        """
        self._commands, self._child_main = commands, child_main
        self._own_sessions, self._allow_threads = own_sessions, allow_threads
        self._selector = selectors.DefaultSelector()
        self._selector.register(commands, selectors.EVENT_READ)
        self._ended: dict[int, int] = {}  # child's pid -> descriptor that is readable once it has ended
        self._grace_s = 0.0

    def serve(self) -> None:
        try:
            with contextlib.suppress(ConnectionError):  # the owner died during the answer
                while True:
                    for key, _ in self._selector.select():
                        if key.data is not None:
                            self._reap(key.data)
                        elif not self._obey():
                            return
        finally:
            self._end_children()

    def _obey(self) -> bool:
        received = receive_command(self._commands)
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
            case Signal(pid, signum) if pid in self._ended:
                if signum == signal.SIGKILL:
                    self._kill(pid)
                else:
                    with contextlib.suppress(ProcessLookupError):
                        system.send_signal(pid, self._ended[pid], signum)
            case Close(grace_s):
                self._grace_s = grace_s
                return False
        return True

    def _fork(self, command: Fork, fds: list[int]) -> None:
        others = [] if self._allow_threads else _other_threads()
        if others:
            send(self._commands, NotForked(f"the fork server has other threads ({', '.join(others)})"))
            return
        me = os.getpid()
        # A signal must not run the parent's handlers in the child: signals are blocked until they are
        # reset.
        with signals_blocked() as mask:
            try:
                pid, ended = system.fork()
            except OSError as error:
                send(self._commands, NotForked(str(error)))
                return
            if pid == 0:
                become_child(me, lambda: self._run_child(command, fds), mask=mask)
        self._ended[pid] = ended
        self._selector.register(ended, selectors.EVENT_READ, pid)
        send(self._commands, Forked(pid), [ended])

    def _run_child(self, command: Fork, fds: list[int]) -> int:
        """In the child: close the server's descriptors, then run."""
        if self._own_sessions:
            os.setsid()
        self._selector.close()
        self._commands.close()
        for ended in self._ended.values():
            os.close(ended)
        setproctitle(command.title)
        return self._child_main(command.role, dict(zip(command.fds, fds, strict=True)))

    def _reap(self, pid: int) -> None:
        if self._own_sessions:
            self._kill(pid)  # first the group, while the dead child still holds its number
        ended = self._ended.pop(pid)
        self._selector.unregister(ended)
        os.close(ended)
        _, status = os.waitpid(pid, 0)
        # The owner may be gone by now, which the next turn of the loop detects.
        with contextlib.suppress(OSError):
            send(self._commands, ChildExited(pid, os.waitstatus_to_exitcode(status)))

    def _end_children(self) -> None:
        deadline = time.monotonic() + self._grace_s
        for pid, ended in self._ended.items():
            if not is_readable(ended, max(0.0, deadline - time.monotonic())) or self._own_sessions:
                self._kill(pid)
        for pid in self._ended:
            os.waitpid(pid, 0)  # a container's first process may reap nobody, so no zombie may be left

    def _kill(self, pid: int) -> None:
        # ESRCH: forked a moment ago and not yet a group of its own.
        for kill in (os.killpg, os.kill) if self._own_sessions else (os.kill,):
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)


def become_child(parent_pid: int, run: Callable[[], int], *, mask: set[int | signal.Signals]) -> None:
    """Run a forked child with default signal handlers; it dies with its parent and never returns into its code."""
    code = 1
    try:
        system.die_with_parent(parent_pid)
        for signum in signal.valid_signals():
            if callable(signal.getsignal(signum)):
                signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        code = run()
    except BaseException:
        traceback.print_exc()
    finally:
        flush()
        os._exit(code)


@contextlib.contextmanager
def signals_blocked() -> Iterator[set[int | signal.Signals]]:
    """Every signal waits while entered; gives the mask before."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def is_readable(fd: int, within_s: float) -> bool:
    """Wait until a descriptor is readable."""
    poll = select.poll()  # unlike select(), it takes descriptors of any number
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(within_s * 1000))


def flush() -> None:
    """Flush output: buffered text would be written twice after a fork, and never after a kill."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _other_threads() -> list[str]:
    """Names of threads beside this one that a fork would lose."""
    return [name for name in system.other_threads() if name not in FORK_SAFE_THREADS]
