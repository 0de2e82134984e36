"""Worker processes of a map_reduce: forked, replaced when they die, told apart by the tasks' claims alone.

They are forks of the calling process, so functions and data need not be sent
anywhere. An exception of a user's function comes back as text.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from functools import partial

import msgspec

from shoal.data.mapreduce.tasks import Tasks
from shoal.errors import DataError, MapReduceFailed, ShoalError
from shoal.runtime.forkserver.client import ForkedServer, ForkRefused, ForkServerGone
from shoal.runtime.forkserver.server import is_readable

_MAX_REPORT = 32_000  # bytes that a pipe holds before anybody reads
_LOOK_EVERY_S = 1.0


class _Report(msgspec.Struct, frozen=True):
    """How a process failed."""

    task: str
    traceback: str
    is_ours: bool
    """It is an error that shoal raised, and its text says everything."""


def finish_in_processes(make_tasks: Callable[[int], Tasks], num_workers: int) -> None:
    """Run all tasks in `num_workers` processes; `make_tasks(number)` is what each of them works on."""
    tasks = make_tasks(0)
    watch = tasks.watch()
    server = ForkedServer(partial(_work, make_tasks), title="shoal map-reduce")
    reports: dict[int, int] = {}  # pid -> the pipe its report comes through
    try:
        for number in range(num_workers):
            reports.update([_start(server, number)])
        while reports:
            is_readable(server.fileno(), 0.0 if server.has_exits else _LOOK_EVERY_S)
            for exited in server.exits():
                fd = reports.pop(exited.pid)
                text = os.read(fd, 2 * _MAX_REPORT)
                os.close(fd)
                if text:
                    raise _error(msgspec.msgpack.decode(text, type=_Report))
                if exited.code != 0 and not tasks.is_complete:
                    # Killed: its task is free again, and hands are missing.
                    reports.update([_start(server, exited.pid)])
            if left := tasks.left():
                watch.look(left)
    except ForkServerGone:
        raise DataError(
            "the process that forks the workers of map_reduce was killed, and they with it. Finished tasks are kept; start "
            "again to go on from there, with fewer workers= if memory was short."
        ) from None
    finally:
        server.close()
        for fd in reports.values():
            os.close(fd)


def _start(server: ForkedServer, number: int) -> tuple[int, int]:
    reader, writer = os.pipe()
    try:
        child = server.fork(str(number), title="shoal map-reduce worker", fds={"report": writer})
    except ForkRefused as refused:
        os.close(reader)
        raise DataError(
            f"the system refused a process for map_reduce: {refused}. Finished tasks are kept; give fewer workers=, or raise "
            "the limit on processes (ulimit -u)."
        ) from None
    finally:
        os.close(writer)
    os.close(child.pidfd)
    return child.pid, reader


def _work(make_tasks: Callable[[int], Tasks], number: str, fds: dict[str, int]) -> int:
    """In a child: run tasks until none is left; a failure is reported."""
    task = ""
    try:
        tasks = make_tasks(int(number))
        try:
            tasks.finish()
        finally:
            task = tasks.current
    except Exception as error:
        is_ours = isinstance(error, ShoalError)
        text = "\n".join([str(error), *getattr(error, "__notes__", [])]) if is_ours else _shown(error)
        os.write(fds["report"], msgspec.msgpack.encode(_Report(task, text[-_MAX_REPORT // 2 :], is_ours)))
        return 1
    return 0


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
