"""Several processes of one's own for the tasks of an aggregate.

They are forked, so that functions and data need not be sent anywhere, and
know nothing of each other: the tasks' claims keep them apart. A process that
dies is replaced. What a user's function raises comes back as text.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import selectors
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import torch

from shoal.data.mapreduce.tasks import Tasks
from shoal.errors import DataError, MapReduceFailed, ShoalError

_MAX_REPORT = 32_000  # what a pipe holds before anybody reads
_LOOK_EVERY_S = 1.0
_PR_SET_PDEATHSIG = 1


class _Report(msgspec.Struct, frozen=True):
    """How a process failed."""

    task: str
    traceback: str
    is_ours: bool
    """It is an error that shoal raised, and its text says everything."""


@dataclass(frozen=True, slots=True)
class _Child:
    pid: int
    pidfd: int
    report_fd: int


def finish_in_processes(make_tasks: Callable[[int], Tasks], num_workers: int) -> None:
    """Run all tasks in `num_workers` processes; `make_tasks(number)` is what each of them works on."""
    tasks = make_tasks(0)
    watch = tasks.watch()
    with _Children() as children:
        for number in range(num_workers):
            children.start(functools.partial(make_tasks, number))
        while children:
            for child, code in children.ended(timeout_s=_LOOK_EVERY_S):
                report = children.report(child)
                if report is not None:
                    raise _error(report)
                if code != 0 and not tasks.is_complete:
                    # Killed: its task is free again, and hands are missing.
                    children.start(functools.partial(make_tasks, child.pid))
            if left := tasks.left():
                watch.look(left)


class _Children:
    """Processes that were forked; none is left when this is exited."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._running: dict[int, _Child] = {}

    def __enter__(self) -> _Children:
        return self

    def __exit__(self, *error: object) -> None:
        for child in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
            os.close(child.pidfd)
            os.close(child.report_fd)
        self._selector.close()

    def __len__(self) -> int:
        return len(self._running)

    def start(self, make_tasks: Callable[[], Tasks]) -> None:
        """One process more."""
        read_fd, write_fd = os.pipe()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or what waits in them is written twice
        parent = os.getpid()
        with warnings.catch_warnings():
            # Python warns of threads that hold locks at a fork; what runs in the child is ours and the user's functions.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            os.close(read_fd)
            _live(make_tasks, write_fd, parent)
        os.close(write_fd)
        child = _Child(pid, os.pidfd_open(pid), read_fd)
        self._running[pid] = child
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)

    def ended(self, *, timeout_s: float) -> Iterator[tuple[_Child, int]]:
        """Those that end within this time, with their exit code."""
        for key, _ in self._selector.select(timeout_s):
            child: _Child = key.data
            _, status = os.waitpid(child.pid, 0)
            self._selector.unregister(child.pidfd)
            del self._running[child.pid]
            os.close(child.pidfd)
            try:
                yield child, os.waitstatus_to_exitcode(status)
            finally:
                os.close(child.report_fd)

    def report(self, child: _Child) -> _Report | None:
        """What an ended process has said."""
        text = os.read(child.report_fd, 2 * _MAX_REPORT)
        return msgspec.msgpack.decode(text, type=_Report) if text else None


def _live(make_tasks: Callable[[], Tasks], report_fd: int, parent: int) -> None:
    """A child's whole life."""
    code = 1
    task = ""
    try:
        torch.set_num_threads(1)  # its threads did not come along, and the cores are taken by our siblings
        _die_with(parent)
        tasks = make_tasks()
        try:
            tasks.finish()
        finally:
            task = tasks.current
        code = 0
    except Exception as error:
        is_ours = isinstance(error, ShoalError)
        text = str(error) if is_ours else _shown(error)
        if is_ours:
            text = "\n".join([text, *getattr(error, "__notes__", [])])
        os.write(report_fd, msgspec.msgpack.encode(_Report(task, text[-_MAX_REPORT // 2 :], is_ours)))
    except BaseException:
        pass  # Ctrl-C reaches the parent too, who says what there is to say
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _die_with(parent: int) -> None:
    """Nobody would wait for what a child of a dead process computes."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # too late for the signal
        os._exit(1)


def _shown(error: Exception) -> str:
    """The traceback from the user's first line on."""
    own = os.path.dirname(__file__)
    frames = traceback.TracebackException.from_exception(error)
    while frames.stack and os.path.dirname(frames.stack[0].filename) == own:
        frames.stack.pop(0)
    return "".join(frames.format())


def _error(report: _Report) -> Exception:
    if report.is_ours:
        return DataError(report.traceback)
    return MapReduceFailed(traceback=report.traceback, task=report.task)
