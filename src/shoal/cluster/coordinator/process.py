"""The coordinator as a process: what it is told at birth, what it remembers, and how it is asked to stop.

It listens on a socket that the supervisor made and keeps: workers may connect
before it runs, and a coordinator that is started again goes on at the same
address, from what is in its journal. Who may say what is `coordination.py`'s
business.
"""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path

import msgspec

from shoal.cluster.coordinator.journal import Journal
from shoal.cluster.coordinator.service import Coordinator
from shoal.cluster.coordinator.state import CoordinationConfig
from shoal.config.faults import Fault
from shoal.errors import JournalFailed
from shoal.runtime import failpoints

CANNOT_GO_ON = JournalFailed.exit_code
"""The exit code that says: it would be no better the next time. Why, is the last thing on stderr."""


class CoordinatorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All a coordinator is told."""

    config: CoordinationConfig
    supervisor: int = 0
    """The process that may watch."""

    journal: str | None = None
    """Path of the journal. None: nothing is kept, and this coordinator must not die."""

    launch: int = 0
    """Which launch of the run this is, by `journal.begin_launch`."""

    incarnation: int = 0
    """How often it was started again."""

    faults: tuple[Fault, ...] = ()
    """What is to go wrong in it, at failpoints."""


def main(spec: bytes, fds: dict[str, int]) -> int:
    """Be the coordinator until SIGTERM."""
    told = msgspec.msgpack.decode(spec, type=CoordinatorSpec)
    failpoints.arm(told.faults, process="coordinator", incarnation=told.incarnation)
    wake, stop = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda signum, frame: None)  # the byte in the wake-up socket is the message
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's to act on
    try:
        _serve(told, socket.socket(fileno=fds["listener"]), stop)
    except JournalFailed as error:
        print(error, file=sys.stderr)
        return CANNOT_GO_ON
    return 0


def _serve(told: CoordinatorSpec, listener: socket.socket, stop: socket.socket) -> None:
    journal = Journal(Path(told.journal), launch=told.launch) if told.journal else None
    coordinator = Coordinator(
        listener,
        told.config,
        memory=journal.load() if journal else None,
        write=journal.write if journal else None,
        supervisor=told.supervisor,
    )
    coordinator.serve(until_readable=stop)
    coordinator.close()
    if journal:
        journal.close()
    if coordinator.num_refused:
        print(
            f"shoal: the coordinator closed {coordinator.num_refused} connections of processes that are no worker of "
            f"this job; the last because {coordinator.last_refusal}",
            file=sys.stderr,
        )
