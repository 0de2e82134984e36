"""The warm parent as its supervisor sees it: children come, go, and are told of."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from shoal.cluster.supervisor import warm_parent as handle
from shoal.cluster.supervisor.warm_parent import WarmParent
from shoal.errors import WaitTimedOut
from waiting import wait_until


def fork_something(warm: WarmParent) -> int:
    """A child that ends by itself: it cannot read what it is told."""
    with open(os.devnull, "wb") as nowhere:
        fds = {"stdout": nowhere.fileno(), "stderr": nowhere.fileno()}
        return warm.fork("worker", title="shoal test", spec=b"nonsense", fds=fds)


def reaped(warm: WarmParent, *pids: int) -> dict[int, int]:
    """Wait for the end of these children; their exit codes."""
    codes: dict[int, int] = {}

    def all_told() -> bool:
        codes.update({exited.pid: exited.code for exited in warm.exits()})
        return set(pids) <= set(codes)

    assert wait_until(all_told)
    return codes


def test_a_child_that_cannot_begin_ends_and_is_told_of(warm_parent: WarmParent) -> None:
    pid = fork_something(warm_parent)
    assert reaped(warm_parent, pid) == {pid: 1}
    assert not psutil.pid_exists(pid)


def test_a_death_heard_of_while_another_fork_was_awaited_is_not_lost(warm_parent: WarmParent) -> None:
    first = fork_something(warm_parent)
    assert wait_until(lambda: not psutil.pid_exists(first))
    second = fork_something(warm_parent)  # reads the news of the first on its way to the answer
    assert warm_parent.has_exits
    assert reaped(warm_parent, first, second) == {first: 1, second: 1}


def test_signals_reach_living_children_only(warm_parent: WarmParent) -> None:
    pid = fork_something(warm_parent)
    warm_parent.signal(pid, signal.SIGKILL)
    assert reaped(warm_parent, pid)[pid] in (1, -signal.SIGKILL)
    warm_parent.signal(pid, signal.SIGKILL)  # gone: no error, and nobody else is hit
    warm_parent.signal(os.getpid(), signal.SIGKILL)  # not its child
    assert psutil.pid_exists(os.getpid())


def test_a_warm_parent_that_was_stopped_and_ends_no_child_is_reported(
    warm_parent: WarmParent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handle, "KILL_TIMEOUT_S", 0.0)
    pid = 0
    while not pid:
        pid = fork_something(warm_parent)
        os.kill(warm_parent.pid, signal.SIGSTOP)
        if warm_parent.exits():  # it was quicker
            os.kill(warm_parent.pid, signal.SIGCONT)
            pid = 0
    try:
        warm_parent.signal(pid, signal.SIGKILL)
        with pytest.raises(WaitTimedOut, match=f"process {pid}, which was to be killed"):
            warm_parent.exits()
    finally:
        monkeypatch.undo()
        warm_parent._killed.clear()
        os.kill(warm_parent.pid, signal.SIGCONT)
    assert reaped(warm_parent, pid)[pid] in (1, -signal.SIGKILL)
