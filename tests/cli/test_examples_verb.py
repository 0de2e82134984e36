"""`shoal examples`: copies what the package brought, and replaces nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from invoking import Shoal


def test_examples_are_copied_and_no_folder_is_replaced(
    shoal: Shoal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert shoal("examples", "tried").exit_code == 0
    original = Path(__file__).parents[2] / "examples"
    assert {path.name for path in (tmp_path / "tried").glob("*.py")} == {
        path.name for path in original.glob("*.py")
    }
    (tmp_path / "tried" / "spirals.py").write_text("mine")
    refused = shoal("examples", "tried")
    assert refused.exit_code == 2
    assert "tried exists. Nothing was copied" in refused.output
    assert (tmp_path / "tried" / "spirals.py").read_text() == "mine"
