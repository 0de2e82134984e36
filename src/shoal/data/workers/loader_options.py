"""The part of a user's DataLoader that says how to read: processes, pinning, read-ahead.

What to read (sampler, batch size) is decided elsewhere; this opens a fresh
DataLoader for it with the user's own settings.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, get_worker_info

from shoal.data.randomness import seeded_generator
from shoal.runtime.forkserver.server import die_with_parent


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """A DataLoader's settings, apart from its data."""

    num_processes: int = 0
    """Its `num_workers`; 0 reads in the worker itself."""

    pin_memory: bool = False
    """Hand out batches in page-locked memory."""

    prefetch_factor: int | None = None
    """Batches read ahead by each process."""

    persistent: bool = False
    """Keep the processes from epoch to epoch."""

    timeout_s: float = 0.0
    """How long to wait for a batch; 0 waits for ever."""

    worker_init_fn: Callable[[int], None] | None = None
    """Run in each process before it reads."""

    multiprocessing_context: Any = None
    """How the processes are started."""

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> LoaderOptions:
        """Those of the user's loader. `in_order=False` is not kept: a batch has its place in the epoch."""
        return cls(
            num_processes=loader.num_workers,
            pin_memory=loader.pin_memory,
            prefetch_factor=loader.prefetch_factor,
            persistent=loader.persistent_workers,
            timeout_s=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
        )

    def open(
        self,
        dataset: Any,
        *,
        seed: int,
        collate_fn: Callable[[Any], Any],
        sampler: Iterable[Any] | None = None,
        batch_size: int | None = None,
        drop_last: bool = False,
        persistent: bool = False,
        inner_dataset: Any = None,
    ) -> DataLoader[Any]:
        """A loader for `dataset`, whose processes die with this one. `inner_dataset` is what its author knows."""
        context = self.multiprocessing_context or multiprocessing
        init = ProcessInit(
            self.worker_init_fn,
            dataset=dataset if inner_dataset is None else inner_dataset,
            # A fork server stands between its children and this process; it ends by itself.
            parent_pid=None if context.get_start_method() == "forkserver" else os.getpid(),
        )
        return DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            drop_last=drop_last,
            collate_fn=collate_fn,
            num_workers=self.num_processes,
            pin_memory=self.pin_memory,
            prefetch_factor=self.prefetch_factor,
            persistent_workers=persistent and self.persistent,
            timeout=self.timeout_s,
            worker_init_fn=init,
            multiprocessing_context=self.multiprocessing_context,
            generator=seeded_generator(seed),
        )


class ProcessInit:
    """The first thing a DataLoader's process runs: shoal's own care, then the user's function."""

    def __init__(
        self, worker_init_fn: Callable[[int], None] | None, *, dataset: Any, parent_pid: int | None
    ) -> None:
        self._worker_init_fn, self._dataset, self._parent_pid = worker_init_fn, dataset, parent_pid

    def __call__(self, number: int) -> None:
        """Set up process `number` of its loader."""
        die_with_parent(self._parent_pid)  # torch looks for its parent every 5 s, between samples
        # Ctrl-C reaches the whole terminal, but the step under way still needs its batches: the parent decides.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # The parent may have taught SIGTERM to finish a step first, and a forked child inherits that.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._worker_init_fn is not None:
            # The user's function finds the user's dataset, not what shoal put around it.
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


def identity(batch: Any) -> Any:
    """A collate function for what is collated already."""
    return batch
