"""Two, three and four workers compute what one process computes, in float64, where rounding cannot hide a bug."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launched import Launched, close, results

from whole_matrix import matrix_only

SCRIPT = Path(__file__).parent / "scripts" / "equality.py"
TOLERANCE = 1e-12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("equality")


@pytest.fixture
def run(launch_script: Callable[..., Launched], folder: Path) -> Callable[..., Path]:
    """`run(3)`: folder with the results of a job of three workers; each is launched once."""

    def run(workers: int, attempt: str = "first") -> Path:
        out = folder / f"{workers} {attempt}"
        if not out.exists():
            out.mkdir()
            launched = launch_script(SCRIPT, workers=workers, args=(str(out),))
            assert launched.exit_code == 0, launched.stderr
        return out

    return run


@pytest.mark.parametrize("workers", [3, *matrix_only(2, 4)])
def test_many_workers_compute_what_one_process_computes(workers: int, run: Callable[..., Path]) -> None:
    reference, report = results(run(1), 0)
    for rank in range(workers):
        weights, told = results(run(workers), rank)
        assert weights.keys() == reference.keys()
        for name, tensor in weights.items():
            torch.testing.assert_close(
                tensor, reference[name], rtol=TOLERANCE, atol=TOLERANCE, msg=f"{name}, rank {rank}"
            )
        assert close(told, report), f"rank {rank} reports {told}, one process {report}"


@pytest.mark.parametrize("workers", [3, *matrix_only(2, 4)])
def test_all_ranks_hold_the_same_bits(workers: int, run: Callable[..., Path]) -> None:
    first, report = results(run(workers), 0)
    for rank in range(1, workers):
        weights, told = results(run(workers), rank)
        assert all(torch.equal(weights[name], first[name]) for name in first)
        assert told == report


def test_a_run_repeats_to_the_bit(run: Callable[..., Path]) -> None:
    first, second = results(run(3), 0)[0], results(run(3, "second"), 0)[0]
    assert all(torch.equal(first[name], second[name]) for name in first)
