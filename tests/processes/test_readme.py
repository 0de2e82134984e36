"""The script that the README shows, taken from it: it runs as it stands, and says the same at any number of workers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from launched import Launched

README = Path(__file__).parents[2] / "README.md"


def script() -> str:
    """What the diff of the README makes of a plain script."""
    shown = re.search(r"^```diff\n(.*?)^```", README.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert shown is not None
    return "".join(line[2:] for line in shown[1].splitlines(keepends=True) if not line.startswith("-")) + "\n"


def test_the_readmes_script_says_the_same_at_any_number_of_workers(
    launch_script: Callable[..., Launched], tmp_path: Path
) -> None:
    said = []
    for workers in (1, 4):
        ran = launch_script(script(), workers=workers, seed=workers, quiet=True)
        assert ran.exit_code == 0, ran.error
        said.append([float(number) for number in re.findall(r"\d+\.\d+", ran.stdout)])
    assert said[1] == pytest.approx(said[0], abs=1e-5)
    assert {path.name for path in (tmp_path / "out/model").iterdir()} == {
        "model.safetensors",
        "manifest.json",
    }
