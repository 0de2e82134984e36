"""torchrun's contract in a worker: its environment variables and its store.

A script that calls `torch.distributed.init_process_group` runs under `shoal run` as under torchrun.
A script that neither does so nor divides its work through shoal would run once per worker, with the
same result each time: it is refused at its first optimizer step, or else at its end.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from itertools import takewhile
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlparse

from shoal import system
from shoal.cluster.worker import session
from shoal.config import job as jobs
from shoal.config.job import Job
from shoal.config.launchers import TORCHELASTIC_RUN_ID
from shoal.errors import NotDistributed
from shoal.runtime import events

if TYPE_CHECKING:  # the supervisor, which has no torch, knows this module through the worker's spec
    from torch._C._distributed_c10d import TCPStore

HOST = "127.0.0.1"

_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"

_store: TCPStore | None = None
"""The server half, in rank 0, for the life of the process: a script may form its group more than once."""

_listener: int | None = None
"""In rank 0, the socket of MASTER_PORT; closed when shoal itself connects the workers."""

_is_closed = False
_has_stepped = False


def environment(job: Job, port: int) -> dict[str, str]:
    """The variables that torchrun sets, for this worker."""
    local = job.local_ranks
    return {
        "RANK": str(job.rank),
        "WORLD_SIZE": str(job.num_workers),
        "LOCAL_RANK": str(local.index(job.rank)),
        "LOCAL_WORLD_SIZE": str(len(local)),
        "GROUP_RANK": str(job.host),
        "MASTER_ADDR": job.head_address or HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": TORCHELASTIC_RUN_ID,  # Lightning detects torchrun by it
    }


def watch(job: Job, *, script: str, port: int, listener: int | None) -> None:
    """Detect how the script divides its work. `listener` is the socket of MASTER_PORT, in the rank that serves it."""
    global _listener
    _listener = listener
    _watch_rendezvous(port)
    if job.num_workers > 1:
        os.environ.__class__ = _WatchedEnvironment
        _refuse_at_first_step(job, script)


def refuse_undivided(job: Job, script: str, *, at_end: bool = True) -> None:
    """Refuse a script that has divided nothing among several workers."""
    if job.num_workers > 1 and not jobs.is_shared():
        raise NotDistributed(script=script, num_workers=job.num_workers, at_end=at_end)


def close_listener() -> None:
    """Serve no store on MASTER_PORT: shoal connects the workers of this script itself."""
    global _listener, _is_closed
    if _store is None:
        _is_closed = True
        if _listener is not None:
            os.close(_listener)
            _listener = None


def has_stepped() -> bool:
    """Whether an optimizer of the script's has made a step."""
    return _has_stepped


def _watch_rendezvous(port: int) -> None:
    # Every process group is formed through here: by the script, DeviceMesh, Accelerate, Lightning; shoal's
    # own groups are not.
    from torch.distributed import distributed_c10d

    c10d: Any = distributed_c10d
    original = c10d.rendezvous

    def rendezvous(url: str, rank: int = -1, world_size: int = -1, **options: Any) -> Iterator[Any]:
        _tell_own_group()
        # Before gloo reads it: otherwise it takes the interface that the host's name resolves to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", system.LOOPBACK)
        asked = urlparse(url)
        asked_port = os.environ.get("MASTER_PORT") if asked.scheme == "env" else str(asked.port)
        is_ours = asked_port == str(port) and not _is_closed
        with _served(port) if is_ours else contextlib.nullcontext():
            found = next(original(url, rank, world_size, **options))
        yield found

    c10d.rendezvous = rendezvous


@contextlib.contextmanager
def _served(port: int) -> Iterator[None]:
    """Serve the store on the supervisor's loopback socket; torch connects to it instead of opening one on all interfaces."""
    global _store
    from torch._C._distributed_c10d import TCPStore

    if _listener is not None and _store is None:
        _store = TCPStore(
            jobs.current().head_address or HOST,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=_listener,
        )
    os.environ[_AGENT_STORE] = "True"
    try:
        yield
    finally:
        del os.environ[_AGENT_STORE]


def _tell_own_group() -> None:
    jobs.share()
    if not session.has_own_group():
        session.own_group()
        events.emit(events.OWN_PROCESS_GROUP)


def _refuse_at_first_step(job: Job, script: str) -> None:
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    # The last name, not a set of all: counting references to each would write to pages that forks share.
    last = next(reversed(sys.modules))

    def decide(optimizer: object, args: Any, options: Any) -> None:
        global _has_stepped
        _has_stepped = True
        handle.remove()
        names = list(takewhile(last.__ne__, reversed(sys.modules)))
        of_script = [sys.modules[name] for name in names if name in sys.modules]
        # A script that does may come to it later.
        if not any(map(_imports_shoal, [sys.modules["__main__"], *of_script])):
            refuse_undivided(job, script, at_end=False)

    handle = register_optimizer_step_pre_hook(decide)


def _imports_shoal(module: ModuleType) -> bool:
    for value in list(getattr(module, "__dict__", {}).values()):
        named = value if isinstance(value, ModuleType | FunctionType | type) else type(value)
        home = named.__name__ if isinstance(named, ModuleType) else named.__module__
        if str(home).partition(".")[0] == "shoal":
            return True
    return False


class _WatchedEnvironment(type(os.environ)):  # type: ignore[misc]  # os._Environ, by no public name
    """Environment that detects whether the script's own code reads its rank, and so divides its work itself."""

    __module__ = "os"  # where a script gets it from

    RANKS: ClassVar = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE"})

    def __getitem__(self, key: str) -> str:
        if key in self.RANKS and not jobs.is_shared() and _is_read_by_script():
            jobs.share()
        return str(super().__getitem__(key))


def _is_read_by_script() -> bool:
    """Whether the script reads it, not a library: many libraries read the rank only to decide who prints."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith("<frozen"):
        frame = frame.f_back
    return not {"site-packages", "dist-packages"} & set(frame.f_code.co_filename.split(os.sep))
