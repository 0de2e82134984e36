"""A server as a process: what it is told at birth, what it is made of, and how it is asked to stop.

It listens on a socket that the supervisor made and keeps: clients may connect
before it runs, and a server that is started again goes on at the same
address, with nothing in memory; what it shall hold, the coordinator and the
other servers tell it.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import socket
import sys

from shoal.cluster.launch import threads
from shoal.cluster.launch.server_spec import ServerSpec, decode_spec
from shoal.errors import CoordinatorLost
from shoal.ps.server.loop import Core, ServerLoop
from shoal.ps.server.memory_limit import MemoryGuard
from shoal.runtime import failpoints

CANNOT_GO_ON = CoordinatorLost.exit_code
"""The exit code that says: nobody wants this server, or nobody is there. Why, is the last thing on stderr."""


def main(spec: bytes, fds: dict[str, int]) -> int:
    """Be a server until SIGTERM, or until the coordinator lets it go."""
    told = decode_spec(spec)
    name = f"server-{told.number}"
    if told.env:
        os.environb.clear()
        os.environb.update(told.env)
    # What it holds is in the host's memory; torch's optimizers would ask for a device at their first step all the same,
    # which takes the driver a while to answer.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    threads.use(told.num_threads)
    failpoints.arm(told.faults, process=name, incarnation=told.incarnation)
    faulthandler.enable()
    # Every segment of a client's holds a descriptor.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    wake, stop = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda signum, frame: None)  # the byte in the wake-up socket is the message
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's to act on
    loop = ServerLoop(
        make_core(told),
        socket.socket(fileno=fds["listener"]),
        number=told.number,
        incarnation=told.incarnation,
        coordinator=f"/proc/self/fd/{fds['coordinator']}",
        servers={
            int(way.removeprefix("server-")): f"/proc/self/fd/{fd}"
            for way, fd in fds.items()
            if way.startswith("server-")
        },
        memory=MemoryGuard(name, told.server_memory_bytes),
    )
    try:
        loop.run(until_readable=stop)
    except CoordinatorLost as error:
        print(error, file=sys.stderr)
        return CANNOT_GO_ON
    finally:
        loop.close()
    if loop.refusal is not None:
        print(f"shoal: the coordinator does not want {name}: {loop.refusal}", file=sys.stderr)
        return CANNOT_GO_ON
    return 0


def make_core(told: ServerSpec) -> Core:
    """What decides in this server."""
    from shoal.ps.server.core import ServerCore

    return ServerCore(number=told.number, incarnation=told.incarnation)
