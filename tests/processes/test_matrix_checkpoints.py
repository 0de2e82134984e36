"""A checkpoint of each strategy goes on under the next, at another size, and nobody can tell at the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matrix_job
from launched import Launched
from matrix_expected import OneProcess, problems

MODELS = ("mlp", "gpt", "tree", "clicks")
"""Some whose result does not depend on how a batch was cut; with the others it is the same code."""

STRETCHES: list[tuple[str, int, dict[str, Any]]] = [
    ("single", 1, {}),
    ("fsdp", 3, {}),
    ("tp", 2, {}),
    ("pp", 4, {}),
    ("ddp", 3, {}),
    ("ps", 2, {"servers": 2}),
    ("single", 1, {}),
]


def test_a_training_that_moves_on_after_every_third_step_is_that_of_one_process(
    launch_script: Callable[..., Launched], one_process: OneProcess, tmp_path: Path
) -> None:
    before: tuple[str, ...] = ()
    for number, (strategy, workers, options) in enumerate(STRETCHES):
        out, kept = tmp_path / f"{number}-{strategy}", tmp_path / f"kept-{number}"
        out.mkdir()
        steps = 3 * number + 3  # an epoch has two: every other stretch ends in the middle of one
        done = launch_script(
            Path(matrix_job.__file__),
            workers=workers,
            strategy=strategy,
            name=out.name,
            args=(str(out), *MODELS, "--steps", str(steps), "--keep", str(kept), *before),
            **options,
        )
        assert done.exit_code == 0, f"{strategy}: {done.error}\n{done.stderr}"
        found = problems(out, one_process, strategy, workers, MODELS, num_steps=steps)
        assert found == {}, f"after {strategy} on {workers}"
        before = ("--resume", str(kept))
