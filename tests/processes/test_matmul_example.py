"""examples/matmul.py: the product of one process, at any number of workers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from examples_expected import FOLDER, numbers
from launched import Launched

from whole_matrix import matrix_only


@pytest.mark.parametrize("workers", [3, 4, *matrix_only(1)])
def test_the_product_is_that_of_one_process(launch_script: Callable[..., Launched], workers: int) -> None:
    done = launch_script(FOLDER / "matmul.py", workers=workers, args=("--size", "61"), quiet=True)
    assert done.exit_code == 0, done.error
    assert max(numbers(r"difference ([\d.e+-]+)", done.stdout)) < 1e-10
    blocks, product = numbers(r"blocks (-?[\d.]+), of the product (-?[\d.]+)", done.stdout)
    assert blocks == pytest.approx(product, abs=1e-5)
