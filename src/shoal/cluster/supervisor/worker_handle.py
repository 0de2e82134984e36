"""Worker as its supervisor sees it: process, output pipes, log and status socket.

Forks the process and closes its descriptors once it has exited. `supervisor.py`
decides when one is started and interprets its messages.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec

from shoal import system
from shoal.cluster.hosts.remote_host import RemoteHost
from shoal.cluster.launch.run_directory import RunDirectory
from shoal.cluster.supervisor import output
from shoal.cluster.supervisor.output import Log, Pipe, Screen
from shoal.cluster.supervisor.warm_parent import WarmParent
from shoal.cluster.worker.process import WorkerSpec, encode_spec
from shoal.errors import WireError
from shoal.runtime.transport import framing
from shoal.runtime.transport.messages.message import Message

MAX_STATUS_BYTES = 256 * 1024


@dataclass(slots=True, kw_only=True)
class WorkerHandle:
    """A running worker process."""

    rank: int
    incarnation: int
    host: int
    pid: int
    status: socket.socket
    pipes: list[Pipe]
    log: Log
    lost_with: str = ""
    """The host that was lost with it, and why."""

    @property
    def name(self) -> str:
        """Name of the process in faults."""
        return f"worker-{self.rank}"

    def register(self, selector: selectors.BaseSelector) -> None:
        for pipe in self.pipes:
            selector.register(pipe, selectors.EVENT_READ, pipe)
        selector.register(self.status, selectors.EVENT_READ, self)

    def unregister(self, selector: selectors.BaseSelector) -> None:
        for fd in [self.status.fileno(), *(pipe.fileno() for pipe in self.pipes)]:
            with contextlib.suppress(KeyError):  # its other end may have been closed before
                selector.unregister(fd)

    def hear(self) -> tuple[bool, Message | None]:
        """(received, message): False when no packet is left; None for a packet that is no message."""
        try:
            packet = system.receive_from(self.status, MAX_STATUS_BYTES)
        except OSError:
            return False, None
        if packet is None:
            return False, None
        # Other packets come from a script that wrote to a descriptor it did not open.
        with contextlib.suppress(WireError):
            return True, framing.decode(packet)[0]
        return True, None

    def close(self) -> None:
        """Close everything once the process has exited; its remaining output is forwarded first."""
        for pipe in self.pipes:
            pipe.close()
        self.status.close()
        self.log.close()


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def start(
    spec: WorkerSpec,
    *,
    rank: int,
    incarnation: int,
    ways_in: Mapping[str, int],
    master: socket.socket,
    run: RunDirectory,
    screen: Screen,
    parent: WarmParent | RemoteHost,
    host: int,
) -> WorkerHandle:
    """Fork a worker by `parent`, on `host`. `spec` is rank 0's; `ways_in` lead to the coordinator and
    the servers; `master` is for rank 0.

    A replacement's output goes to its log alone at first: it repeats earlier work. It also gets the
    real pipes, for when it has caught up.
    """
    job = replace(spec.job, rank=rank, incarnation=incarnation)
    status, their_status = system.packet_pair()
    status.setblocking(False)
    system.know_senders(status)
    theirs: dict[str, int] = {}
    log = Log(run.log_path(rank))

    def pipe(*names: str) -> int:
        ours, end = os.pipe()
        theirs.update(dict.fromkeys(names, end))
        return ours

    prefix = "live_" if incarnation else ""
    pipes = [
        output.stdout_pipe(pipe(f"{prefix}stdout"), log, screen, rank=rank, shown_rank=spec.debug_rank or 0),
        output.stderr_pipe(pipe(f"{prefix}stderr"), log, screen, rank=rank, num_workers=job.num_workers),
    ]
    if incarnation:
        pipes.insert(0, Pipe(pipe("stdout", "stderr"), log))
    worker = WorkerHandle(
        rank=rank, incarnation=incarnation, host=host, pid=0, status=status, pipes=pipes, log=log
    )
    try:
        worker.pid = parent.fork(
            "worker",
            title=f"shoal worker {rank} [{job.name}]",
            spec=encode_spec(msgspec.structs.replace(spec, job=job, master_port=master.getsockname()[1])),
            fds={
                **theirs,
                "status": their_status.fileno(),
                **ways_in,
                **({} if rank else {"master": master.fileno()}),
                **({"stdin": 0} if rank == spec.debug_rank and host == 0 and _is_open(0) else {}),
            },
        )
    except BaseException:
        worker.close()
        raise
    finally:
        for fd in set(theirs.values()):
            os.close(fd)
        their_status.close()
    return worker
