"""Every model under every exchange of `ddp`: the weights, optimizer state and evaluations of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matrix_job
import pytest
from launched import Launched
from matrix_expected import SIZES, OneProcess, problems

from shoal.config.choices import EXCHANGES
from whole_matrix import IS_WHOLE

pytestmark = [pytest.mark.matrix] if IS_WHOLE else []

LAUNCHES = [
    ("native", 2),
    ("shm", 3),
    ("ring", 3),
    ("hierarchical", 4),
    ("tree", 3),
    ("halving", 4),
    ("broadcast", 2),
    ("allgather", 3),
    ("chain", 4),
    ("mapreduce", 3),
]


ALL_SIZES = [(exchange, workers) for exchange, _ in LAUNCHES for workers in SIZES]


@pytest.mark.parametrize(("exchange", "workers"), ALL_SIZES if IS_WHOLE else LAUNCHES)
def test_every_model_is_trained_as_in_one_process(
    launch_script: Callable[..., Launched],
    one_process: OneProcess,
    tmp_path: Path,
    exchange: str,
    workers: int,
) -> None:
    done = launch_script(
        Path(matrix_job.__file__),
        workers=workers,
        strategy="ddp",
        exchange=exchange,
        args=(str(tmp_path),),
    )
    assert done.exit_code == 0, f"{done.error}\n{done.stderr}"
    assert problems(tmp_path, one_process, "ddp", workers) == {}


def test_no_exchange_is_left_out() -> None:
    assert {exchange for exchange, _ in LAUNCHES} == set(EXCHANGES) - {"auto"}
