"""DataLoaders with processes of their own: the same data as without, and nothing left behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data import Dataset as TorchDataset

from shoal.data import Batches, as_batches
from shoal.data.workers.loader_options import ProcessInit
from shoal.errors import DataError
from waiting import wait_until
from whole_matrix import matrix_only


class Noisy(TorchDataset):  # type: ignore[type-arg]
    """A sample of its index, a random number, and the process that read it."""

    opened_in = 0

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[int, float, int]:
        if index == 29 and self.opened_in == -1:
            raise KeyError("no such file")
        return index, random.random() + torch.rand(()).item(), os.getpid()


def batches_of(num_processes: int, **settings: Any) -> Batches:
    loader: DataLoader[Any] = DataLoader(
        settings.pop("dataset", None) or Noisy(), batch_size=8, num_workers=num_processes, **settings
    )
    return as_batches(loader, default_seed=3)


@pytest.fixture
def children() -> Callable[[], list[psutil.Process]]:
    """The processes a test has started."""
    others = set(psutil.Process().children())
    return lambda: [child for child in psutil.Process().children() if child not in others]


def values(
    batches: Batches, *, num_workers: int = 1, epoch: int = 0, start: int = 0
) -> list[tuple[int, float]]:
    by_rank = [
        list(batches.slices(epoch=epoch, start=start, rank=rank, num_workers=num_workers))
        for rank in range(num_workers)
    ]
    found = []
    for step in zip(*by_rank, strict=True):
        for part in step:
            index, noise, _ = part.batch
            assert index[: part.num_local].tolist() == list(part.indices)
            found += list(zip(part.indices, noise[: part.num_local].tolist(), strict=True))
    return found


@pytest.mark.parametrize("num_workers", [3, *matrix_only(1)])
def test_processes_read_the_same_samples_and_draw_the_same_numbers(num_workers: int) -> None:
    plain = values(batches_of(0, shuffle=True), epoch=1)
    apart = batches_of(2, shuffle=True)
    assert values(apart, num_workers=num_workers, epoch=1) == plain
    assert values(apart, num_workers=num_workers, epoch=1, start=16) == plain[16:]


def test_the_reading_is_done_by_the_processes_and_they_end_with_the_pass() -> None:
    pids = {int(pid) for _, _, read_by in batches_of(2) for pid in read_by}
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_pass_left_in_the_middle_leaves_no_process(children: Callable[[], list[psutil.Process]]) -> None:
    pass_over = iter(batches_of(2))
    next(pass_over)
    assert len(children()) == 2
    del pass_over
    gc.collect()
    assert children() == []


def test_persistent_processes_serve_every_epoch(children: Callable[[], list[psutil.Process]]) -> None:
    batches = batches_of(2, shuffle=True, persistent_workers=True)
    plain = batches_of(0, shuffle=True)
    pids = set()
    for epoch in range(3):
        if epoch == 2:  # a pass that is left early must not leak into the next
            next(batches.slices(epoch=7, start=0, rank=0, num_workers=1))
        assert values(batches, epoch=epoch) == values(plain, epoch=epoch)
        pids.add(tuple(child.pid for child in children()))
    assert len(pids) == 1
    del batches
    gc.collect()
    assert children() == []


def test_persistent_processes_outlive_a_thread_that_read_ahead() -> None:
    batches = batches_of(2, persistent_workers=True).prefetch(2)
    assert values(batches) == values(batches_of(0))
    assert values(batches, epoch=1) == values(batches_of(0), epoch=1)


def test_a_second_pass_over_persistent_processes_ends_the_first_with_an_error() -> None:
    batches = batches_of(1, persistent_workers=True)
    first = batches.slices(epoch=0, start=0, rank=0, num_workers=1)
    next(first)
    values(batches, epoch=1)
    with pytest.raises(DataError, match="one pass at a time"):
        list(first)


def _open(number: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.opened_in = -1  # type: ignore[attr-defined]


def test_worker_init_fn_finds_the_users_dataset_and_an_error_there_names_the_sample_and_ends_the_pass(
    children: Callable[[], list[psutil.Process]],
) -> None:
    with pytest.raises(KeyError, match=r"(?s)no such file.*raised by Noisy for the sample with index 29"):
        list(batches_of(1, worker_init_fn=_open))
    assert children() == []
    gc.collect()  # torch raises such an error in a cycle, which keeps the pass's pipes


def test_a_started_interpreter_reads_the_same() -> None:
    try:
        assert values(batches_of(1, multiprocessing_context="spawn")) == values(batches_of(0))
    finally:
        _stop_tracker()


def _stop_tracker() -> None:
    """End a process that Python keeps for itself: after all semaphores are gone, or the next to go starts it again."""
    wait_until(lambda: all(thread.name != "QueueFeederThread" for thread in threading.enumerate()))
    gc.collect()
    resource_tracker._resource_tracker._stop()


def test_pinning_without_an_accelerator_warns_as_torch_does_and_reads_the_same() -> None:
    with pytest.warns(UserWarning, match="pin_memory"):
        assert values(batches_of(0, pin_memory=True)) == values(batches_of(0))


class Shards(IterableDataset):  # type: ignore[type-arg]
    """Each process reads its own part, in an order it draws."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        part = list(range(40)) if info is None else list(range(info.id, 40, info.num_workers))
        random.shuffle(part)
        return iter(part)


def test_processes_of_a_stream_give_every_rank_the_same_samples() -> None:
    loader: DataLoader[Any] = DataLoader(Shards(), batch_size=6, num_workers=2)
    batches = as_batches(loader, default_seed=1)

    def read(num_workers: int, start: int = 0) -> list[int]:
        ranks = [
            list(batches.slices(epoch=1, start=start, rank=r, num_workers=num_workers))
            for r in range(num_workers)
        ]
        return [
            int(n) for step in zip(*ranks, strict=True) for part in step for n in part.batch[: part.num_local]
        ]

    whole = read(1)
    assert sorted(whole) == list(range(40))
    assert whole != sorted(whole)
    assert read(3) == whole
    assert read(2, start=12) == whole[12:]


_PARENT = """
import time, torch
from torch.utils.data import DataLoader
from shoal.data import as_batches

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, index):
        if index >= 8:
            time.sleep(60)
        return index

batches = iter(as_batches(DataLoader(Slow(), batch_size=4, num_workers=2), default_seed=0))
next(batches), next(batches)  # one from each process
print("reading", flush=True)
next(batches)
"""


@pytest.fixture
def parent() -> Iterator[psutil.Process]:
    process = subprocess.Popen(
        [sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "reading\n"
        yield psutil.Process(process.pid)
        process.kill()
        process.wait()


def is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE  # whoever inherited it may be slow to reap it
    except psutil.NoSuchProcess:
        return True


def test_processes_die_with_their_parent_in_the_middle_of_a_sample(parent: psutil.Process) -> None:
    # torch's own check comes after the sample, a minute later.
    children = parent.children()
    assert len(children) == 2
    parent.kill()
    assert wait_until(lambda: all(map(is_gone, children)))


def test_a_process_that_finds_its_parent_gone_at_birth_ends() -> None:
    process = multiprocessing.get_context("fork").Process(
        target=ProcessInit(None, dataset=None, parent_pid=1), args=(0,)
    )
    process.start()
    process.join()
    assert process.exitcode == 1
    process.close()


def test_ctrl_c_does_not_reach_the_processes_and_terminate_does(parent: psutil.Process) -> None:
    children = parent.children()
    for child in children:
        child.send_signal(signal.SIGINT)
    assert not wait_until(lambda: any(map(is_gone, children)), timeout_s=0.3)
    for child in children:
        child.send_signal(signal.SIGTERM)
    assert wait_until(lambda: all(map(is_gone, children)))
