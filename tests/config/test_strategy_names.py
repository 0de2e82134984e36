from __future__ import annotations

import pytest

from shoal.config.strategy import STRATEGIES, StrategyName, choose, parse
from shoal.errors import ConfigError, UnknownStrategy


@pytest.mark.parametrize(
    ("strategy", "num_workers", "chosen"),
    [
        (None, 1, "single"),
        (None, 4, "ddp"),
        ("ddp", 1, "ddp"),
        ("ddp", 3, "ddp"),
        ("single", 1, "single"),
        ("DDP", 2, "ddp"),
        ("FSDP=2,TP=2", 4, "fsdp=2,tp=2"),
    ],
)
def test_the_strategy_follows_the_wish_or_the_workers(
    strategy: str | None, num_workers: int, chosen: str
) -> None:
    assert choose(strategy, num_workers) == chosen


def test_a_misspelt_strategy_gets_a_guess() -> None:
    with pytest.raises(UnknownStrategy) as refused:
        choose("dpd", 2)
    assert refused.value.guess == "ddp"
    assert "single" in refused.value.known


def test_one_process_is_not_many() -> None:
    with pytest.raises(ConfigError, match="--strategy ddp"):
        choose("single", 2)


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("single", StrategyName("single")),
        ("ddp", StrategyName("ddp")),
        ("ps", StrategyName("ps", "exact")),
        ("ps:ssp=0", StrategyName("ps", "ssp", 0)),
        ("ps:ssp=12", StrategyName("ps", "ssp", 12)),
        ("ps:async", StrategyName("ps", "async")),
        ("ps:hybrid", StrategyName("ps", "hybrid")),
        ("ps:hybrid,ssp=3", StrategyName("ps", "hybrid", 3)),
        ("ps:drop=1", StrategyName("ps", "drop", 1)),
        ("ps:stale-ok", StrategyName("ps", "stale")),
    ],
)
def test_a_name_is_taken_apart(name: str, meaning: StrategyName) -> None:
    assert parse(name) == meaning
    assert choose(name, 1 if name == "single" else 2) == name
    assert meaning.has_servers == name.startswith("ps")


def test_every_listed_name_means_something() -> None:
    assert all(parse(name.replace("K", "1")) for name in STRATEGIES)


@pytest.mark.parametrize(
    ("wrong", "guess"),
    [
        ("ps:spp=4", "ps:ssp=4"),
        ("ps:asynch", "ps:async"),
        ("ps:ssp", "ps:ssp=K"),
        ("ps:stale", "ps:stale-ok"),
        ("ps:hybrid,sssp=2", "ps:hybrid,ssp=2"),
        ("ps:", "ps"),
        ("ps:ssp=-1", "ps:ssp=1"),
        ("ps:ssp=1 ", "ps:ssp=1"),
    ],
)
def test_a_misspelt_mode_gets_a_guess_with_its_number(wrong: str, guess: str) -> None:
    with pytest.raises(UnknownStrategy) as refused:
        parse(wrong)
    assert refused.value.guess == guess


@pytest.mark.parametrize(("name", "why"), [("ps:drop=0", "nobody"), ("ps:ssp=100000000", "1000000")])
def test_bounds_that_cannot_be_meant_are_refused(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse(name)


def test_somebody_is_left_of_a_step() -> None:
    assert choose("ps:drop=2", 3)
    with pytest.raises(ConfigError, match="nobody would be left"):
        choose("ps:drop=3", 3)


def test_every_product_of_axes_is_a_strategy() -> None:
    assert choose("pp=2,fsdp=2", 4) == "pp=2,fsdp=2"
    assert choose("dp=2,tp=2,pp=2", 8) == "dp=2,tp=2,pp=2"
