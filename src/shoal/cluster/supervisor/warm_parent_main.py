"""The warm parent: a fork server that has imported torch, so that workers start in milliseconds.

`python -m shoal.cluster.supervisor.warm_parent_main FD SUPERVISOR_PID JOB [MODULE...]`, started by
`warm_parent.WarmParent`. It runs no tensor operation on more than one element
(see `threads.choose_vector_code`): OpenMP hangs after a fork. It leaves when
its socket closes or the supervisor dies, and takes its children's process
groups with it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import platform
import signal
import sys
import time
import weakref
from types import FrameType

from setproctitle import setproctitle

from shoal import system
from shoal.cluster.launch import roles, threads
from shoal.config.exchange_rule import ORDERED
from shoal.runtime.forkserver.messages import ServerReady, send
from shoal.runtime.forkserver.server import ForkServer, flush
from shoal.runtime.transport import unix


def run_role(role: str, fds: dict[str, int]) -> int:
    """Put a child's descriptors in place, read its specification, become its role."""
    for name, target in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        if name in fds:
            fd = fds.pop(name)
            os.dup2(fd, target, inheritable=True)
            os.close(fd)
    with open(fds.pop("spec"), "rb") as file:
        spec = file.read()
    return roles.entry(role)(spec, fds)


def _leave_with(supervisor: int) -> None:
    """Arrange for this process to exit when the supervisor dies.

    The kernel's signal comes when the *thread* that started this process ends, which need not be
    the end of the supervisor: so check the parent's pid.
    """

    def on_parent_death(signum: int, frame: FrameType | None) -> None:
        if os.getppid() != supervisor:
            raise SystemExit(0)

    def ignore(signum: int, frame: FrameType | None) -> None:
        """A handler, unlike SIG_IGN, is reset to the default in children."""

    signal.signal(signal.SIGHUP, on_parent_death)
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(0))
    signal.signal(signal.SIGINT, ignore)
    # No thread here, since this process forks; where the kernel sends no signal, the closed command socket
    # ends it.
    system.die_with_parent(supervisor, signal.SIGHUP, may_start_thread=False)


def import_everything(more: list[str]) -> float:
    """Import what children need, `more` beside the usual; returns the seconds it took."""
    # One thread per library while they load: each would start its own pool. Workers set their share later.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    if any(name.startswith("shoal.ps.") for name in more):
        # Threads of a worker that waits for servers sleep at once: spinning, they take cores from the
        # servers. On 16 cores, 8 workers of two threads and 4 servers made 1.15 M samples/s so, and 1.05 M
        # with OpenMP's default.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    started = time.monotonic()
    gc.disable()  # imports create no garbage, and searching for it takes a seventh of the time
    for name in (*roles.PRELOAD, *more):
        importlib.import_module(name)
    _load_kernels(is_all="numba" in more)
    threads.choose_vector_code()
    # Objects made here are not torn down at the end of each child: torch would deregister its operators one
    # by one, which copies 30 MiB of shared pages and is half of a short job's cost.
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]  # there is no public list of them
        finalizer.atexit = False
    # Imported objects stay: the collector need not walk them, nor write to their pages, in any child.
    gc.collect()
    gc.freeze()
    gc.enable()
    return time.monotonic() - started


def _load_kernels(*, is_all: bool) -> None:
    """Load the compiled loops here, once: no child compiles them or reads them from disk.

    All of them for servers and for workers with rows. Plain gradients are summed by torch
    operations until their loops are compiled in the background.
    """
    from shoal.collectives.shm_layout import KERNELS
    from shoal.embedding import fused_updates
    from shoal.runtime import kernel_cache, row_kernels

    if is_all:
        kernel_cache.compile_all(KERNELS)
        kernel_cache.warm()
    else:
        for module in (KERNELS, row_kernels.KERNELS, fused_updates.KERNELS):
            if kernel_cache.is_compiled(module):
                kernel_cache.compile_all(module)
            elif platform.machine() in ORDERED:
                kernel_cache.compile_in_background(module)
        if KERNELS not in sys.modules:
            return
    importlib.import_module("shoal.cluster.supervisor.prewarm").make()


def main(argv: list[str]) -> None:
    """Import, say so, and serve."""
    commands = system.packet_socket(int(argv[1]))
    commands.set_inheritable(False)
    _leave_with(supervisor=int(argv[2]))
    setproctitle(f"shoal warm-parent [{argv[3]}]" if argv[3] else "shoal warm-parent")
    import_s = import_everything(argv[4:])
    send(commands, ServerReady(import_s, roles.protocol_version()))
    with contextlib.suppress(SystemExit):
        ForkServer(commands, run_role, own_sessions=True, allow_threads=False).serve()
    if not system.IS_LINUX:
        unix.remove_abandoned_dirs()  # of a supervisor that was killed, and had no time to
    # Without finalizing the interpreter: finalizing torch and numba delays the parent by 0.4 s.
    flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv)
