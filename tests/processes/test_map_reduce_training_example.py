"""examples/map_reduce_training.py: a failed task alone is run again, and the weights are the same to the bit."""

from __future__ import annotations

import re
from collections.abc import Callable

from examples_expected import FOLDER, falls, numbers
from launched import Launched


def test_only_the_task_that_failed_is_run_again(launch_script: Callable[..., Launched]) -> None:
    def said(workers: int, *args: str) -> Launched:
        done = launch_script(FOLDER / "map_reduce_training.py", workers=workers, args=args, quiet=True)
        assert done.exit_code == 0, done.error
        return done

    alone = said(1)
    falls(numbers(r"loss ([\d.]+)", alone.stdout), by=0.1)
    assert "run again: none" in alone.stdout
    for workers in (3, 4):
        failing = said(workers, "--fail-task", "4")
        assert re.findall(r"weights \w+", failing.stdout) == re.findall(r"weights \w+", alone.stdout)
        assert "7 tasks, each run 6 times; run again: {4: 1}" in failing.stdout
        assert f"task 4 failed in round 1, after 4 batches on worker {4 % workers}" in failing.stderr
