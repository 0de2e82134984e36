"""A job inside another launcher's world: `shoal run --on torchrun` in every process that torchrun started.

Rank 0 is the head. On each other machine the first process joins it as a host,
with as many workers as the launcher put there. The remaining processes start
nothing: they wait for the first of their machine and end as it does.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from shoal import system
from shoal.config.hosts import DEFAULT_PORT, HostsConfig, parse_bind
from shoal.config.launchers import World, forget, world_of
from shoal.engines.protocol import KEY_VARIABLE
from shoal.errors import ClusterError, ConfigError
from shoal.runtime.transport import unix

MEET_TIMEOUT_S = 30.0
"""Time for the first process of a machine to listen for the others."""

_CODE = struct.Struct("<i")


def enter(engine: str) -> World | None:
    """World of this process, if `--on` names the launcher that started it. Removes the launcher's variables."""
    world = world_of(os.environ)
    if world is None or world.engine != engine:
        if engine == "torchrun":
            raise ConfigError(
                "--on torchrun is for a process that torchrun started, and this one was not. Nothing was started; use `torchrun "
                "--nproc-per-node 4 train.py`, or leave --on out."
            )
        return None
    if world.size % world.local_size:
        raise ConfigError(
            f"{world.launcher} put {world.local_size} of {world.size} processes on this machine, and other numbers elsewhere. "
            "Nothing was started; use as many on each."
        )
    forget(os.environ)
    if world.launcher == "mpirun" and world.local_size > 1:
        # mpirun bound each process to its own cores, and this one runs the workers of all.
        with contextlib.suppress(OSError, AttributeError):  # macOS has no binding
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
    return world


def hosts_of(world: World, bind: str | None, **options: object) -> HostsConfig | None:
    """Hosts of the job, for rank 0; None if one machine has all ranks."""
    if world.num_nodes == 1:
        return None
    address, port = _place(world, bind)
    return HostsConfig(
        num_hosts=world.num_nodes,
        workers=(world.local_size,) * world.num_nodes,
        bind=address,
        port=port,
        **options,  # type: ignore[arg-type]  # of the command line
    )


def follow(world: World, bind: str | None, run_dir: Path) -> int:
    """Wait as one of the other processes until the job is over; returns its exit code."""
    if world.local_rank > 0:
        return _wait_for_first(world)
    from shoal.cluster.hosts import opening

    address, port = _place(world, bind)
    with leading(world) as ended:
        code, error = opening.join(
            f"shoal://{address}:{port}",
            key_file=None,
            run_dir=run_dir,
            timeout_s=MEET_TIMEOUT_S,
            wants=world.node,
        )
        ended.append(code)
    if error is not None:
        raise error
    return code


@contextlib.contextmanager
def leading(world: World) -> Iterator[list[int]]:
    """Context that sends the appended exit code to this machine's other processes at its end."""
    ended: list[int] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            system.bind_name(listener, _meeting())
        except OSError as error:
            raise ConfigError(
                f"rank {world.rank}, the first process of {world.launcher} on this machine, cannot listen for the others "
                f"({error.strerror}): another process, perhaps of another user, has the name {_meeting()}. Nothing was started; "
                f"end that process (`ss -xlp` lists it), or start {world.launcher} again, which chooses another name."
            ) from None
        listener.listen(max(1, world.local_size))
        listener.setblocking(False)
        try:
            yield ended
        finally:
            with contextlib.suppress(BlockingIOError):
                while True:
                    connection, _ = listener.accept()
                    with connection, contextlib.suppress(OSError):
                        connection.sendall(_CODE.pack(ended[-1] if ended else 1))


def _wait_for_first(world: World) -> int:
    deadline = time.monotonic() + MEET_TIMEOUT_S
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as first:
            try:
                first.connect(system.address_of(_meeting()))
            except OSError:
                if time.monotonic() > deadline:
                    raise ClusterError(
                        f"rank {world.rank - world.local_rank}, the first process of {world.launcher} on this machine, did not "
                        f"start the job within {MEET_TIMEOUT_S:g} s. Nothing was trained by this process; its own message says why."
                    ) from None
                time.sleep(0.1)
                continue
            # Any user can take an abstract socket name, and could then report a false exit code.
            if (uid := unix.peer_of(first).uid) != os.getuid():
                raise ClusterError(
                    f"a process of user {uid} listens in place of rank {world.rank - world.local_rank}, the first process of "
                    f"{world.launcher} on this machine, so how the job ends cannot be known here. Nothing was trained by this "
                    f"process; end that one (`ss -xlp` lists it), or start {world.launcher} again."
                )
            data = b""
            with contextlib.suppress(OSError):
                data = first.recv(_CODE.size, socket.MSG_WAITALL)
            return int(_CODE.unpack(data)[0]) if len(data) == _CODE.size else ClusterError.exit_code


def _meeting() -> str:
    """Socket name by which the processes of one launcher on one machine find each other: they have the same parent."""
    parent = os.getppid()
    return f"shoal-world-{os.getuid()}-{parent}-{system.start_of(parent)}"


def _place(world: World, bind: str | None) -> tuple[str, int]:
    """Address at which rank 0 listens."""
    if not os.environ.get(KEY_VARIABLE):
        raise ConfigError(
            f"{world.launcher} started {world.size} processes on {world.num_nodes} machines, which join with a key that all know. "
            f"Nothing was started; put the same random word of 20 characters or more into {KEY_VARIABLE} on each machine."
        )
    address, port = parse_bind(bind) if bind else (world.head, DEFAULT_PORT)
    if not address:
        raise ConfigError(
            f"{world.launcher} started {world.size} processes on {world.num_nodes} machines and does not tell where rank 0 is. "
            f"Nothing was started; run `shoal run --on {world.engine} --hosts {world.num_nodes}` once, without {world.launcher}, "
            "which asks it for the hosts; or give --bind ADDRESS, rank 0's, to all."
        )
    return address, port
