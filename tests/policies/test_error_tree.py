"""Whatever shoal raises on purpose is in one tree, and the tree in the docstring is that tree."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest
from parsed import Module

from shoal import errors
from shoal.errors import ShoalError

LINE = re.compile(r"^    (?P<branch>[│├└─ ]*)(?P<name>[A-Z]\w+)(?P<rest>.*)$")
EXITS = re.compile(r"exit (?P<codes>[\d, ]+)$")


@pytest.fixture(scope="module")
def exceptions(modules: list[Module]) -> list[type[BaseException]]:
    """Every exception class defined in src/shoal, whatever file it is in."""
    homes = [importlib.import_module(module.name) for module in modules if module.name != "shoal.__main__"]
    classes = [
        (value, home.__name__) for home in homes for value in vars(home).values() if inspect.isclass(value)
    ]
    return [value for value, home in classes if issubclass(value, BaseException) and value.__module__ == home]


def test_every_error_derives_from_shoal_error(exceptions: list[type[BaseException]]) -> None:
    # Exceptions for control flow, which never reach a user, say so or begin with an underscore.
    strays = [
        f"{error.__module__}.{error.__name__}"
        for error in exceptions
        if not issubclass(error, ShoalError)
        and not error.__name__.startswith("_")
        and not (error.__doc__ or "").startswith("Internal: ")
    ]
    assert not strays, (
        f"a user catches everything with `except shoal.ShoalError`: derive {strays} from one of its families."
    )


def test_the_tree_in_the_docstring_is_the_real_one(exceptions: list[type[BaseException]]) -> None:
    real = {
        error.__name__: error.__bases__[0].__name__ for error in exceptions if issubclass(error, ShoalError)
    }
    drawn = {name: parent for name, parent, _ in _drawn()}
    assert drawn == {**real, "ShoalError": ""}, (
        "the tree at the top of errors.py is what users read. Drawn but not real: "
        f"{sorted(drawn.items() - real.items() - {('ShoalError', '')})}; real but not drawn: "
        f"{sorted(real.items() - drawn.items() - {('ShoalError', 'Exception')})}. Change the drawing with the classes."
    )


def test_the_exit_codes_in_the_docstring_are_the_real_ones() -> None:
    drawn = {name: codes for name, _, codes in _drawn() if codes}
    assert drawn, "the tree at the top of errors.py names no exit codes"
    for name, codes in drawn.items():
        assert getattr(errors, name).exit_code in codes, (
            f"errors.py draws exit {codes} for {name}: not its exit_code."
        )


def test_every_error_says_when_it_is_raised(exceptions: list[type[BaseException]]) -> None:
    silent = [error.__name__ for error in exceptions if "__doc__" not in vars(error) or not error.__doc__]
    assert not silent, f"an error without a docstring cannot be looked up: {silent}"


def _drawn() -> list[tuple[str, str, list[int]]]:
    """(name, parent, exit codes) of each line of the drawn tree."""
    assert errors.__doc__
    lines, path = [], []
    for line in errors.__doc__.splitlines():
        if found := LINE.match(line):
            depth = len(found["branch"]) // 4
            path[depth:] = [found["name"]]
            exits = EXITS.search(found["rest"])
            codes = [int(code) for code in exits["codes"].split(",")] if exits else []
            lines.append((found["name"], path[depth - 1] if depth else "", codes))
    return lines
