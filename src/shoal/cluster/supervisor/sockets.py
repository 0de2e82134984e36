"""Listening sockets without a name, for processes that are started again.

Whoever keeps the socket keeps the address: a process that is killed is
started again at the same one, and nobody who connects meanwhile is turned
away.
"""

from __future__ import annotations

import os
import shutil
import socket

from shoal.runtime.transport import unix


def listen_unnamed(name: str) -> tuple[socket.socket, int]:
    """A socket to listen on, and a descriptor that leads there; `name` is how it shows among open files.

    Its name is gone before anybody uses it, so nothing is left in the file
    system however the job ends; `/proc/self/fd/N` still leads to it, for
    processes that were given the descriptor, and for nobody else.
    """
    directory = unix.runtime_dir()
    try:
        listener = unix.listen(directory / name)
        way_in = os.open(directory / name, os.O_PATH | os.O_CLOEXEC)
    finally:
        shutil.rmtree(directory)
    return listener, way_in
