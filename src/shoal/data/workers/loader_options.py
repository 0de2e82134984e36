"""The part of a user's DataLoader that says how to read: processes, pinning, read-ahead.

What to read (sampler, batch size) is decided elsewhere; this opens a fresh
DataLoader for it with the user's own settings.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, get_worker_info

from shoal import system
from shoal.data.randomness import seeded_generator

_KEPT = ("num_workers", "pin_memory", "prefetch_factor", "timeout", "multiprocessing_context")
"""Settings that say how to read. `in_order=False` is not among them: a batch has its place in the epoch."""


def open_like(
    user: DataLoader[Any] | None,
    dataset: Any,
    *,
    seed: int,
    is_persistent: bool = False,
    inner_dataset: Any = None,
    **what: Any,
) -> DataLoader[Any]:
    """A loader for `dataset` with the settings of the user's, whose processes die with this one.

    `inner_dataset` is what the author of the dataset knows; `what` goes to the DataLoader.
    """
    kept = {} if user is None else {name: getattr(user, name) for name in _KEPT}
    context = kept.get("multiprocessing_context") or multiprocessing
    init = ProcessInit(
        None if user is None else user.worker_init_fn,
        dataset=dataset if inner_dataset is None else inner_dataset,
        # A fork server stands between its children and this process; it ends by itself.
        parent_pid=None if context.get_start_method() == "forkserver" else os.getpid(),
    )
    return DataLoader(
        dataset,
        persistent_workers=is_persistent,
        worker_init_fn=init,
        generator=seeded_generator(seed),
        **kept,
        **what,
    )


class ProcessInit:
    """Start-up code of a DataLoader's process: shoal's own set-up, then the user's function."""

    def __init__(
        self, worker_init_fn: Callable[[int], None] | None, *, dataset: Any, parent_pid: int | None
    ) -> None:
        self._worker_init_fn, self._dataset, self._parent_pid = worker_init_fn, dataset, parent_pid

    def __call__(self, number: int) -> None:
        system.die_with_parent(self._parent_pid)  # torch looks for its parent every 5 s, between samples
        # Ctrl-C reaches the whole terminal, but the current step still needs its batches: the parent
        # decides.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # The parent may have a SIGTERM handler that finishes a step first, which a forked child inherits.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._worker_init_fn is not None:
            # The user's function gets the user's dataset, not shoal's wrapper.
            object.__setattr__(get_worker_info(), "dataset", self._dataset)
            self._worker_init_fn(number)


def start_pass(loader: DataLoader[Any]) -> Iterator[Any]:
    """One pass over a loader, whose processes start now and end with it, unless they are meant to stay.

    Now, not at the first batch: to the kernel they are children of the thread
    that starts them, which must not be one that only reads ahead.
    """
    return _until_end(iter(loader))


def _until_end(batches: Any) -> Iterator[Any]:
    try:
        yield from batches
    finally:
        # Left to the garbage collector after an exception, torch takes 5 s over this.
        if getattr(batches, "_workers", None) and not batches._persistent_workers:
            batches._shutdown_workers()
