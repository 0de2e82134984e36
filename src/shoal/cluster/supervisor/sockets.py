"""Unix sockets of the supervisor: unnamed listeners for its children, and the control socket of a running job.

A listener outlives the process that serves it: a killed coordinator or server is restarted at the
same address, and clients that connect meanwhile wait.

`shoal scale` and `shoal leave` reach a running job through the control socket. Under Linux its
address is abstract, so nothing is left behind however the job ends. It is named after the run
directory's lock file. Both sides check the other's user through the kernel and refuse another
user's process. The supervisor decides which requests are valid.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from shoal import system
from shoal.errors import ClusterError, WaitTimedOut, WireError
from shoal.runtime.transport import unix
from shoal.runtime.transport.framing import Decoder, encode, read_message
from shoal.runtime.transport.messages.message import Message

MAX_WAITING = 8
CONNECT_TIMEOUT_S = 5.0


def listen_unnamed(name: str) -> tuple[socket.socket, int]:
    """A listening socket without a name, and a descriptor that leads to it; `name` shows among open files.

    Under Linux its name is removed before the first use, so nothing is left in the file system
    however the job ends. Only processes that inherit the descriptor can connect
    (`system.path_of_way`).
    """
    directory = unix.runtime_dir()
    try:
        listener = unix.listen(directory / name)
        return listener, system.way_to(listener, directory / name)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


class Control:
    """The supervisor's end of the control socket, registered with its selector.

    A client gets every answer up to the last; one that hangs up is forgotten.
    """

    def __init__(self, run: Path, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._listener: socket.socket | None = None
        self._asking: dict[socket.socket, Decoder] = {}
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            system.bind_name(listener, _name(run))
            listener.listen(MAX_WAITING)
            listener.setblocking(False)
        except OSError:
            # The name is taken, by another network namespace or user: the job runs without a control
            # socket.
            listener.close()
            return
        self._listener = listener
        selector.register(listener, selectors.EVENT_READ, self)

    def hear(self) -> list[Message]:
        """Requests received since the last call."""
        self._accept()
        asked: list[Message] = []
        for sock, decoder in list(self._asking.items()):
            try:
                while True:
                    data = sock.recv(64 * 1024)
                    if not data:
                        raise ConnectionResetError
                    asked += [message for message, _ in decoder.feed(data)]
            except BlockingIOError:
                pass
            except (OSError, WireError):
                self._forget(sock)
        return asked

    def answer(self, message: Message, *, is_last: bool) -> None:
        """Send `message` to every client that has asked."""
        for sock in list(self._asking):
            with contextlib.suppress(OSError):
                sock.send(b"".join(encode(message)))
            if is_last:
                self._forget(sock)

    def close(self) -> None:
        for sock in list(self._asking):
            self._forget(sock)
        if self._listener is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        if self._listener is None:
            return
        with contextlib.suppress(OSError, WireError):
            sock, _ = unix.accept(self._listener)
            if len(self._asking) >= MAX_WAITING:
                sock.close()
                return
            sock.setblocking(False)
            self._asking[sock] = Decoder()
            self._selector.register(sock, selectors.EVENT_READ, self)

    def _forget(self, sock: socket.socket) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(sock)
        self._asking.pop(sock, None)
        sock.close()


def ask(run: Path, message: Message, *, timeout_s: float) -> Iterator[Message]:
    """Ask the supervisor of a running job; yields its answers until it hangs up. Each must come within `timeout_s`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(CONNECT_TIMEOUT_S)
        try:
            sock.connect(system.address_of(_name(run)))
        except OSError as error:
            raise ClusterError(
                f"the supervisor of {run} does not answer ({error.strerror or error}): the run has ended, "
                "or its head is another host or container: give the command there. Nothing was changed; `shoal status` tells how it stands."
            ) from None
        if unix.peer_of(sock).uid != os.getuid():
            raise ClusterError(f"the supervisor of {run} belongs to another user. Nothing was changed.")
        sock.sendall(b"".join(encode(message)))
        while True:
            started = time.monotonic()
            try:
                yield read_message(sock, timeout_s=timeout_s)[0]
            except EOFError:
                return
            except TimeoutError:
                raise WaitTimedOut(
                    operation=f"the supervisor's answer to {type(message).__name__}",
                    waited_s=time.monotonic() - started,
                    missing=["the supervisor"],
                    setting=f"the wait of {timeout_s:g} s",
                ) from None
            except OSError:
                return


def _name(run: Path) -> str:
    lock = os.stat(run / "lock")
    return f"shoal-{os.getuid()}-{lock.st_dev:x}-{lock.st_ino:x}"
