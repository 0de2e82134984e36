"""Registries: every choice has an implementation, and the guide lists all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.config.choices import BATCHNORMS, COMPRESSORS, EXCHANGES, OUTERS, SCHEDULES, Registry
from shoal.config.strategy import STRATEGIES

ROOT = Path(__file__).parents[2]
WITHOUT_IMPLEMENTATION = {"auto", "none", "local"}


@pytest.mark.parametrize("registry", [EXCHANGES, COMPRESSORS, OUTERS, SCHEDULES, BATCHNORMS, STRATEGIES])
def test_every_choice_has_an_implementation_that_can_be_imported(registry: Registry[Any]) -> None:
    for choice in registry.values():
        assert bool(choice.implementation) != (choice.name in WITHOUT_IMPLEMENTATION)
        if choice.implementation:
            assert callable(choice.load())


@pytest.mark.parametrize("registry", [EXCHANGES, COMPRESSORS, OUTERS, SCHEDULES, BATCHNORMS])
def test_every_form_means_the_defaults_of_its_settings(registry: Registry[Any]) -> None:
    for choice in registry.values():
        assert registry.parse(choice.form) == registry.parse(choice.name)


@pytest.mark.parametrize("registry", [STRATEGIES, EXCHANGES, COMPRESSORS, OUTERS, SCHEDULES, BATCHNORMS])
def test_the_guide_shows_the_registry_as_it_is(registry: Registry[Any]) -> None:
    guide = (ROOT / "docs/guides/strategies.md").read_text()
    assert registry.table in guide, f"docs/guides/strategies.md lacks, or has changed:\n\n{registry.table}"
