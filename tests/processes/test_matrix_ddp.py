"""Every model under every exchange of `ddp`: the weights, optimizer state and evaluations of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matrix_job
import pytest
from launched import Launched
from matrix_expected import SIZES, OneProcess, problems
from matrix_models import CASES

from shoal.config.choices import EXCHANGES
from whole_matrix import IS_WHOLE

pytestmark = [pytest.mark.matrix] if IS_WHOLE else []

ALL = tuple(CASES)
SOME = ("vgg with dropout", "gpt", "clicks")

LAUNCHES = [
    ("native", 2, ALL),
    ("shm", 3, ALL),
    ("ring", 3, SOME),
    ("hierarchical", 4, ALL),
    ("tree", 3, SOME),
    ("halving", 4, SOME),
    ("broadcast", 2, SOME),
    ("allgather", 3, SOME),
    ("chain", 4, SOME),
    ("mapreduce", 3, SOME),
]
"""A scheme sums flat tensors and knows no model: those that nobody gets unasked meet dense, sparse and random layers."""

ALL_SIZES = [(exchange, workers, ALL) for exchange, _, _ in LAUNCHES for workers in SIZES]


@pytest.mark.parametrize(("exchange", "workers", "names"), ALL_SIZES if IS_WHOLE else LAUNCHES)
def test_every_model_is_trained_as_in_one_process(
    launch_script: Callable[..., Launched],
    one_process: OneProcess,
    tmp_path: Path,
    exchange: str,
    workers: int,
    names: tuple[str, ...],
) -> None:
    done = launch_script(
        Path(matrix_job.__file__),
        workers=workers,
        strategy="ddp",
        exchange=exchange,
        args=(str(tmp_path), *names),
    )
    assert done.exit_code == 0, f"{done.error}\n{done.stderr}"
    assert problems(tmp_path, one_process, "ddp", workers, names) == {}


def test_no_exchange_is_left_out() -> None:
    assert {exchange for exchange, _, _ in LAUNCHES} == set(EXCHANGES) - {"auto"}
