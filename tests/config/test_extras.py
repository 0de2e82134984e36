"""The command that installs an extra's packages."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from shoal.config.extras import install_command

EXTRAS = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]


@pytest.mark.parametrize("extra", sorted(EXTRAS))
def test_the_command_names_the_packages_of_the_extra(extra: str) -> None:
    command = install_command(extra)
    assert command.startswith("pip install '")
    assert sorted(command.removeprefix("pip install ").replace("'", "").split()) == sorted(EXTRAS[extra])


def test_sources_that_are_not_installed_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", none)
    assert install_command("ray") == "pip install '/path/to/shoal[ray]'"
