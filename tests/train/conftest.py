"""Every test of the Trainer gets a job, a run directory and a script's state of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.config import job
from shoal.train.custom import loop as custom


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(job, "_current", job.Job(name="test", run_dir=tmp_path / "run"))
    monkeypatch.setattr(custom, "script", custom.Script())
    return tmp_path / "run"
