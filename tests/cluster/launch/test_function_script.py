from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from shoal.cluster.launch import function_script
from shoal.cluster.launch.function_script import script_of
from shoal.errors import ConfigError

RATE = 0.5
TABLE = np.zeros(3)


class Scaled:
    def __call__(self, value: float) -> float:
        return math.floor(value * RATE)


def helper(value: float) -> float:
    return Scaled()(value)


@pytest.fixture(autouse=True)
def this_is_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    for thing in (Scaled, helper, Scaled.__call__):
        monkeypatch.setattr(thing, "__module__", "__main__")


def test_a_function_becomes_a_script_with_what_it_names() -> None:
    told: list[Any] = []

    def note(value: Any) -> None:
        told.append(value)

    def train() -> None:
        print([helper(value) for value in (4, 5)])

    text = script_of(train)
    exec(compile(text, "train.py", "exec"), {"__name__": "__main__", "print": note})
    assert told == [[2, 2]]
    assert "import math" in text
    assert "RATE = 0.5" in text


def test_what_workers_cannot_have_is_refused_by_name() -> None:
    outside = 3

    def with_array() -> Any:
        return TABLE.sum()

    def with_closure() -> int:
        return outside

    def with_argument(rate: float) -> float:
        return rate

    with pytest.raises(ConfigError, match="with_array uses 'TABLE', a ndarray of this notebook"):
        script_of(with_array)
    with pytest.raises(ConfigError, match=r"variables of the function around it \(outside\)"):
        script_of(with_closure)
    with pytest.raises(ConfigError, match=r"arguments without a default \(rate\)"):
        script_of(with_argument)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="written with def"):
        script_of(lambda: None)


def test_the_same_function_is_the_same_script(tmp_path: Any) -> None:
    def train() -> None:
        print(RATE)

    first = function_script.write_script(train, tmp_path)
    assert function_script.write_script(train, tmp_path) == first
    assert first.endswith("/train.py")
