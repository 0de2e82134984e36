from __future__ import annotations

import pytest

from shoal.cluster.launch.api import LaunchConfig
from shoal.config.choices import ShardForm
from shoal.config.choices import parse_shard as parse
from shoal.errors import ConfigError


def test_words_mean_what_shard_takes() -> None:
    assert parse("equal") == ShardForm("equal")
    assert parse("dynamic") == ShardForm("dynamic")
    assert parse("dynamic").drain_slower_than == 8.0
    assert parse("dynamic=4.5") == ShardForm("dynamic", drain_slower_than=4.5)
    assert parse("dynamic=none") == ShardForm("dynamic", drain_slower_than=None)
    assert parse("balanced=length") == ShardForm("balanced", cost="length")
    assert parse("weighted=2,1,0.5") == ShardForm("weighted", weights=(2.0, 1.0, 0.5))
    assert parse("weighted=measured") == ShardForm("weighted", weights="measured")


@pytest.mark.parametrize(
    "text",
    ["", "even", "equal=2", "balanced", "weighted", "weighted=a,b", "dynamic=1", "dynamic=x", "dynamic=nan"],
)
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="Nothing was started"):
        parse(text)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"workers": 3, "shard": "dynamic"}, "computes every batch on all 3 workers"),
        ({"workers": 3, "shard": "dynamic", "strategy": "ps"}, "relaxed"),
        ({"workers": 3, "shard": "weighted=1,2"}, "2 weights, and there are 3 workers"),
    ],
)
def test_what_a_job_cannot_do_is_refused_before_it_starts(options: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        LaunchConfig(script="x.py", **options)  # type: ignore[arg-type]


def test_what_it_can_do_is_not() -> None:
    LaunchConfig(script="x.py", workers=2, strategy="ps:async", shard="dynamic")
    LaunchConfig(script="x.py", workers=2, shard="weighted=1,2")
    LaunchConfig(script="x.py", workers=1, shard="weighted=1,2")
