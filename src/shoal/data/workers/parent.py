"""The parent of a pool's processes: one fork of the worker, made when the pool begins, that forks the rest.

A process that dies is replaced from here, so the new one knows exactly what
the old one knew, whatever the worker has done since; and a fork in the middle
of training cannot take over a lock that one of the worker's threads holds.
Both ends are in this file: `ReaderParent` is what the worker holds, `_Parent`
is what it forks.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import stat
import struct
import sys
import time
import traceback
import warnings
from array import array
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
from setproctitle import setproctitle

from shoal.config import job as jobs
from shoal.errors import ClusterError

Run = Callable[[int, socket.socket, int], None]
"""What a process does until it ends: its number, its end of the line, and where it notes what it is at."""

ASKS_FOR_STACK = signal.SIGUSR2
"""Tells a process to write down where it stands."""

AT = struct.Struct("<q")
"""The number of the task that a process is at; -1 between two."""

_PACKET_BYTES = 4096
_ANSWERS_WITHIN_S = 60.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)
_IGNORED = (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Ctrl-C and the launcher's wishes are for the worker, which may need a batch more before it leaves."""


class Child(NamedTuple):
    """A process as the worker holds it. Three descriptors, the holder's to close."""

    number: int
    pid: int
    line: socket.socket
    pidfd: int
    """Readable once the process has ended."""

    notes: int
    """A file in which the process notes what it is at: in the first bytes a number, behind it, when asked, its stack."""

    @property
    def at(self) -> int | None:
        """What it was at when it was last seen, or died."""
        number: int = AT.unpack(os.pread(self.notes, AT.size, 0))[0]
        return number if number >= 0 else None

    def close(self) -> None:
        """Let go of it; a process that waits for work then ends."""
        with contextlib.suppress(OSError):  # not only closed: somebody else may have been forked with a copy
            self.line.shutdown(socket.SHUT_RDWR)
        self.line.close()
        for fd in (self.pidfd, self.notes):
            os.close(fd)


class ReaderParent:
    """Forks processes on demand, and says how they ended."""

    def __init__(self, run: Run) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        owner_pid = os.getpid()
        flush()
        with _signals_blocked():  # none may reach the child before it has handlers of its own
            try:
                with warnings.catch_warnings():
                    # Python 3.12 warns of threads whose locks a fork copies; this file's beginning says what is done about it.
                    warnings.filterwarnings("ignore", "(?s).*fork", DeprecationWarning)
                    self.pid = os.fork()
            except OSError as error:
                ours.close()
                theirs.close()
                raise _refused(error) from None
            if self.pid == 0:
                _stay_until(lambda: _Parent(theirs, run).serve(), parent_pid=owner_pid, keep=theirs)
        theirs.close()
        self._pidfd = os.pidfd_open(self.pid)
        self._line = ours
        self._line.settimeout(_ANSWERS_WITHIN_S)
        self._exit_codes: dict[int, int] = {}

    def fork(self, number: int) -> Child:
        """One process more. EOFError where the parent is gone."""
        try:
            _tell(self._line, _Fork(number))
            while True:
                said, fds = self._hear()
                if isinstance(said, _Born):
                    return Child(number, said.pid, socket.socket(fileno=fds[0]), fds[1], fds[2])
                if isinstance(said, _NotBorn):
                    raise _refused(said.reason)
        except TimeoutError:
            raise EOFError("it does not answer") from None
        except OSError as error:
            raise EOFError(str(error)) from None

    def exit_code(self, pid: int, *, within_s: float = 1.0) -> int | None:
        """How a process ended that has ended: its exit code, or minus the signal; None where nobody knows."""
        self._line.settimeout(within_s)
        with contextlib.suppress(OSError, EOFError):
            while pid not in self._exit_codes:
                self._hear()
        self._line.settimeout(_ANSWERS_WITHIN_S)
        return self._exit_codes.pop(pid, None)

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended. When it ends, so do its children."""
        return not _ended(self._pidfd, 0.0)

    def close(self, *, within_s: float) -> None:
        """End its children, in the middle of what they do if that takes longer than `within_s`, and then itself."""
        with contextlib.suppress(OSError):  # it may be gone already
            _tell(self._line, _Close(within_s))
        self._line.close()
        if not _ended(self._pidfd, within_s + 5.0):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        os.close(self._pidfd)
        with contextlib.suppress(ChildProcessError):  # somebody waits for any child there is
            os.waitpid(self.pid, 0)

    def _hear(self) -> tuple[Any, list[int]]:
        data, fds = receive(self._line, max_fds=3)
        said = ForkingPickler.loads(data)
        if isinstance(said, _Ended):
            self._exit_codes[said.pid] = said.code
        return said, fds


class _Fork(NamedTuple):
    number: int


class _Close(NamedTuple):
    within_s: float


class _Born(NamedTuple):
    pid: int  # beside it: line, pidfd, notes


class _NotBorn(NamedTuple):
    reason: str


class _Ended(NamedTuple):
    pid: int
    code: int


class _Parent:
    """The forked side: waits for what its owner says and for the end of its children."""

    def __init__(self, line: socket.socket, run: Run) -> None:
        self._line, self._run = line, run
        self._pidfds: dict[int, int] = {}  # by themselves: pidfd -> pid
        job = jobs.current()
        self._of = f"of worker {job.rank} [{job.name}]"

    def serve(self) -> None:
        """Until the owner is done with it, or gone."""
        setproctitle(f"shoal readers {self._of}")
        torch.set_num_threads(1)  # the threads of the owner's pool were not forked with it
        gc.freeze()  # what is there now stays: it is the owner's to take apart, and its pages are shared with it
        within_s = 0.0
        with contextlib.suppress(EOFError, OSError):
            while True:
                poll = _poll(self._line.fileno(), *self._pidfds)
                for fd, _ in poll.poll():
                    if fd != self._line.fileno():
                        self._reap(fd)
                        continue
                    told = ForkingPickler.loads(receive(self._line)[0])
                    if isinstance(told, _Close):
                        within_s = told.within_s
                        raise EOFError
                    self._fork(told.number)
        self._see_off(within_s)

    def _fork(self, number: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        notes = os.memfd_create("shoal-notes", os.MFD_CLOEXEC)
        os.write(notes, AT.pack(-1))
        parent_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            ours.close()
            theirs.close()
            os.close(notes)
            _tell(self._line, _NotBorn(str(error)))
            return
        if pid == 0:
            _stay_until(
                lambda: self._become_reader(number, theirs, notes), parent_pid=parent_pid, keep=theirs
            )
        pidfd = os.pidfd_open(pid)
        _tell(self._line, _Born(pid), [ours.fileno(), pidfd, notes])
        for end in (ours, theirs):
            end.close()
        os.close(notes)
        self._pidfds[pidfd] = pid

    def _become_reader(self, number: int, line: socket.socket, notes: int) -> None:
        for pidfd in self._pidfds:
            os.close(pidfd)
        setproctitle(f"shoal reader {number} {self._of}")
        self._run(number, line, notes)

    def _reap(self, pidfd: int) -> None:
        pid = self._pidfds.pop(pidfd)
        _, status = os.waitpid(pid, 0)
        os.close(pidfd)
        _tell(self._line, _Ended(pid, os.waitstatus_to_exitcode(status)))

    def _see_off(self, within_s: float) -> None:
        """The owner has closed their lines, so they end after what they are at; or they are ended."""
        deadline = time.monotonic() + within_s
        for pidfd, pid in self._pidfds.items():
            if not _ended(pidfd, max(0.0, deadline - time.monotonic())):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.waitpid(pid, 0)


def _tell(line: socket.socket, what: NamedTuple, fds: list[int] | None = None) -> None:
    send(line, bytes(ForkingPickler.dumps(what)), fds)


def send(line: socket.socket, data: bytes, fds: list[int] | None = None, *, flags: int = 0) -> None:
    """One packet, and copies of descriptors beside it."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
    line.sendmsg([data], rights, flags)


def receive(
    line: socket.socket, *, max_bytes: int = _PACKET_BYTES, max_fds: int = 0, flags: int = 0
) -> tuple[bytes, list[int]]:
    """One packet, and the descriptors beside it, the caller's to close. EOFError where the other end is gone."""
    room = socket.CMSG_SPACE(max_fds * array("i").itemsize) if max_fds else 0
    data, ancillary, _, _ = line.recvmsg(max_bytes, room, socket.MSG_CMSG_CLOEXEC | flags)
    fds = array("i")
    for _, _, rights in ancillary:
        fds.frombytes(rights[: len(rights) - len(rights) % fds.itemsize])
    if not data:
        raise EOFError("the line was closed")
    return data, fds.tolist()


def _stay_until(run: Callable[[], None], *, parent_pid: int, keep: socket.socket) -> None:
    """In a forked child: run, and never return into the code that forked it."""
    code = 1
    try:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:  # it died before the kernel was told
            os._exit(1)
        _take_signals_back()
        _let_go_of_sockets(keep.fileno())
        run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        flush()
        os._exit(code)


def _take_signals_back() -> None:
    """Handlers are the worker's."""
    for signum in signal.valid_signals():
        if callable(signal.getsignal(signum)):
            signal.signal(signum, signal.SIG_DFL)
    for signum in _IGNORED:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _let_go_of_sockets(keep: int) -> None:
    """Connections are the worker's: whoever is at their other end must see them end with it, and hear nobody else.

    A socket's number is kept, for an object here that believes in it would
    else close somebody else's file. Files stay: a dataset may read from them.
    """
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd <= 2 or fd in (keep, nowhere):
            continue
        with contextlib.suppress(OSError):  # the one that listed them
            # Not by its mode alone: a path to a socket, opened as a path, is no connection.
            if stat.S_ISSOCK(os.fstat(fd).st_mode) and os.readlink(f"/proc/self/fd/{fd}").startswith(
                "socket:"
            ):
                os.dup2(nowhere, fd, inheritable=False)
    os.close(nowhere)


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _poll(*fds: int) -> select.poll:
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return poll


def _ended(pidfd: int, within_s: float) -> bool:
    return bool(_poll(pidfd).poll(within_s * 1000))


def flush() -> None:
    """Write out what was printed: what is in the buffers at a fork would be written twice, at a kill never."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _refused(why: object) -> ClusterError:
    return ClusterError(
        f"the system refused a process for reading data: {why}. Nothing was read in it; give map(fn, workers=...) fewer, or "
        "raise the limit on processes (ulimit -u)."
    )
