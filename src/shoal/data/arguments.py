"""Argument checks of the public methods: refuse at the call, with the argument's name and the value given."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from shoal.errors import ConfigError

OnError = Literal["raise", "skip"]

_SHOWN = 80  # characters of a value in a message


def whole_number(what: str, value: Any, *, at_least: int | None = None) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise ConfigError(f"{what} takes a whole number, got {shown(value)}") from None
    if at_least is not None and number < at_least:
        raise ConfigError(f"{what} takes a whole number of at least {at_least}, got {number}")
    return number


def above_zero(what: str, value: Any, unit: str) -> float:
    """A number of something, seconds for instance, above 0; it may be infinite."""
    is_number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    if not is_number or math.isnan(value) or value <= 0:
        raise ConfigError(f"{what} takes a number{' of ' if unit else ''}{unit} above 0, got {shown(value)}")
    return float(value)


def flag(what: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise ConfigError(f"{what} is True or False, got {shown(value)}")
    return bool(value)


def function(what: str, fn: Any, of: str = "a sample") -> Any:
    if not callable(fn):
        raise ConfigError(f"{what} takes a function of {of}, got {shown(fn)}")
    return fn


def path(what: str, value: Any) -> str:
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise ConfigError(f"{what} takes a path, got {shown(value)}")
    return str(os.fspath(value))


def paths(what: str, value: Any) -> list[str]:
    if isinstance(value, (str, os.PathLike)):
        return [path(what, value)]
    if not isinstance(value, Sequence) or isinstance(value, (bytes, bytearray)):
        raise ConfigError(f"{what} takes a path, a pattern, a URL or a list of them, got {shown(value)}")
    return [path(f"a list of {what}", each) for each in value]


def names(what: str, value: Any) -> list[str]:
    if isinstance(value, str):
        raise ConfigError(f"{what} takes a list of names, got the string {value!r}: write [{value!r}]")
    listed = list(value) if isinstance(value, Sequence) else []
    if not listed or not all(isinstance(name, str) and name for name in listed):
        raise ConfigError(f"{what} takes a list of names of columns, at least one, got {shown(value)}")
    return listed


def directory(what: str, value: Any) -> str:
    """A path at which there is a directory, or nothing yet."""
    place = path(what, value)
    if os.path.lexists(place) and not os.path.isdir(place):
        raise ConfigError(f"{what} takes a directory, and {place} is none")
    return place


def by_name(what: str, value: Any) -> dict[str, Any]:
    """A dict by names of columns; nothing for None."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"{what} takes a dict by names of columns, got {shown(value)}")
    return dict(value)


def skipping(caller: str, on_error: Any, max_skips: Any) -> tuple[OnError, int | None]:
    """`on_error=` and its budget, validated. `caller` is "map", or "" for a constructor."""
    named = f"{caller}(%s=)" if caller else "%s="
    if on_error not in ("raise", "skip"):
        raise ConfigError(f"{named % 'on_error'} is 'raise' or 'skip', got {shown(on_error)}")
    if max_skips is not None:
        max_skips = whole_number(named % "max_skips", max_skips, at_least=0)
        if on_error == "raise":
            raise ConfigError(
                f"{named % 'max_skips'} says how many bad samples may be skipped: it needs on_error='skip'"
            )
    return on_error, max_skips


def shown(value: Any) -> str:
    """A value for a message: on one line, truncated if long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
