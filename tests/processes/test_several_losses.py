"""Several losses: two models with an optimizer each, a loss of named parts, a scaled one; as in one process, and logged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launched import Launched
from safetensors.torch import load_file

Launch = Callable[..., Launched]
SCRIPT = Path(__file__).parent / "scripts" / "several_losses.py"
LOGGED: dict[str, tuple[str, ...]] = {
    "gan": ("loss", "critic"),
    "named": ("loss", "fit", "balance"),
    "scaled": (),
    "scaled-fused": (),
}


@pytest.mark.parametrize("kind", LOGGED)
def test_several_losses_train_and_log_as_in_one_process(
    launch_script: Launch, tmp_path: Path, kind: str
) -> None:
    ends = []
    for workers in (1, 2, 3):
        done = launch_script(
            SCRIPT, workers=workers, args=(str(tmp_path / f"{workers}"), kind), name=f"{workers}"
        )
        assert done.exit_code == 0, done.error
        lines = [json.loads(line) for line in (done.run_dir / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [
            *range(1, 10 if kind.startswith("scaled") else 11)
        ]  # one is skipped
        logged = {name: torch.tensor([line[name] for line in lines]) for name in LOGGED[kind]}
        ends.append(load_file(tmp_path / f"{workers}") | logged)
    for name, value in ends[0].items():
        for other in ends[1:]:
            torch.testing.assert_close(other[name], value, rtol=1e-11, atol=1e-12, msg=name)
