"""First start of a script of two workers, cold and warm, against torchrun; the import of shoal; the size of an install.

Cold is without a cache of compiled loops (an empty XDG_CACHE_HOME), which a
new machine has once. Processor seconds stand beside wall seconds: on a busy
machine they say more.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path
from typing import Any

from benchmarks.harness import Report, in_turn, summarise

SCRIPTS = Path(__file__).parent / "scripts"


def measured(command: list[str], cwd: str, **env: str) -> tuple[float, float]:
    """Wall and processor seconds of a command and everything it waited for."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, cwd=cwd, env={**os.environ, **env}, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime)
    return time.perf_counter() - began, used


def sides(
    folder: str, cache: Callable[[], str]
) -> tuple[Callable[[], float], Callable[[], float], dict[str, list[float]]]:
    cpu: dict[str, list[float]] = {"ours": [], "theirs": []}
    job = ["tiny", "2", f"{folder}/out.json"]

    def ours() -> float:
        command = [sys.executable, "-m", "shoal", "run", "-n", "2", str(SCRIPTS / "with_shoal.py"), *job]
        wall, used = measured(command, folder, XDG_CACHE_HOME=cache())
        cpu["ours"].append(used)
        return wall

    def theirs() -> float:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        wall, used = measured([*launcher, str(SCRIPTS / "with_torch.py"), *job], folder, OMP_NUM_THREADS="1")
        cpu["theirs"].append(used)
        return wall

    return ours, theirs, cpu


def base_install() -> dict[str, float]:
    """MiB of shoal and everything it requires, without and with torch and what torch requires."""

    def all_of(name: str, seen: set[str]) -> set[str]:
        try:
            distribution(name)
        except PackageNotFoundError:
            return seen
        if (plain := name.lower().replace("_", "-")) not in seen:
            seen.add(plain)
            for requirement in requires(name) or ():
                named = re.match(r"[\w.-]+", requirement)
                if named and "extra ==" not in requirement:
                    all_of(named[0], seen)
        return seen

    def mib(names: set[str]) -> float:
        files = [Path(str(file.locate())) for name in names for file in distribution(name).files or ()]
        return round(sum(file.stat().st_size for file in files if file.is_file()) / 2**20, 1)

    with_torch, torch = all_of("shoal", set()), all_of("torch", set())
    return {
        "mib_with_torch": mib(with_torch),
        "mib_beside_torch": mib(with_torch - torch),
        "packages": len(with_torch),
    }


def main(quick: bool = False) -> None:
    report, rounds = Report("first_start"), 2 if quick else 5
    facts: dict[str, Any] = {
        "workers": 2,
        "cores": len(os.sched_getaffinity(0)),
        "load_1min": round(os.getloadavg()[0], 1),
    }
    with tempfile.TemporaryDirectory() as folder:
        kept = tempfile.mkdtemp(dir=folder)
        for figure, cache, warmup in (
            ("first start, cold", lambda: tempfile.mkdtemp(dir=folder), 0),
            ("start, warm", lambda: kept, 1),
        ):
            ours, theirs, cpu = sides(folder, cache)
            for _ in range(warmup):
                ours()
                compile_loops(kept)
                cpu["ours"].clear()
            values = summarise([in_turn(ours, theirs, number) for number in range(rounds)], digits=2)
            used = {f"{side}_cpu_s": round(sorted(times)[len(times) // 2], 2) for side, times in cpu.items()}
            report.add(figure, {**values, **used}, **facts)
    code = "import time; began = time.perf_counter(); import shoal; print(time.perf_counter() - began)"
    times = [float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(5)]
    report.add("import shoal", {"seconds": round(sorted(times)[2], 4)}, **facts)
    report.add("size of the base install", base_install())
    report.save()


def compile_loops(cache: str) -> None:
    """What the first start does in the background, waited for."""
    code = "from shoal.runtime.kernel_cache import compile_all; compile_all('shoal.collectives.shm_kernels')"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "XDG_CACHE_HOME": cache}, check=True)


if __name__ == "__main__":
    main("--quick" in sys.argv)
