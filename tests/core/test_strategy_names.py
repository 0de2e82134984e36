from __future__ import annotations

import pytest

from shoal.core.errors import ConfigError, UnknownStrategy
from shoal.core.strategy_names import choose


@pytest.mark.parametrize(
    ("strategy", "num_workers", "chosen"),
    [(None, 1, "single"), (None, 4, "ddp"), ("ddp", 1, "ddp"), ("ddp", 3, "ddp"), ("single", 1, "single")],
)
def test_the_strategy_follows_the_wish_or_the_workers(
    strategy: str | None, num_workers: int, chosen: str
) -> None:
    assert choose(strategy, num_workers) == chosen


def test_a_misspelt_strategy_gets_a_guess() -> None:
    with pytest.raises(UnknownStrategy) as refused:
        choose("dpd", 2)
    assert (refused.value.guess, refused.value.known) == ("ddp", ["single", "ddp"])


def test_one_process_is_not_many() -> None:
    with pytest.raises(ConfigError, match="--strategy ddp"):
        choose("single", 2)
