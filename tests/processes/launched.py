"""What a process test gets back from `launch_script`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
