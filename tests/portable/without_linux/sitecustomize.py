"""Python without what Linux has and macOS has not: before any other import, in every process that has this on its PYTHONPATH.

Names of the standard library are removed, calls that macOS refuses are
refused, and code of shoal finds no /proc. Other packages keep theirs: they
were built for Linux.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import pathlib
import select
import selectors
import signal
import socket
import sys
import time
from typing import Any

GONE = {
    os: ("memfd_create", "pidfd_open", "eventfd", "eventfd_read", "eventfd_write", "O_PATH", "O_TMPFILE", "posix_fallocate",
         "sched_getaffinity", "sched_setaffinity", "pipe2", "fdatasync", "getrandom", "copy_file_range", "waitid", "posix_fadvise"),
    signal: ("pidfd_send_signal", "sigtimedwait", "sigwaitinfo", "SIGRTMIN", "SIGRTMAX"),
    socket: ("MSG_CMSG_CLOEXEC", "SO_PASSCRED", "SCM_CREDENTIALS", "TCP_USER_TIMEOUT", "TCP_KEEPIDLE"),
    fcntl: ("F_ADD_SEALS", "F_GET_SEALS", "F_SEAL_SHRINK", "F_SETPIPE_SZ"),
    select: ("epoll", "POLLRDHUP"),
    mmap: ("MADV_HUGEPAGE", "MADV_NOHUGEPAGE", "MADV_DONTFORK"),
    time: ("CLOCK_BOOTTIME",),
}  # fmt: skip

SYMBOLS_GONE = {"prctl", "renameat2", "mallopt", "malloc_trim", "memfd_create"}

PACKAGE = f"{os.sep}src{os.sep}shoal{os.sep}"  # not the checkout, whose folder may be called shoal too


def remove() -> None:
    sys.without_linux = True  # type: ignore[attr-defined]  # on purpose: `system.missing_calls` refuses it else
    for module, names in GONE.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    selectors.DefaultSelector = selectors.PollSelector  # type: ignore[misc, assignment]
    pair, look_up = socket.socketpair, ctypes.CDLL.__getattr__

    def socketpair(family: int = socket.AF_UNIX, type: int = socket.SOCK_STREAM, proto: int = 0) -> Any:
        if type == socket.SOCK_SEQPACKET:
            raise OSError(errno.EPROTONOSUPPORT, os.strerror(errno.EPROTONOSUPPORT))
        return pair(family, type, proto)

    def symbol(library: ctypes.CDLL, name: str) -> Any:
        if name in SYMBOLS_GONE:
            raise AttributeError(name)
        return look_up(library, name)

    socket.socketpair = socketpair  # type: ignore[assignment]
    ctypes.CDLL.__getattr__ = symbol  # type: ignore[method-assign]
    sys.addaudithook(refuse_proc)


def refuse_proc(event: str, arguments: tuple[Any, ...]) -> None:
    """No /proc and no abstract socket for code of shoal."""
    if event in ("open", "os.listdir", "os.scandir", "os.readlink"):
        path = arguments[0]
        if isinstance(path, str) and path.startswith(("/proc/", "/sys/")) and asks_shoal():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    elif event in ("socket.bind", "socket.connect") and arguments[1][:1] in ("\0", b"\0"):
        raise FileNotFoundError(errno.ENOENT, "no abstract sockets here")


def asks_shoal() -> bool:
    """Whether the code that asked, pathlib aside, is shoal's."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename in (__file__, pathlib.__file__):
        frame = frame.f_back
    return frame is not None and PACKAGE in frame.f_code.co_filename


remove()
