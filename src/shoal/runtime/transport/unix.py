"""Unix sockets between processes of one user on one host.

Access is decided here, before a byte is read: the socket has mode 0600 inside a directory of mode
0700, and both sides check the other's user through the kernel. Another user's process is refused,
root's too: root could read our memory anyway, so this guards against mistakes there, not against
root.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import stat
import tempfile
from pathlib import Path
from typing import NamedTuple

from shoal import system
from shoal.errors import ConfigError, WireError

MAX_GENERATIONS = 32
"""Processes between a job's supervisor and one of its own: a worker has two, its readers three."""


class Peer(NamedTuple):
    """The process at the other end of a connection, by the kernel's word."""

    pid: int
    uid: int


def runtime_dir() -> Path:
    """Make a private, short-named directory for sockets; the caller removes it.

    Under XDG_RUNTIME_DIR where that is ours, else under the temporary
    directory, else (should that be too deep for a socket's path) under /tmp.
    """
    prefix = f"shoal-{os.getuid()}-"
    for base in _bases():
        # mkdtemp adds 8 characters, and the socket's own name needs some.
        if _is_ours(base) and len(os.fsencode(base)) + len(prefix) + 8 + 32 <= system.MAX_SOCKET_PATH_BYTES:
            return Path(tempfile.mkdtemp(prefix=prefix, dir=base))
    raise ConfigError(
        f"there is no directory for sockets: neither XDG_RUNTIME_DIR nor {tempfile.gettempdir()} nor /tmp is writable "
        "and short enough. Nothing was started; set TMPDIR to a short path that you may write to."
    )


def _bases() -> tuple[str, ...]:
    return os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"


def remove_abandoned_dirs() -> None:
    """Remove directories of `runtime_dir` that a killed process left behind: those with sockets that nobody listens at."""
    for base in filter(_is_ours, dict.fromkeys(_bases())):
        for directory in Path(base).glob(f"shoal-{os.getuid()}-*"):
            with contextlib.suppress(OSError):  # another process does the same
                sockets = list(directory.iterdir())
                if sockets and all(map(_is_abandoned, sockets)):
                    shutil.rmtree(directory)


def listen(path: str | Path) -> socket.socket:
    """A socket that listens at `path`, mode 0600; one left behind by a process that is gone is replaced."""
    sock = _new_socket(path)
    try:
        try:
            sock.bind(os.fspath(path))
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not _is_abandoned(path):
                raise ConfigError(
                    f"cannot listen at {path}: {error.strerror}. Nothing was started; another process uses that path."
                ) from None
            os.unlink(path)
            sock.bind(os.fspath(path))
        # No connection is possible between bind and chmod: the socket does not listen yet.
        os.chmod(path, 0o600)
        sock.listen(128)
    except BaseException:
        sock.close()
        raise
    return sock


def accept(listener: socket.socket) -> tuple[socket.socket, Peer]:
    """The next connection and who made it; WireError (and the connection is closed) where it is another user's."""
    sock, _ = listener.accept()
    return sock, _refuse_strangers(sock)


def connect(path: str | Path, *, timeout_s: float) -> socket.socket:
    """Connect to the listener at `path`; OSError where there is none, WireError where it is another user's."""
    sock = _new_socket(path)
    try:
        sock.settimeout(timeout_s)
        sock.connect(os.fspath(path))
        _refuse_strangers(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def peer_of(sock: socket.socket) -> Peer:
    """The other end, as of the moment it connected or listened."""
    return Peer(*system.peer_of(sock))


def is_descendant(pid: int, ancestor: int) -> bool:
    """Whether a process was started by `ancestor`, or by a process that was; also the ancestor itself."""
    for _ in range(MAX_GENERATIONS):
        if pid == ancestor:
            return True
        parent = system.parent_of(pid)
        if parent is None or parent <= 1:
            return False
        pid = parent
    return False


def _refuse_strangers(sock: socket.socket) -> Peer:
    peer = peer_of(sock)
    if peer.uid != os.getuid():
        sock.close()
        raise WireError(f"process {peer.pid} belongs to user {peer.uid}, this one to user {os.getuid()}")
    return peer


def _new_socket(path: str | Path) -> socket.socket:
    num_bytes = len(os.fsencode(path))
    if num_bytes > system.MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"the socket path {path} has {num_bytes} bytes, and the system takes at most {system.MAX_SOCKET_PATH_BYTES}. Nothing was "
            "started; set XDG_RUNTIME_DIR or TMPDIR to a shorter directory."
        )
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)


def _is_abandoned(path: str | Path) -> bool:
    """Whether nothing listens at this socket any more. Anything else must not be removed."""
    if not stat.S_ISSOCK(os.stat(path).st_mode):
        return False
    try:
        connect(path, timeout_s=1.0).close()
    except ConnectionRefusedError:
        return True
    except (OSError, WireError):
        pass
    return False


def _is_ours(directory: str) -> bool:
    return bool(directory) and os.path.isdir(directory) and os.access(directory, os.W_OK | os.X_OK)
