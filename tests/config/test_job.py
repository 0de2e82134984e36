from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shoal.config import job as jobs


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_plain_python_never_takes_over_a_run_of_shoal_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    names = ["train", "train-python", "train-python-python"]
    for name in names[:taken]:
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.json").touch()
    (tmp_path / "runs" / names[taken]).mkdir(parents=True)  # of plain python, from before
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(jobs, "_current", None)
    assert jobs.current().run_dir == Path("runs") / names[taken]
