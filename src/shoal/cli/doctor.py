"""`shoal doctor`: checks of this machine, line by line, and the cure for each failure.

Sockets, memory, disk and limits are tried, not looked up; each check returns one Finding. Nothing
here imports torch: a process of its own queries torch.
"""

from __future__ import annotations

import json
import mmap
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import typer

import shoal
from shoal import system
from shoal.cli.options import RunDir
from shoal.cli.verb import console
from shoal.config.strategy import STRATEGIES
from shoal.errors import ShoalError

GIB = 1 << 30


class Level(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARN = "warn"  # training works, with less speed or room
    FAIL = "fail"  # no job can run before this is cured


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor: what was checked, the result, and the cure if needed."""

    level: Level
    what: str
    found: str
    cure: str = ""


def ok(what: str, found: str) -> Finding:
    return Finding(Level.OK, what, found)


def warn(what: str, found: str, cure: str) -> Finding:
    return Finding(Level.WARN, what, found, cure)


def fail(what: str, found: str, cure: str = "") -> Finding:
    return Finding(Level.FAIL, what, found, cure)


def memory() -> Finding:
    """Memory this process may use: the machine's, or its control group's limit."""
    import psutil

    machine = psutil.virtual_memory()
    limit = cgroup_memory_bytes()
    total = min(machine.total, limit) if limit else machine.total
    free = min(machine.available, total)
    found = f"{total / GIB:.1f} GiB, {free / GIB:.1f} GiB available"
    if limit and limit < machine.total:
        found += f" (limited by the control group; the machine has {machine.total / GIB:.1f} GiB)"
    if free < GIB:
        return warn(
            "memory",
            found,
            "a worker with torch needs about 0.3 GiB before its model: close something",
        )
    return ok("memory", found)


def cgroup_memory_bytes() -> int | None:
    """The smallest memory limit of this process's control group and those around it; None where there is none."""
    try:
        own = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip()  # version 2 writes "0::/path"
    except OSError:
        own = "/"
    groups = Path("/sys/fs/cgroup") / own.strip("/")
    files = [group / "memory.max" for group in (groups, *groups.parents)]
    limits = []
    for path in (*files, Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        try:
            limits.append(int(path.read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    # Version 1 writes "no limit" as the largest multiple of a page.
    return min((limit for limit in limits if limit < 1 << 60), default=None)


def shared_memory() -> Finding:
    """Anonymous shared memory, written through one mapping and read through another."""
    try:
        descriptor = system.anonymous_file("shoal-doctor")
        try:
            os.ftruncate(descriptor, mmap.PAGESIZE)
            with mmap.mmap(descriptor, mmap.PAGESIZE) as one, mmap.mmap(descriptor, mmap.PAGESIZE) as other:
                one[:5] = b"shoal"
                if other[:5] != b"shoal":
                    raise OSError("what one mapping writes the other does not see")
        finally:
            os.close(descriptor)
    except OSError as error:
        return fail(
            "shared memory", str(error), "shoal needs Linux 3.17 or newer, or room in the temporary directory"
        )
    if (problem := system.missing_calls()) is not None:
        return fail("shared memory", "not by this Python", problem)
    if not system.IS_LINUX:
        return ok("shared memory", "unlinked files of the temporary directory")
    try:
        room = shutil.disk_usage("/dev/shm")
    except OSError as error:
        # Only a DataLoader's own workers use it; shoal's segments have no name.
        return warn(
            "shared memory",
            f"memfd works; /dev/shm: {error}",
            "a DataLoader with num_workers > 0 needs /dev/shm: mount it, or give the container --shm-size",
        )
    found = f"memfd works; /dev/shm has {room.free / GIB:.1f} of {room.total / GIB:.1f} GiB free"
    if room.free < GIB // 4:
        return warn("shared memory", found, "a DataLoader with num_workers > 0 may run out: --shm-size=1g")
    return ok("shared memory", found)


def loopback() -> Finding:
    begin = time.perf_counter()
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            with socket.create_connection(server.getsockname(), timeout=5.0) as client:
                accepted, _ = server.accept()
                with accepted:
                    _say_something(client, accepted)
    except OSError as error:
        return fail(
            "loopback",
            f"bind, connect on 127.0.0.1: {error}",
            "bring the interface up: ip link set lo up",
        )
    return ok("loopback", f"bind and connect on 127.0.0.1 in {1e3 * (time.perf_counter() - begin):.1f} ms")


def runtime_directory() -> Finding:
    """A Unix socket where a job's sockets live, made and reached as a job does it."""
    from shoal.runtime.transport import unix

    what = "runtime directory"
    directory: Path | None = None
    try:
        directory = unix.runtime_dir()
        path = directory / "doctor"
        with unix.listen(path) as server, unix.connect(path, timeout_s=5.0) as client:
            accepted, peer = unix.accept(server)
            with accepted:
                _say_something(client, accepted)
    except (ShoalError, OSError) as error:
        return fail(what, str(error), "set XDG_RUNTIME_DIR or TMPDIR to a short directory of your own")
    finally:
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
    return ok(what, f"{directory.parent}, sockets work, the peer is known (process {peer.pid})")


def _say_something(speaker: socket.socket, listener: socket.socket) -> None:
    listener.settimeout(5.0)
    speaker.sendall(b"shoal")
    if listener.recv(5) != b"shoal":
        raise OSError("the bytes that came are not the ones that were sent")


def disk(run_dir: Path) -> Finding:
    """Write access to run directories, and free space."""
    home = next(parent for parent in (run_dir.absolute(), *run_dir.absolute().parents) if parent.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=home, prefix=".shoal-doctor-"):
            pass
        free = shutil.disk_usage(home).free
    except OSError as error:
        return fail(
            "disk",
            f"{run_dir} cannot be written: {error.strerror}",
            "choose another with --run-dir",
        )
    found = f"{run_dir} has {free / GIB:.1f} GiB free"
    if free < GIB:
        return warn("disk", found, "checkpoints may not fit: make room, or choose another --run-dir")
    return ok("disk", found)


def descriptors() -> Finding:
    """Open files a process may have: each worker costs the supervisor a few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < 256:
        return warn(
            "open files",
            f"{soft}",
            f"raise it: ulimit -n {min(hard, 4096) if hard > 0 else 4096}",
        )
    return ok("open files", "unlimited" if soft < 0 else f"{soft}")


_ASK_TORCH = """
import json, time
begin = time.perf_counter()
import torch, torch.distributed as dist
kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
module = torch.get_device_module(kind) if kind is not None else None
name = getattr(module, "get_device_name", lambda i: f"{kind.type}:{i}")
print(json.dumps({
    "version": torch.__version__,
    "import_s": time.perf_counter() - begin,
    "gloo": dist.is_available() and dist.is_gloo_available(),
    "nccl": dist.is_available() and dist.is_nccl_available(),
    "gpus": [name(i) for i in range(torch.accelerator.device_count())] if kind is not None else [],
}))
"""


def ask_torch(timeout_s: float = 120.0) -> dict[str, Any] | str:
    """Torch's version and devices, from a fresh process; a sentence where that failed."""
    try:
        asked = subprocess.run(
            [sys.executable, "-P", "-c", _ASK_TORCH],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if asked.returncode:
        return (asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"])[-1]
    answer: dict[str, Any] = json.loads(asked.stdout.splitlines()[-1])
    return answer


MAX_PLANS = 8
"""Worker counts shown of the thread plan."""


def doctor(run_dir: RunDir = Path("runs")) -> None:
    """Say what this machine can do. Exit code 1: no job can run before something is cured."""
    from rich.text import Text

    screen = console()
    styles = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}
    worst = Level.OK
    # Shown as they come: the last ones take seconds.
    for finding in findings(run_dir):
        line = Text.assemble(
            (f"{finding.level:<4}", styles[finding.level]), f"  {finding.what:<18} {finding.found}"
        )
        screen.print(line, soft_wrap=True)
        if finding.cure:
            screen.print(f"{'':<24} → {finding.cure}", soft_wrap=True)
        worst = max(worst, finding.level, key=list(Level).index)
    if worst is Level.FAIL:
        screen.print("no job can run here before the failures above are cured")
        raise typer.Exit(1)


def findings(run_dir: Path) -> Iterator[Finding]:
    yield ok("shoal", f"{shoal.__version__}, strategies: {STRATEGIES.forms}")
    yield ok(
        "python",
        f"{platform.python_version()} on {platform.system()} {platform.release()} {platform.machine()}",
    )
    yield from cores()
    yield memory()
    yield shared_memory()
    yield loopback()
    yield runtime_directory()
    yield disk(run_dir)
    yield descriptors()
    yield compiled_loops()
    torch = list(torch_and_devices())
    yield from torch
    if all(finding.level is not Level.FAIL for finding in torch):
        yield warm_parent()


def cores() -> Iterator[Finding]:
    from shoal.cluster.launch.threads import available_cores, threads_per_worker

    usable, present = available_cores(), os.cpu_count() or 1
    limited = f" of {present} (affinity or the control group's quota)" if usable < present else ""
    yield ok("cores", f"{usable} usable{limited}")
    plan = {n: threads_per_worker(n, cores=usable, env=os.environ) for n in range(1, usable + 1)}
    shown = [f"-n {n}: {threads}" for n, threads in plan.items() if n <= MAX_PLANS or n == usable]
    yield ok("threads per worker", ", ".join(shown))


def compiled_loops() -> Finding:
    """The kernels that numba compiles, and where they are kept."""
    from shoal.collectives.shm_layout import KERNELS
    from shoal.runtime.kernel_cache import cache_directory, is_compiled

    directory = cache_directory()
    if directory is None:
        return warn(
            "compiled loops",
            "cannot be kept: neither $XDG_CACHE_HOME nor ~/.cache is a folder of this user that takes writing",
            "gradients are summed by torch operations; `ps` compiles for half a minute at every start. Set XDG_CACHE_HOME",
        )
    if not is_compiled(KERNELS):
        return ok(
            "compiled loops",
            f"not compiled yet; the first job of several workers does it beside itself, into {directory}",
        )
    return ok("compiled loops", f"in {directory}")


def torch_and_devices() -> Iterator[Finding]:
    answer = ask_torch()
    if isinstance(answer, str):
        yield fail("torch", answer, f"{Path(sys.executable).name} -m pip install torch")
        return
    yield ok("torch", f"{answer['version']}, imported in {answer['import_s']:.1f} s")
    if answer["gloo"]:
        yield ok(
            "collectives", "gloo" + (", nccl" if answer["nccl"] else " (no nccl in this build of torch)")
        )
    else:
        yield fail(
            "collectives",
            "this build of torch has no gloo",
            "install the build of torch from PyPI",
        )
    yield ok("gpus", ", ".join(answer["gpus"]) if answer["gpus"] else "none: training runs on the CPU")


def warm_parent() -> Finding:
    """Start the process that forks workers, and let it run a job of two that do nothing."""
    from shoal.cluster.launch.api import LaunchConfig, launch
    from shoal.cluster.supervisor.warm_parent import WarmParent

    with tempfile.TemporaryDirectory(prefix="shoal-doctor-") as directory:
        script = Path(directory) / "nothing.py"
        script.write_text("import shoal\nshoal.rank()\n")
        config = LaunchConfig(script=str(script), workers=2, run_dir=directory, quiet=True)
        try:
            with WarmParent() as warm:
                warm.wait_ready()
                begin = time.perf_counter()
                result = launch(config, warm=warm)
                seconds = time.perf_counter() - begin
        except ShoalError as error:
            return fail("processes", str(error))
    if result.exit_code:
        return fail("processes", f"a script that does nothing: {result.error}")
    return ok(
        "processes",
        f"torch and shoal imported once in {warm.import_s:.1f} s, then two workers begin and end in {seconds:.2f} s",
    )
