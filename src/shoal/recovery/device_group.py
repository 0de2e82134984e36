"""NCCL process groups: set-up, connection and abort.

The host is not told of a lost peer: a kernel on the device waits for it, and
the host waits for the device. So the group's connections on the host are
watched (rendezvous.py), and the device's collectives are aborted when they
end; their values are dropped.
"""

from __future__ import annotations

import os
import threading
import time

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup, _abort_process_group, _world

from shoal.config import placement
from shoal.config.job import Job

LET_GO_S = 10.0
"""How long the end of a group is waited for: it takes milliseconds."""


def backend_for(job: Job) -> str:
    """Gloo; and what belongs to the accelerator (NCCL) beside it where the workers' exchange by themselves."""
    kind = placement.of_job(job).accelerator
    if kind is None or not placement.meet_on_devices(job):
        return "gloo"
    theirs = dist.get_default_backend_for_device(kind)
    return f"cpu:gloo,{kind}:{theirs}" if dist.is_backend_available(theirs) else "gloo"


def set_up(job: Job, interface: str) -> None:
    """What NCCL reads when it starts in this process."""
    os.environ["NCCL_SOCKET_IFNAME"] = interface
    # Its own way with errors ends the process. Ours looks at the connections, and lets go of what waits.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    if placement.of_job(job).is_shared:
        # It refuses two ranks on one device of one host. As if on hosts of their own, they talk through sockets.
        os.environ["NCCL_HOSTID"] = f"worker-{job.rank}"
        os.environ.setdefault("NCCL_NET", "Socket")


def connect(device: torch.device, group: ProcessGroup | None = None) -> None:
    """Have all ranks of `group` connect now: later, whoever waits for one that died meanwhile could not be told."""
    torch.accelerator.set_device_index(device.index)  # threads begin with the first one
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    torch.accelerator.synchronize(device)


def let_go() -> None:
    """End what waits on the device, in all groups of this process. From any thread; nothing works in them any more."""
    groups = [group for group in list(_world.pg_names) if _on_device(group) is not None]
    # At once: the end of one waits until the device is done, and that may wait for another (measured: for ever).
    ends = [threading.Thread(target=group.abort, name="ending a group", daemon=True) for group in groups]
    for end in ends:
        end.start()
    until = time.monotonic() + LET_GO_S
    for end in ends:
        end.join(max(until - time.monotonic(), 0.0))


def leave() -> None:
    """Take the default group down, and all within it, whatever the others do."""
    world = dist.group.WORLD
    if world is not None and _on_device(world) is not None:
        let_go()
        _abort_process_group()
    else:
        dist.destroy_process_group()


def _on_device(group: ProcessGroup) -> dist.ProcessGroupNCCL | None:
    if not dist.is_nccl_available():
        return None
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:
        return None
    return backend if isinstance(backend, dist.ProcessGroupNCCL) else None
