"""Result of `launch_script`, and comparison of the results of two jobs."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from shoal.cluster.launch.api import RunResult
from shoal.errors import ShoalError


@dataclass(frozen=True)
class Launched:
    """What came of a launched script."""

    result: RunResult
    stdout: str
    stderr: str

    @property
    def exit_code(self) -> int:
        return self.result.exit_code

    @property
    def error(self) -> ShoalError | None:
        return self.result.error

    @property
    def run_dir(self) -> Path:
        return self.result.run_dir

    @property
    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self.run_dir / "summary.json").read_text()))

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / "events.jsonl").read_text().splitlines()]

    def log(self, rank: int) -> str:
        return (self.run_dir / "logs" / f"worker-{rank}.log").read_text()

    def printed(self) -> list[Any]:
        """The list that the script of a job that ended well printed in a line that begins with "result"; hex is a float."""
        assert self.exit_code == 0, f"{self.error}\n{self.stderr}"
        [line] = [line for line in self.stdout.splitlines() if line.startswith("result")]
        return [_float(each) for each in json.loads(line.removeprefix("result "))]


def _float(printed: Any) -> Any:
    return float.fromhex(printed) if isinstance(printed, str) and "0x" in printed else printed


@dataclass(frozen=True)
class Ended:
    """What came of a job, as far as it must not depend on faults."""

    ranks: list[dict[str, Any]]
    stdout: str


def results(folder: Path, rank: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and report that a rank wrote to its folder."""
    report = json.loads((folder / f"rank-{rank}.json").read_text())
    return load_file(folder / f"rank-{rank}.safetensors"), report


def close(one: Any, other: Any) -> bool:
    """Whether two reports are equal, floats up to rounding."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(close(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(close(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, float):
        return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9) or (math.isnan(one) and math.isnan(other))
    return bool(one == other)
