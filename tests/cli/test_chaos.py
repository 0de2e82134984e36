from __future__ import annotations

import pytest

from shoal.cli.chaos import seconds
from shoal.errors import ConfigError


@pytest.mark.parametrize(("text", "expected"), [("15s", 15.0), ("2m", 120.0), ("1.5 h", 5400.0), ("3", 3.0)])
def test_times_are_read_as_people_write_them(text: str, expected: float) -> None:
    assert seconds(text, "--rate") == expected


@pytest.mark.parametrize("text", ["", "0s", "-3s", "soon", "3 d"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--rate takes a time"):
        seconds(text, "--rate")
