"""Scripts of the migration pages, after: each runs as its page says and learns."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launched import Launched

FOLDER = Path(__file__).parents[2] / "examples/migration"

LEARNED: dict[str, Callable[[float], bool]] = {
    "accuracy": lambda value: value > 0.95,
    "loss": lambda value: value < 0.4,
}

WITH_OWN_ENGINE = {"hf_trainer", "keras", "spark"}  # in tests/engines


def test_every_migrated_script_is_tried() -> None:
    names = {path.stem.removesuffix("_after") for path in FOLDER.glob("*_after.py")}
    assert names == {name for name, _ in RUNS} | WITH_OWN_ENGINE


RUNS: list[tuple[str, dict[str, Any]]] = [
    ("accelerate", {}),
    ("ddp", {}),
    ("estimator", {"servers": 2, "strategy": "ps"}),
    ("horovod", {}),
    ("lightning", {}),
    ("mxnet", {"servers": 2, "strategy": "ps:async"}),
    ("paddle", {}),
    ("tf_ps", {"servers": 2, "strategy": "ps"}),
]


@pytest.mark.parametrize(("name", "options"), RUNS, ids=[name for name, _ in RUNS])
def test_the_migrated_script_learns(
    name: str,
    options: dict[str, Any],
    launch_script: Callable[..., Launched],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    launched = launch_script(FOLDER / f"{name}_after.py", workers=2, quiet=True, **options)
    assert launched.exit_code == 0, launched.error
    measured = re.findall(r"(accuracy|loss) (\d\.\d+)", launched.stdout)
    assert measured, launched.stdout
    what, value = measured[-1]
    assert LEARNED[what](float(value)), launched.stdout
