"""`shoal doctor`: what this machine can do, line by line, and the cure for what it cannot."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import typer

import shoal
from shoal.cli import machine
from shoal.cli.machine import Finding, Level, fail, ok
from shoal.cli.options import RunDir
from shoal.cli.verb import console
from shoal.config.strategy import STRATEGIES
from shoal.errors import ShoalError

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
    """Every check, quick ones first."""
    yield ok("shoal", f"{shoal.__version__}, strategies: {STRATEGIES.forms}")
    yield ok(
        "python",
        f"{platform.python_version()} on {platform.system()} {platform.release()} {platform.machine()}",
    )
    yield from cores()
    yield machine.memory()
    yield machine.shared_memory()
    yield machine.loopback()
    yield machine.runtime_directory()
    yield machine.disk(run_dir)
    yield machine.descriptors()
    torch = list(torch_and_devices())
    yield from torch
    if all(finding.level is not Level.FAIL for finding in torch):
        yield warm_parent()


def cores() -> Iterator[Finding]:
    """How many cores there are, and how workers share them."""
    from shoal.cluster.launch.threads import available_cores, threads_per_worker

    usable, present = available_cores(), os.cpu_count() or 1
    limited = f" of {present} (affinity or the control group's quota)" if usable < present else ""
    yield ok("cores", f"{usable} usable{limited}")
    plan = {n: threads_per_worker(n, cores=usable, env=os.environ) for n in range(1, usable + 1)}
    shown = [f"-n {n}: {threads}" for n, threads in plan.items() if n <= MAX_PLANS or n == usable]
    yield ok("threads per worker", ", ".join(shown))


def torch_and_devices() -> Iterator[Finding]:
    """What torch has, asked in a process of its own."""
    answer = machine.ask_torch()
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
        script.write_text("")
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
