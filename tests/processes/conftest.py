"""Tests that start real processes: launching scripts, and proof that nothing is left of them.

    launch_script(source, workers=2)   run a script as a job, in this process as its supervisor.
                                       `source` is Python text, or the Path of a file. Options are
                                       those of LaunchConfig (strategy=, args=, name=, grace_s=, ...).
                                       Gives back Launched: exit_code, stdout, stderr, error, run_dir,
                                       summary, events, log(rank). A refused configuration raises.
    at_file(path, act)                 while a job runs: call `act` in another thread once `path`
                                       exists. A script says "now" by `touch`ing a file; nobody sleeps.
    supervisor_process(source, ...)    the same job under a supervisor of its own: for killing it.
                                       It imports torch, so it takes seconds; use it for little else.
                                       terminal=fd gives it a controlling terminal, for Ctrl-C.
    invoke("verify", "train.py")       a command of shoal in this process, with the warm parent of the session.
    small_disk(path, size_kib)         a disk of that size, mounted at `path` until the test ends.
    own_cache                          caches that no other test finds.
    warm_parent                        the one warm parent of the whole test session.
    one_process                        what one process computes of the matrix's models, computed once.

Every test in this folder is checked: after it there is no new child process,
descriptor, shared memory segment or socket directory. (Threads and the
environment are checked in tests/conftest.py.)

Scripts run with tmp_path as their folder, so `pathlib.Path("x")` in a script
is `tmp_path / "x"` in the test.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import re
import subprocess
import sys
import tempfile
import termios
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from launched import Launched
from typer.testing import CliRunner, Result

from large_pages import use_large_pages
from shoal import system
from shoal.cli import app
from shoal.cluster.launch.api import LaunchConfig, launch
from shoal.cluster.launch.roles import PRELOAD_WITH_MESH, PRELOAD_WITH_SERVERS
from shoal.cluster.supervisor import warm_parent as warm_client
from shoal.cluster.supervisor.warm_parent import WarmParent
from waiting import wait_until

if TYPE_CHECKING:
    from matrix_expected import OneProcess


@pytest.fixture(scope="session", autouse=True)
def _own_sockets() -> Iterator[None]:
    """Sockets of this run lie in a directory of its own, so that nobody else's are taken for left behind."""
    with tempfile.TemporaryDirectory(prefix="xdg-") as directory, pytest.MonkeyPatch.context() as patch:
        os.chmod(directory, 0o711)  # tests with another user have to get through
        patch.setenv("XDG_RUNTIME_DIR", directory)
        yield


@pytest.fixture(scope="session")
def warm_parent(_own_sockets: None) -> Iterator[WarmParent]:
    # For any script: with torch's sharding, and with numba and the kernels of servers.
    with WarmParent(
        "tests", preload=["shoal.train.metrics", PRELOAD_WITH_MESH, *PRELOAD_WITH_SERVERS]
    ) as warm:
        warm.wait_ready()
        if system.IS_LINUX:
            use_large_pages(warm.pid)
        yield warm


@pytest.fixture(scope="session")
def one_process() -> OneProcess:
    from matrix_expected import OneProcess

    return OneProcess()


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(warm_parent: WarmParent) -> Iterator[None]:
    parent = psutil.Process(warm_parent.pid)

    def world() -> dict[str, set[str]]:
        return {
            "processes": _children(psutil.Process(), parent),
            "descriptors": _descriptors(),
            "shared memory": {name for name in os.listdir("/dev/shm") if not _is_anothers(name)},
            "socket directories": set(os.listdir(os.environ["XDG_RUNTIME_DIR"])),
        }

    before = world()
    yield

    def left() -> dict[str, set[str]]:
        return {what: there - before[what] for what, there in world().items() if there - before[what]}

    wait_until(lambda: not left())
    assert not left()


def _is_anothers(segment: str) -> bool:
    """Whether this segment is not of our making, or of a living process that is none of ours: tests run side by side."""
    if not segment.startswith(("torch_", "shoal", "psm_")):
        return True  # a database's, or a semaphore of another test run
    owner = re.match(r"torch_(\d+)_", segment)
    if owner is None or not psutil.pid_exists(int(owner[1])):
        return False
    return os.getpid() not in (parent.pid for parent in psutil.Process(int(owner[1])).parents())


def _children(*processes: psutil.Process) -> set[str]:
    found = set()
    for child in (child for process in processes for child in process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            if (
                child.name() != "postgres"
            ):  # a server that tests share has processes that come and go as it likes
                found.add(f"{child.pid} {child.name()}")
    return found


def _descriptors() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{fd} -> {os.readlink(f'/proc/self/fd/{fd}')}")
        except FileNotFoundError:
            continue  # the one that listed them
    return found


def script_at(source: str | Path, folder: Path) -> Path:
    """The script's file; text is written to one."""
    if isinstance(source, Path):
        return source
    path = folder / "script.py"
    path.write_text(textwrap.dedent(source))
    return path


@pytest.fixture
def launch_script(
    warm_parent: WarmParent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Launched]:
    monkeypatch.chdir(tmp_path)

    def launch_script(source: str | Path, *, workers: int = 1, seed: int = 0, **options: Any) -> Launched:
        stdout, stderr = io.BytesIO(), io.BytesIO()
        config = LaunchConfig(
            script=str(script_at(source, tmp_path)),
            workers=workers,
            seed=seed,
            run_dir=options.pop("run_dir", str(tmp_path / "runs")),
            **options,
        )
        result = launch(config, warm=warm_parent, stdout=stdout, stderr=stderr)
        return Launched(
            result, stdout.getvalue().decode(errors="replace"), stderr.getvalue().decode(errors="replace")
        )

    return launch_script


@pytest.fixture
def invoke(warm_parent: WarmParent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(warm_client, "WarmParent", lambda *_, **__: contextlib.nullcontext(warm_parent))
    return lambda *words: CliRunner().invoke(app, list(words), prog_name="shoal")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def small_disk() -> Iterator[Callable[[Path, int], None]]:
    with contextlib.ExitStack() as mounted:

        def small_disk(path: Path, size_kib: int) -> None:
            path.mkdir()
            mount = ["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "tmpfs", str(path)]
            if subprocess.run(mount, capture_output=True).returncode:
                pytest.skip("mounting a small disk needs root's permissions")
            mounted.callback(subprocess.run, ["umount", str(path)], check=True)

        yield small_disk


@pytest.fixture
def at_file() -> Iterator[Callable[[Path, Callable[[], object]], None]]:
    threads: list[threading.Thread] = []
    failures: list[str] = []
    is_over = threading.Event()

    def at_file(path: Path, act: Callable[[], object]) -> None:
        # As long as the test takes, which has a time limit: a busy machine may need minutes to import torch.
        def watch() -> None:
            while not path.exists() and not is_over.wait(0.01):
                pass
            if path.exists():
                act()
            else:
                failures.append(f"{path} never came")

        thread = threading.Thread(target=watch)
        threads.append(thread)
        thread.start()

    yield at_file
    is_over.set()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.fixture
def supervisor_process(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(
        source: str | Path, *, workers: int = 1, terminal: int | None = None, **options: Any
    ) -> subprocess.Popen[bytes]:
        options |= {
            "script": str(script_at(source, tmp_path)),
            "workers": workers,
            "run_dir": str(tmp_path / "runs"),
        }
        program = (
            "import sys\n"
            "from shoal.cluster.launch.api import LaunchConfig, launch\n"
            f"sys.exit(launch(LaunchConfig(**{options!r})).exit_code)\n"
        )
        with open(tmp_path / "supervisor.log", "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", program],
                cwd=tmp_path,
                stdin=subprocess.DEVNULL if terminal is None else terminal,
                stdout=log,
                stderr=log,
                start_new_session=True,
                # A session's first terminal is the one that Ctrl-C comes from.
                preexec_fn=None if terminal is None else lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
