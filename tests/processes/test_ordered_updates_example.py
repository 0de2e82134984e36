"""examples/ordered_updates.py: the same order in one process, to the bit."""

from __future__ import annotations

from collections.abc import Callable

from examples_expected import FOLDER, falls, numbers
from launched import Launched


def test_replicas_update_in_turn_as_in_one_process(launch_script: Callable[..., Launched]) -> None:
    said = {}
    for workers in (1, 3, 4):
        done = launch_script(FOLDER / "ordered_updates.py", workers=workers, quiet=True)
        assert done.exit_code == 0, done.error
        assert "equal to one process: True" in done.stdout
        said[workers] = done.stdout
    assert said[1] == said[3] == said[4]  # with a hash of the weights
    falls(numbers(r"loss ([\d.]+) at first, ([\d.]+) at last", said[1]), by=0.1)
