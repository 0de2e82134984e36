"""Two source trees of shoal, alternated: what a refactoring costs.

    git worktree add ../before REVISION
    python -m benchmarks.two_trees ../before

Every figure is a child process with the one or the other tree first on its
path, running scripts/two_trees_job.py, which uses public names only. With
`--cpu` figures are processor time instead of wall time, which means something
on a busy machine too: of rank 0 per step, or of all processes of a command.
With `--together` both trees run at the same time instead of in turn, so that
they are slowed down alike by whatever else runs: for figures of steps.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.harness import Report, alternate, summarise

HERE = Path(__file__).resolve().parent
JOB = HERE / "scripts" / "two_trees_job.py"
AFTER = HERE.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="a checkout of the revision to compare with")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--figure", dest="figures", action="append", default=[], help="only those that begin so"
    )
    parser.add_argument("--cpu", action="store_true", help="processor time instead of wall time")
    parser.add_argument("--together", action="store_true", help="both at the same time")
    options = parser.parse_args()
    report = Report("two_trees")
    shoal = [sys.executable, "-m", "shoal"]
    run = [*shoal, "run"]
    figures: dict[str, tuple[list[str], bool]] = {
        # name: (command, whether the script measures itself)
        "import shoal": ([sys.executable, "-c", "import shoal; shoal.rank()"], False),
        "shoal --help": ([*shoal, "--help"], False),
        "launch to end of the first step, 2 workers": ([*run, "-n", "2", str(JOB), "first"], False),
        "Trainer step, small MLP": ([sys.executable, str(JOB), "trainer"], True),
        "ddp step, 2 workers": ([*run, "-n", "2", str(JOB), "ddp"], True),
        "ps step, 2 workers, 1 server": ([*run, "-n", "2", "--servers", "1", "--strategy", "ps", str(JOB), "click"], True),
        "ps:async step, 2 workers, 1 server": (
            [*run, "-n", "2", "--servers", "1", "--strategy", "ps:async", str(JOB), "click"],
            True,
        ),
        "array reader, shuffled epoch": ([sys.executable, str(JOB), "arrays"], True),
        "Parquet reader, first epoch": ([sys.executable, str(JOB), "parquet"], True),
    }  # fmt: skip
    for name, (command, measures_itself) in figures.items():
        if options.figures and not any(name.startswith(begin) for begin in options.figures):
            continue
        if options.together and not measures_itself:
            continue
        values = (_at_once if options.together else alternate)(
            _side(AFTER, command, measures_itself, cpu=options.cpu),
            _side(options.before.resolve(), command, measures_itself, cpu=options.cpu),
            rounds=options.rounds,
        )
        report.add(
            f"{name}: after / before",
            values,
            command=" ".join(command[1:]).replace(str(HERE), "benchmarks"),
            time="processor" if options.cpu else "wall",
            order="at once" if options.together else "in turn",
        )
    report.save()


def _at_once(ours: Callable[[], float], theirs: Callable[[], float], *, rounds: int) -> dict[str, Any]:
    with ThreadPoolExecutor(2) as pool:
        pairs = []
        for _ in range(rounds):
            mine, other = pool.submit(ours), pool.submit(theirs)
            pairs.append((mine.result(), other.result()))
    return summarise(pairs, digits=6)


def _side(tree: Path, command: list[str], measures_itself: bool, *, cpu: bool) -> Callable[[], float]:
    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime if cpu else time.perf_counter()

    def once() -> float:
        with tempfile.TemporaryDirectory() as folder:
            environment = {
                **os.environ,
                "PYTHONPATH": str(tree / "src"),
                "TWO_TREES_OUT": f"{folder}/seconds",
                "TWO_TREES_CPU": "1" if cpu else "",
                **(
                    {"OMP_NUM_THREADS": "1"} if cpu else {}
                ),  # threads that spin for work count as processor time
            }
            began = spent()
            subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
            took = spent() - began
            return float(json.loads(Path(folder, "seconds").read_text())) if measures_itself else took

    return once


if __name__ == "__main__":
    main()
