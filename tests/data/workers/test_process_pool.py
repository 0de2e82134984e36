"""A pool of processes: whatever becomes of them, results are complete and in order, and nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from shoal.data.workers.pool import PoolConfig, ProcessPool
from shoal.errors import ConfigError, DataError, ReadersLost, ReaderStuck, SampleEndsReader
from shoal.runtime import events
from waiting import wait_until


def descriptors() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{fd} -> {os.readlink(f'/proc/self/fd/{fd}')}")
        except FileNotFoundError:
            continue  # the one that listed them
    return found


@pytest.fixture(autouse=True)
def _leaves_no_process_and_no_descriptor() -> Iterator[None]:
    gc.collect()
    processes, files = set(psutil.Process().children(recursive=True)), descriptors()
    yield
    gc.collect()

    def left() -> set[Any]:
        return (set(psutil.Process().children(recursive=True)) - processes) | (descriptors() - files)

    wait_until(lambda: not left())
    assert not left()


Start = Callable[..., ProcessPool]


@pytest.fixture
def start() -> Iterator[Start]:
    pools: list[ProcessPool] = []

    def start(work: Callable[[Any], Any], num_processes: int = 2, **settings: Any) -> ProcessPool:
        config = PoolConfig(num_processes=num_processes, **settings)
        pool = ProcessPool(work, config, describe=lambda task: ("map(work)", [task]))
        pools.append(pool)
        return pool

    yield start
    for pool in pools:
        pool.close()


def square(number: int) -> tuple[int, torch.Tensor]:
    return number * number, torch.full((500,), number)


def values(results: Iterator[Any]) -> list[int]:
    found = []
    for squared, filled in results:
        assert filled.eq(filled[0]).all()
        assert filled[0] ** 2 == squared
        found.append(int(squared))
    return found


SQUARES = [number * number for number in range(40)]


@pytest.mark.parametrize("num_processes", [1, 3])
def test_results_come_in_the_order_of_the_tasks(start: Start, num_processes: int) -> None:
    pool = start(square, num_processes)
    for _ in range(2):
        assert values(pool.run(iter(range(40)))) == SQUARES


@pytest.fixture
def _many_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    torch.rand(200_000).sum()  # it has them when it first needs them
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_many_threads")
def test_the_work_is_done_by_the_processes_with_one_thread_each_under_names_of_their_own(
    start: Start,
) -> None:
    pool = start(lambda task: (os.getpid(), os.getppid(), torch.get_num_threads()), 2)
    found = set(pool.run(iter(range(20))))
    assert {pid for pid, _, _ in found} == set(pool.pids)
    assert {threads for _, _, threads in found} == {1}
    [parent] = {parent for _, parent, _ in found}
    titles = [" ".join(psutil.Process(pid).cmdline()) for pid in (parent, *pool.pids)]
    assert [title.split(" [")[0] for title in titles] == [
        "shoal readers of worker 0",
        "shoal reader 0 of worker 0",
        "shoal reader 1 of worker 0",
    ]


def test_no_more_is_read_ahead_than_two_per_process(start: Start) -> None:
    drawn: list[int] = []

    def tasks() -> Iterator[int]:
        for number in range(40):
            drawn.append(number)
            yield number

    results = start(square, 2).run(tasks())
    assert len(drawn) == 4
    next(results)
    assert len(drawn) <= 5


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_processes", [1, 3])
def test_processes_killed_at_any_moment_are_replaced_and_nothing_is_lost(
    start: Start, num_processes: int, seed: int
) -> None:
    def slowly(number: int) -> tuple[int, torch.Tensor]:
        time.sleep(0.001 * (number % 3))
        return square(number)

    draws, found = random.Random(seed), []
    # Chance may hit one task several times; that is not what is tested here.
    pool = start(slowly, num_processes, max_deaths=100)
    for squared, filled in pool.run(iter(range(40))):
        assert filled.eq(filled[0]).all()
        found.append(squared)
        if draws.random() < 0.3:
            with contextlib.suppress(ProcessLookupError):  # killed before, and the pool has not looked since
                os.kill(draws.choice(pool.pids), signal.SIGKILL)
            time.sleep(draws.random() * 0.004)
    assert found == SQUARES
    assert ("reader restarted", "was killed by SIGKILL") in [
        (kind, facts.get("how")) for kind, facts in events.emitted
    ]


def test_the_parent_of_the_processes_is_replaced_too(start: Start) -> None:
    pool, found = start(square, 2), []
    for squared, _ in pool.run(iter(range(40))):
        found.append(squared)
        if squared in (9, 400):
            os.kill(psutil.Process(pool.pids[0]).ppid(), signal.SIGKILL)
    assert found == SQUARES


def test_a_parent_that_is_killed_again_and_again_is_given_up(start: Start) -> None:
    def kill_the_parent(task: int) -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)

    with pytest.raises(ReadersLost, match="10 processes that were to read data were lost"):
        list(start(kill_the_parent, 1).run(iter(range(3))))


def test_a_process_that_dies_between_two_passes_is_replaced_and_nobody_blamed(start: Start) -> None:
    pool = start(square, 2, max_deaths=1)
    assert values(pool.run(iter(range(40)))) == SQUARES
    before = pool.pids
    os.kill(before[1], signal.SIGKILL)
    assert wait_until(lambda: psutil.Process(before[0]).status() != psutil.STATUS_ZOMBIE)
    assert wait_until(lambda: not psutil.pid_exists(before[1]))
    assert values(pool.run(iter(range(40)))) == SQUARES
    assert pool.pids[0] == before[0]
    assert pool.pids[1] != before[1]


def test_a_task_that_ends_its_process_three_times_is_an_error_that_names_it(start: Start) -> None:
    def crash_at_five(number: int) -> int:
        if number == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    results = start(crash_at_five, 2).run(iter(range(10)))
    assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(SampleEndsReader) as caught:
        next(results)
    assert caught.value.indices == [5]
    assert caught.value.num_deaths == 3
    assert "map(work), the samples with indices 5" in str(caught.value)
    assert "was killed by SIGKILL" in str(caught.value)


def test_a_process_that_closes_its_own_line_is_no_use_and_is_replaced(start: Start) -> None:
    def close_everything(number: int) -> int:
        if number == 3:
            os.closerange(3, 64)
            time.sleep(60)
        return number

    results = start(close_everything, 1).run(iter(range(6)))
    with pytest.raises(SampleEndsReader, match="the samples with indices 3"):
        list(results)


def test_what_comes_before_an_error_is_delivered_first(start: Start) -> None:
    def fail_at_five(number: int) -> int:
        return number if number != 5 else {}[number]  # type: ignore[no-any-return]

    results = start(fail_at_five, 3).run(iter(range(10)))
    assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(KeyError):
        next(results)


class Uncooperative(Exception):
    """Cannot be built again from its message."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")


def test_an_exception_comes_home_with_its_notes_and_the_users_traceback_first(start: Start) -> None:
    def users_function(number: int) -> float:
        try:
            return number / 0
        except ZeroDivisionError as error:
            error.add_note("for the sample with index 7")
            raise

    with pytest.raises(ZeroDivisionError, match="division by zero") as caught:
        list(start(users_function, 1).run(iter([7])))
    text = "".join(traceback.format_exception(caught.value))
    assert caught.value.__notes__ == ["for the sample with index 7"]
    assert "in users_function\n    return number / 0" in text
    ours = os.path.join("shoal", "data", "workers")
    assert ours in text
    assert ours not in text[: text.index("in users_function")]


def test_an_exception_that_cannot_travel_is_told_in_words(start: Start) -> None:
    def fail(number: int) -> None:
        raise Uncooperative(code=number)

    with pytest.raises(DataError, match="failed with Uncooperative: code 3") as caught:
        list(start(fail, 1).run(iter([3])))
    assert "raise Uncooperative(code=number)" in str(caught.value.__cause__)


def test_an_error_of_the_gpu_says_what_to_do(start: Start) -> None:
    def use_the_gpu(number: int) -> None:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA ...")

    with pytest.raises(RuntimeError, match="re-initialize") as caught:
        list(start(use_the_gpu, 1).run(iter([3])))
    assert "keep samples on the CPU there" in caught.value.__notes__[0]


def test_stop_iteration_does_not_pass_for_the_end_and_leaving_is_leaving(start: Start) -> None:
    def stop(number: int) -> None:
        raise StopIteration

    def leave(number: int) -> None:
        raise SystemExit(4)

    with pytest.raises(RuntimeError, match="StopIteration"):
        list(start(stop, 1).run(iter([3])))
    with pytest.raises(SystemExit) as caught:
        list(start(leave, 1).run(iter([3])))
    assert caught.value.code == 4


def test_a_result_that_cannot_be_handed_over_is_refused_in_words(start: Start) -> None:
    with pytest.raises(DataError, match="cannot be handed from the process that read it"):
        list(start(lambda task: lambda: task, 1).run(iter([3])))


def test_a_function_that_hangs_is_named_with_the_line_where_it_stands(start: Start) -> None:
    def wait_for_ever(number: int) -> None:
        threading.Event().wait()

    pool = start(wait_for_ever, 2, timeout_s=0.3)
    with pytest.raises(ReaderStuck) as caught:
        list(pool.run(iter(range(5))))
    assert caught.value.indices == [0]
    assert "has been at 1 samples for 0.3 s: map(work), the samples with indices 0." in str(caught.value)
    assert 'test_process_pool.py"' in caught.value.stack[-1]
    assert caught.value.stack[-1].endswith("in wait_for_ever")
    assert caught.value.stack[-1] in str(caught.value)


def test_time_in_which_nobody_waits_does_not_count(start: Start) -> None:
    results = start(lambda number: time.sleep(0.05), 1, timeout_s=1.5).run(iter(range(8)))
    next(results)
    time.sleep(2.0)
    assert len(list(results)) == 7


def test_a_pass_that_is_left_gives_way_to_the_next(start: Start) -> None:
    reading, writing = os.pipe()

    def work(number: int) -> int:
        if number < 0:
            os.write(writing, b"x")
            time.sleep(0.2)
        return number

    pool = start(work, 2)
    first = pool.run(itertools.count(-8))
    assert list(pool.run(iter(range(30)))) == list(range(30))
    os.close(writing)
    pool.close()
    with open(reading, "rb") as file:
        assert len(file.read()) <= 2  # what each was at, not what it held besides
    with pytest.raises(RuntimeError, match="after another had begun"):
        next(first)


def test_a_process_that_stays_behind_for_many_passes_is_replaced(start: Start) -> None:
    pool = start(lambda task: time.sleep(60) if task[0] == "slow" else len(task[1]), 1)
    pool.run(iter([("slow", b"")]))
    for _ in range(40):
        pool.run(iter([("quick", bytes(15_000)), ("quick", bytes(15_000))]))
    assert list(pool.run(iter([("quick", b"abc")]))) == [3]


def test_tasks_may_be_large(start: Start) -> None:
    assert list(start(len, 2).run(bytes(size) for size in (10, 1 << 20, 3))) == [10, 1 << 20, 3]


def test_what_happens_in_a_process_is_written_down_by_its_owner(start: Start) -> None:
    def skip(number: int) -> int:
        events.emit("sample skipped", index=number)
        return number

    events.emitted.clear()
    assert list(start(skip, 2).run(iter(range(6)))) == list(range(6))
    assert list(events.emitted) == [("sample skipped", {"index": number}) for number in range(6)]


def test_a_pool_that_is_dropped_ends_its_processes_in_the_middle_of_their_work() -> None:
    config = PoolConfig(num_processes=2, grace_s=0.1)
    pool = ProcessPool(lambda task: time.sleep(60), config, describe=lambda task: ("", []))
    results = pool.run(iter(range(9)))
    processes = [psutil.Process(pid) for pid in pool.pids]
    del results, pool
    gc.collect()
    assert wait_until(lambda: not any(process.is_running() for process in processes))


def test_a_fork_of_the_owner_may_forget_the_pool(start: Start) -> None:
    pool = start(square, 1)
    pid = os.fork()
    if pid == 0:
        pool.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert values(pool.run(iter(range(40)))) == SQUARES


def test_connections_of_the_owner_end_with_the_owners_end_and_files_can_be_read(
    start: Start, tmp_path: Path
) -> None:
    ours, theirs = socket.socketpair()
    (tmp_path / "data").write_bytes(b"0123456789")
    with open(tmp_path / "data", "rb") as file, theirs:

        def read(number: int) -> bytes:
            with pytest.raises(OSError, match="non-socket"):
                ours.send(b"nonsense")
            return os.pread(file.fileno(), 1, number)

        pool = start(read, 2)
        assert b"".join(pool.run(iter(range(10)))) == b"0123456789"
        ours.close()
        theirs.settimeout(5.0)
        assert theirs.recv(10) == b""


def test_what_is_printed_is_printed_once(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    print("before", end=" ")
    pool = start(lambda number: print(number, end=" "), 1)
    list(pool.run(iter(range(3))))
    pool.close()
    print("after")
    assert capfd.readouterr().out == "before 0 1 2 after\n"


def test_a_pool_begun_in_a_thread_outlives_it(start: Start) -> None:
    pools: list[ProcessPool] = []
    thread = threading.Thread(target=lambda: pools.append(start(square, 2)))
    thread.start()
    thread.join()
    assert values(pools[0].run(iter(range(40)))) == SQUARES


@pytest.mark.parametrize("settings", [{"num_processes": 0}, {"num_processes": 1, "timeout_s": 0}])
def test_a_pool_without_processes_or_patience_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        PoolConfig(**settings)
