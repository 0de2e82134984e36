"""NCCL process groups: set-up, connection, abort, and the watchdog that aborts them.

NCCL does not report a lost peer to the host: a kernel on the device waits for the peer, and the
host waits for the device. So rendezvous.py watches the group's connections on the host, and the
watchdog aborts the device's collectives when one of them closes. The values of aborted collectives
are dropped.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup, _abort_process_group, _world

from shoal.config import placement
from shoal.config.job import Job

ABORT_TIMEOUT_S = 10.0  # limit for ending a group, which normally takes milliseconds


def backend_for(job: Job) -> str:
    """Backend string: gloo, and the accelerator's own backend (NCCL) beside it where each worker has a device."""
    kind = placement.of_job(job).accelerator
    if kind is None or not placement.groups_on_devices(job):
        return "gloo"
    theirs = dist.get_default_backend_for_device(kind)
    return f"cpu:gloo,{kind}:{theirs}" if dist.is_backend_available(theirs) else "gloo"


def set_up(job: Job, interfaces: str) -> None:
    """Set the environment variables that NCCL reads at its start. Given several interfaces it uses all of them."""
    os.environ["NCCL_SOCKET_IFNAME"] = (
        f"={interfaces}"  # "=" matches these names exactly; without it NCCL matches prefixes
    )
    # NCCL's own error handling ends the process. Ours watches the connections and aborts the groups that wait.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    if placement.of_job(job).is_shared:
        # NCCL refuses two ranks on one device of one host. With host ids of their own they talk through
        # sockets.
        os.environ["NCCL_HOSTID"] = f"worker-{job.rank}"
        os.environ.setdefault("NCCL_NET", "Socket")


def connect(device: torch.device, group: ProcessGroup | None = None) -> None:
    """Connect all ranks of `group` now. A rank that connects later and waits for a dead one cannot be interrupted."""
    torch.accelerator.set_device_index(device.index)  # new threads start with device 0
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    torch.accelerator.synchronize(device)


def abort_groups() -> None:
    """Abort all groups of this process, so that nothing waits on the device. Safe from any thread."""
    groups = [group for group in list(_world.pg_names) if _on_device(group) is not None]
    # Abort all groups at once: one abort waits until the device is done, which may wait for another group
    # (measured: for ever).
    ends = [threading.Thread(target=group.abort, name="ending a group", daemon=True) for group in groups]
    for end in ends:
        end.start()
    until = time.monotonic() + ABORT_TIMEOUT_S
    for end in ends:
        end.join(max(until - time.monotonic(), 0.0))


def leave() -> None:
    """Take the default group down, and all within it, whatever the others do."""
    world = dist.group.WORLD
    if world is not None and _on_device(world) is not None:
        abort_groups()
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


LOOK_EVERY_S = 0.25

FREE_WITHIN_S = 20.0  # limit for a device that hangs in a way the abort does not end

EXIT_STUCK = 70


class DeviceWatch:
    """Watchdog over one device; starts at the first `over`."""

    def __init__(
        self,
        device: torch.device,
        timeout_s: float,
        *,
        is_broken: Callable[[], bool],
        abort_groups: Callable[[], None] = abort_groups,
        is_busy: Callable[[], bool] | None = None,
        give_up: Callable[[], None] | None = None,
    ) -> None:
        self._timeout_s, self._is_broken, self._abort = timeout_s, is_broken, abort_groups
        self._is_busy = is_busy or (lambda: not torch.accelerator.current_stream(device).query())
        self._give_up = give_up or self._end_process
        self._lock = threading.Lock()
        self._depth = 0
        self._waits_since = 0.0
        self._thread: threading.Thread | None = None
        self.ended: str | None = None
        """Reason of the abort, once there was one: values computed since are invalid."""

    @contextlib.contextmanager
    def over(self) -> Iterator[None]:
        """Context in which this process may wait for the device. Raises RuntimeError if the wait was aborted."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="device watch", daemon=True)
            self._thread.start()
        self._enter(+1)
        try:
            yield
        except Exception:
            if self.ended is None:
                raise
        finally:
            self._enter(-1)
        if self.ended is not None:
            # The aborted collectives left garbage behind, so any error since has this cause.
            raise RuntimeError(self.ended)

    def _enter(self, change: int) -> None:
        with self._lock:  # not during an abort, which ends the groups that this thread may be about to leave
            if not self._depth:
                self._waits_since = time.monotonic()
            self._depth += change

    def _watch(self) -> None:
        while self.ended is None:
            time.sleep(LOOK_EVERY_S)
            with self._lock:
                if self._depth:
                    self._check(time.monotonic())
        until = time.monotonic() + FREE_WITHIN_S
        while self._depth:
            if time.monotonic() > until:
                self._give_up()
            time.sleep(LOOK_EVERY_S)

    def _check(self, now: float) -> None:
        try:
            if self._is_broken():
                self.ended = "a connection of the group was closed"
            elif not self._is_busy():
                self._waits_since = now  # the host itself is busy: compiling, or writing a checkpoint
            elif now - self._waits_since > self._timeout_s:
                self.ended = f"the device is not done after {now - self._waits_since:.1f} s"
            if self.ended is not None:
                self._abort()
        except Exception as error:
            # An error of the driver, or of a group that ends meanwhile. The watchdog must keep running: a
            # waiting host depends on it.
            self.ended = self.ended or f"the device cannot be asked: {error}"

    def _end_process(self) -> None:
        print(
            f"error: {self.ended}, and it did not let go of this worker within {FREE_WITHIN_S:g} s either. The step was not "
            "applied; this worker ends, and the job goes on from the newest snapshot.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(EXIT_STUCK)
