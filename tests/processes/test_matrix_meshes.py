"""Every model cut over workers in every way: what one process computes, or a refusal that names the layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matrix_job
import pytest
from launched import Launched
from matrix_expected import SIZES, OneProcess, problems
from matrix_models import CASES

from whole_matrix import IS_WHOLE

pytestmark = [pytest.mark.matrix] if IS_WHOLE else []

ALL = tuple(CASES)
SOME = ("lstm", "resnet", "vgg with dropout", "gpt", "clicks")
OTHERS = ("mlp", "vgg", "vae", "bert", "own loss", "pair", "interactions", "tree", "blocks")

LAUNCHES: list[tuple[str, int, tuple[str, ...]]] = [
    ("fsdp", 2, OTHERS),
    ("fsdp", 3, ("lstm", "resnet", "vgg with dropout")),
    ("fsdp", 4, ("gpt", "clicks")),
    ("tp", 2, SOME),
    ("tp", 3, ("vgg", "vae", "own loss", "pair", "interactions", "tree")),
    ("tp", 4, ("mlp", "bert", "blocks")),
    ("pp", 2, ("gpt", "clicks")),
    ("pp", 3, OTHERS),
    ("pp", 4, ("lstm", "resnet", "vgg with dropout")),
    ("dp=2,fsdp=2", 4, ("lstm", "vae", "gpt", "clicks")),
    ("fsdp=2,tp=2", 4, ("resnet", "gpt", "tree", "blocks")),
    ("dp=2,pp=2", 4, ("vgg with dropout", "bert", "own loss", "clicks")),
    ("pp=2,tp=2", 4, ("mlp", "vgg with dropout", "gpt", "tree")),
]
"""Every model once on every axis, and of the products what mixes, draws, is tied or is cut by columns; `make matrix` runs all."""


ALL_SIZES = [
    *((strategy, workers, ALL) for strategy in ("fsdp", "tp", "pp") for workers in SIZES),
    *(
        (strategy, 4, ALL)
        for strategy in ("dp=2,fsdp=2", "fsdp=2,tp=2", "dp=2,tp=2", "dp=2,pp=2", "pp=2,tp=2")
    ),
]


@pytest.mark.parametrize(("strategy", "workers", "names"), ALL_SIZES if IS_WHOLE else LAUNCHES)
def test_every_model_is_trained_as_in_one_process_or_refused(
    launch_script: Callable[..., Launched],
    one_process: OneProcess,
    tmp_path: Path,
    strategy: str,
    workers: int,
    names: tuple[str, ...],
) -> None:
    done = launch_script(
        Path(matrix_job.__file__), workers=workers, strategy=strategy, args=(str(tmp_path), *names)
    )
    assert done.exit_code == 0, f"{done.error}\n{done.stderr}"
    assert problems(tmp_path, one_process, strategy, workers, names) == {}


def test_every_model_meets_every_strategy_and_every_strategy_every_size() -> None:
    for strategy in ("fsdp", "tp", "pp"):
        met = [(workers, names) for each, workers, names in LAUNCHES if each == strategy]
        assert [workers for workers, _ in met] == [2, 3, 4]
        assert {name for _, names in met for name in names} == set(ALL), strategy
