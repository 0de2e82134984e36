"""`map(fn, workers=n)`: the same batches as without, under kills too, and nothing left behind."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from launched import Launched
from torch import nn

import shoal
from shoal import Faults
from shoal.data import Batches
from shoal.errors import ReaderStuck, SampleEndsReader
from waiting import wait_until
from whole_matrix import matrix_only

Launch = Callable[..., Launched]
Children = Callable[[], list[psutil.Process]]


def title_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it is gone, or nearly
        return ""


@pytest.fixture
def readers() -> Children:
    """The processes that read, of this process's pools."""
    others = set(psutil.Process().children(recursive=True))

    def readers() -> list[psutil.Process]:
        mine = [child for child in psutil.Process().children(recursive=True) if child not in others]
        return [child for child in mine if "shoal reader " in title_of(child)]

    return readers


def noisy(sample: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, float, int]:
    """A sample with random numbers from all three generators, and the process that drew them."""
    noise = random.random() + float(np.random.rand()) + torch.rand(()).item()
    return sample[0], noise, os.getpid()


def batches_of(workers: int, fn: Any = noisy, num_samples: int = 60, **settings: Any) -> Batches:
    data = shoal.Dataset.from_arrays((torch.arange(num_samples), torch.zeros(num_samples)))
    return data.shuffle(seed=3).map(fn, workers=workers, **settings).batch(8)


def shift(sample: Any, generator: torch.Generator) -> Any:
    return (sample[0], sample[1] + torch.randn((), generator=generator).item(), sample[2])


def values(
    batches: Batches,
    *,
    num_workers: int = 1,
    epoch: int = 0,
    start: int = 0,
    at: Callable[[], None] | None = None,
) -> list[tuple[int, float]]:
    by_rank: list[list[Any]] = []
    for rank in range(num_workers):
        by_rank.append([])
        for part in batches.slices(epoch=epoch, start=start, rank=rank, num_workers=num_workers):
            by_rank[-1].append(part)
            if at is not None:
                at()
    found = []
    for step in zip(*by_rank, strict=True):
        for part in step:
            index, noise, _ = part.batch
            assert index[: part.num_local].tolist() == list(part.indices)
            found += list(zip(part.indices, noise[: part.num_local].tolist(), strict=True))
    return found


@pytest.mark.parametrize("num_workers", [3, *matrix_only(1)])
def test_processes_read_the_same_samples_and_draw_the_same_numbers(num_workers: int) -> None:
    plain = values(batches_of(0), epoch=1)
    apart = batches_of(2)
    assert values(apart, num_workers=num_workers, epoch=1) == plain
    assert values(apart, num_workers=num_workers, epoch=1, start=16) == plain[16:]


@pytest.mark.parametrize("num_workers", [3, *matrix_only(1)])
def test_readers_killed_at_random_change_nothing(num_workers: int, readers: Children) -> None:
    draws = random.Random(num_workers)
    kills = []

    def kill() -> None:
        alive = readers()
        if alive and draws.random() < 0.35 and len(kills) < 12:
            victim = draws.choice(alive)
            kills.append(victim.pid)
            time.sleep(draws.random() * 0.003)
            victim.kill()

    data = shoal.Dataset.from_arrays((torch.arange(120), torch.zeros(120)))
    plain, apart = (
        data.shuffle(seed=3).map(noisy, workers=workers).augment(shift, seed=5).batch(8) for workers in (0, 3)
    )
    assert values(apart, num_workers=num_workers, at=kill) == values(plain, num_workers=num_workers)
    assert len(kills) > 3


def test_the_reading_is_done_by_processes_that_end_with_the_pass(readers: Children) -> None:
    pids = {int(pid) for _, _, read_by in batches_of(2) for pid in read_by}
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert readers() == []


def test_a_pass_that_is_left_or_never_begun_leaves_no_process(readers: Children) -> None:
    batches = batches_of(2)
    begun = iter(batches)
    next(begun)
    assert wait_until(lambda: len(readers()) == 2)  # one may have no title yet
    del begun
    assert readers() == []
    unread = batches.slices(epoch=0, start=0, rank=0, num_workers=1)
    assert wait_until(lambda: len(readers()) == 2)
    del unread
    assert readers() == []


def test_an_exception_in_the_consumer_leaves_no_process(readers: Children) -> None:
    def consume() -> None:
        for _ in batches_of(2):
            raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        consume()
    gc.collect()
    assert readers() == []


def test_processes_are_kept_while_they_are_held_and_not_longer(readers: Children) -> None:
    batches, plain = batches_of(2), batches_of(0)
    pids = []
    with batches.held():
        for epoch in range(3):
            next(batches.slices(epoch=7, start=0, rank=0, num_workers=1))  # left early: not met by the next
            assert values(batches, epoch=epoch) == values(plain, epoch=epoch)
            pids.append([reader.pid for reader in readers()])
    assert pids[0] == pids[1] == pids[2]
    assert readers() == []


def test_two_passes_at_a_time_have_processes_each(readers: Children) -> None:
    batches = batches_of(1)
    with batches.held():
        together = zip(
            batches.slices(epoch=0, start=0, rank=0, num_workers=1),
            batches.slices(epoch=1, start=0, rank=0, num_workers=1),
            strict=True,
        )
        assert next(together)[0].batch[0].tolist() != next(together)[1].batch[0].tolist()
        assert wait_until(lambda: len(readers()) == 2)
        del together
        assert wait_until(lambda: len(readers()) == 1)
    assert readers() == []


def test_prefetch_behind_processes_that_draw_is_welcome_and_before_them_says_so() -> None:
    assert values(batches_of(2).prefetch(2)) == values(batches_of(0))
    with pytest.raises(shoal.ShoalError, match=r"map\(fn, workers=2\)"):
        next(iter(batches_of(0).prefetch(2)))


def test_a_reader_killed_while_a_thread_reads_ahead_is_replaced(readers: Children) -> None:
    found = []
    batches = batches_of(2).prefetch(2)
    with batches.held():
        for number, part in enumerate(batches.slices(epoch=0, start=0, rank=0, num_workers=1)):
            found += part.batch[1].tolist()
            if number in (1, 3):
                for reader in readers():
                    reader.kill()
            if number == 5:  # and the one that starts them
                for reader in readers()[:1]:
                    psutil.Process(reader.ppid()).kill()
        assert found == [noise for _, noise in values(batches_of(0))]
        assert values(batches, epoch=1) == values(batches_of(0), epoch=1)


def test_an_iterator_goes_on_from_its_position() -> None:
    plain = [batch[1].tolist() for batch in batches_of(0)]
    iterator = batches_of(2).iterator()
    first = [iterator.next()[1].tolist() for _ in range(3)]
    resumed = batches_of(3).iterator(iterator.position)
    iterator.close()
    assert first + [batch[1].tolist() for batch in resumed] == plain


def fail_at(sample: Any) -> Any:
    if int(sample[0]) in (7, 20, 21):
        raise ValueError(f"no such thing as {int(sample[0])}")
    return sample[0], float(sample[0]), 0


def test_an_exception_names_the_sample_and_shows_the_users_line(readers: Children) -> None:
    with pytest.raises(ValueError, match="no such thing as") as caught:
        list(batches_of(2, fail_at))
    assert "map(fail_at) for the sample with index" in "".join(getattr(caught.value, "__notes__", []))
    assert 'raise ValueError(f"no such thing as' in str(caught.value.__cause__)
    assert "/src/shoal/" not in str(caught.value.__cause__), "the user's lines alone"
    gc.collect()
    assert readers() == []


def test_bad_samples_are_skipped_and_counted_as_without_processes() -> None:
    plain, apart = (batches_of(workers, fail_at, on_error="skip", max_skips=9) for workers in (0, 2))
    assert values(apart) == values(plain)
    assert sorted(skipped.index for skipped in apart.skipped) == [7, 20, 21]
    assert [skipped.index for skipped in apart.skipped] == [skipped.index for skipped in plain.skipped]


def crash_at(sample: Any) -> Any:
    if int(sample[0]) == 20:
        os._exit(7)
    return sample[0], 0.0, 0


def test_a_sample_that_ends_every_process_is_named(readers: Children) -> None:
    with pytest.raises(SampleEndsReader, match=r"map\(crash_at\)") as caught:
        list(batches_of(2, crash_at))
    assert 20 in caught.value.indices
    assert len(caught.value.indices) == 8
    assert "left with exit code 7" in str(caught.value)
    gc.collect()
    assert readers() == []


def test_a_function_that_hangs_is_named_after_its_time() -> None:
    def wait_for_ever(sample: Any) -> Any:
        time.sleep(3600)

    with pytest.raises(ReaderStuck, match=r"map\(.*wait_for_ever\)") as caught:
        list(batches_of(2, wait_for_ever, timeout_s=0.3))
    assert caught.value.stack[-1].endswith("in wait_for_ever")


def half(sample: Any) -> Any:
    return sample[0] / 2 + torch.rand(4), sample[1]


def trained(workers: int) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(48, 4, generator=generator)
    data = shoal.Dataset.from_arrays((inputs, inputs.sum(1, keepdim=True))).map(half, workers=workers)
    torch.manual_seed(0)
    trainer = shoal.Trainer(
        nn.Linear(4, 1), loss=nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), progress=False
    )
    trainer.fit(data.shuffle(seed=1).batch(8), epochs=2, validation_data=data.batch(16))
    measured = trainer.evaluate(data.batch(16))
    predicted = trainer.predict(data.batch(16))
    return [*trainer.model.weight.tolist()[0], measured["loss"], *predicted.flatten().tolist()]


def test_fit_evaluate_and_predict_give_the_same_and_leave_no_process(readers: Children) -> None:
    assert trained(2) == trained(0)
    assert readers() == []


SCRIPT = """
import os, signal, sys, time
import psutil, torch
from torch import nn
import shoal

WORKERS, WHAT = int(sys.argv[1]), sys.argv[2]

def title(process):
    try:
        return " ".join(process.cmdline()).strip()
    except psutil.Error:  # it is gone, or nearly
        return ""

def readers():
    return [c for c in psutil.Process().children(recursive=True) if "shoal reader " in title(c)]

def noisy(sample):
    return sample[0] + torch.rand(4) / 10, sample[1]

class Look(shoal.callbacks.Callback):
    ranks = "every"
    seen = set()

    def on_step_end(self, trainer, logs):
        self.seen.update((c.pid, title(c)) for c in readers())
        if WHAT == "leave" and logs.step == 3 and shoal.rank() == 0:
            os.killpg(0, signal.SIGUSR1)  # how Ctrl-C reaches a worker; here, its readers too
        if WHAT == "kill" and logs.step % 3 == 0:
            for reader in readers()[:1 + logs.step % 2]:
                reader.kill()

inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
data = shoal.Dataset.from_arrays((inputs, inputs.sum(1, keepdim=True))).shuffle(seed=1)
data = data.map(noisy, workers=WORKERS).batch(8)
trainer = shoal.Trainer(nn.Linear(4, 1), loss=nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), callbacks=[Look()])
trainer.fit(data, epochs=2)
if shoal.rank() == 0:
    torch_bits = trainer.model.weight.detach().numpy().tobytes().hex()
    print("weights", torch_bits)
print("saw", len({pid for pid, _ in Look.seen}), sorted({title for _, title in Look.seen}), "left", len(readers()))
"""


def weights_of(launched: Launched) -> str:
    assert launched.exit_code == 0, f"{launched.error}\\n{launched.stderr}"
    [line] = [line for line in launched.stdout.splitlines() if "weights " in line]
    return line.split("weights ")[1]


def test_a_job_whose_readers_are_killed_trains_the_same_weights(launch_script: Launch) -> None:
    plain = launch_script(SCRIPT, workers=2, strategy="ddp", args=("0", "-"), name="plain", quiet=True)
    killed = launch_script(SCRIPT, workers=2, strategy="ddp", args=("2", "kill"), name="killed", quiet=True)
    assert weights_of(killed) == weights_of(plain)
    for rank in range(2):
        assert "left 0" in killed.log(rank)
        for number in range(2):
            assert f"shoal reader {number} of worker {rank} [killed]" in killed.log(rank)
    restarts = [event for event in killed.events if event["event"] == "reader restarted"]
    assert {event["rank"] for event in restarts} == {0, 1}
    assert all(event["how"] == "was killed by SIGKILL" for event in restarts)


def test_a_killed_worker_takes_its_readers_along_and_its_replacement_has_its_own(
    launch_script: Launch,
) -> None:
    plain = launch_script(SCRIPT, workers=2, strategy="ddp", args=("0", "-"), name="plain", quiet=True)
    faults = Faults().kill("worker-1", at_step=5)
    killed = launch_script(
        SCRIPT, workers=2, strategy="ddp", args=("2", "-"), name="killed", quiet=True, faults=faults
    )
    assert weights_of(killed) == weights_of(plain)


def test_a_job_that_is_asked_to_leave_takes_its_readers_along(launch_script: Launch) -> None:
    launched = launch_script(SCRIPT, workers=2, strategy="ddp", args=("2", "leave"), name="left", quiet=True)
    assert launched.exit_code == 130, f"{launched.error}\\n{launched.stderr}"
    assert "reader restarted" not in [event["event"] for event in launched.events]


def test_relaxed_leases_are_read_by_the_same_processes(launch_script: Launch) -> None:
    launched = launch_script(
        SCRIPT, workers=2, servers=1, strategy="ps:async", args=("2", "-"), name="relaxed", quiet=True
    )
    assert launched.exit_code == 0, f"{launched.error}\\n{launched.stderr}"
    for rank in range(2):
        assert "saw 2 " in launched.log(rank)
        assert "left 0" in launched.log(rank)


_PLAIN = """
import time, torch
import shoal

def slow(sample):
    if int(sample) >= 8:
        time.sleep(60)
    return sample

data = shoal.Dataset.from_arrays(torch.arange(100)).map(slow, workers=2).batch(4)
batches = iter(data)
next(batches), next(batches)
print("reading", flush=True)
next(batches)
"""


@pytest.fixture
def plain_script() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_PLAIN)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        assert process.stdout.readline() == "reading\n"
        yield process
        process.kill()
        process.wait()


def is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE  # whoever inherited it may be slow to reap it
    except psutil.NoSuchProcess:
        return True


def test_readers_die_with_their_owner_in_the_middle_of_a_sample(plain_script: subprocess.Popen[str]) -> None:
    children = psutil.Process(plain_script.pid).children(recursive=True)
    assert len(children) == 3
    plain_script.kill()
    assert wait_until(lambda: all(map(is_gone, children)))


def test_ctrl_c_ends_the_script_and_its_readers_in_the_middle_of_a_sample(
    plain_script: subprocess.Popen[str],
) -> None:
    children = psutil.Process(plain_script.pid).children(recursive=True)
    os.killpg(plain_script.pid, signal.SIGINT)
    assert plain_script.wait(timeout=100) == -signal.SIGINT
    assert wait_until(lambda: all(map(is_gone, children)))
    assert plain_script.stderr is not None
    told = plain_script.stderr.read()
    assert told.rstrip().endswith("KeyboardInterrupt")
    assert told.count("Traceback") == 1
