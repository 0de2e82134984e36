"""NCCL process groups: set-up, connection, abort, and the watchdog that aborts them.

The host is not told of a lost peer: a kernel on the device waits for it, and
the host waits for the device. So the group's connections on the host are
watched (rendezvous.py), and the device's collectives are aborted when they
end; their values are dropped.
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

LET_GO_S = 10.0  # how long the end of a group is waited for: it takes milliseconds


def backend_for(job: Job) -> str:
    """Gloo; and what belongs to the accelerator (NCCL) beside it where the workers' exchange by themselves."""
    kind = placement.of_job(job).accelerator
    if kind is None or not placement.groups_on_devices(job):
        return "gloo"
    theirs = dist.get_default_backend_for_device(kind)
    return f"cpu:gloo,{kind}:{theirs}" if dist.is_backend_available(theirs) else "gloo"


def set_up(job: Job, interfaces: str) -> None:
    """Set the variables that NCCL reads at its start; of several interfaces it uses all."""
    os.environ["NCCL_SOCKET_IFNAME"] = f"={interfaces}"  # these, not all whose names begin so
    # Its own way with errors ends the process. Ours looks at the connections, and lets go of what waits.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    if placement.of_job(job).is_shared:
        # It refuses two ranks on one device of one host. As if on hosts of their own, they talk through sockets.
        os.environ["NCCL_HOSTID"] = f"worker-{job.rank}"
        os.environ.setdefault("NCCL_NET", "Socket")


def connect(device: torch.device, group: ProcessGroup | None = None) -> None:
    """Have all ranks of `group` connect now: later, a rank that waits for one that died meanwhile could not be interrupted."""
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


LOOK_EVERY_S = 0.25

FREE_WITHIN_S = (
    20.0  # a device that is stuck in another way than we know holds its process for no longer than this
)

EXIT_STUCK = 70


class DeviceWatch:
    """The watch over one device, from the first `over` on."""

    def __init__(
        self,
        device: torch.device,
        timeout_s: float,
        *,
        is_broken: Callable[[], bool],
        let_go: Callable[[], None] = let_go,
        is_busy: Callable[[], bool] | None = None,
        give_up: Callable[[], None] | None = None,
    ) -> None:
        self._timeout_s, self._is_broken, self._let_go = timeout_s, is_broken, let_go
        self._is_busy = is_busy or (lambda: not torch.accelerator.current_stream(device).query())
        self._give_up = give_up or self._end_process
        self._lock = threading.Lock()
        self._depth = 0
        self._waits_since = 0.0
        self._thread: threading.Thread | None = None
        self.ended: str | None = None
        """Why it let go, once it did: what was computed since is worth nothing."""

    @contextlib.contextmanager
    def over(self) -> Iterator[None]:
        """While this lasts, somebody may wait for the device; RuntimeError where that was ended."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._look_on, name="device watch", daemon=True)
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
            # Whatever was made of the numbers that were left behind: this is why.
            raise RuntimeError(self.ended)

    def _enter(self, change: int) -> None:
        with self._lock:  # not while it is letting go: that ends the groups we may be about to leave
            if not self._depth:
                self._waits_since = time.monotonic()
            self._depth += change

    def _look_on(self) -> None:
        while self.ended is None:
            time.sleep(LOOK_EVERY_S)
            with self._lock:
                if self._depth:
                    self._look(time.monotonic())
        until = time.monotonic() + FREE_WITHIN_S
        while self._depth:
            if time.monotonic() > until:
                self._give_up()
            time.sleep(LOOK_EVERY_S)

    def _look(self, now: float) -> None:
        try:
            if self._is_broken():
                self.ended = "a connection of the group was closed"
            elif not self._is_busy():
                self._waits_since = now  # the host takes its time: it compiles, say, or writes a checkpoint
            elif now - self._waits_since > self._timeout_s:
                self.ended = f"the device is not done after {now - self._waits_since:.1f} s"
            if self.ended is not None:
                self._let_go()
        except Exception as error:
            # The driver's, or of a group that ends meanwhile; who waits must not wait for ever.
            self.ended = self.ended or f"the device cannot be asked: {error}"

    def _end_process(self) -> None:
        print(
            f"error: {self.ended}, and it did not let go of this worker within {FREE_WITHIN_S:g} s either. The step was not "
            "applied; this worker ends, and the job goes on from the newest snapshot.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(EXIT_STUCK)
