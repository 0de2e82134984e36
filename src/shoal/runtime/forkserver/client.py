"""The owner's side: a handle on a fork server, and servers that are forks of their owner.

A fork of the owner has the owner's state at that time (dataset, functions), so its children's work
need not be sent anywhere. A child forked later begins from the same state, and a fork in the middle
of training cannot copy a lock that one of the owner's threads holds.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import time
import warnings
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from setproctitle import setproctitle

from shoal import system
from shoal.runtime.forkserver.messages import (
    ChildExited,
    Close,
    Fork,
    Forked,
    NotForked,
    ServerReady,
    Signal,
    receive_report,
    send,
)
from shoal.runtime.forkserver.server import (
    ChildMain,
    ForkServer,
    become_child,
    flush,
    is_readable,
    signals_blocked,
)

FORK_TIMEOUT_S = 60.0

_IGNORED = (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Ctrl-C and the launcher's signals are for the owner, which may need its children a moment longer."""


class ForkServerGone(EOFError):
    """Internal: the fork server ended, and its children with it."""


class ForkRefused(Exception):
    """Internal: no child was forked, with the reason."""


class ForkedProcess(NamedTuple):
    """A child of the server. The descriptor is the holder's to close."""

    pid: int
    ended: int
    """Readable once the process has ended."""


class ForkClient:
    """Commands to a fork server, and its reports. For one thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._exited: deque[ChildExited] = deque()
        self.ready: ServerReady | None = None

    def fileno(self) -> int:
        """Descriptor for a selector: readable when there is something for `exits`, or when the server is gone."""
        return self._sock.fileno()

    @property
    def has_exits(self) -> bool:
        """Exits read while waiting for an answer: a selector does not report those."""
        return bool(self._exited)

    def fork(
        self, role: str, *, title: str, fds: Mapping[str, int], timeout_s: float = FORK_TIMEOUT_S
    ) -> ForkedProcess:
        """Fork a child, which gets copies of `fds`; the caller's stay open. TimeoutError without an answer."""
        self._send(Fork(role, title, list(fds)), list(fds.values()))
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            match self.hear(left_s):
                case ForkedProcess() as child:
                    return child
                case NotForked(reason):
                    raise ForkRefused(reason)
        raise TimeoutError(f"no answer within {timeout_s:g} s")

    def signal(self, pid: int, signum: signal.Signals) -> None:
        """Signal one child; one that is gone is no error."""
        self._send(Signal(pid, signum))

    def exits(self) -> list[ChildExited]:
        """Exits since the last call, in order."""
        while heard := self.hear(0.0):
            if isinstance(heard, ForkedProcess):
                os.close(heard.ended)  # a late answer to an abandoned fork request
        exited = list(self._exited)
        self._exited.clear()
        return exited

    def exit_code(self, pid: int, *, within_s: float = 1.0) -> int | None:
        """Exit code of an ended child, or minus the signal; None if the server does not report it in time."""
        deadline = time.monotonic() + within_s
        with contextlib.suppress(ForkServerGone):
            while not any(exited.pid == pid for exited in self._exited):
                if not self.hear(max(0.0, deadline - time.monotonic())):
                    return None
        found = [exited for exited in self._exited if exited.pid == pid]
        for exited in found:
            self._exited.remove(exited)
        return found[0].code if found else None

    def hear(self, timeout_s: float) -> ServerReady | ForkedProcess | NotForked | ChildExited | None:
        """Next report, with exits and readiness recorded; None if none came in time."""
        if not is_readable(self._sock.fileno(), timeout_s):
            return None
        received = receive_report(self._sock)
        if received is None:
            raise ForkServerGone("the fork server is gone")
        report, fds = received
        match report:
            case Forked(pid):
                return ForkedProcess(pid, *fds)
            case ChildExited():
                self._exited.append(report)
            case ServerReady():
                self.ready = report
        return report

    def close(self, *, grace_s: float = 0.0) -> None:
        """Tell the server to end: its children after `grace_s` at the latest, then itself."""
        if grace_s:
            with contextlib.suppress(OSError):  # it may be gone already
                send(self._sock, Close(grace_s))
        self._sock.close()

    def _send(self, message: Fork | Signal, fds: list[int] | None = None) -> None:
        try:
            send(self._sock, message, fds)
        except OSError as error:
            raise ForkServerGone(str(error)) from None


class ForkedServer(ForkClient):
    """A fork server that is a fork of this process."""

    def __init__(self, child_main: ChildMain, *, title: str) -> None:
        """OSError where the system refuses a process."""
        ours, theirs = system.packet_pair()
        owner_pid = os.getpid()
        flush()
        with signals_blocked():  # no signal may reach the child before it has its own handlers
            try:
                with warnings.catch_warnings():
                    # Python 3.12 warns of threads whose locks a fork copies: this module's docstring says why that is safe.
                    warnings.filterwarnings("ignore", "(?s).*fork", DeprecationWarning)
                    self.pid, self._ended = system.fork()
            except OSError:
                ours.close()
                theirs.close()
                raise
            if self.pid == 0:
                become_child(owner_pid, lambda: _serve(theirs, child_main, title), mask=set())
        theirs.close()
        super().__init__(ours)

    @property
    def is_alive(self) -> bool:
        return not is_readable(self._ended, 0.0)

    def close(self, *, grace_s: float = 0.0) -> None:
        super().close(grace_s=grace_s)
        if not is_readable(self._ended, grace_s + 5.0):
            with contextlib.suppress(ProcessLookupError):
                system.send_signal(self.pid, self._ended, signal.SIGKILL)
        os.close(self._ended)
        with contextlib.suppress(ChildProcessError):  # the owner's program may have reaped it
            os.waitpid(self.pid, 0)


def _serve(commands: socket.socket, child_main: ChildMain, title: str) -> int:
    for signum in _IGNORED:
        signal.signal(signum, signal.SIG_IGN)
    _close_sockets(keep=commands.fileno())
    setproctitle(title)
    gc.freeze()  # existing objects belong to the owner, and their pages are shared with it

    def run_child(role: str, fds: dict[str, int]) -> int:
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(1)  # the owner's thread pool was not forked
        return child_main(role, fds)

    ForkServer(commands, run_child, own_sessions=False, allow_threads=True).serve()
    return 0


def _close_sockets(*, keep: int) -> None:
    """Close the owner's connections: their peers must see them end with the owner.

    A socket's number stays reserved: an object here that refers to it would otherwise close another
    file. Files stay open: a dataset may read from them.
    """
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in system.open_sockets():
        if fd > 2 and fd != keep:
            os.dup2(nowhere, fd, inheritable=False)
    os.close(nowhere)
