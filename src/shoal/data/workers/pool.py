"""The reader pool: processes that read data beside the one that trains, their restarts, and the feed that reads in them.

`TaskQueue` decides which process reads what; `ProcessPool` sends tasks,
receives results in shared memory, notices at once when a process has died,
forks another and sends its tasks again. A result is a function of its task
alone, so a retry leaves no trace. Processes are forked by the pool's own fork
server. `PooledFeed` (`map(fn, workers=4)`) runs the whole of the reading in
them, source and functions alike, a share of a batch at a time.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import select
import signal
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from shoal import system
from shoal.config import job as jobs
from shoal.data.feed import BatchCut, BatchShare, IndexedFeed
from shoal.data.order import Order
from shoal.data.reader import Reader, Reading, ReadRequest
from shoal.data.sharding import ShardPlan
from shoal.data.slice import Slice
from shoal.data.tree import Tree
from shoal.data.workers.reader_process import (
    ASKS_FOR_STACK,
    AT,
    Delivery,
    ReadOutcome,
    ReadTask,
    Receiver,
    serve,
    task_packet,
)
from shoal.errors import ClusterError, ConfigError, ReadersLost, ReaderStuck, SampleEndsReader
from shoal.runtime import events
from shoal.runtime.forkserver.client import ForkedServer, ForkRefused
from shoal.runtime.forkserver.messages import receive_packet, send_packet
from shoal.runtime.signal_names import signal_name
from shoal.runtime.user_frames import is_ours

Task = TypeVar("Task")
Result = TypeVar("Result")


class PoolTicket(NamedTuple, Generic[Task]):
    """One task for one process."""

    process: int
    number: int
    """The place of its result. Counts through, over all queues of a pool."""

    task: Task


class SuspectTask(NamedTuple, Generic[Task]):
    """Task that a process was running when it died."""

    task: Task
    num_deaths: int
    """Processes that died at it, this one among them."""


class TaskQueue(Generic[Task, Result]):
    """Hands tasks to processes and their results back in the order of the tasks.

    Every task is finished once, however many processes die at it: tasks of a dead process are
    handed out again, before anything new.
    """

    def __init__(self, tasks: Iterator[Task], *, ahead: int, first_number: int = 0) -> None:
        """`ahead`: tasks that a process holds at a time. So many per process are under way or wait to be taken."""
        self._tasks, self._ahead = tasks, ahead
        self._is_drained = False
        self._broken: Exception | None = None
        self._open: dict[int, Task] = {}  # handed out, not finished
        self._held: dict[int, deque[int]] = {}
        self._returned: list[int] = []
        self._deaths: dict[int, int] = {}
        self._results: dict[int, Result] = {}
        self._next_taken = self.next_number = first_number

    def join(self, process: int) -> None:
        self._held[process] = deque()

    def hand_out(self) -> list[PoolTicket[Task]]:
        """Tasks to send now, in order. A process that holds little is served first."""
        tickets = []
        while free := [process for process, held in self._held.items() if len(held) < self._ahead]:
            process = min(free, key=lambda process: len(self._held[process]))
            number = heapq.heappop(self._returned) if self._returned else self._draw()
            if number is None:
                break
            self._held[process].append(number)
            tickets.append(PoolTicket(process, number, self._open[number]))
        return tickets

    def finish(self, process: int, number: int, result: Result) -> bool:
        held = self._held.get(process)
        if held is None or number not in held:
            return False
        held.remove(number)
        del self._open[number]
        self._deaths.pop(number, None)
        self._results[number] = result
        return True

    def lose(self, process: int, *, at: int | None = None) -> SuspectTask[Task] | None:
        """A process is gone and its tasks are to be handed out again; the one it was `at` may have ended it."""
        held = self._held.pop(process, deque())
        for number in held:
            heapq.heappush(self._returned, number)
        if at is None or at not in held:  # it had not begun, or it was through with it
            return None
        self._deaths[at] = self._deaths.get(at, 0) + 1
        return SuspectTask(self._open[at], self._deaths[at])

    def settle(self, number: int, result: Result) -> None:
        """Set the result of a task that no process holds; it is not handed out again."""
        self._returned.remove(number)
        heapq.heapify(self._returned)
        del self._open[number]
        self._results[number] = result

    @property
    def has_result(self) -> bool:
        return self._next_taken in self._results

    @property
    def is_over(self) -> bool:
        """Whether every result has been taken. An error of the tasks' own iterator is raised here, at its place."""
        if self._next_taken < self.next_number or not self._is_drained:
            return False
        if self._broken is not None:
            raise self._broken
        return True

    @property
    def waits_for(self) -> tuple[int, Task] | None:
        """The process that holds the next task in order, and the task it is at: that one, or one before it."""
        for process, held in self._held.items():
            if self._next_taken in held:
                return process, self._open[held[0]]
        return None

    def take(self) -> Result:
        result = self._results.pop(self._next_taken)
        self._next_taken += 1
        return result

    def _draw(self) -> int | None:
        if self._is_drained or self.next_number - self._next_taken >= self._ahead * len(self._held):
            return None
        try:
            task = next(self._tasks)
        except StopIteration:
            self._is_drained = True
            return None
        except Exception as error:
            self._is_drained, self._broken = True, error
            return None
        number, self.next_number = self.next_number, self.next_number + 1
        self._open[number] = task
        return number


_MAX_LOST_PER_PROCESS = 10  # in a row, without a result between them
_STACK_WITHIN_S = 0.5
_LOOKS_EVERY_S = 1.0
_PACKET_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """Number of reader processes, and their time-outs."""

    num_processes: int
    """Processes that read."""

    timeout_s: float = 600.0
    """How long one may take over one batch before it is taken for stuck."""

    ahead: int = 2
    """Batches that each of them is given before they are asked for."""

    max_deaths: int = 3
    """Processes that may die over the same batch before that is called an error."""

    grace_s: float = 1.0
    """Time a process may continue with an unwanted task."""

    def __post_init__(self) -> None:
        if self.num_processes < 1:
            raise ConfigError(f"a pool needs at least 1 process, got {self.num_processes}")
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s must be positive, got {self.timeout_s}: nothing is read in no time")


class _ReaderProcess(NamedTuple):
    """A reader process as its owner holds it. Three descriptors, the holder's to close."""

    number: int
    pid: int
    line: socket.socket
    ended: int
    notes: int
    """A file in which the process notes the number of its task and, when asked, its stack."""

    @property
    def at(self) -> int | None:
        """Task it was at when it was last seen, or died."""
        number: int = AT.unpack(os.pread(self.notes, AT.size, 0))[0]
        return number if number >= 0 else None

    def send_signal(self, signum: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # it is dead
            system.send_signal(self.pid, self.ended, signum)

    def close(self) -> None:
        """Close it; a process that waits for work then ends."""
        with contextlib.suppress(OSError):  # not only closed: another forked process may hold a copy
            self.line.shutdown(socket.SHUT_RDWR)
        self.line.close()
        for fd in (self.ended, self.notes):
            os.close(fd)


@dataclass(slots=True)
class _Processes:
    """Processes to end, however a pool ends."""

    server: ForkedServer | None
    readers: dict[int, _ReaderProcess]
    grace_s: float
    owner_pid: int

    def close(self) -> None:
        if os.getpid() != self.owner_pid:  # a fork of the owner has inherited this object, not the processes
            return
        for reader in self.readers.values():
            reader.close()
        self.readers.clear()
        server, self.server = self.server, None
        if server is not None:
            server.close(grace_s=self.grace_s)


class ProcessPool:
    """Some processes that do `work`, for one pass at a time.

    Belongs to one thread at a time. There is no thread in it: processes are
    fed and their results taken when the next result is asked for.
    """

    def __init__(
        self,
        work: Callable[[Any], Any],
        config: PoolConfig,
        *,
        describe: Callable[[Any], tuple[str, list[Any]]],
    ) -> None:
        """`describe` gives what is done for a task, in words, and the indices of its samples."""
        self._work, self._config, self._describe = work, config, describe
        self._processes = _Processes(None, {}, config.grace_s, os.getpid())
        self._receivers: dict[int, Receiver] = {}
        self._queue: TaskQueue[Any, ReadOutcome] | None = None
        self._next_number = 0
        self._num_lost = 0
        self._poll = select.poll()
        self._owners: dict[int, int] = {}  # descriptor -> process
        self._closing = weakref.finalize(self, _Processes.close, self._processes)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [child.pid for _, child in sorted(self._processes.readers.items())]

    def run(self, tasks: Iterator[Any]) -> Iterator[Any]:
        """Results of the tasks, in their order; work on the first ones begins now."""
        self.call_off()
        self._listen(0.0)  # processes that died meanwhile have nothing to do with these tasks
        self._queue = TaskQueue(tasks, ahead=self._config.ahead, first_number=self._next_number)
        for number in self._processes.readers:
            self._queue.join(number)
        self._hand_out()
        return iter(partial(self._next, self._queue), _OVER)

    def call_off(self) -> None:
        """Drop the rest of a pass: results not taken, tasks not needed."""
        if self._queue is not None:
            self._next_number, self._queue = self._queue.next_number, None

    def close(self) -> None:
        """End the processes. May be called again."""
        self._closing()
        self._queue = None
        self._receivers.clear()

    def _next(self, queue: TaskQueue[Any, ReadOutcome]) -> Any:
        if queue is not self._queue:
            raise RuntimeError("a pass over a pool was read on after another had begun")
        self._listen(0.0)
        waited_s = 0.0
        while not queue.has_result:
            if queue.is_over:
                return _OVER
            self._hand_out()
            waited_s = self._wait(waited_s)
        outcome = queue.take()
        self._num_lost = 0
        self._hand_out()
        return outcome.get()

    def _wait(self, waited_s: float) -> float:
        """Wait for an event; returns how long the process that blocks the pass has made no progress."""
        assert self._queue is not None
        awaited = self._queue.waits_for
        # In short waits: while all processes are stopped (Ctrl-Z), hours may pass without anyone being
        # slow.
        wait_s = min(_LOOKS_EVERY_S, self._config.timeout_s - waited_s)
        began = time.monotonic()
        heard = self._listen(wait_s)
        if awaited is None or awaited[0] in heard:
            return 0.0
        waited_s += min(time.monotonic() - began, 2 * wait_s)
        if waited_s >= self._config.timeout_s and not heard:
            self._give_up(*awaited)
        return min(waited_s, self._config.timeout_s)

    def _hand_out(self) -> None:
        assert self._queue is not None
        for process, number, task in self._queue.hand_out():
            order = ReadTask(number, task, self._next_number, self._receivers[process].releases())
            data, fd = task_packet(order)
            child = self._processes.readers[process]
            try:
                send_packet(child.line, data, [] if fd is None else [fd], flags=socket.MSG_DONTWAIT)
            except BlockingIOError:
                # Many passes were begun and cancelled while it was at one task: it is useless by now.
                child.send_signal(signal.SIGKILL)
            except OSError:
                pass  # it has died, which its descriptor reports, and the task is sent again
            finally:
                if fd is not None:
                    os.close(fd)

    def _listen(self, within_s: float) -> set[int]:
        """Receive results and replace dead processes; returns the processes that sent something."""
        ready = {fd for fd, _ in self._poll.poll(within_s * 1000)}
        heard = {self._owners[fd] for fd in ready}
        for process in sorted(heard):
            self._receive(process)
        dead = [child for child in self._processes.readers.values() if child.ended in ready]
        for child in dead:
            # Else its parent was lost, and all are new.
            if self._processes.readers.get(child.number) is child:
                self._replace(child)
        return heard

    def _receive(self, process: int) -> None:
        """All results in a process's socket, also those sent before it died."""
        line, receiver = self._processes.readers[process].line, self._receivers[process]
        while True:
            try:
                data, fds = receive_packet(
                    line, max_bytes=_PACKET_BYTES, max_fds=1, flags=socket.MSG_DONTWAIT
                )
            except BlockingIOError:
                return
            # It is dead, or the user's code closed a descriptor that was not its own.
            except (EOFError, OSError):
                self._processes.readers[process].send_signal(signal.SIGKILL)
                return
            delivery: Delivery = ForkingPickler.loads(data)
            try:
                outcome = receiver.receive(delivery.parcel, fds[0] if fds else None)
            finally:
                for fd in fds:
                    os.close(fd)
            if self._queue is not None:
                self._queue.finish(process, delivery.number, outcome)

    def _replace(self, child: _ReaderProcess) -> None:
        server, at = self._processes.server, child.at
        assert server is not None
        self._forget(child)
        if not server.is_alive:
            self._start_anew()
            return
        how = _how(server.exit_code(child.pid))
        suspect = self._queue.lose(child.number, at=at) if self._queue is not None else None
        what, indices = ("", []) if suspect is None else self._describe(suspect.task)
        events.emit("reader restarted", reader=child.number, how=how, indices=indices[:8])
        if suspect is not None and suspect.num_deaths >= self._config.max_deaths:
            error = SampleEndsReader(what=what, indices=indices, how=how, num_deaths=suspect.num_deaths)
            assert self._queue is not None
            assert at is not None
            self._queue.settle(at, ReadOutcome(None, error))  # earlier results are delivered first
        self._count_loss(how)
        try:
            self._fork(server, child.number)
        except (EOFError, TimeoutError):
            self._start_anew()

    def _count_loss(self, how: str) -> None:
        """Count a loss: processes that die before they do anything would be restarted for ever."""
        self._num_lost += 1
        if self._num_lost >= _MAX_LOST_PER_PROCESS * self._config.num_processes:
            raise ReadersLost(num_lost=self._num_lost, how=how)

    def _start(self) -> None:
        try:
            server = ForkedServer(partial(_run_reader, self._work), title=f"shoal readers {_of_worker()}")
        except OSError as error:
            raise _refused(error) from None
        self._processes.server = server
        try:
            for number in range(self._config.num_processes):
                self._fork(server, number)
        except (EOFError, TimeoutError):
            self._start_anew()

    def _fork(self, server: ForkedServer, number: int) -> None:
        """One reader more. EOFError or TimeoutError where the fork server is gone or does not answer."""
        notes = system.anonymous_file("shoal-notes")
        os.write(notes, AT.pack(-1))
        line, theirs = system.packet_pair()
        try:
            with theirs:
                fds = {"line": theirs.fileno(), "notes": notes}
                process = server.fork("reader", title=f"shoal reader {number} {_of_worker()}", fds=fds)
        except BaseException as error:
            line.close()
            os.close(notes)
            if isinstance(error, ForkRefused):
                raise _refused(error) from None
            raise
        self._join(_ReaderProcess(number, process.pid, line, process.ended, notes))

    def _start_anew(self) -> None:
        """Restart all: the parent of the processes was killed, and they with it, so no task is blamed."""
        for child in list(self._processes.readers.values()):
            self._receive(child.number)
            self._forget(child)
        for process in range(self._config.num_processes):
            if self._queue is not None:
                self._queue.lose(process)
        self._processes.close()
        events.emit("readers restarted", num_readers=self._config.num_processes)
        self._count_loss("was lost with the process that starts readers")
        self._start()

    def _join(self, child: _ReaderProcess) -> None:
        self._processes.readers[child.number] = child
        self._receivers[child.number] = Receiver()
        for fd in (child.line.fileno(), child.ended):
            self._poll.register(fd, select.POLLIN)
            self._owners[fd] = child.number
        if self._queue is not None:
            self._queue.join(child.number)

    def _forget(self, child: _ReaderProcess) -> None:
        del self._processes.readers[child.number]
        for fd in (child.line.fileno(), child.ended):
            self._poll.unregister(fd)
            del self._owners[fd]
        child.close()

    def _give_up(self, process: int, task: Any) -> None:
        what, indices = self._describe(task)
        raise ReaderStuck(
            reader=process,
            rank=jobs.current().rank,
            what=what,
            indices=indices,
            waited_s=self._config.timeout_s,
            stack=_stack_of(self._processes.readers[process]),
        )


_OVER = object()


def _run_reader(work: Callable[[Any], Any], role: str, fds: dict[str, int]) -> int:
    serve(work, system.packet_socket(fds["line"]), fds["notes"])
    return 0


def _of_worker() -> str:
    job = jobs.current()
    return f"of worker {job.rank} [{job.name}]"


def _refused(why: object) -> ClusterError:
    return ClusterError(
        f"the system refused a process for reading data: {why}. Nothing was read in it; give map(fn, workers=...) fewer, or "
        "raise the limit on processes (ulimit -u)."
    )


def _stack_of(child: _ReaderProcess) -> list[str]:
    """Stack of a process in the user's code, innermost first; empty where it is not known."""
    child.send_signal(ASKS_FOR_STACK)
    deadline = time.monotonic() + _STACK_WITHIN_S
    while time.monotonic() < deadline:
        text = os.pread(child.notes, 1 << 16, AT.size).decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.startswith("  File ")]
        if lines:  # only those of foreign code, which come before ours
            return list(itertools.takewhile(lambda line: not is_ours(line.split('"')[1]), lines))
        time.sleep(0.01)
    return []


def _how(code: int | None) -> str:
    if code is None:
        return "ended without a word"
    if code >= 0:
        return f"left with exit code {code}"
    try:
        return f"was killed by {signal_name(-code)}"
    except ValueError:
        return f"was killed by signal {-code}"


class PooledFeed(IndexedFeed):
    """Reads in a pool of processes; what is read stays the same."""

    _announces = False

    def __init__(self, reader: Reader, order: Order, cut: BatchCut, config: PoolConfig) -> None:
        super().__init__(reader, order, cut)
        self._config = config
        self._idle: ProcessPool | None = None
        self._num_holders = 0

    def sharded(self, plan: ShardPlan) -> PooledFeed:
        feed = super().sharded(plan)
        assert isinstance(feed, PooledFeed)
        feed._idle, feed._num_holders = None, 0
        return feed

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While entered, what a pass has started is there for the next one."""
        self._num_holders += 1
        try:
            yield
        finally:
            self._num_holders -= 1
            if not self._num_holders and self._idle is not None:
                pool, self._idle = self._idle, None
                pool.close()

    def give_back(self, pool: ProcessPool) -> None:
        """A pass is over. Two at a time have a pool each, of which one is kept."""
        if self._num_holders and self._idle is None:
            pool.call_off()
            self._idle = pool
        else:
            pool.close()

    def _read(self, requests: Iterable[tuple[BatchShare, ReadRequest]]) -> Iterator[Slice]:
        pool, self._idle = self._idle, None
        return _Pass(self, pool or self._open(), requests)

    def _open(self) -> ProcessPool:
        self._reader.source.share()
        return ProcessPool(partial(_read, self._reader), self._config, describe=self._describe_request)

    def _describe_request(self, request: ReadRequest) -> tuple[str, list[Any]]:
        indices = (
            request.indices.tolist() if isinstance(request.indices, np.ndarray) else list(request.indices)
        )
        stages = [
            f"{stage.get('stage', stage.get('source'))}({stage['fn']})"
            for stage in self._reader.source.describe()
            if "fn" in stage
        ]
        return ", ".join(stages) or "reading", indices


class _Pass:
    """One pass over a pool. Not a generator: one that was never started would not return the pool."""

    def __init__(
        self, feed: PooledFeed, pool: ProcessPool, requests: Iterable[tuple[BatchShare, ReadRequest]]
    ) -> None:
        self._feed = feed
        self._pool: ProcessPool | None = pool
        self._asked: deque[tuple[BatchShare, ReadRequest]] = deque()
        try:
            self._read: Iterator[Reading | Tree] = pool.run(_tasks(requests, self._asked))
        except BaseException:
            self._end()
            raise

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> Slice:
        if self._pool is None:
            raise StopIteration
        try:
            read = next(self._read)
            share, request = self._asked.popleft()
            return self._feed._slice(share, read if isinstance(read, Reading) else Reading(read, request))
        except StopIteration:
            self.close()
            raise
        except BaseException:
            self._end()
            raise

    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            self._feed.give_back(pool)

    def _end(self) -> None:
        """End the pass: results in flight at an error must not reach the next pass."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def __del__(self) -> None:
        self.close()


def _tasks(
    requests: Iterable[tuple[BatchShare, ReadRequest]], asked: deque[tuple[BatchShare, ReadRequest]]
) -> Iterator[ReadRequest]:
    """The requests alone; what they are for waits. Not a method: the pool must not keep the pass alive."""
    for share, request in requests:
        asked.append((share, request))
        yield request


def _read(reader: Reader, request: ReadRequest) -> Reading | Tree:
    """Read a request in a reader process; the batch alone where no sample was skipped."""
    reading = reader.read(request)
    return reading if reading.skipped else reading.batch
