"""Two, three and four workers compute what one process computes, in float64, where rounding cannot hide a bug."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launched import Launched
from safetensors.torch import load_file

SCRIPT = Path(__file__).parent / "scripts" / "equality.py"
TOLERANCE = 1e-12


def results(folder: Path, rank: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    report = json.loads((folder / f"rank-{rank}.json").read_text())
    return load_file(folder / f"rank-{rank}.safetensors"), report


def close(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(close(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(close(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, float):
        return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9)
    return bool(one == other)


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_many_workers_compute_what_one_process_computes(
    workers: int, launch_script: Callable[..., Launched], tmp_path: Path
) -> None:
    for count in (1, workers):
        (tmp_path / str(count)).mkdir()
        launched = launch_script(SCRIPT, workers=count, args=(str(tmp_path / str(count)),))
        assert launched.exit_code == 0, launched.stderr
    reference, report = results(tmp_path / "1", 0)
    for rank in range(workers):
        weights, told = results(tmp_path / str(workers), rank)
        assert weights.keys() == reference.keys()
        for name, tensor in weights.items():
            torch.testing.assert_close(
                tensor, reference[name], rtol=TOLERANCE, atol=TOLERANCE, msg=f"{name}, rank {rank}"
            )
        assert close(told, report), f"rank {rank} reports {told}, one process {report}"


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_all_ranks_hold_the_same_bits(
    workers: int, launch_script: Callable[..., Launched], tmp_path: Path
) -> None:
    launched = launch_script(SCRIPT, workers=workers, args=(str(tmp_path),))
    assert launched.exit_code == 0, launched.stderr
    first, report = results(tmp_path, 0)
    for rank in range(1, workers):
        weights, told = results(tmp_path, rank)
        assert all(torch.equal(weights[name], first[name]) for name in first)
        assert told == report


def test_a_run_repeats_to_the_bit(launch_script: Callable[..., Launched], tmp_path: Path) -> None:
    for attempt in ("a", "b"):
        (tmp_path / attempt).mkdir()
        launched = launch_script(SCRIPT, workers=3, args=(str(tmp_path / attempt),))
        assert launched.exit_code == 0, launched.stderr
    first, second = results(tmp_path / "a", 0)[0], results(tmp_path / "b", 0)[0]
    assert all(torch.equal(first[name], second[name]) for name in first)
