"""The coordinator as a process: what it is told at birth, and how it is asked to stop.

It listens on a socket that the supervisor made and keeps: workers may connect
before it runs, and a coordinator that is started again goes on at the same
address. Who may say what is `coordinator.py`'s business.
"""

from __future__ import annotations

import signal
import socket
import sys

import msgspec

from shoal.cluster.coordinator import Coordinator


class CoordinatorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All a coordinator is told."""

    num_workers: int
    join_timeout_s: float


def main(spec: bytes, fds: dict[str, int]) -> int:
    """Be the coordinator until SIGTERM."""
    told = msgspec.msgpack.decode(spec, type=CoordinatorSpec)
    wake, stop = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda signum, frame: None)  # the byte in the wake-up socket is the message
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's to act on
    coordinator = Coordinator(
        socket.socket(fileno=fds["listener"]),
        num_workers=told.num_workers,
        join_timeout_s=told.join_timeout_s,
    )
    coordinator.serve(until_readable=stop)
    coordinator.close()
    if coordinator.num_refused:
        print(
            f"shoal: the coordinator closed {coordinator.num_refused} connections of processes that are no worker of "
            f"this job; the last because {coordinator.last_refusal}",
            file=sys.stderr,
        )
    return 0
