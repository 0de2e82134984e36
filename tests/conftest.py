"""For every test: what it starts it ends, and what it sets it takes back.

A test that leaves a thread or a changed environment behind fails, by name:
the next test would run in another world than alone.

Here too: what keeps the run of all tests short, whatever they test.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from waiting import wait_until
from whole_matrix import IS_WHOLE

# How long one example takes says more about the machine than about shoal; every test has a time limit anyway. Fifty of them
# where a test does not say: every run draws others.
settings.register_profile(
    "shoal", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shoal")

SET_BY_LIBRARIES = {
    "PYTEST_CURRENT_TEST",
    "GLOO_SOCKET_IFNAME",  # shoal.recovery.rendezvous, for as long as the process lives
    "NCCL_SOCKET_IFNAME",
    "TORCHINDUCTOR_CACHE_DIR",  # torch, when it first compiles
    "TRITON_CACHE_DIR",
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
    "TF_FORCE_GPU_ALLOW_GROWTH",  # keras, when it is imported
    "KMP_DUPLICATE_LIB_OK",  # torch, when it is imported
    "KMP_INIT_AT_FORK",
}


def pytest_configure() -> None:
    """Take signals as in a terminal: a shell has its background jobs ignore Ctrl-C, and tests that send it would wait for ever."""
    for signum in (signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(signum) is signal.SIG_IGN:
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What comes with the imports stays: the collector walks it neither now nor in every test that calls it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


_STARTS_PROCESSES = re.compile(
    r"\bsubprocess\b|\bos\.fork\b|\bmultiprocessing\b|\bpostgres\w*|\bForkServer\b|\betcd_members\b|\binvoking\b|\bcompile=True\b|\bstart_cluster\b|\bon_hosts\b|workers=[1-9]"
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of files that start processes: `make test-fast` leaves them out. Leave out those of the matrix."""
    if not IS_WHOLE:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("matrix")])
        items[:] = [item for item in items if not item.get_closest_marker("matrix")]
    is_slow: dict[Path, bool] = {}
    for item in items:
        if item.path not in is_slow:
            is_slow[item.path] = _STARTS_PROCESSES.search(item.path.read_text()) is not None
        if is_slow[item.path]:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Test processes side by side share the cores: with a thread of torch's for each core, all wait for each other.

    Jobs that tests launch are not meant: they have the threads that they have for users.
    """
    num_processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if num_processes > 1 and session.items:
        import torch

        torch.set_num_threads(max(1, torch.get_num_threads() // num_processes))


@pytest.fixture(autouse=True)
def _leaves_the_process_as_it_was() -> Iterator[None]:
    threads, environment = set(threading.enumerate()), dict(os.environ)
    yield

    def leaked() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread not in threads and thread.is_alive()]

    wait_until(lambda: not leaked())
    assert not leaked(), f"threads left behind: {leaked()}"
    changed = {
        name
        for name in environment.keys() | os.environ.keys()
        if name not in SET_BY_LIBRARIES and environment.get(name) != os.environ.get(name)
    }
    assert not changed, f"environment variables left changed: {changed}"
    if "torch" in sys.modules:  # not imported for this: some tests are of processes without it
        torch = sys.modules["torch"]
        left, _ = torch.get_default_dtype(), torch.set_default_dtype(torch.float32)
        assert left is torch.float32, f"torch's default dtype was left at {left}"
