"""Public names: exactly those that are promised."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import shoal
from shoal import _HOMES


def test_all_is_exactly_what_is_visible() -> None:
    visible = [name for name in dir(shoal) if not name.startswith("_")]
    assert sorted(visible) == sorted(shoal.__all__), (
        "dir(shoal) and shoal.__all__ differ: a public name is in both, a private one in neither."
    )
    assert list(shoal.__all__) == sorted(shoal.__all__), (
        "keep shoal.__all__ sorted: it is read as a list of promises."
    )


@pytest.mark.parametrize("name", shoal.__all__)
def test_every_public_name_loads_from_its_home(name: str) -> None:
    home = importlib.import_module(_HOMES[name])
    expected = home if home.__name__ == f"shoal.{name}" else getattr(home, name)
    assert getattr(shoal, name) is expected, (
        f"shoal.{name} is not what {home.__name__} defines: fix its entry in _HOMES."
    )


def test_what_a_type_checker_sees_is_what_is_loaded(root: Path) -> None:
    tree = ast.parse((root / "src/shoal/__init__.py").read_text())
    block = next(
        node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    )
    seen = {
        name.name: node.module if node.module != "shoal" else f"shoal.{name.name}"
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("shoal")
        for name in node.names
    }
    assert seen == _HOMES, (
        "the TYPE_CHECKING block of src/shoal/__init__.py and _HOMES name different things: change both."
    )
    assert sorted(_HOMES) == sorted(shoal.__all__), (
        "_HOMES and __all__ of src/shoal/__init__.py differ: change both."
    )


def test_an_unknown_name_is_an_ordinary_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'trainer_of_the_year'"):
        _ = shoal.trainer_of_the_year
